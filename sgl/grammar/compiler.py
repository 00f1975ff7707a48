"""The public door: a constraint and a vocabulary become a `Grammar`, which hands out matchers.

Compiling is lazy: it checks the whole constraint and builds the first state; all others are built when a text or a
mask comes to them. What cannot be enforced exactly is an error, or, in lenient mode, listed in `Grammar.dropped`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.automaton.nfa import Builder, CountedText, KeyOrder, Node
from sgl.grammar.automaton.pushdown import MAX_STATES, Automaton
from sgl.grammar.automaton.structural_tag import Structure, read_structural_tag, structural_tag_node
from sgl.grammar.automaton.tag_formats import format_node
from sgl.grammar.automaton.values import value_node
from sgl.grammar.backends.lark import is_lark
from sgl.grammar.backends.llguidance import compile_ebnf, compile_llguidance
from sgl.grammar.matching.budget import Budget
from sgl.grammar.matching.masks import MaskCache
from sgl.grammar.matching.matcher import Matcher
from sgl.grammar.regular.expr import Expr, is_empty, words
from sgl.grammar.regular.regex import compile_regex, counted_regex
from sgl.grammar.schema.compile import compile_schema
from sgl.grammar.schema.report import Dropped
from sgl.grammar.text.json import WHITESPACE
from sgl.grammar.token_matcher import TokenMatcher
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import check_size

Whitespace = Literal["compact", "flexible"]
AdditionalProperties = Literal["closed", "schema"]
Backend = Literal["sgl", "outlines", "llguidance"]
FORMAT_VERSION = 1
MAX_SOURCE = 4 << 20
"""Characters that a constraint may have."""
JSON_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of JSON mode: any JSON object."""
MASK_CACHE_BYTES = 64 << 20
"""How many bytes of masks a grammar keeps unless told otherwise."""


_STATE_BYTES = 4096  # of Python's objects for one state, more or less

