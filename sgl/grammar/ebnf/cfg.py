"""Context-free rules over characters, rewritten so that an Earley parser reads them fast; `ebnf/reader.py` makes them.

A symbol is the number of a rule, or ~i for the i-th terminal: one character of a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sgl.errors import GrammarError
from sgl.grammar.regular import charset
from sgl.grammar.regular.charset import CharSet
from sgl.time_limit import check_size, check_time

Alternative = tuple[int, ...]
MAX_RULES = 10_000
"""Rules, with those of parentheses and repeats."""
MAX_SYMBOLS = 100_000
"""Symbols in all alternatives."""
MAX_TERMINALS = 4_000
"""Different sets of characters."""
MAX_SHORTEST = 1 << 16
"""Characters of the shortest text."""
_BASE = 4
"""Repeats are counted in powers of it, so that a count takes a logarithm of rules."""
_SHORT = 16  # characters of a text that is inlined
_MAX_NAMES = 4  # rules that only name another, followed to find a repeat of a repeat
_MANY = 16  # alternatives
_MAX_COPIES = 8
"""Mutually right-recursive rules are copied for each entry, if these are no more."""


class Cfg:
    """Rules by number, each a list of alternatives; texts begin with rule 0."""

    def __init__(self) -> None:
        self.rules: list[list[Alternative]] = []
        self.terminals: list[CharSet] = []
        self._terminals: dict[CharSet, int] = {}
        self._repeats: dict[tuple[str, int, int], int] = {}
        self._endless: set[int] = set()  # rules that are another any number of times
        self._num_symbols = 0

    def rule(self, alternatives: list[Alternative]) -> int:
        """A new rule. Raises GrammarTooLarge, and OutOfTime in an enclosing `time_limit`."""
        self.check_size(sum(map(len, alternatives)) + len(alternatives))
        return self.add(alternatives)

    def add(self, alternatives: list[Alternative]) -> int:
        """A new rule, its symbols already counted."""
        check_size(len(self.rules) + 1, MAX_RULES, "the grammar has more than {} rules and groups")
        self.rules.append(alternatives)
        return len(self.rules) - 1

    def check_size(self, num_more: int) -> None:
        """Count more symbols. Raises GrammarTooLarge."""
        self._num_symbols += num_more
        check_size(self._num_symbols, MAX_SYMBOLS, "the grammar has more than {} symbols")
        check_time()

    def terminal(self, chars: CharSet) -> int:
        """The terminal of a set, the same one each time."""
        if chars not in self._terminals:
            self._terminals[chars] = ~len(self.terminals)
            self.terminals.append(chars)
        return self._terminals[chars]

    def repeated(self, symbol: int, least: int, most: int | None) -> int:
        """A rule for `least` to `most` of a symbol."""
        for _ in range(_MAX_NAMES):
            if symbol >= 0 and len(self.rules[symbol]) == 1 and len(self.rules[symbol][0]) == 1:
                [[symbol]] = self.rules[symbol]
        if symbol in self._endless and least <= 1 and most in (None, 1):
            return symbol
        if (least, most) == (1, None):
            return self._any(symbol, (symbol,))
        parts = self._times(symbol, least)
        if most is None:
            parts = (*parts, self._any(symbol))
        elif most > least:
            parts = (*parts, self._up_to(symbol, most - least))
        return self.rule([parts])

    def _any(self, symbol: int, first: Alternative = ()) -> int:
        """`first`, which is empty or the symbol, and any number of the symbol."""
        key = "any", symbol, len(first)
        if key not in self._repeats:
            self._repeats[key] = number = self.rule([])
            self.rules[number] = [first, (number, symbol)]
            self.check_size(3)
            if not first:
                self._endless.add(number)
        return self._repeats[key]

    def _times(self, symbol: int, count: int) -> Alternative:
        """Exactly `count`: blocks of _BASE, and the rest."""
        if count <= _BASE:
            return (symbol,) * count
        blocks, rest = divmod(count, _BASE)
        return (*self._times(self._block(symbol), blocks), *(symbol,) * rest)

    def _block(self, symbol: int) -> int:
        key = "times", symbol, _BASE
        if key not in self._repeats:
            self._repeats[key] = self.rule([(symbol,) * _BASE])
        return self._repeats[key]

    def _up_to(self, symbol: int, count: int) -> int:
        """At most `count`: fewer whole blocks of _BASE and less than one more, or all blocks and at most the rest. Each
        number has one derivation."""
        key = "up to", symbol, count
        if key not in self._repeats:
            if count < _BASE:
                alternatives = [(symbol,) * number for number in range(count + 1)]
            else:
                blocks, rest = divmod(count, _BASE)
                block = self._block(symbol)
                few = [self._up_to(block, blocks - 1)] if blocks > 1 else []
                more = [self._up_to(symbol, rest)] if rest else []
                alternatives = [
                    (*few, self._up_to(symbol, _BASE - 1)),
                    (*self._times(block, blocks), *more),
                ]
            self._repeats[key] = self.rule(alternatives)
        return self._repeats[key]

    def simplify(self) -> None:
        """Drop useless rules and unroll right recursion. Raises as `drop_useless`."""
        self.drop_useless()
        self._inline()
        self._absorb()
        self._unroll()
        self._keep_reachable()
        self._factor()
        self._keep_reachable()
        check_size(len(self.terminals), MAX_TERMINALS, "the grammar has more than {} different sets of characters")

    def drop_useless(self) -> None:
        """Drop alternatives that come to no end. Raises GrammarError if there is no text, and GrammarTooLarge if the
        shortest is too long."""
        shortest = self._shortest()
        if shortest[0] is None:
            raise GrammarError("the grammar matches no text at all: every way through it is endless")
        check_size(shortest[0], MAX_SHORTEST, "the shortest text of the grammar has more than {} characters")
        for number, alternatives in enumerate(self.rules):
            kept = [each for each in alternatives if all(s < 0 or shortest[s] is not None for s in each)]
            self.rules[number] = [each for each in dict.fromkeys(kept) if each != (number,)]

    def _shortest(self) -> list[int | None]:
        """The length of each rule's shortest text; None without one."""
        shortest: list[int | None] = [None] * len(self.rules)
        uses: list[list[tuple[int, int]]] = [[] for _ in self.rules]  # of each rule: rule and alternative
        missing: dict[tuple[int, int], int] = {}
        lengths: dict[tuple[int, int], int] = {}
        heap: list[tuple[int, int]] = []
        for number, alternatives in enumerate(self.rules):
            for i, symbols in enumerate(alternatives):
                rules = [symbol for symbol in symbols if symbol >= 0]
                missing[number, i], lengths[number, i] = len(rules), len(symbols) - len(rules)
                for rule in rules:
                    uses[rule].append((number, i))
                if not rules:
                    heap.append((len(symbols), number))
        heapq.heapify(heap)
        while heap:
            length, number = heapq.heappop(heap)
            if shortest[number] is not None:
                continue
            shortest[number] = length
            for user in uses[number]:
                lengths[user] += length
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(heap, (lengths[user], user[0]))
        return shortest

    def _inline(self) -> None:
        """Inline rules that are one short text or one other rule."""
        found: dict[int, Alternative] = {}
        for number, alternatives in enumerate(self.rules):
            if len(alternatives) == 1:
                [only] = alternatives
                if len(only) <= 1 or (len(only) <= _SHORT and all(symbol < 0 for symbol in only)):
                    found[number] = only
        for number in found:  # ends: rules that only name each other have no text and were dropped
            while len(found[number]) == 1 and found[number][0] in found:
                found[number] = found[found[number][0]]
        for number, alternatives in enumerate(self.rules):
            inlined = [tuple(part for s in each for part in found.get(s, (s,))) for each in alternatives]
            self.check_size(sum(map(len, inlined)) - sum(map(len, alternatives)))
            self.rules[number] = [each for each in dict.fromkeys(inlined) if each != (number,)]

    def _absorb(self) -> None:
        """Make repeats of repeats unambiguous: (x+ | y)* is (x | y)*. Else items grow with the text."""
        repeated: dict[int, int] = {}  # rule: the symbol of which it is x* or x+
        for number, alternatives in enumerate(self.rules):
            match alternatives:
                case [first, (again, symbol)] if again == number and first in ((), (symbol,)):
                    repeated[number] = symbol
        for number in repeated:
            check_time()
            first, (_, symbol) = self.rules[number]
            each: list[Alternative] = [(symbol,)]
            for _ in range(_MAX_NAMES):
                larger = [part for one in each for part in self._choices(one, repeated)]
                if len(larger) > _MANY or larger == each:
                    break
                each = larger
            each = [one for one in each if one != (number,)]
            is_nullable = not first or any(map(self._is_nullable_rule, each))
            once = list(dict.fromkeys(self._once(one, repeated) for one in each if one))
            self.check_size(2 * (sum(map(len, once)) + len(once)))
            self.rules[number] = [*([()] if is_nullable else once), *((number, *one) for one in once)]

    def _choices(self, alternative: Alternative, repeated: dict[int, int]) -> list[Alternative]:
        """The alternatives of an alternative that is one rule and no repeat; else itself."""
        is_rule = len(alternative) == 1 and alternative[0] >= 0 and alternative[0] not in repeated
        return self.rules[alternative[0]] if is_rule else [alternative]

    def _is_nullable_rule(self, alternative: Alternative) -> bool:
        return not alternative or (
            len(alternative) == 1 and alternative[0] >= 0 and () in self.rules[alternative[0]]
        )

    def _once(self, alternative: Alternative, repeated: dict[int, int]) -> Alternative:
        """The symbol that an alternative repeats: x of x+, of x* and of x x*."""
        match alternative:
            case (only,) if only in repeated:
                return (repeated[only],)
            case (first, more) if repeated.get(more) == first and () in self.rules[more]:
                return (first,)
        return alternative

    def _unroll(self) -> None:
        """Make right recursion left recursion: an Earley parser keeps a row of items for each turn of the former, and
        one item for the latter. Rules that end in each other are a walk from one to the next, read from its start."""
        ends = [sorted({each[-1] for each in rule if each and each[-1] >= 0}) for rule in self.rules]
        component = _components(ends)
        members: dict[int, list[int]] = {}
        for number, root in enumerate(component):
            members.setdefault(root, []).append(number)
        recursive = {root for root, each in members.items() if len(each) > 1 or root in ends[root]}
        entries: dict[int, set[int]] = {root: set() for root in recursive}
        if component[0] in recursive:
            entries[component[0]].add(0)
        for number, alternatives in enumerate(self.rules):
            for each in alternatives:
                for i, symbol in enumerate(each):
                    is_turn = i == len(each) - 1 and symbol >= 0 and component[symbol] == component[number]
                    if symbol >= 0 and component[symbol] in recursive and not is_turn:
                        entries[component[symbol]].add(symbol)
        for root in sorted(recursive):
            if len(entries[root]) <= _MAX_COPIES:
                self._unroll_component(members[root], sorted(entries[root]))

    def _unroll_component(self, members: Sequence[int], entries: Sequence[int]) -> None:
        inside = set(members)
        rules = {number: self.rules[number] for number in members}
        for entry in entries:
            reached = {number: self.rule([]) for number in members}  # the text read between the entry and it
            self.rules[reached[entry]].append(())
            ends: list[Alternative] = []
            for number, alternatives in rules.items():
                for each in alternatives:
                    if each and each[-1] in inside:
                        step = (reached[number], *each[:-1])
                        if step != (reached[each[-1]],):
                            self.rules[reached[each[-1]]].append(step)
                    else:
                        ends.append((reached[number], *each))
                    self.check_size(len(each) + 1)
            self.rules[entry] = ends

    def _factor(self) -> None:
        """Leave a rule few alternatives: merge those that differ in the first character only, and if many are left,
        share common beginnings."""
        for number, alternatives in enumerate(self.rules):  # grows meanwhile
            check_time()
            merged = self._merged(alternatives)
            if len(merged) > _MANY:
                merged = self._merged(self._with_shared_beginnings(merged))
            self.rules[number] = merged

    def _merged(self, alternatives: list[Alternative]) -> list[Alternative]:
        by_rest: dict[Alternative, list[CharSet]] = {}
        others: dict[Alternative, None] = {}
        for each in alternatives:
            if each and each[0] < 0:
                by_rest.setdefault(each[1:], []).append(self.terminals[~each[0]])
            else:
                others[each] = None
        merged = [
            (self.terminal(sets[0] if len(sets) == 1 else charset.union_of(*sets)), *rest)
            for rest, sets in by_rest.items()
        ]
        return [*others, *merged]

    def _with_shared_beginnings(self, alternatives: list[Alternative]) -> list[Alternative]:
        by_first: dict[Alternative, list[Alternative]] = {}
        for each in alternatives:
            by_first.setdefault(each[:1], []).append(each[1:])
        self.check_size(2 * len(by_first))
        shared = []
        for first, rests in by_first.items():
            shared.append((*first, *rests[0]) if len(rests) == 1 else (*first, self.add(rests)))
        return shared

    def _keep_reachable(self) -> None:
        """Renumber the rules and terminals that are in use."""
        numbers, waiting = {0: 0}, [0]
        for number in waiting:
            for each in self.rules[number]:
                for symbol in each:
                    if symbol >= 0 and symbol not in numbers:
                        numbers[symbol] = len(numbers)
                        waiting.append(symbol)
        terminals, self.terminals, self._terminals = self.terminals, [], {}
        self.rules = [
            [
                tuple(numbers[s] if s >= 0 else self.terminal(terminals[~s]) for s in each)
                for each in self.rules[old]
            ]
            for old in waiting
        ]


def _components(edges: Sequence[Sequence[int]]) -> list[int]:
    """The strongly connected component of each node, named by one of its nodes (Tarjan, without recursion)."""
    component, index, low = [-1] * len(edges), [-1] * len(edges), [0] * len(edges)
    count, stack = 0, list[int]()
    for start in range(len(edges)):
        if index[start] >= 0:
            continue
        calls = [(start, 0)]
        while calls:
            node, at = calls.pop()
            if at == 0:
                index[node] = low[node] = count
                count += 1
                stack.append(node)
            for i in range(at, len(edges[node])):
                child = edges[node][i]
                if index[child] < 0:
                    calls += [(node, i + 1), (child, 0)]
                    break
                if component[child] < 0:
                    low[node] = min(low[node], index[child])
            else:
                if low[node] == index[node]:
                    while component[node] < 0:
                        component[stack.pop()] = node
                if calls:
                    parent = calls[-1][0]
                    low[parent] = min(low[parent], low[node])
    return component
