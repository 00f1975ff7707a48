"""The public door: `compile` makes a `Grammar` of a constraint and a vocabulary, which hands out matchers.

Compiling checks the whole constraint and builds the first state; texts and masks build the others when they reach
them. What cannot be enforced exactly is an error or, if lenient, listed in `Grammar.dropped`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.automaton.brackets import check_brackets
from sgl.grammar.automaton.format_check import check_format
from sgl.grammar.automaton.nfa import Builder, CountedText, KeyOrder, Node
from sgl.grammar.automaton.parameters import Style, parameters_node
from sgl.grammar.automaton.pushdown import MAX_STATES, Automaton
from sgl.grammar.automaton.spelling import Spelling
from sgl.grammar.automaton.structural_tag import Structure, read_structural_tag, structural_tag_node
from sgl.grammar.automaton.styles import STYLES
from sgl.grammar.automaton.tag_formats import TagFormats
from sgl.grammar.automaton.values import value_node
from sgl.grammar.backends.lark import is_lark
from sgl.grammar.backends.llguidance import compile_ebnf, compile_llguidance
from sgl.grammar.matching.budget import Budget
from sgl.grammar.matching.masks import MaskCache
from sgl.grammar.matching.matcher import Matcher
from sgl.grammar.named_tokens import named_tokens
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
    """The source of a grammar as plain JSON data: a key of caches, and serialised. Raises GrammarError."""

    kind: Kind
    source: str
    """JSON text of the schema, pattern, list of choices, structural tag or grammar."""
    whitespace: Whitespace = "compact"
    lenient: bool = False
    key_order: KeyOrder = "schema"
    additional_properties: AdditionalProperties = "schema"
    backend: Backend = "sgl"
    special_tokens: tuple[str, ...] = ()
    """The special tokens that a structural tag speaks of, which the model writes as one."""
    end_tokens: tuple[str, ...] = ()
    """Those of them that end a text."""

    def __post_init__(self) -> None:
        for name, values in _OPTIONS.items():
            if getattr(self, name) not in values:
                *others, last = map(repr, values)
                raise GrammarError(f"{name} is {', '.join(others)} or {last}, not {getattr(self, name)!r}")
        if self.backend != "sgl" and (self.lenient or self.key_order != "schema"):
            raise GrammarError(
                f"backend {self.backend!r} is never lenient, and knows keys in the schema's order alone"
            )


_OPTIONS: dict[str, tuple[str, ...]] = {
    "whitespace": ("compact", "flexible"),
    "key_order": ("schema", "any"),
    "additional_properties": ("closed", "schema"),
    "backend": ("sgl", "outlines", "llguidance"),
}


@dataclass(eq=False, repr=False)
class Grammar:
    """A compiled constraint over one vocabulary, shared by requests.

    Its automaton grows as matchers walk it: matchers of one grammar must not run at the same time.
    """

    constraint: Constraint
    vocabulary: Vocabulary
    _first: TokenMatcher
    dropped: tuple[Dropped, ...] = ()
    """The keywords that lenient mode did not enforce."""
    automaton: Automaton | None = None
    """What the matchers walk; None for `ebnf`, which is llguidance's, and for other backends."""
    masks: MaskCache | None = None

    @property
    def num_bytes(self) -> int:
        """The approximate size of its states, tables and masks so far."""
        tables = 0 if self.automaton is None else self.automaton.tables.nbytes + len(self.automaton) * _STATE_BYTES
        return tables + self._first.num_bytes + (0 if self.masks is None else self.masks.num_bytes)

    @property
    def is_worn(self) -> bool:
        """Whether its automaton has half of the states that it may have: matchers of a new grammar go further."""
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
        """The grammar of `to_bytes`. Raises GrammarError for another vocabulary or version."""
        try:
            document: dict[str, Any] = json.loads(data)
            version, digest = document.pop("version"), document.pop("vocabulary")
            constraint = Constraint(**_frozen(document)) if version == FORMAT_VERSION else None
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

    `json_schema` is a schema or its JSON text; JSON_OBJECT is any JSON object. `regex` is matched in full, in Python's
    dialect with ASCII classes. `choices` are the possible texts. `ebnf` is a grammar in EBNF as llama.cpp and XGrammar
    read it, or in Lark's notation, and needs the extra sgl[ebnf]. `structural_tag` is free text with constrained parts,
    see `structural_tag.py`. `whitespace` may stand between JSON's tokens; "flexible" also allows every spelling of
    numbers. `key_order` "any" lets keys come in any order. `additional_properties` "closed" allows declared keys only
    where a schema declares some and says nothing of others, which JSON Schema leaves open. `lenient` lists keywords
    that cannot be enforced in `Grammar.dropped` instead of refusing them. `backend` decides what may come next:
    "outlines" and "llguidance", which need extras, refuse more and keep to no budget. Raises UnsupportedSchema,
    RegexSyntaxError, GrammarTooLarge (also past an enclosing `time_limit`) or GrammarError.
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
        vocabulary,
        whitespace=whitespace,
        lenient=lenient,
        key_order=key_order,
        additional_properties=additional_properties,
        backend=backend,
    )
    return build(constraint, vocabulary, mask_cache_bytes)


