"""Arguments that stand as parameters between tags: keys and strings as they are, other values as JSON.

`formats/arguments.py` reads them. What it takes for another value than a string is not offered as a string: "5" where
a number may stand, or a text that begins with a bracket where an array may.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl.grammar.automaton.nfa import Builder, Node, Opening, Thread
from sgl.grammar.automaton.spelling import Spelling
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
    union,
    words,
)
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.shape import Array, Object, Schema


def _regex(pattern: str) -> Expr:
    return compile_regex(pattern, dialect="python", search=False)


_STRING = frozenset({"string"})
_SCALARS = {
    "number": _regex(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"),
    "boolean": words((b"true", b"false")),
    "null": literal(b"null"),
}
_BRACKETS = {"object": (b"{", Object), "array": (b"[", Array)}
_OTHERS = frozenset({*_SCALARS, *_BRACKETS})
_ALL = _STRING | _OTHERS


class XmlStyle(NamedTuple):
    """How a parameter is written: a key between the first two, its value before the third."""

    begin: str
    middles: tuple[tuple[str, frozenset[str]], ...]
    """Each with the kinds of values that stand behind it. A line break may be left out."""
    end: str
    may_be_padded: bool = False
    """A value may stand in lines of its own; another one begins and ends with no line break."""
    has_cdata: bool = False
    """A text may stand between <![CDATA[ and ]]>, and begins in no other way so."""
    escapes: tuple[tuple[str, str], ...] = ()
    """Characters, and what stands for each in a key."""
    spelling: Spelling = Spelling()

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens."""
        return (self.begin, self.end, *(middle for middle, _ in self.middles))

    @property
    def key(self) -> Expr:
        """What may be a key, nothing of which is escaped."""
        return _ESCAPED_KEY if self.escapes else _QUOTED_KEY if self.begin.endswith('"') else _KEY

    def in_bytes(self, spelling: Spelling) -> XmlStyle:
        """The style with its marks as a vocabulary spells them."""
        return self._replace(spelling=spelling)

    def bytes_of(self, mark: str) -> Expr:
        """A mark, any line break in which may be left out."""
        first, *others = [literal(self.spelling.trigger(part)) for part in mark.split("\n")]
        return concat(first, *(concat(_MAY_BREAK, other) for other in others))

    def before(self, *, is_first: bool) -> Expr:
        """What stands before a parameter's key."""
        return concat(_MAY_BREAK, self.bytes_of(self.begin))

    def parameter(self, builder: Builder, key: Expr, schema: Schema, then: Node) -> Node:
        """Where a key begins, with its value behind it, and `then` behind that."""
        ways = []
        for middle, kinds in self.middles:
            forms = [(middle, self, kinds)]
            if self.has_cdata:
                inside = self._replace(end=f"]]>{self.end}", has_cdata=False)
                forms.append((middle + _CDATA, inside, kinds & _STRING))
            for before, style, allowed in forms:
                value = builder.one(XmlValue, builder, schema, style, allowed, then)
                if value.threads():
                    ways.append(builder.after(concat(key, self.bytes_of(before)), value))
        return ways[0] if len(ways) == 1 else builder.one(Tags, tuple(ways))


def _marked(suffix: str = "") -> XmlStyle:
    return XmlStyle(
        f"<arg_key{suffix}>", ((f"</arg_key{suffix}>\n<arg_value{suffix}>", _ALL),), f"</arg_value{suffix}>"
    )


