"""A short way to the end of a document from any place in it.

The text is the shortest in bytes but for two choices, which are greedy, not optimal: the order of an object's keys, and
the text of keys that must be unique. Following the answer byte by byte gives the same answer at every point. It may be
longer than memory, so it is a rope (`rope.py`). `budget.py` counts its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from sgl.errors import GrammarTooLarge
from sgl.grammar.automaton.arrays import AfterItem, ArrayPlan, Items, NextItem
from sgl.grammar.automaton.frame_ends import FrameEnds
from sgl.grammar.automaton.nfa import (
    After,
    Closing,
    Counted,
    CountedText,
    InLexeme,
    Lexeme,
    Node,
    Opening,
    Thread,
    UniqueText,
)
from sgl.grammar.automaton.objects import AfterProperty, DeclaredKeys, KeyNode, ObjectPlan, Seen
from sgl.grammar.automaton.parameters import Parameters
from sgl.grammar.automaton.place import NONE_SEEN, Frame, Place, SeenTexts
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.structural_tag import FirstEnd, FreeText, Loop, Tags
from sgl.grammar.automaton.subsets_reference import Int32Array, Int64Array
from sgl.grammar.automaton.values import ValueNode
from sgl.grammar.regular.expr import Expr, difference, words
from sgl.grammar.regular.rope import MAX_TEXT, Rope, is_same, joined, rope, shorter, shortest_of, times
from sgl.grammar.regular.shortest import shortest, shortest_first, shortest_rope
from sgl.grammar.shape import Array, CountedString, Object, Schema, Shape, Text
from sgl.time_limit import check_time

_Key = TypeVar("_Key")
_MAX_KNOWN = 5_000
_NOTHING = rope()
_BRACE, _BRACKET = rope(b"}"), rope(b"]")


class ShortestEnds:
    """Finds the ends of documents of one automaton. What it does raises GrammarTooLarge where that is too hard."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.builder = automaton.builder
        self._values: dict[tuple[Schema, str], Rope] = {}
        self._guesses: dict[tuple[Schema, str], Rope | None] | None = None
        """While values are being worked out that may hold one another: the best known so far."""
        self._guessed = False  # whether a guess was asked for since this was cleared
        self._known: dict[tuple[Thread, int, int, SeenTexts], Rope | None] = {}
        self._frames = FrameEnds(automaton.callers, self._behind)
        self._keys_left: dict[tuple[ObjectPlan, Seen, bytes], Rope] = {}
        """Of objects where no undeclared key has been used that may not come again: what `_keys` found."""
        self._items_left: dict[tuple[ArrayPlan, Items, int], Rope] = {}  # the same of arrays and `_next_items`
        self._texts: dict[Expr, list[bytes]] = {}  # the shortest of a language, as far as they were asked for
        self._max_bytes_known: dict[Thread | Node, int] = {}
        self._max_bytes_behind: dict[int, int] = {}
        self._tags: dict[Tags, Rope | None] = {}
        """They stand in no value: nothing is counted there, and no text comes once alone."""
        self.longest: tuple[str, int] | None = None
        """The keyword that asked for the longest text, and how much it asks for."""
        self._seen_texts = NONE_SEEN  # of the frame that is being brought to its end

    def end(self, place: Place) -> Rope:
        """What brings the document to its end."""
        with _bounded_depth():
            return self._end(place)

    def max_bytes_within(self, states: Int32Array) -> Int64Array:
        """Bytes that suffice from each state to the end of its frame, whatever was counted there; int64 [S]."""
        return self.automaton.subsets.most(states, self._max_bytes, within=True)

    def max_bytes_from_any(self, states: Int32Array) -> int:
        """Bytes that suffice from any of the states to the end of its frame, whichever of its threads goes on alone."""
        return int(self.automaton.subsets.most(states, self._max_bytes, within=False).max(initial=0))

    def max_bytes_behind(self, symbol: int) -> int:
        """Bytes that suffice from behind a frame that was pushed as `symbol` to the end of the frame around it."""
        found = self._max_bytes_behind.get(symbol)
        if found is None:
            nodes = [node for callers in self.automaton.callers[symbol] for _, node in callers]
            found = self._max_bytes_behind[symbol] = max(map(self._max_bytes, nodes), default=0)
        return found

    def _max_bytes(self, begun: Thread | Node) -> int:
        """Bytes that suffice from the start of a thread or node to the end of its frame."""
        found = self._max_bytes_known.get(begun)
        if found is None:
            self._seen_texts = NONE_SEEN
            with _bounded_depth():
                if isinstance(begun, Lexeme) and isinstance(begun.target, Node):
                    found = _size(shortest_rope(begun.expr)) + self._max_bytes(begun.target)
                else:
                    found = _size(self._node(begun, 0) if isinstance(begun, Node) else self._thread(begun, 0, 0))
            self._max_bytes_known[begun] = found
        return found

    def _end(self, place: Place) -> Rope:
        ends: dict[int, Rope] = {}  # by origin: up to the end of the frame
        for origin, thread in self.automaton.members(place.state):
            self._seen_texts = place.seen_texts
            key = thread, place.char_count, place.item_count, place.seen_texts
            if key not in self._known:
                _make_room(self._known)
                self._known[key] = self._thread(thread, place.char_count, place.item_count)
            _keep_shorter(ends, origin, self._known[key])
        if place.stack is not None:
            behind = self._frames.behind(place.stack, set(ends))
            ends = {
                origin: Rope((*text.parts, rest)) if text.count == 1 else Rope((text, rest))
                for origin, text in ends.items()
                if (rest := behind[origin]) is not None
            }
        found = shortest_of(ends.values())
        assert found is not None, "every place can be completed"
        return found

    def _behind(self, node: Node, frame: Frame) -> Rope | None:
        self._seen_texts = frame.seen_texts
        return self._node(node, frame.item_count)

    def _thread(self, thread: Thread, chars: int, items: int) -> Rope | None:
        """From inside a lexeme to the end of the frame. None, here and below: not known yet."""
        match thread:
            case InLexeme():
                target = thread.target
                if isinstance(target, Closing):
                    return shortest_rope(thread.expr)
                if isinstance(target, Opening):
                    bracket = shortest(thread.expr)
                    assert bracket is not None
                    inner = self._value(target.schema, bracket[-1:].decode())
                    return joined(bracket[:-1], inner, self._node(target.then, items))
                return joined(shortest_rope(thread.expr), self._node(target, items))
            case FirstEnd():
                return joined(shortest_rope(thread.expr), self._node(thread.then, items))
            case Counted():
                text = thread.text
                self._asks("minLength", text.low)
                rest = _NOTHING if thread.rest is None else shortest_rope(thread.rest)
                return joined(rest, _times(text.char, text.low - chars), self._node(text.then, items))
            case DeclaredKeys():
                candidates = [index for _, index in thread.names[thread.low : thread.high]]
                index = self._best_declared(thread.plan, candidates)
                return joined(
                    memoryview(thread.plan.names[index])[thread.depth :],
                    self._declared(thread.plan, thread.seen, index),
                )
            case UniqueText():
                read, used = self._seen_texts
                begun = words([one[len(read) :] for one in used if one.startswith(read)])
                last = shortest(difference(thread.expr, begun))
                if last is None:
                    return None
                self._seen_texts = SeenTexts(b"", used | {read + last})
                return joined(last, b'"', shortest(thread.after), self._node(thread.then, items))
        return _NOTHING  # finished

    def _node(self, node: Node, items: int) -> Rope | None:
        """From between lexemes to the end of the frame; `items` commas were read of it."""
        match node:
            case ValueNode():
                return joined(self._value(node.schema), self._node(node.then, items))
            case After():
                return joined(shortest_rope(node.expr), self._node(node.then, items))
            case CountedText():
                self._asks("minLength", node.low)
                return joined(_times(node.char, node.low), self._node(node.then, items))
            case KeyNode():
                return self._keys(node.plan, node.seen, b"", self._seen_texts.used)
            case AfterProperty():
                if node.plan.may_close(node.seen):
                    return _BRACE
                return self._keys(node.plan, node.seen, b"," + node.plan.key_begin, self._seen_texts.used)
            case AfterItem():
                return self._items(node.plan, node.items, items)
            case FreeText():
                if node.then is not None:
                    return self._node(node.then, items)
            case Loop():
                return self._node(node.then, items)
            case Tags():
                if node not in self._tags:
                    self._tags[node] = shortest_of(self._node(way, items) for way in node.ways)
                return self._tags[node]
            case Parameters():
                return self._node(node.ahead(), items)
            case NextItem():
                # its comma is yet to come
                return self._next_items(node.plan, node.items, items + 1, self._seen_texts.used)
        threads = node.threads()
        return shortest_of(self._thread(thread, 0, items) for thread in threads) if threads else _NOTHING

    def _value(self, schema: Schema, bracket: str = "") -> Rope | None:
        """The shortest value, or the shortest that opens with `bracket`."""
        key = schema, bracket
        found = self._values.get(key)
        if found is not None:
            return found
        if self._guesses is not None:
            self._guessed = True
            return self._guesses.setdefault(key, None)
        guesses = self._guesses = {key: None}
        try:
            self._settle(guesses)
        finally:
            self._guesses = None
        self._values.update({one: text for one, text in guesses.items() if text is not None})
        found = self._values.get(key)
        assert found is not None, "shapes have values"
        return found

    def _settle(self, guesses: dict[tuple[Schema, str], Rope | None]) -> None:
        """Work out all values that one may hold: each round knows those that are nested deeper, until none gets
        shorter. What was met last comes first, as it is what others hold. What holds no guess is none."""
        is_settled = False
        while not is_settled:
            order = list(guesses)
            for one in order:  # which grows
                if guesses[one] is None:
                    self._guess(guesses, one)
                    order += list(guesses)[len(order) :]
            is_settled = True
            for one in reversed(order):
                if one not in self._values:
                    before = guesses[one]
                    is_settled &= is_same(before, self._guess(guesses, one))
            is_settled &= len(order) == len(guesses)

    def _guess(self, guesses: dict[tuple[Schema, str], Rope | None], one: tuple[Schema, str]) -> Rope | None:
        check_time()
        self._guessed = False
        found = guesses[one] = shortest_of(self._shape(shape) for shape in _shapes(*one))
        if found is not None and not self._guessed:
            self._values[one] = found
        return found

    def _asks(self, keyword: str, number: int) -> None:
        if number > MAX_TEXT and (self.longest is None or number > self.longest[1]):
            self.longest = keyword, number

    def _shape(self, shape: Shape) -> Rope | None:
        match shape:
            case Text():
                return shortest_rope(shape.expr)
            case CountedString():
                self._asks("minLength", shape.min_length)
                return joined(b'"', _times(shape.char, shape.min_length), b'"')
            case Object():
                plan = self.builder.one(ObjectPlan, self.builder, shape)
                if plan.may_close(plan.start):
                    return rope(b"{}")
                return joined(b"{", self._keys(plan, plan.start, plan.key_begin, frozenset()))
            case Array():
                self._asks("minItems", shape.min_items)
                items = self.builder.one(ArrayPlan, self.builder, shape)
                may_close = any(
                    isinstance(thread, Lexeme) and isinstance(thread.target, Closing)
                    for thread in items.threads_at_start()
                )
                if may_close:
                    return rope(b"[]")
                return joined(b"[", self._next_items(items, items.start, 0, frozenset()))

    def _keys(self, plan: ObjectPlan, seen: Seen, before: bytes, used: frozenset[bytes]) -> Rope | None:
        """The properties that are still needed, at least one, and the closing brace; `before` comes first. `used` are
        undeclared keys that may not come again."""
        is_kept = not used and self._guesses is None
        steps: list[tuple[tuple[ObjectPlan, Seen, bytes] | None, Rope | None]] = []
        end: Rope | None = None
        while end is None:
            check_time()
            key = plan, seen, before
            end = self._keys_left.get(key) if is_kept else None
            if end is not None:
                break
            chosen = self._next_key(plan, seen, used)
            if chosen is None:
                return None
            name, value, seen, used = chosen
            step = joined(before, name, shortest(plan.after_key), value)  # passed where the value is not known yet
            steps.append((key if is_kept and (plan.in_order or not steps) else None, step))
            is_kept = is_kept and not used
            before = b"," + plan.key_begin
            if plan.may_close(seen):
                end = _BRACE
        return _put_together(steps, end, self._keys_left)

    def _next_key(
        self, plan: ObjectPlan, seen: Seen, used: frozenset[bytes]
    ) -> tuple[bytes, Rope | None, Seen, frozenset[bytes]] | None:
        """A key with its closing quote, its value, and what has been seen and used behind it: the first required one
        that may come, else the one that brings most of what must exist, with the fewest bytes."""
        declared, required = self._next_declared(plan, seen)
        if required is not None:
            return plan.names[required], self._property(plan, required), plan.with_declared(seen, required), used
        found = [
            (plan.names[i], value, plan.with_declared(seen, i))
            for i in declared
            if (value := self._property(plan, i)) is not None
        ]
        found += self._undeclared(plan, seen, used)
        if seen.met != plan.every_met:  # only an undeclared key can bring what must exist
            found = [one for one in found if one[2].met != seen.met]
        if not found:
            return None
        name, value, seen = min(found, key=lambda one: (-one[2].met, len(one[0]) + one[1].size))
        return name, value, seen, used | {name[:-1]}

    def _next_declared(self, plan: ObjectPlan, seen: Seen) -> tuple[list[int], int | None]:
        """The declared keys that may come next, and the first required one; the others are left out if there is one."""
        if not (plan.in_order or plan.is_counted or plan.shape.exists):
            missing = plan.required_mask & ~seen.keys
            if missing:
                return [], (missing & -missing).bit_length() - 1
        declared = plan.declared_at(seen)
        return declared, next((i for i in declared if plan.required_mask >> i & 1), None)

    def _property(self, plan: ObjectPlan, index: int) -> Rope | None:
        return self._value(plan.shape.properties[index][1])

    def _undeclared(self, plan: ObjectPlan, seen: Seen, used: frozenset[bytes]) -> list[tuple[bytes, Rope, Seen]]:
        """Key with its closing quote, value and what has been seen behind it, of each kind of undeclared key."""
        found = []
        for key, schema, met in plan.undeclared_at(seen):
            value = self._value(schema)
            if value is None:
                continue
            text = next(self._unused(key, used), None) if plan.is_unique(seen) else shortest(key)
            if text is not None:
                found.append((text + plan.key_end, value, plan.with_undeclared(seen, met)))
        return found

    def _unused(self, expr: Expr, used: Set[bytes]) -> Iterator[bytes]:
        """The texts of a language that are none of some, the shortest first."""
        _make_room(self._texts)
        return (text for text in shortest_first(expr, self._texts.setdefault(expr, [])) if text not in used)

    def _best_declared(self, plan: ObjectPlan, candidates: list[int]) -> int:
        required = [i for i in candidates if plan.required_mask >> i & 1]
        if required:
            return min(required)
        return min(candidates, key=lambda i: (len(plan.names[i]) + _size(self._property(plan, i)), i))

    def _declared(self, plan: ObjectPlan, seen: Seen, index: int) -> Rope | None:
        """From behind the key of a declared property to the end of the object."""
        after = AfterProperty(plan, plan.with_declared(seen, index))
        return joined(shortest(plan.after_key), self._property(plan, index), self._node(after, 0))

    def _items(self, plan: ArrayPlan, items: Items, commas: int) -> Rope | None:
        """From behind an item to the end of the array."""
        is_done = commas + 1 >= plan.shape.min_items if plan.counts_commas else plan.may_close(items)
        if is_done:
            return _BRACKET
        return joined(b",", self._next_items(plan, items, commas + 1, self._seen_texts.used))

    def _next_items(self, plan: ArrayPlan, items: Items, commas: int, used: frozenset[bytes]) -> Rope | None:
        """The items that are still needed, at least one, and the closing bracket. Strings of `used` come no more."""
        shape, contains = plan.shape, plan.shape.contains
        if shape.unique is not None:
            missing = max(shape.min_items - (commas if plan.counts_commas else items.length), 1)
            strings = list(islice(self._unused(shape.unique, used), missing))
            return None if len(strings) < missing else rope(b'"', b'","'.join(strings), b'"]')
        is_kept = self._guesses is None
        steps: list[tuple[tuple[ArrayPlan, Items, int] | None, Rope | None]] = []
        end: Rope | None = None
        while end is None:
            check_time()
            key = plan, items, commas if plan.counts_commas else 0
            end = self._items_left.get(key) if is_kept else None
            if end is not None:
                break
            choices = plan.choices(items)
            if not choices:
                return None
            if contains is not None and items.matching < contains.min_count:
                choices = choices[:1]  # what matches comes first
            known = [(text, after) for schema, after in choices if (text := self._value(schema)) is not None]
            # what is not known yet is passed, to ask for the others, too
            step: Rope | None
            step, items = min(known, key=lambda choice: choice[0].size) if known else (None, choices[0][1])
            if plan.counts_commas and items.length >= len(shape.prefix):
                more = max(shape.min_items - 1 - commas, 0)
                rest = self._value(shape.items) if more and shape.items is not None else _NOTHING
                step = joined(step, None if rest is None else times(rope(b",", rest), more))
                end = _BRACKET
            elif commas + 1 >= shape.min_items if plan.counts_commas else plan.may_close(items):
                end = _BRACKET
            else:
                step = joined(step, b",")
            steps.append((key if is_kept else None, step))
            commas += 1
        return _put_together(steps, end, self._items_left)


@contextmanager
def _bounded_depth() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise GrammarTooLarge("a value is nested too deeply", states=0, limit=0) from error


def _put_together(steps: list[tuple[_Key | None, Rope | None]], end: Rope, left: dict[_Key, Rope]) -> Rope | None:
    """Steps and the end behind them, if all are known; what is left from a step that has a key is kept."""
    found: Rope | None = end
    for key, step in reversed(steps):
        found = joined(step, found)
        if found is None:
            return None
        if key is not None:
            _make_room(left)
            left[key] = found
    return found


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()


def _shapes(schema: Schema, bracket: str) -> list[Shape]:
    kind = {"{": Object, "[": Array}.get(bracket, object)
    return [shape for shape in schema.alternatives() if isinstance(shape, kind)]


def _times(char: Expr, number: int) -> Rope:
    text = shortest_rope(char)
    assert text is not None
    return times(text, number)


def _size(text: Rope | None) -> int:
    return 0 if text is None else text.size


def _keep_shorter(ends: dict[int, Rope], origin: int, text: Rope | None) -> None:
    """Of two as long the first in order: the members of a state have none, and what is found may not hang on theirs."""
    kept = shorter(text, ends.get(origin))
    if kept is not None:
        ends[origin] = kept