def make_constraint(given: Mapping[str, Any], vocabulary: Vocabulary | None = None, **options: Any) -> Constraint:
    """A constraint from the arguments of `compile`, by name, of which exactly one is not None. Special tokens are those
    of `vocabulary`. Raises GrammarError."""
    chosen = {kind: source for kind, source in given.items() if source is not None}
    if len(chosen) != 1:
        raise GrammarError(f"exactly one of {', '.join(given)} is expected, not {sorted(chosen) or 'none'}")
    (kind, source), *_ = chosen.items()
    if kind in ("json_schema", "structural_tag") and isinstance(source, str):
        text = source
    elif kind == "choices":
        text = json.dumps(source if isinstance(source, str | dict | bool) else list(source))
    else:
        try:
            text = json.dumps(source, allow_nan=False)
        except RecursionError as error:
            raise GrammarTooLarge(f"{kind} is nested too deeply", states=0, limit=MAX_STATES) from error
        except (TypeError, ValueError) as error:
            raise GrammarError(f"{kind} is not JSON data: {error}") from error
    if kind == "structural_tag" and (grammar := _grammar_alone(text)) is not None:
        return Constraint("ebnf", json.dumps(grammar), **options)
    if kind == "structural_tag" and vocabulary is not None:
        text, options["special_tokens"], options["end_tokens"] = named_tokens(text, vocabulary)
    return Constraint(kind, text, **options)  # type: ignore[arg-type]  # one of five


def _grammar_alone(tag: str) -> str | None:
    """The grammar that is all of a structural tag, which may nest then."""
    try:
        source = json.loads(tag)
    except (ValueError, RecursionError):
        return None
    format = source.get("format") if isinstance(source, dict) else None
    if isinstance(format, dict) and format.keys() == {"type", "grammar"} and format["type"] == "grammar":
        return format["grammar"] if isinstance(format["grammar"], str) else None
    return None


def _frozen(document: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}


def build(constraint: Constraint, vocabulary: Vocabulary, mask_cache_bytes: int = MASK_CACHE_BYTES) -> Grammar:
    """Compile a constraint given as plain data."""
    check_size(len(constraint.source), MAX_SOURCE, f"{constraint.kind} has more than {{}} characters")
    try:
        source = json.loads(constraint.source, parse_constant=_no_number)
        if constraint.backend != "sgl":
            return Grammar(constraint, vocabulary, _matcher_of_backend(constraint, source, vocabulary))
        if constraint.kind == "ebnf":
            return Grammar(constraint, vocabulary, compile_ebnf(source, vocabulary))
        builder = Builder(WHITESPACE[constraint.whitespace], constraint.key_order)
        dropped: list[Dropped] = []
        start = _start_node(builder, source, constraint, dropped)
        automaton = Automaton(builder, start, MAX_STATES)
        if builder.may_clash:
            check_brackets(automaton)
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


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number there")


def can_be_stopped(constraint: Constraint) -> bool:
    """Whether compiling checks the time. outlines-core and llguidance do not: a few terminals in Lark's notation that
    exclude each other take llguidance minutes."""
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
        raise GrammarError("backend 'outlines' needs outlines-core and interegular: install sgl[engine]") from error
    return compile_outlines(constraint.kind, source, vocabulary, constraint.whitespace)


def _start_node(builder: Builder, source: Any, constraint: Constraint, dropped: list[Dropped]) -> Node:
    match constraint.kind:
        case "json_schema":
            return _schema_node(builder, source, constraint, dropped, builder.end)
        case "regex":
            return _regex_node(builder, source, builder.end)
        case "choices":
            return _expression_node(builder, words(_check_choices(source)), "choices", builder.end)

    spelling = Spelling(constraint.special_tokens, constraint.end_tokens)

    def body(structure: Structure, then: Node, *, counts: bool = True) -> Node:
        if structure.regex is not None:
            return _regex_node(builder, structure.regex, then, counts=counts)
        style = None if structure.style == "json" else STYLES[structure.style].in_bytes(spelling)
        return _schema_node(builder, structure.schema, constraint, dropped, then, style)

    if isinstance(source, dict) and "format" in source:
        if source.keys() - {"type", "format"}:
            raise GrammarError("a structural tag with a format has nothing beside it")
        builder.may_clash |= check_format(source["format"])
        return TagFormats(builder, partial(body, counts=False), spelling).node(source["format"], builder.end)
    return structural_tag_node(builder, read_structural_tag(source), body, builder.end, spelling)


def _schema_node(
    builder: Builder,
    source: Any,
    constraint: Constraint,
    dropped: list[Dropped],
    then: Node,
    style: Style | None = None,
) -> Node:
    schema, not_enforced = compile_schema(
        source,
        lenient=constraint.lenient,
        any_spelling=constraint.whitespace == "flexible",
        closes_objects=constraint.additional_properties == "closed",
    )
    dropped += not_enforced
    return value_node(builder, schema, then) if style is None else parameters_node(builder, schema, style, then)


def _regex_node(builder: Builder, pattern: str, then: Node, *, counts: bool = True) -> Node:
    counted = counted_regex(pattern) if counts else None
    if counted is not None:
        return builder.one(CountedText, builder, *counted, then)
    return _expression_node(builder, compile_regex(pattern, dialect="python", search=False), "the regex", then)


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