STYLES = {
    "qwen_xml": XmlStyle("<parameter=", ((">", _ALL),), "</parameter>", may_be_padded=True),
    "glm_xml": _marked(),
    "ifm_xml": XmlStyle("<ifm|arg_key>", (("</ifm|arg_key>\n<ifm|arg_value>", _ALL),), "</ifm|arg_value>"),
    "solar_xml": XmlStyle("<|tool_arg:start|>", (("<|tool_arg:value|>", _ALL),), "<|tool_arg:end|>"),
    "minicpm_xml": XmlStyle('<param name="', (('">', _ALL),), "</param>", has_cdata=True),
    "hy_xml": _marked(":opensource"),
    "minimax_xml": XmlStyle('<parameter name="', (('">', _ALL),), "</parameter>"),
    "step_xml": XmlStyle('<steptml:parameter name="', (('">', _ALL),), "</steptml:parameter>"),
    "deepseek_xml": XmlStyle(
        '<｜DSML｜parameter name="',
        (('" string="true">', _STRING), ('" string="false">', _OTHERS)),
        "</｜DSML｜parameter>",
    ),
    "kimi_xml": XmlStyle(
        '<|open|>argument key="',
        tuple((f'" type="{kind}"<|sep|>', frozenset({kind})) for kind in ("string", *sorted(_OTHERS))),
        "<|close|>argument<|sep|>",
        escapes=(("&", "&amp;"), ('"', "&quot;")),
    ),
    "gcml_xml": XmlStyle(
        '<｜GCML｜parameter name="',
        (('" string="true">', _STRING), ('" string="false">', _OTHERS)),
        "</｜GCML｜parameter>",
    ),
}
_KEY = _regex(r"[^\s<>]+")
_QUOTED_KEY = _regex(r'[^\s<>"]+')
_ESCAPED_KEY = _regex(r'[^\s<>"&]+')
_BLANK = _regex(r"[ \t\r\n]*")
_LINE_BREAK = literal(b"\n")
_MAY_BREAK = _regex("\n?")
_CDATA = "<![CDATA["


class XmlValue(Node):
    """Behind a key: a value of some kinds, and its end tag."""

    def __init__(
        self, builder: Builder, schema: Schema, style: XmlStyle, kinds: frozenset[str], then: Node
    ) -> None:
        self.builder = builder
        self.schema = schema
        self.style = style
        self.kinds = kinds
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        builder, end = self.builder, self.style.bytes_of(self.style.end)
        texts = bare_texts(self.schema, self.style.end.encode(), self.kinds)
        if self.style.has_cdata:
            texts = difference(texts, concat(literal(_CDATA.encode()), ANYTHING))
        behind = builder.after(end, self.then)
        if not self.style.may_be_padded:
            return self._values(texts, behind)
        unpadded = difference(texts, union(concat(_LINE_BREAK, ANYTHING), concat(ANYTHING, _LINE_BREAK)))
        padded = builder.one(PaddedValue, self, texts, builder.after(concat(_LINE_BREAK, end), self.then))
        return (*self._values(unpadded, behind), builder.lexeme(_LINE_BREAK, padded))

    def _values(self, texts: Expr, behind: Node) -> tuple[Thread, ...]:
        builder, shapes = self.builder, self.schema.alternatives()
        opening = Opening(self.schema, behind)
        found = list(builder.enter(texts, behind))
        for kind, (bracket, shape_of) in _BRACKETS.items():
            if kind in self.kinds and any(isinstance(shape, shape_of) for shape in shapes):
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


def bare_texts(schema: Schema, end: bytes, kinds: frozenset[str]) -> Expr:
    """The scalars of a schema, of some kinds, as they stand before an end tag."""
    strings, others = schema.bare()
    if not kinds & _STRING:
        return union(*(intersect(others, scalar) for kind, scalar in _SCALARS.items() if kind in kinds))
    free = text_without([end])
    strings = free if strings is ANY_TEXT else strings if strings is EMPTY else intersect(strings, free)
    if kinds == _STRING:
        return EMPTY if is_empty(strings) else strings
    taken = [
        concat(_BLANK, scalar, _BLANK) for scalar in _SCALARS.values() if not is_empty(intersect(others, scalar))
    ]
    for bracket, shape_of in _BRACKETS.values():
        if any(isinstance(shape, shape_of) for shape in schema.alternatives()):
            taken.append(concat(_BLANK, literal(bracket), ANYTHING))
    return union(difference(strings, union(*taken)) if taken else strings, others)
