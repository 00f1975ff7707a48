"""Regex patterns to expressions over UTF-8, or over the JSON text of a string.

A pattern becomes the language of texts that it matches, by search, as in JSON Schema, or in full. It is compiled from
its end, each part with the language of all that may follow: `$` and look-ahead are intersections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from operator import is_

from sgl.errors import RegexSyntaxError
from sgl.grammar.regular import charset
from sgl.grammar.regular.expr import EMPTY, EPSILON, Expr, concat, difference, intersect, literal, repeat, union
from sgl.grammar.regular.syntax import (
    Chars,
    Choice,
    Dialect,
    End,
    LookAhead,
    Node,
    Repetition,
    Sequence,
    Start,
    parse,
)

_Pair = tuple[Expr, Expr]
"""Texts at the start of the whole text, and texts further on: `^` tells them apart."""
UNROLL_LIMIT = 16
"""The most copies of a repeated part with an assertion in it."""


@lru_cache(maxsize=1024)
def compile_regex(pattern: str, *, dialect: Dialect = "ecma", search: bool = True, json: bool = False) -> Expr:
    """The texts that `pattern` matches somewhere (`search`) or as a whole.

    With `json`, the JSON text of such strings in canonical spelling, without quotes. Raises RegexSyntaxError.
    """
    return _Compiler(pattern, json=json).whole(parse(pattern, dialect), search=search)


def single_class_repeat(pattern: str) -> tuple[Expr, int, int | None] | None:
    """(character, low, high) if an ECMA pattern, searched, repeats one class over the whole text; over JSON text."""
    found = _class_repeat(parse(pattern, "ecma"), search=True)
    return None if found is None else (charset.json_text(found[0]), found[1], found[2])


def counted_regex(pattern: str) -> tuple[Expr, int, int | None] | None:
    """(character, low, high) if a Python pattern, matched in full, repeats one class so often that counting pays."""
    found = _class_repeat(parse(pattern, "python"), search=False)
    if found is None or max(found[1], found[2] or 0) <= UNROLL_LIMIT:
        return None
    return charset.utf8(found[0]), found[1], found[2]


def _class_repeat(node: Node, *, search: bool) -> tuple[charset.CharSet, int, int | None] | None:
    parts = list(node.parts) if isinstance(node, Sequence) else [node]
    if search and not (isinstance(parts[0] if parts else None, Start) and isinstance(parts[-1], End)):
        return None
    inner = [part for part in parts if not isinstance(part, Start | End)]
    if len(inner) != 1 or len(parts) > 3 or any(isinstance(part, End) and part.before_newline for part in parts):
        return None
    body = inner[0]
    low, high = (body.low, body.high) if isinstance(body, Repetition) else (1, 1)
    chars = _one_class(body.body if isinstance(body, Repetition) else body)
    return None if not chars else (chars, low, high)


def _one_class(node: Node) -> charset.CharSet | None:
    """The characters of a class, or of a choice of classes; None for another part."""
    if isinstance(node, Chars):
        return node.chars
    if isinstance(node, Choice):
        sets = [_one_class(option) for option in node.options]
        return None if None in sets else charset.union_of(*[chars for chars in sets if chars is not None])
    return None


class _Compiler:
    def __init__(self, pattern: str, *, json: bool) -> None:
        self.pattern = pattern
        self.char = charset.json_text if json else charset.utf8
        self.any_text = repeat(self.char(charset.EVERY_CHAR), 0, None)
        self.some_text = repeat(self.char(charset.EVERY_CHAR), 1, None)
        self.newline = self.char(charset.of("\n"))

    def whole(self, node: Node, *, search: bool) -> Expr:
        if not search:
            return self.compile(node, (EPSILON, EPSILON))[0]
        at_start, later = self.compile(node, (self.any_text, self.any_text))
        if at_start is later:
            return concat(self.any_text, later)
        return union(at_start, concat(self.some_text, later))

    def compile(self, node: Node, rest: _Pair) -> _Pair:
        if _is_pure(node):
            own, (at_start, later) = self.plain(node), rest
            longer = concat(own, later)
            if at_start is later or not own.nullable:
                return longer, longer
            return union(at_start, concat(intersect(own, self.some_text), later)), longer
        match node:
            case Start():
                return rest[0], EMPTY
            case End(before_newline):
                end = union(EPSILON, self.newline) if before_newline else EPSILON
                return _each(intersect, rest, (end, end))
            case LookAhead(body, is_negative):
                ahead = self.compile(body, (self.any_text, self.any_text))
                return _each(difference if is_negative else intersect, rest, ahead)
            case Choice(options):
                return _each(union, *[self.compile(option, rest) for option in options])
            case Sequence(parts):
                for part in reversed(parts):
                    rest = self.compile(part, rest)
                return rest
            case Repetition(body, low, high):
                return self.repetition(body, low, high, rest)
        raise AssertionError(f"{node} is pure")

    def plain(self, node: Node) -> Expr:
        match node:
            case Chars(chars):
                return self.char(chars)
            case Choice(options):
                return union(*[self.plain(option) for option in options])
            case Sequence(parts):
                return concat(*self.joined(parts))
            case Repetition(body, low, high):
                return repeat(self.plain(body), low, high)
        raise AssertionError(f"{node} is an assertion")

    def joined(self, parts: tuple[Node, ...]) -> list[Expr]:
        """The parts; runs of plain letters become one literal."""
        result: list[Expr] = []
        for is_letter, run in groupby(parts, _is_letter):
            if is_letter:
                result.append(literal(bytes(part.chars[0][0] for part in run if isinstance(part, Chars))))
            else:
                result += map(self.plain, run)
        return result

    def repetition(self, body: Node, low: int, high: int | None, rest: _Pair) -> _Pair:
        if _is_zero_width(body):
            low, high = min(low, 1), 1 if high is None else min(high, 1)
        if high is None or high > UNROLL_LIMIT:
            raise RegexSyntaxError(
                f"an assertion inside a repeat is not supported, in the regex {self.pattern[:200]!r}",
                pattern=self.pattern,
            )
        result = rest
        for i in reversed(range(high)):
            once = self.compile(body, result)
            result = once if i < low else _each(union, rest, once)
        return result


def _each(operation: Callable[..., Expr], *pairs: _Pair) -> _Pair:
    """An operation on both languages of pairs: once, if each pair has one language twice."""
    at_start, later = zip(*pairs, strict=True)
    found = operation(*at_start)
    return found, found if all(map(is_, at_start, later)) else operation(*later)


def _is_letter(node: Node) -> bool:
    """Whether it is one ASCII character, with the same text in JSON."""
    if not isinstance(node, Chars) or len(node.chars) != 1:
        return False
    first, last = node.chars[0]
    return 0x20 <= first == last < 0x7F and first not in b'"\\'


def _parts(node: Node) -> tuple[Node, ...]:
    match node:
        case Choice(parts) | Sequence(parts):
            return parts
        case Repetition(body) | LookAhead(body):
            return (body,)
    return ()


@lru_cache(maxsize=4096)
def _is_pure(node: Node) -> bool:
    return not isinstance(node, Start | End | LookAhead) and all(map(_is_pure, _parts(node)))


def _is_zero_width(node: Node) -> bool:
    if isinstance(node, Start | End | LookAhead) or (isinstance(node, Repetition) and node.high == 0):
        return True
    return not isinstance(node, Chars) and all(map(_is_zero_width, _parts(node)))