Kind = Literal["json_schema", "regex", "choices", "structural_tag", "ebnf"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a grammar is made from, as plain JSON data: the key of caches, and what is serialised."""

    kind: Kind
    source: str
    """JSON text of the schema, pattern, list of choices, structural tag or grammar."""
    whitespace: Whitespace
    lenient: bool
    key_order: KeyOrder
    additional_properties: AdditionalProperties = "schema"
    backend: Backend = "sgl"


class Grammar:
    """A compiled constraint over one vocabulary, shared by all requests that use it.

    Its automaton grows as matchers walk it; matchers of one grammar must not run at the same time.
    """

    def __init__(
        self,
        constraint: Constraint,
        vocabulary: Vocabulary,
        first: TokenMatcher,
        dropped: tuple[Dropped, ...] = (),
        automaton: Automaton | None = None,
        masks: MaskCache | None = None,
    ) -> None:
        self.constraint = constraint
        self.vocabulary = vocabulary
        self.dropped = dropped
        """What lenient mode did not enforce: keyword and path of each."""
        self.automaton = automaton
        """What the matchers walk; None for `ebnf`, which llguidance walks, and for other backends."""
        self.masks = masks
        self._first = first

    @property
    def num_bytes(self) -> int:
        """About the size of states, tables and masks as far as they were worked out."""
        tables = 0 if self.automaton is None else self.automaton.tables.nbytes + len(self.automaton) * _STATE_BYTES
        return tables + self._first.num_bytes + (0 if self.masks is None else self.masks.num_bytes)

    @property
    def is_worn(self) -> bool:
        """Whether half of the states that its automaton may have are there: matchers of a new one go further."""
        return self.automaton is not None and 2 * len(self.automaton) > self.automaton.max_states

    def matcher(self) -> TokenMatcher:
        """A cursor at the start of the text."""
        return self._first.copy()

    def to_bytes(self) -> bytes:
        """The grammar for `from_bytes`, in any process with the same vocabulary."""
        document = {
            "version": FORMAT_VERSION,
            "vocabulary": self.vocabulary.digest.hex(),
            **asdict(self.constraint),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary: Vocabulary) -> Grammar:
        """The grammar that `to_bytes` described. Raises GrammarError if it was made for another vocabulary or by
        another version.
        """
        try:
            document: dict[str, Any] = json.loads(data)
            version, digest = document.pop("version"), document.pop("vocabulary")
            constraint = Constraint(**document) if version == FORMAT_VERSION else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GrammarError(f"not a serialised grammar: {error}") from error
        if constraint is None:
            raise GrammarError(f"the grammar has format {version} and {FORMAT_VERSION} is expected")
        if digest != vocabulary.digest.hex():
            raise GrammarError("the grammar was compiled for another vocabulary")
        return build(constraint, vocabulary)


def compile(  # the public name: sgl.grammar.compile
    *,
    json_schema: dict[str, Any] | bool | str | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    ebnf: str | None = None,
    structural_tag: dict[str, Any] | str | None = None,
    vocabulary: Vocabulary,
    whitespace: Whitespace = "compact",
    lenient: bool = False,
    key_order: KeyOrder = "schema",
    additional_properties: AdditionalProperties = "schema",
    backend: Backend = "sgl",
    mask_cache_bytes: int = MASK_CACHE_BYTES,
) -> Grammar:
    """Compile exactly one constraint.

    `json_schema` is a schema, or its JSON text; JSON_OBJECT is any JSON object. `regex` is matched in full, in
    Python's dialect with ASCII classes; `choices` are texts, one of which is produced. `ebnf` is a grammar in EBNF as
    llama.cpp and XGrammar read it, or in Lark's notation, and needs the extra sgl[ebnf]. `structural_tag` is free text
    with constrained parts, see `structural_tag.py`. `whitespace` is what may stand between JSON's tokens; "flexible"
    also allows every spelling of numbers. `key_order` "any" lets keys come in any order. `additional_properties`
    "closed" lets no keys but declared ones come where a schema declares some and says nothing of others, which
    JSON Schema leaves open. `lenient` lists in
    `Grammar.dropped` what of a schema cannot be enforced, instead of refusing it. `backend` is whose automata tell what
    comes next: "outlines" and "llguidance", which need extras, refuse more and keep to no budget. Raises
    UnsupportedSchema, RegexSyntaxError, GrammarTooLarge (also past an enclosing `time_limit`) or GrammarError.
    """
    given = {
        "json_schema": json_schema,
        "regex": regex,
        "choices": choices,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
    }
    constraint = make_constraint(
        given,
        whitespace=whitespace,
        lenient=lenient,
        key_order=key_order,
        additional_properties=additional_properties,
        backend=backend,
    )
    return build(constraint, vocabulary, mask_cache_bytes)


def make_constraint(
    given: Mapping[str, Any],
    *,
    whitespace: Whitespace = "compact",
    lenient: bool = False,
    key_order: KeyOrder = "schema",
    additional_properties: AdditionalProperties = "schema",
    backend: Backend = "sgl",
) -> Constraint:
    """A constraint from the arguments of `compile`, by name, of which exactly one is not None. Raises GrammarError."""
    chosen = {kind: source for kind, source in given.items() if source is not None}
    if len(chosen) != 1:
        raise GrammarError(f"exactly one of {', '.join(given)} is expected, not {sorted(chosen) or 'none'}")
    (kind, source), *_ = chosen.items()
    if whitespace not in WHITESPACE:
        raise GrammarError(f"whitespace is 'compact' or 'flexible', not {whitespace!r}")
    if key_order not in ("schema", "any"):
        raise GrammarError(f"key_order is 'schema' or 'any', not {key_order!r}")
    if additional_properties not in ("closed", "schema"):
        raise GrammarError(f"additional_properties is 'closed' or 'schema', not {additional_properties!r}")
    if backend not in ("sgl", "outlines", "llguidance"):
        raise GrammarError(f"backend is 'sgl', 'outlines' or 'llguidance', not {backend!r}")
    if backend != "sgl" and (lenient or key_order != "schema"):
        raise GrammarError(f"backend {backend!r} is never lenient, and knows keys in the schema's order alone")
    if kind in ("json_schema", "structural_tag") and isinstance(source, str):
        text = source
    elif kind == "choices":
        text = json.dumps(source if isinstance(source, str | dict | bool) else list(source))
    else:
        try:
            text = json.dumps(source)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"{kind} is not JSON data: {error}") from error
    return Constraint(kind, text, whitespace, lenient, key_order, additional_properties, backend)  # type: ignore[arg-type]  # one of five


def build(constraint: Constraint, vocabulary: Vocabulary, mask_cache_bytes: int = MASK_CACHE_BYTES) -> Grammar:
    """Compile a constraint given as plain data."""
    check_size(len(constraint.source), MAX_SOURCE, f"{constraint.kind} has more than {{}} characters")
    try:
        source = json.loads(constraint.source)
        if constraint.backend != "sgl":
            return Grammar(constraint, vocabulary, _matcher_of_backend(constraint, source, vocabulary))
        if constraint.kind == "ebnf":
            return Grammar(constraint, vocabulary, compile_ebnf(source, vocabulary))
        builder = Builder(WHITESPACE[constraint.whitespace], constraint.key_order)
        dropped: list[Dropped] = []
        start = _start_node(builder, source, constraint, dropped)
        automaton = Automaton(builder, start, MAX_STATES)
    except RecursionError as error:
        raise GrammarTooLarge(f"{constraint.kind} is nested too deeply", states=0, limit=MAX_STATES) from error
    except ValueError as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"{constraint.kind} is not valid JSON: {error}") from error
    masks = MaskCache(automaton, vocabulary, mask_cache_bytes)
    budget = Budget(automaton, vocabulary)
    budget.check_length(constraint.kind)
    first = Matcher(automaton, vocabulary, masks, budget)
    return Grammar(constraint, vocabulary, first, tuple(dropped), automaton, masks)


def can_be_stopped(constraint: Constraint) -> bool:
    """Whether compiling looks at the time as it goes. outlines-core and llguidance do not, nor does the latter's reader
    of grammars in Lark's notation: a few terminals that exclude each other keep it for minutes."""
    if constraint.backend != "sgl":
        return False
    return constraint.kind != "ebnf" or not is_lark(json.loads(constraint.source))


def _matcher_of_backend(constraint: Constraint, source: Any, vocabulary: Vocabulary) -> TokenMatcher:
    if constraint.kind == "choices":
        _check_choices(source)
    if constraint.kind == "regex" and not isinstance(source, str):
        raise GrammarError("a regex is a string")
    if constraint.backend == "llguidance":
        closes_objects = constraint.additional_properties == "closed"
        return compile_llguidance(
            constraint.kind, source, vocabulary, constraint.whitespace, closes_objects=closes_objects
        )
    try:
        from sgl.grammar.backends.outlines import compile_outlines
    except ImportError as error:
        raise GrammarError(
            "backend 'outlines' needs outlines-core and interegular: install sgl[outlines]"
        ) from error
    return compile_outlines(constraint.kind, source, vocabulary, constraint.whitespace)


def _start_node(builder: Builder, source: Any, constraint: Constraint, dropped: list[Dropped]) -> Node:
    match constraint.kind:
        case "json_schema":
            return _schema_node(builder, source, constraint, dropped, builder.end)
        case "regex":
            return _regex_node(builder, source, builder.end)
        case "choices":
            return _choices_node(builder, source)

    def body(structure: Structure, then: Node, *, counts: bool = True) -> Node:
        if structure.regex is not None:
            return _regex_node(builder, structure.regex, then, counts=counts)
        return _schema_node(builder, structure.schema, constraint, dropped, then)

    if isinstance(source, dict) and "format" in source:
        if source.keys() - {"type", "format"}:
            raise GrammarError("a structural tag with a format has nothing beside it")
        return format_node(builder, source["format"], partial(body, counts=False), builder.end)
    return structural_tag_node(builder, read_structural_tag(source), body, builder.end)


def _schema_node(builder: Builder, source: Any, constraint: Constraint, dropped: list[Dropped], then: Node) -> Node:
    compiled = compile_schema(
        source,
        lenient=constraint.lenient,
        any_spelling=constraint.whitespace == "flexible",
        closes_objects=constraint.additional_properties == "closed",
    )
    dropped += compiled.dropped
    return value_node(builder, compiled.root, then)


def _regex_node(builder: Builder, pattern: str, then: Node, *, counts: bool = True) -> Node:
    counted = counted_regex(pattern) if counts else None
    if counted is not None:
        return builder.one(CountedText, builder, *counted, then)
    return _expression_node(builder, compile_regex(pattern, dialect="python", search=False), "the regex", then)


def _choices_node(builder: Builder, choices: Any) -> Node:
    return _expression_node(builder, words(_check_choices(choices)), "choices", builder.end)


def _check_choices(choices: Any) -> list[bytes]:
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise GrammarError("choices are a list of at least one string")
    try:
        return [text.encode() for text in choices]
    except UnicodeEncodeError as error:
        raise GrammarError(f"a choice is not valid Unicode: {error}") from error


def _expression_node(builder: Builder, expr: Expr, what: str, then: Node) -> Node:
    if is_empty(expr):
        raise GrammarError(f"{what} can match nothing at all")
    return builder.after(expr, then)
