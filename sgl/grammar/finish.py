"""A short way to the end of a document from any place in it.

The text is the shortest in bytes but for two choices, where looking for the best would take for ever: which keys of
an object come first, and how a key may go on whose text matters. It is consistent: what is left of it after some of its
bytes is what is found there. `budget.py` counts its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl.errors import GrammarTooLarge
from sgl.grammar.arrays import AfterItem, ArrayPlan, Items, NextItem
from sgl.grammar.automaton import Automaton
from sgl.grammar.expr import Expr, difference, words
from sgl.grammar.objects import AfterProperty, DeclaredKeys, KeyNode, ObjectPlan, Seen
from sgl.grammar.place import NO_NOTES, Notes, Place
from sgl.grammar.shape import Array, CountedString, Object, Schema, Shape, Text
from sgl.grammar.shortest import shortest
from sgl.grammar.structural_tag import FreeText
from sgl.grammar.threads import After, Closing, Counted, CountedText, Lexeme, Node, NotedText, Opening, Thread
from sgl.grammar.time_limit import check_time
from sgl.grammar.values import ValueNode

_MAX_KNOWN = 20_000


class Finish:
    """Finds the ends of documents of one automaton."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.builder = automaton.builder
        self._values: dict[tuple[Schema, str], bytes] = {}
        self._guesses: dict[tuple[Schema, str], bytes | None] | None = None
        """While values are being worked out that may hold one another: the best known so far."""
        self._known: dict[tuple[Thread, int, int, Notes], bytes | None] = {}
        self._rests: dict[tuple[ObjectPlan, Seen, bytes], bytes | None] = {}
        """Of objects where no undeclared key has been used that may not come again: what `_keys` found."""
        self._notes = NO_NOTES
        """Of the frame that is being brought to its end."""

    def text(self, place: Place) -> bytes:
        """What brings the document to its end. Raises GrammarTooLarge where that is too hard to find."""
        try:
            return self._text(place)
        except RecursionError as error:
            raise GrammarTooLarge("a value is nested too deeply", states=0, limit=0) from error

    def most_within(self, state: int) -> int:
        """How many bytes suffice, whatever was counted, to end the frame that a state stands in. Raises as `text`."""
        ends: dict[int, bytes] = {}
        try:
            for origin, thread in self.automaton.members[state]:
                _keep_shorter(ends, origin, self._thread(thread, 0, 0))
        except RecursionError as error:
            raise GrammarTooLarge("a value is nested too deeply", states=0, limit=0) from error
        return max(map(len, ends.values()), default=0)

    def _text(self, place: Place) -> bytes:
        ends: dict[int, bytes] = {}  # by origin: up to the end of the frame
        for origin, thread in self.automaton.members[place.state]:
            self._notes = place.notes
            key = thread, place.char_count, place.item_count, place.notes
            if key not in self._known:
                if len(self._known) > _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = self._thread(thread, place.char_count, place.item_count)
            _keep_shorter(ends, origin, self._known[key])
        frame = place.stack
        while frame is not None:
            outer_ends: dict[int, bytes] = {}
            self._notes = frame.notes
            callers = self.automaton.callers[frame.symbol]
            for origin, text in ends.items():
                for outer, node in callers[origin]:
                    _keep_shorter(outer_ends, outer, _joined(text, self._node(node, frame.item_count)))
            ends, frame = outer_ends, frame.parent
        found = _shortest_of(ends.values())
        assert found is not None, "every place can be completed"
        return found

    def _thread(self, thread: Thread, chars: int, items: int) -> bytes | None:
        """From inside a lexeme to the end of the frame. None, here and below: not known yet."""
        match thread:
            case Lexeme():
                target = thread.target
                if isinstance(target, Closing):
                    return shortest(thread.expr)
                if isinstance(target, Opening):
                    bracket = shortest(thread.expr)
                    assert bracket is not None
                    inner = self._value(target.schema, bracket[-1:].decode())
                    return _joined(bracket[:-1], inner, self._node(target.then, items))
                return _joined(shortest(thread.expr), self._node(target, items))
            case Counted():
                text = thread.text
                rest = b"" if thread.rest is None else shortest(thread.rest)
                return _joined(rest, _times(text.char, text.low - chars), self._node(text.then, items))
            case DeclaredKeys():
                candidates = [index for _, index in thread.names[thread.low : thread.high]]
                index = self._best_declared(thread.plan, candidates)
                return _joined(
                    thread.plan.names[index][thread.depth :], self._declared(thread.plan, thread.seen, index)
                )
            case NotedText():
                read, used = self._notes
                last = _unused(thread.expr, [one[len(read) :] for one in used if one.startswith(read)])
                if last is None:
                    return None
                self._notes = Notes(b"", used | {read + last})
                return _joined(last, b'"', shortest(thread.after), self._node(thread.then, items))
        return b""  # finished

    def _node(self, node: Node, items: int) -> bytes | None:
        """From between lexemes to the end of the frame; `items` commas were read of it."""
        match node:
            case ValueNode():
                return _joined(self._value(node.schema), self._node(node.then, items))
            case After():
                return _joined(shortest(node.expr), self._node(node.then, items))
            case CountedText():
                return _joined(_times(node.char, node.low), self._node(node.then, items))
            case KeyNode():
                return self._keys(node.plan, node.seen, b"", self._notes.used)
            case AfterProperty():
                if node.plan.may_close(node.seen):
                    return b"}"
                return self._keys(node.plan, node.seen, b',"', self._notes.used)
            case AfterItem():
                return self._items(node.plan, node.items, items)
            case FreeText():
                if node.may_end:
                    return b""
            case NextItem():
                return self._next_items(
                    node.plan, node.items, items + 1, self._notes.used
                )  # its comma is yet to come
        texts = [self._thread(thread, 0, items) for thread in node.threads()]
        return _shortest_of(texts) if texts else b""

    def _value(self, schema: Schema, bracket: str = "") -> bytes | None:
        """The shortest value, or the shortest that opens with `bracket`."""
        key = schema, bracket
        found = self._values.get(key)
        if found is not None:
            return found
        if self._guesses is not None:
            return self._guesses.setdefault(key, None)
        guesses = self._guesses = {key: None}
        try:
            # From below: each round knows the values that are nested one deeper, until none gets shorter.
            while True:
                check_time()
                before = dict(guesses)
                for one in list(guesses):
                    guesses[one] = _shortest_of(self._shape(shape) for shape in _shapes(*one))
                if guesses == before:
                    break
        finally:
            self._guesses = None
        self._values.update({one: text for one, text in guesses.items() if text is not None})
        found = self._values.get(key)
        assert found is not None, "shapes have values"
        return found

    def _shape(self, shape: Shape) -> bytes | None:
        match shape:
            case Text():
                return shortest(shape.expr)
            case CountedString():
                return _joined(b'"', _times(shape.char, shape.min_length), b'"')
            case Object():
                plan = self.builder.one(ObjectPlan, self.builder, shape)
                return b"{}" if plan.may_close(plan.start) else _joined(b"{", self._keys(plan, plan.start, b'"'))
            case Array():
                items = self.builder.one(ArrayPlan, self.builder, shape)
                may_close = any(
                    isinstance(thread, Lexeme) and isinstance(thread.target, Closing)
                    for thread in items.threads_at_start()
                )
                return b"[]" if may_close else _joined(b"[", self._next_items(items, items.start, 0))

    def _keys(
        self, plan: ObjectPlan, seen: Seen, before: bytes, used: frozenset[bytes] = frozenset()
    ) -> bytes | None:
        """The properties that are still needed, at least one, and the closing brace; `before` comes first. `used` are
        undeclared keys that may not come again."""
        if used or self._guesses is not None:
            return self._work_out_keys(plan, seen, before, used)
        key = plan, seen, before
        if key not in self._rests:
            if len(self._rests) > _MAX_KNOWN:
                self._rests.clear()
            self._rests[key] = self._work_out_keys(plan, seen, before, used)
        return self._rests[key]

    def _work_out_keys(self, plan: ObjectPlan, seen: Seen, before: bytes, used: frozenset[bytes]) -> bytes | None:
        parts: list[bytes | None] = []
        while True:
            check_time()
            declared = plan.declared_at(seen)
            required = [i for i in declared if self._is_required(plan, i)]
            if required:
                index = min(required)
                parts += [before, plan.names[index], shortest(plan.after_quote), self._property(plan, index)]
                seen = plan.with_declared(seen, index)
            else:
                found = [
                    (plan.names[i], value, plan.with_declared(seen, i))
                    for i in declared
                    if (value := self._property(plan, i)) is not None
                ]
                found += self._undeclared(plan, seen, used)
                if seen.met != plan.every_met:  # only an undeclared key can bring what must exist
                    found = [way for way in found if way[2].met != seen.met]
                if not found:
                    return None
                name, value, seen = min(found, key=lambda way: (-way[2].met, len(way[0]) + len(way[1])))
                parts += [before, name, shortest(plan.after_quote), value]
                used |= {name[:-1]}
            if plan.may_close(seen):
                return _joined(*parts, b"}")
            before = b',"'

    def _is_required(self, plan: ObjectPlan, index: int) -> bool:
        return bool(plan.required_mask >> index & 1)

    def _property(self, plan: ObjectPlan, index: int) -> bytes | None:
        return self._value(plan.shape.properties[index][1])

    def _undeclared(self, plan: ObjectPlan, seen: Seen, used: frozenset[bytes]) -> list[tuple[bytes, bytes, Seen]]:
        """Key with its closing quote, value and what has been seen behind it, of each kind of undeclared key."""
        found = []
        for key, schema, met in plan.undeclared_at(seen):
            value = self._value(schema)
            if value is None:
                continue
            text = _unused(key, used) if plan.is_noted(seen) else shortest(key)
            if text is not None:
                found.append((text + b'"', value, plan.with_undeclared(seen, met)))
        return found

    def _best_declared(self, plan: ObjectPlan, candidates: list[int]) -> int:
        required = [i for i in candidates if self._is_required(plan, i)]
        if required:
            return min(required)
        return min(candidates, key=lambda i: (len(plan.names[i]) + len(self._property(plan, i) or b""), i))

    def _declared(self, plan: ObjectPlan, seen: Seen, index: int) -> bytes | None:
        """From behind the key of a declared property to the end of the object."""
        after = AfterProperty(plan, plan.with_declared(seen, index))
        return _joined(shortest(plan.after_quote), self._property(plan, index), self._node(after, 0))

    def _items(self, plan: ArrayPlan, items: Items, commas: int) -> bytes | None:
        """From behind an item to the end of the array."""
        is_done = commas + 1 >= plan.shape.min_items if plan.counts_commas else plan.may_close(items)
        return b"]" if is_done else _joined(b",", self._next_items(plan, items, commas + 1, self._notes.used))

    def _next_items(
        self, plan: ArrayPlan, items: Items, commas: int, used: frozenset[bytes] = frozenset()
    ) -> bytes | None:
        """The items that are still needed, at least one, and the closing bracket. `used` are strings that may not come
        again.
        """
        parts: list[bytes | None] = []
        contains = plan.shape.contains
        while True:
            check_time()
            choices = plan.choices(items)
            if contains is not None and items.matching < contains.min_count:
                choices = choices[:1]  # what matches comes first
            noted = plan.shape.noted
            if noted is not None:
                string = _unused(noted, used)
                if string is None:
                    return None
                used |= {string}
                texts: list[tuple[bytes | None, Items]] = [(b'"' + string + b'"', after) for _, after in choices]
            else:
                texts = [(self._value(schema), after) for schema, after in choices]
            known = [(text, after) for text, after in texts if text is not None]
            if not known:
                return None
            text, items = min(known, key=lambda choice: len(choice[0]))
            parts.append(text)
            if noted is None and plan.counts_commas and items.length >= len(plan.shape.prefix):
                more = max(plan.shape.min_items - 1 - commas, 0)
                rest = self._value(plan.shape.items) if more and plan.shape.items is not None else b""
                return _joined(*parts, None if rest is None else (b"," + rest) * more, b"]")
            if commas + 1 >= plan.shape.min_items if plan.counts_commas else plan.may_close(items):
                return _joined(*parts, b"]")
            parts.append(b",")
            commas += 1


def _shapes(schema: Schema, bracket: str) -> list[Shape]:
    kind = {"{": Object, "[": Array}.get(bracket, object)
    return [shape for shape in schema.alternatives() if isinstance(shape, kind)]


def _unused(expr: Expr, used: Iterable[bytes]) -> bytes | None:
    """The shortest text that is none of some."""
    return shortest(difference(expr, words(used)))


def _times(char: Expr, number: int) -> bytes:
    text = shortest(char)
    assert text is not None
    return text * max(number, 0)


def _joined(*parts: bytes | None) -> bytes | None:
    known = [part for part in parts if part is not None]
    return b"".join(known) if len(known) == len(parts) else None


def _shortest_of(texts: Iterable[bytes | None]) -> bytes | None:
    return min((text for text in texts if text is not None), key=lambda text: (len(text), text), default=None)


def _keep_shorter(ends: dict[int, bytes], origin: int, text: bytes | None) -> None:
    """Of two as long the first in order: the members of a state have none, and what is found may not hang on theirs."""
    kept = _shortest_of((text, ends.get(origin)))
    if kept is not None:
        ends[origin] = kept
