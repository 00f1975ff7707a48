"""Arguments that stand as parameters between tags: keys and strings as they are, other values as JSON.

`formats/arguments.py` reads them. What it takes for another value than a string is not offered as a string: "5" where
a number may stand, or a text that begins with a bracket where an array may.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl.errors import GrammarError
from sgl.grammar.automaton.nfa import Builder, Node, Opening, Thread
from sgl.grammar.automaton.objects import ObjectPlan, Seen
from sgl.grammar.automaton.structural_tag import Tags, text_without
from sgl.grammar.regular.charset import ANY_TEXT
from sgl.grammar.regular.expr import (
    ANYTHING,
    EMPTY,
    Expr,
    concat,
    difference,
    intersect,
    is_empty,
    literal,
    matches,
    union,
    words,
)
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.shape import Array, Object, Schema


def _regex(pattern: str) -> Expr:
    return compile_regex(pattern, dialect="python", search=False)


class XmlStyle(NamedTuple):
    """How a parameter is written: a key between the first two, its value before the third."""

    begin: bytes
    middle: Expr
    end: bytes
    may_be_padded: bool
    """A value may stand in lines of its own; another one begins and ends with no line break."""


STYLES = {
    "qwen_xml": XmlStyle(b"<parameter=", literal(b">"), b"</parameter>", may_be_padded=True),
    "glm_xml": XmlStyle(b"<arg_key>", _regex("</arg_key>\n?<arg_value>"), b"</arg_value>", may_be_padded=False),
}
_KEY = _regex(r"[^\s<>]{1,256}")
_BLANK = _regex(r"[ \t\r\n]*")
_NUMBER = _regex(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERALS = (b"true", b"false", b"null")
_LINE_BREAK = literal(b"\n")
_MAY_BREAK = _regex("\n?")


def xml_node(builder: Builder, schema: Schema, style: XmlStyle, then: Node) -> Node:
    """Where the parameters of an object of the schema begin. Raises GrammarError where they cannot be written so."""
    shapes = [shape for shape in schema.alternatives() if isinstance(shape, Object)]
    if not shapes:
        raise GrammarError("what stands as parameters between tags is an object, which the schema does not allow")
    for shape in shapes:
        if shape.exists or shape.min_properties > len(shape.required):
            raise GrammarError("parameters between tags are no fewer than are required: there is no minProperties")
        for name, _ in shape.properties:
            if not matches(_KEY, name.encode()):
                raise GrammarError(f"a parameter between tags cannot be named {name!r}")
    plans = [builder.one(ObjectPlan, builder, shape) for shape in shapes]
    return Tags([builder.one(Parameters, plan, plan.start, style, then) for plan in plans])


class Parameters(Node):
    """Where another parameter of an object may begin, or the end."""

    def __init__(self, plan: ObjectPlan, seen: Seen, style: XmlStyle, then: Node) -> None:
        self.plan = plan
        self.seen = seen
        self.style = style
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, seen = self.plan, self.seen
        ways = [self._declared(index) for index in plan.declared_at(seen)]
        for key, schema, met in plan.undeclared_at(seen):
            bare = intersect(key, _KEY)
            if not is_empty(bare):
                ways.append(self._parameter(bare, schema, plan.with_undeclared(seen, met)))
        if plan.may_close(seen):
            ways.append(self.then)
        return tuple(dict.fromkeys(thread for way in ways for thread in way.threads()))

    def ahead(self) -> Node:
        """What brings the parameters to their end soonest."""
        plan, seen = self.plan, self.seen
        if plan.may_close(seen):
            return self.then
        shape = plan.shape
        index = next(i for i in plan.declared_at(seen) if shape.properties[i][0] in shape.required)
        return self._declared(index)

    def _declared(self, index: int) -> Node:
        name, schema = self.plan.shape.properties[index]
        return self._parameter(literal(name.encode()), schema, self.plan.with_declared(self.seen, index))

    def _parameter(self, key: Expr, schema: Schema, seen: Seen) -> Node:
        builder, style = self.plan.builder, self.style
        behind = builder.one(Parameters, self.plan, seen, style, self.then)
        value = builder.one(XmlValue, builder, schema, style, behind)
        return builder.after(concat(_MAY_BREAK, literal(style.begin), key, style.middle), value)


class XmlValue(Node):
    """Behind a key: a value, and its end tag."""

    def __init__(self, builder: Builder, schema: Schema, style: XmlStyle, then: Node) -> None:
        self.builder = builder
        self.schema = schema
        self.style = style
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        builder, end = self.builder, self.style.end
        texts = bare_texts(self.schema, end)
        behind = builder.after(literal(end), self.then)
        if not self.style.may_be_padded:
            return self._values(texts, behind)
        unpadded = difference(texts, union(concat(_LINE_BREAK, ANYTHING), concat(ANYTHING, _LINE_BREAK)))
        padded = builder.one(PaddedValue, self, texts, builder.after(literal(b"\n" + end), self.then))
        return (*self._values(unpadded, behind), builder.lexeme(_LINE_BREAK, padded))

    def _values(self, texts: Expr, behind: Node) -> tuple[Thread, ...]:
        builder, shapes = self.builder, self.schema.alternatives()
        opening = Opening(self.schema, behind)
        found = list(builder.enter(texts, behind))
        for bracket, kind in ((b"{", Object), (b"[", Array)):
            if any(isinstance(shape, kind) for shape in shapes):
                found.append(builder.lexeme(literal(bracket), opening))
        return tuple(dict.fromkeys(found))


class PaddedValue(Node):
    """Such a value in lines of its own."""

    def __init__(self, value: XmlValue, texts: Expr, then: Node) -> None:
        self.value = value
        self.texts = texts
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        return self.value._values(self.texts, self.then)


def bare_texts(schema: Schema, end: bytes) -> Expr:
    """The scalars of a schema as they stand before an end tag."""
    strings, others = schema.bare()
    shapes = schema.alternatives()
    taken = [_NUMBER] if not is_empty(difference(others, words(_LITERALS))) else []
    if any(matches(others, each) for each in _LITERALS[:2]):
        taken.append(words(_LITERALS[:2]))
    taken += [literal(b"null")] if matches(others, b"null") else []
    taken = [concat(_BLANK, one, _BLANK) for one in taken]
    for bracket, kind in ((b"{", Object), (b"[", Array)):
        if any(isinstance(shape, kind) for shape in shapes):
            taken.append(concat(_BLANK, literal(bracket), ANYTHING))
    free = text_without([end])
    strings = free if strings is ANY_TEXT else strings if strings is EMPTY else intersect(strings, free)
    return union(difference(strings, union(*taken)) if taken else strings, others)
