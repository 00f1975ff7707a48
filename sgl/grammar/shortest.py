"""The shortest text of an expression: how a document that runs out of room is brought to its end. And how many texts
an expression has."""

from __future__ import annotations

from sgl.grammar.byteset import lowest
from sgl.grammar.expr import (
    EMPTY,
    EXPLORE_LIMIT,
    ByteSet,
    Concat,
    Expr,
    Repeat,
    Union,
    Words,
    is_empty,
)
from sgl.grammar.time_limit import check_size, check_time


def shortest(expr: Expr) -> bytes | None:
    """The first, in the order of bytes, of the shortest strings of the language; None if it is empty.

    It is consistent: what is left of it after some bytes is the shortest string of what is left of the expression.
    """
    if expr is EMPTY or is_empty(expr):
        return None
    return _shortest(expr)


def _shortest(expr: Expr) -> bytes:
    found = expr.known_shortest
    if found is not None:
        return found
    if expr.nullable:
        found = b""
    elif isinstance(expr, ByteSet):
        found = bytes([lowest(expr.mask)])
    elif isinstance(expr, Words):
        chosen = min(expr.words[expr.low : expr.high], key=lambda word: (len(word), word))
        found = chosen[expr.depth :]
    elif isinstance(expr, Concat):
        parts = []
        rest: Expr = expr
        while isinstance(rest, Concat):
            parts.append(_shortest(rest.head))
            rest = rest.tail
        found = b"".join([*parts, _shortest(rest)])
    elif isinstance(expr, Union):
        found = min((_shortest(m) for m in expr.members if not is_empty(m)), key=lambda word: (len(word), word))
    elif isinstance(expr, Repeat):
        found = _shortest(expr.body) * expr.low
    else:
        found = _search_shortest(expr)
    expr.known_shortest = found
    return found


def _search_shortest(start: Expr) -> bytes:
    """Breadth first, level by level in the order of bytes, until a level holds a nullable expression."""
    level: dict[Expr, bytes] = {start: b""}
    seen = {start}
    while level:
        check_size(
            len(seen), EXPLORE_LIMIT, "the shortest string of an intersection lies behind more than {} derivatives"
        )
        done = [word for expr, word in level.items() if expr.nullable]
        if done:
            return min(done)
        following: dict[Expr, bytes] = {}
        for expr, word in sorted(level.items(), key=lambda item: item[1]):
            for mask, target in expr.arcs():
                longer = word + bytes([lowest(mask)])
                if target not in seen and (target not in following or longer < following[target]):
                    following[target] = longer
        seen.update(following)
        level = following
    raise AssertionError("a language that is not empty has a shortest string")


def num_texts(expr: Expr, enough: int) -> int:
    """How many strings the language has, at most `enough`."""
    found = 0
    level = {expr: 1}  # by what is left of them, how many strings begin so
    while level and found < enough:
        check_time()
        found += sum(number for place, number in level.items() if place.nullable)
        following: dict[Expr, int] = {}
        for place, number in level.items():
            for mask, target in place.arcs():
                following[target] = min(following.get(target, 0) + number * mask.bit_count(), enough)
        if found + sum(following.values()) >= enough:  # each of them goes on to a string of its own at least
            return enough
        level = following
    return min(found, enough)
