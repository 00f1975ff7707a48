"""The shortest text of an expression: how a document that runs out of room is brought to its end. And how many texts
an expression has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from heapq import heappop, heappush
from itertools import count

from sgl.grammar.regular.byteset import lowest
from sgl.grammar.regular.emptiness import EXPLORE_LIMIT, is_empty
from sgl.grammar.regular.expr import EMPTY, ByteSet, Compound, Concat, Expr, Repeat, Union, Words, difference, words
from sgl.grammar.regular.rope import Rope, rope, shorter, times
from sgl.time_limit import check_size, check_time


def shortest(expr: Expr) -> bytes | None:
    """The first, in the order of bytes, of the shortest strings of the language; None if it is empty.

    It is consistent: what is left of it after some bytes is the shortest string of what is left of the expression.
    Raises GrammarTooLarge where it has more than MAX_TEXT bytes.
    """
    found = shortest_rope(expr)
    return None if found is None else found.text()


def shortest_first(expr: Expr, known: list[bytes]) -> Iterator[bytes]:
    """All texts of the language, the shortest first. known: those that were found before; it grows."""
    for index in count():
        if index == len(known):
            text = shortest(difference(expr, words(known)))
            if text is None:
                return
            known.append(text)
        yield known[index]


def shortest_rope(expr: Expr) -> Rope | None:
    """As `shortest`, of any length; of strings of more than MAX_TEXT bytes that are as long, any."""
    if expr is EMPTY or is_empty(expr):
        return None
    return _shortest(expr)


def _shortest(expr: Expr) -> Rope:
    found = expr.known_shortest
    if found is not None:
        return found
    if expr.nullable:
        found = rope()
    elif isinstance(expr, ByteSet):
        found = rope(bytes([lowest(expr.mask)]))
    elif isinstance(expr, Words):
        check_time()
        # Their first bytes are the same: no need to take them off before they are compared.
        chosen = min(expr.words[expr.low : expr.high], key=lambda word: (len(word), word))
        found = rope(memoryview(chosen)[expr.depth :])
    elif isinstance(expr, Concat):
        # Each tail keeps its own, which others share: a place in a long text costs no more than one in a short.
        heads: list[Concat] = []
        rest: Expr = expr
        while isinstance(rest, Concat) and rest.known_shortest is None:
            heads.append(rest)
            rest = rest.tail
        found = _shortest(rest)
        for concat in reversed(heads):
            found = concat.known_shortest = rope(_shortest(concat.head), found)
    elif isinstance(expr, Union):
        shortest_members = [_shortest(member) for member in expr.members if not is_empty(member)]
        found = reduce(_shorter, shortest_members)
    elif isinstance(expr, Repeat):
        found = times(_shortest(expr.body), expr.low)
    else:
        text = expr.shortest_text() if isinstance(expr, Compound) else None
        found = rope(_search_shortest(expr) if text is None else text)
    expr.known_shortest = found
    return found


def _shorter(one: Rope, other: Rope) -> Rope:
    found = shorter(one, other)
    assert found is not None, "there are two"
    return found


def _search_shortest(start: Expr) -> bytes:
    """Best first: by the least length that a string through a place can have, then in the order of bytes."""
    ways = {start: b""}  # by place, the first of the shortest ways to it
    heap = [(start.least, b"", start)]  # a word leads to one place: no two are compared
    while heap:
        check_size(
            len(ways), EXPLORE_LIMIT, "the shortest string of an intersection lies behind more than {} derivatives"
        )
        check_time()
        least, word, expr = heappop(heap)
        if ways[expr] != word:  # a shorter one was found meanwhile
            continue
        if expr.nullable:
            return word
        for mask, target in expr.raw_arcs():
            if target.known_empty:
                continue
            longer = word + bytes([lowest(mask)])
            known = ways.get(target)
            if known is None or (len(longer), longer) < (len(known), known):
                ways[target] = longer
                heappush(heap, (max(least, len(longer) + target.least), longer, target))
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
