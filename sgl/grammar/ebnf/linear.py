"""Grammars that a regular expression can say: those whose rules come back to themselves at their ends alone.

Rules that use each other are a system of equations; X = A X | B has the solution A* B (Arden 1961).
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl.errors import GrammarError
from sgl.grammar.ebnf.cfg import Alternative, Cfg
from sgl.grammar.regular.charset import utf8
from sgl.grammar.regular.expr import EMPTY, EPSILON, Expr, concat, repeat, union
from sgl.time_limit import check_time


def regular_of(rules: Cfg) -> Expr:
    """The texts of the first rule. Raises GrammarError where rules nest."""
    found: dict[int, Expr] = {}
    for group in _groups(rules):
        check_time()
        if len(group) == 1:
            [number] = group
            found[number] = _alone(rules, number, found)
        else:
            _solve(rules, group, found)
    return found[0]


def _alone(rules: Cfg, number: int, found: dict[int, Expr]) -> Expr:
    """A rule that uses no other of which it is part: before·self, self·behind, or neither."""
    before, behind, ends = [], [], []
    for alternative in rules.rules[number]:
        if number not in alternative:
            ends.append(_text(rules, alternative, found))
        elif alternative[0] == number and number not in alternative[1:]:
            behind.append(_text(rules, alternative[1:], found))
        elif alternative[-1] == number and number not in alternative[:-1]:
            before.append(_text(rules, alternative[:-1], found))
        else:
            raise _nests()
    return concat(repeat(union(*before), 0, None), union(*ends), repeat(union(*behind), 0, None))


def _solve(rules: Cfg, group: Sequence[int], found: dict[int, Expr]) -> None:
    """Rules that use each other, each at its end."""
    members = set(group)
    ways: dict[int, dict[int, Expr]] = {}  # by rule and the rule that it goes on with: the texts before it
    ends: dict[int, Expr] = {}
    for number in group:
        ways[number], ends[number] = {}, EMPTY
        for alternative in rules.rules[number]:
            if members.isdisjoint(alternative):
                ends[number] = union(ends[number], _text(rules, alternative, found))
            elif members.isdisjoint(alternative[:-1]):
                text = _text(rules, alternative[:-1], found)
                last = alternative[-1]
                ways[number][last] = union(ways[number].get(last, EMPTY), text)
            else:
                raise _nests()
    for place, number in enumerate(group):  # each is put into those behind it
        loop = repeat(ways[number].pop(number, EMPTY), 0, None)
        ways[number] = {last: concat(loop, text) for last, text in ways[number].items()}
        ends[number] = concat(loop, ends[number])
        for other in group[place + 1 :]:
            if number in ways[other]:
                text = ways[other].pop(number)
                for last, rest in ways[number].items():
                    ways[other][last] = union(ways[other].get(last, EMPTY), concat(text, rest))
                ends[other] = union(ends[other], concat(text, ends[number]))
    for number in reversed(group):
        behind = [concat(text, found[last]) for last, text in ways[number].items()]
        found[number] = union(ends[number], *behind)


def _text(rules: Cfg, symbols: Alternative, found: dict[int, Expr]) -> Expr:
    parts = [found[symbol] if symbol >= 0 else utf8(rules.terminals[~symbol]) for symbol in symbols]
    return concat(*parts) if parts else EPSILON


def _groups(rules: Cfg) -> list[list[int]]:
    """The rules, those that use each other together, behind all that they use (Tarjan 1972)."""
    groups: list[list[int]] = []
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    is_open: set[int] = set()
    waiting = [(0, iter(_used(rules, 0)))]
    order[0] = lowest[0] = 0
    stack.append(0)
    is_open.add(0)
    while waiting:
        number, rest = waiting[-1]
        other = next(rest, None)
        if other is None:
            waiting.pop()
            if waiting:
                parent = waiting[-1][0]
                lowest[parent] = min(lowest[parent], lowest[number])
            if lowest[number] == order[number]:
                at = stack.index(number)
                groups.append(stack[at:])
                is_open.difference_update(stack[at:])
                del stack[at:]
        elif other not in order:
            order[other] = lowest[other] = len(order)
            stack.append(other)
            is_open.add(other)
            waiting.append((other, iter(_used(rules, other))))
        elif other in is_open:
            lowest[number] = min(lowest[number], order[other])
    return groups


def _used(rules: Cfg, number: int) -> list[int]:
    return [symbol for alternative in rules.rules[number] for symbol in alternative if symbol >= 0]


def _nests() -> GrammarError:
    return GrammarError(
        "a grammar within a structural tag comes back to a rule at its beginning or end alone: give one that nests as "
        "`ebnf`, for the whole text"
    )
