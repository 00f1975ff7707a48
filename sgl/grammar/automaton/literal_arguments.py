"""Arguments as languages write values that are not quite JSON: Python's, and Gemma's, whose strings stand between two
marks as they are.

`formats/literals.py` reads them. Python's strings are written as in JSON, which Python reads alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sgl.errors import GrammarError
from sgl.grammar.automaton.nfa import Builder, Node
from sgl.grammar.automaton.parameters import check_bare
from sgl.grammar.automaton.spelling import Spelling
from sgl.grammar.automaton.structural_tag import text_without
from sgl.grammar.automaton.values import value_node
from sgl.grammar.regular.expr import EPSILON, Expr, concat, intersect, is_empty, literal, matches, union
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.shape import Array, Contains, CountedString, KeyPattern, Object, Schema, Shape, Text
from sgl.time_limit import check_time


def _regex(pattern: str) -> Expr:
    return compile_regex(pattern, dialect="python", search=False)


_BARE_KEY = _regex(r"""[^\s=:,(){}\[\]<>"'\\]+""")
_WORDS = ((b"true", b"True"), (b"false", b"False"), (b"null", b"None"))


class LiteralStyle(NamedTuple):
    """How values are written."""

    assigns: bytes
    """Between a parameter and its value."""
    comma: Expr
    quote: str = ""
    """Around strings, which stand as they are; empty: strings are JSON's, and words may be Python's."""
    spelled_quote: bytes = b""
    """In the bytes of a vocabulary."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens."""
        return (self.quote,) if self.quote else ()

    @property
    def key(self) -> Expr:
        """What may be a key."""
        return _BARE_KEY

    @property
    def escapes(self) -> tuple[tuple[str, str], ...]:
        """Characters, and what stands for each in a key."""
        return ()

    def before(self, *, is_first: bool) -> Expr:
        """What stands before a parameter's key."""
        return EPSILON if is_first else self.comma

    def in_bytes(self, spelling: Spelling) -> LiteralStyle:
        """The style with its marks as a vocabulary spells them."""
        return self._replace(spelled_quote=spelling.trigger(self.quote))

    def parameter(self, builder: Builder, key: Expr, schema: Schema, then: Node) -> Node:
        """Where a key begins, with its value behind it, and `then` behind that."""
        written = builder.one(Written, builder, schema, self)
        written.check()
        return builder.after(concat(key, literal(self.assigns)), value_node(builder, written, then))


STYLES = {
    "pythonic": LiteralStyle(b"=", _regex(", ?")),
    "gemma4": LiteralStyle(b":", literal(b","), '<|"|>'),
    "functiongemma": LiteralStyle(b":", literal(b","), "<escape>"),
}


class Written:
    """The values of a schema as a style writes them. One object for each, by the builder."""

    def __init__(self, builder: Builder, schema: Schema, style: LiteralStyle) -> None:
        self.builder = builder
        self.schema = schema
        self.style = style
        self._shapes: tuple[Shape, ...] | None = None

    def alternatives(self) -> tuple[Shape, ...]:
        """As `Schema` has them. Raises GrammarError where values cannot be written so."""
        if self._shapes is None:
            check_time()
            self._shapes = tuple(self._find_shapes())
        return self._shapes

    def bare(self) -> tuple[Expr, Expr]:
        """As `Schema` has them."""
        return self.schema.bare()

    def check(self) -> None:
        """Raise GrammarError where the values, or those within them, cannot be written so."""
        known, left = {self}, [self]
        while left:
            found = set().union(*map(_children, left.pop().alternatives())) - known
            known |= found
            left += found

    def _find_shapes(self) -> list[Shape]:
        found: list[Shape] = []
        if quote := self.style.spelled_quote:
            strings, others = self.schema.bare()
            within = intersect(strings, text_without([self.style.quote.encode()]))
            found += [
                Text(each)
                for each in (concat(literal(quote), within, literal(quote)), others)
                if not is_empty(each)
            ]
        for shape in self.schema.alternatives():
            match shape:
                case Text(expr) if not quote:
                    words = [literal(python) for json, python in _WORDS if matches(expr, json)]
                    found.append(Text(union(expr, *words)) if words else shape)
                case CountedString() if not quote:
                    found.append(shape)
                case Object():
                    found.append(self._object(shape))
                case Array():
                    found.append(self._array(shape))
        if not found:
            raise GrammarError(f"a text that holds {self.style.quote!r} cannot stand between two of them")
        return found

    def _object(self, shape: Object) -> Object:
        is_bare = bool(self.style.quote)
        if is_bare:
            check_bare(shape, _BARE_KEY)
        patterns = [
            KeyPattern(intersect(each.key, _BARE_KEY) if is_bare else each.key, self._of(each.value))
            for each in shape.patterns
        ]
        return replace(
            shape,
            properties=tuple((name, self._of(schema)) for name, schema in shape.properties),
            patterns=tuple(patterns),
            exists=tuple(KeyPattern(each.key, self._of(each.value)) for each in shape.exists),
            has_bare_keys=is_bare,
        )

    def _array(self, shape: Array) -> Array:
        if shape.unique is not None and self.style.quote:
            raise GrammarError("uniqueItems of strings cannot be enforced where they stand without JSON's quotes")
        contains = shape.contains
        if contains is not None:
            contains = replace(contains, matching=self._each(contains.matching), other=self._each(contains.other))
        return replace(
            shape,
            prefix=tuple(map(self._of, shape.prefix)),
            items=None if shape.items is None else self._of(shape.items),
            contains=contains,
            distinct=None if shape.distinct is None else tuple(map(self._of, shape.distinct)),
        )

    def _of(self, schema: Schema) -> Written:
        return self.builder.one(Written, self.builder, schema, self.style)

    def _each(self, schemas: tuple[Schema | None, ...]) -> tuple[Schema | None, ...]:
        return tuple(None if schema is None else self._of(schema) for schema in schemas)


def _children(shape: Shape) -> set[Written]:
    found: list[Schema | None] = []
    if isinstance(shape, Object):
        found = [schema for _, schema in shape.properties]
        found += [each.value for each in (*shape.patterns, *shape.exists)]
    elif isinstance(shape, Array):
        contains = shape.contains or Contains((), (), 0, None)
        found = [*shape.prefix, shape.items, *contains.matching, *contains.other, *(shape.distinct or ())]
    return {each for each in found if isinstance(each, Written)}
