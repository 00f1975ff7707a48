"""Regex patterns to expressions, over plain UTF-8 or over the JSON text of a string.

A pattern becomes the language of whole texts that it matches: by search, as JSON Schema means it, or in full. It is
compiled from its end, each part given the language of all that may follow, so that `$` and look-ahead are plain
intersections with what follows.
"""

from __future__ import annotations

from functools import lru_cache

from sgl.errors import RegexSyntaxError
from sgl.grammar.regular import charset
from sgl.grammar.regular.expr import EMPTY, EPSILON, Expr, complement, concat, intersect, literal, repeat, union
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

UNROLL_LIMIT = 16
"""How often a repeat of a part with an assertion in it is written out."""


@lru_cache(maxsize=1024)
def compile_regex(pattern: str, *, dialect: Dialect = "ecma", search: bool = True, json: bool = False) -> Expr:
    """The texts that `pattern` matches somewhere (`search`) or as a whole.

    With `json`, the JSON text of such strings in canonical spelling, without quotes. Raises RegexSyntaxError.
    """
    return _Compiler(pattern, json=json).whole(parse(pattern, dialect), search=search)


def single_class_repeat(pattern: str) -> tuple[Expr, int, int | None] | None:
    """(character, low, high) if an ECMA pattern, searched, is one class of characters repeated over the whole text:
    over the JSON text of a string.
    """
    found = _class_repeat(parse(pattern, "ecma"), search=True)
    return None if found is None else (charset.json_text(found[0]), found[1], found[2])


def counted_regex(pattern: str) -> tuple[Expr, int, int | None] | None:
    """(character, low, high) if a Python pattern, matched in full, is one class of characters repeated a large
    number of times: what is worth counting.
    """
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
    """The characters of a part that is one character: a class, or a choice of classes."""
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
            return self.compile(node, EPSILON, at_start=True)
        later = self.compile(node, self.any_text, at_start=False)
        if not _has_start(node):
            return concat(self.any_text, later)
        return union(self.compile(node, self.any_text, at_start=True), concat(self.some_text, later))

    def compile(self, node: Node, rest: Expr, *, at_start: bool) -> Expr:
        """The texts that begin with `node` and go on with `rest`, at the start of the text or behind it."""
        if _is_pure(node):
            return concat(self.plain(node), rest)
        match node:
            case Start():
                return rest if at_start else EMPTY
            case End(before_newline):
                return intersect(rest, union(EPSILON, self.newline) if before_newline else EPSILON)
            case LookAhead(body, is_negative):
                ahead = self.compile(body, self.any_text, at_start=at_start)
                return intersect(rest, complement(ahead) if is_negative else ahead)
            case Choice(options):
                return union(*[self.compile(option, rest, at_start=at_start) for option in options])
            case Sequence(parts):
                return self.sequence(parts, rest, at_start=at_start)
            case Repetition(body, low, high):
                return self.repetition(body, low, high, rest, at_start=at_start)
        raise AssertionError(f"{node} is pure")

    def plain(self, node: Node) -> Expr:
        """A part without assertions, whatever follows."""
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
        """The parts, runs of single ASCII characters drawn together."""
        result: list[Expr] = []
        run: list[str] = []
        for part in (*parts, None):
            if (
                isinstance(part, Chars)
                and len(part.chars) == 1
                and 0x20 <= part.chars[0][0] == part.chars[0][1] < 0x7F
            ):
                char = chr(part.chars[0][0])
                if char not in '"\\':
                    run.append(char)
                    continue
            if run:
                result.append(literal("".join(run).encode()))
                run = []
            if part is not None:
                result.append(self.plain(part))
        return result

    def sequence(self, parts: tuple[Node, ...], rest: Expr, *, at_start: bool) -> Expr:
        last_start = max((i for i, part in enumerate(parts) if _has_start(part)), default=-1)
        if not at_start and last_start < 0:
            for part in reversed(parts):
                rest = self.compile(part, rest, at_start=False)
            return rest
        for i in reversed(range(last_start + 1, len(parts))):
            # Whether these stand at the start matters to none of them.
            rest = self.compile(parts[i], rest, at_start=False)
        return self.up_to_start(parts[: last_start + 1], rest, at_start=at_start)

    def up_to_start(self, parts: tuple[Node, ...], rest: Expr, *, at_start: bool) -> Expr:
        """A sequence whose last part asks for the start of the text."""
        if not parts:
            return rest
        first, others = parts[0], parts[1:]
        if not others:
            return self.compile(first, rest, at_start=at_start)
        if _is_zero_width(first):
            return self.compile(first, self.up_to_start(others, rest, at_start=at_start), at_start=at_start)
        behind = self.up_to_start(others, rest, at_start=False)
        if not _may_be_empty(first):
            return self.compile(first, behind, at_start=at_start)
        if not _is_pure(first):
            raise self.refusal("an anchor behind a part that may be empty and holds an assertion")
        skipped = self.up_to_start(others, rest, at_start=at_start)
        some = intersect(self.plain(first), self.some_text)
        return union(concat(some, behind), skipped)

    def repetition(self, body: Node, low: int, high: int | None, rest: Expr, *, at_start: bool) -> Expr:
        if _is_zero_width(body):
            once = self.compile(body, rest, at_start=at_start)
            return once if low else rest if high == 0 else union(rest, once)
        if high is None or high > UNROLL_LIMIT or (high > 1 and _has_start(body)):
            raise self.refusal("an assertion inside a repeat")
        result = rest
        for i in reversed(range(high)):
            once = self.compile(body, result, at_start=at_start and i == 0)
            result = once if i < low else union(rest, once)
        return result

    def refusal(self, what: str) -> RegexSyntaxError:
        return RegexSyntaxError(
            f"{what} is not supported, in the regex {self.pattern[:200]!r}", pattern=self.pattern
        )


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


def _has_start(node: Node) -> bool:
    return isinstance(node, Start) or any(map(_has_start, _parts(node)))


def _is_zero_width(node: Node) -> bool:
    if isinstance(node, Start | End | LookAhead) or (isinstance(node, Repetition) and node.high == 0):
        return True
    return not isinstance(node, Chars) and all(map(_is_zero_width, _parts(node)))


def _may_be_empty(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Choice(parts):
            return any(map(_may_be_empty, parts))
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Repetition(body, low):
            return low == 0 or _may_be_empty(body)
    return True
