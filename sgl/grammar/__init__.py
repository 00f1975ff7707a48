"""Constraints on generated text: `compile` one over a `Vocabulary` and ask its matchers for token masks."""

from sgl.grammar.compiler import JSON_OBJECT, Grammar, compile
from sgl.grammar.matching.matcher import Matcher
from sgl.grammar.schema.report import Dropped
from sgl.grammar.vocabulary.tokens import Vocabulary

__all__ = ["JSON_OBJECT", "Dropped", "Grammar", "Matcher", "Vocabulary", "compile"]
