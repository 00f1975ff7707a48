"""Nondeterministic places in a grammar: what one reading of the text so far expects next.

A *thread* stands inside a lexeme and knows its moves by byte; a *node* stands between lexemes and knows the threads
that begin there. Threads are interned, so that sets of them name states. Knows lexemes and shapes of JSON values,
nothing of stacks, tables or vocabularies: `automaton/pushdown.py` runs sets of threads in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar, cast

from sgl.grammar.automaton.tables import CHARS, INC_CHAR, RESET_CHAR
from sgl.grammar.regular.expr import EMPTY, EPSILON, Expr, concat, literal, repeat
from sgl.grammar.shape import Schema
from sgl.grammar.text.json import BLANK_BYTES, MAX_BLANKS, behind_blanks

KeyOrder = Literal["schema", "any"]
PLAIN: Final = 0


class Stay(NamedTuple):
    """After the byte, any of `threads`, in the same frame."""

    threads: tuple[Thread, ...]
    operation: int


class Push(NamedTuple):
    """The byte opens an object or array of `schema`; behind its end stands `then`."""

    schema: Schema
    then: Node


class Pop(NamedTuple):
    """The byte closes the object or array, which is complete."""


Move = Stay | Push | Pop
Moves = tuple[tuple[int, Move], ...]
"""Sets of bytes and the move each leads to; the sets of one thread may overlap."""
POP: Final = Pop()


class Thread:
    """A place inside a lexeme. Compared by identity; `Builder` interns."""

    __slots__ = ("_moves",)

    def __init__(self) -> None:
        self._moves: Moves | None = None

    def moves(self) -> Moves:
        """What each byte may lead to, computed on first use."""
        if self._moves is None:
            self._moves = self._find_moves()
        return self._moves

    def _find_moves(self) -> Moves:
        raise NotImplementedError  # no ABC, here and below: asking isinstance of one takes three times as long


class Node:
    """A place between lexemes. `operation` is what reaching it does to the counters."""

    operation = PLAIN
    _threads: tuple[Thread, ...] | None = None

    def threads(self) -> tuple[Thread, ...]:
        """The threads that begin here, always the same ones, computed on first use."""
        if self._threads is None:
            self._threads = self._find_threads()
        return self._threads

    def _find_threads(self) -> tuple[Thread, ...]:
        raise NotImplementedError


T = TypeVar("T")


class Finished(Thread):
    """The grammar is satisfied: the text may end here."""

    def _find_moves(self) -> Moves:
        return ()


class End(Node):
    """The end of the whole text."""

    def _find_threads(self) -> tuple[Thread, ...]:
        return (Finished(),)


@dataclass(frozen=True, slots=True)
class Opening:
    """A lexeme's target: it ended with the bracket that opens an object or array of `schema`."""

    schema: Schema
    then: Node


class Closing:
    """A lexeme's target: it ended with the bracket that closes the frame."""


CLOSING: Final = Closing()
Target = Node | Opening | Closing


class InLexeme(Thread):
    """Before what is left of a lexeme, and where that leads."""

    __slots__ = ("builder", "expr", "target")

    def __init__(self, builder: Builder, expr: Expr, target: Target) -> None:
        super().__init__()
        self.builder = builder
        self.expr = expr
        self.target = target


class Lexeme(InLexeme):
    """Where the rest of a lexeme is read."""

    __slots__ = ()

    def _find_moves(self) -> Moves:
        return tuple((mask, self._move(rest)) for mask, rest in self.expr.arcs())

    def _move(self, rest: Expr) -> Move:
        builder, target = self.builder, self.target
        if rest is EPSILON and isinstance(target, Opening):
            return Push(target.schema, target.then)
        if rest is EPSILON and isinstance(target, Closing):
            return POP
        operation = target.operation if isinstance(target, Node) and rest.nullable else PLAIN
        indented = behind_blanks(rest)
        if indented is None:
            return Stay(builder.enter(rest, target), operation)
        blanks = builder.one(Blanks, builder, indented, target)
        return Stay((blanks, *builder.enter(indented, target)), operation | RESET_CHAR)


class Blanks(InLexeme):
    """Where one more blank behind a line break may come first. Counted, blanks take one state, and not one for each
    number of them."""

    __slots__ = ()

    def _find_moves(self) -> Moves:
        behind = self.builder.enter(self.expr, self.target)
        guard = self.builder.one(Guard, CHARS, MAX_BLANKS, (self, *behind), behind)
        return ((BLANK_BYTES, Stay((guard,), INC_CHAR)),)


class Counted(Thread):
    """Inside text of counted characters: in `rest` of one character, or between two if that is None.

    `region` says how the count stands to the bounds: 0 below the least, 1 between, 2 at the most.
    """

    __slots__ = ("region", "rest", "text")

    def __init__(self, text: CountedText, rest: Expr | None, region: int) -> None:
        super().__init__()
        self.text = text
        self.rest = rest
        self.region = region

    def _find_moves(self) -> Moves:
        text, region = self.text, self.region
        moves: list[tuple[int, Move]] = []
        if self.rest is not None:
            for mask, rest in self.rest.arcs():
                moves.append((mask, Stay(text.inside(rest, region), PLAIN)))
        elif region < 2:
            limit = text.limit(region)
            for mask, rest in text.char.arcs():
                if limit is None:
                    moves.append((mask, Stay(text.inside(rest, region), PLAIN)))
                else:
                    moves.append((mask, Stay((text.guard(rest, region, limit),), INC_CHAR)))
        return tuple(moves)


class UniqueText(Thread):
    """Inside a text that may not come twice in its frame: `expr` is still to come before the closing quote, and `after`
    between that and `then`. Which texts came before is for `unique_texts.py` to know.
    """

    __slots__ = ("after", "builder", "expr", "then")

    def __init__(self, builder: Builder, expr: Expr, after: Expr, then: Node) -> None:
        super().__init__()
        self.builder = builder
        self.expr = expr
        self.after = after
        self.then = then

    def _find_moves(self) -> Moves:
        builder, after, then = self.builder, self.after, self.then
        moves = []
        for mask, rest in self.expr.arcs():
            moves.append((mask, Stay((builder.one(UniqueText, builder, rest, after, then),), PLAIN)))
        if self.expr.nullable:
            moves.append((1 << 0x22, Stay(builder.enter(after, then), PLAIN)))
        return tuple(moves)


class UniqueNode(Node):
    """Behind the opening quote of such a text."""

    def __init__(self, builder: Builder, expr: Expr, then: Node) -> None:
        self._threads = (builder.one(UniqueText, builder, expr, EPSILON, then),)


class Guard(Thread):
    """Not a place to stay: right after a counter moved, stands for `at` if it has reached `limit`, else for
    `below`.
    """

    __slots__ = ("at", "below", "counter", "limit")

    def __init__(self, counter: int, limit: int, below: tuple[Thread, ...], at: tuple[Thread, ...]) -> None:
        super().__init__()
        self.counter = counter
        self.limit = limit
        self.below = below
        self.at = at

    def _find_moves(self) -> Moves:
        raise AssertionError("a guard is resolved before anything is read")


class CountedText(Node):
    """Between `low` and `high` characters, then `then`. Reaching it starts the count."""

    operation = RESET_CHAR

    def __init__(self, builder: Builder, char: Expr, low: int, high: int | None, then: Node) -> None:
        self.builder = builder
        self.char = char
        self.loop = repeat(char, 0, None)
        self.low = low
        self.high = high
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        return self.inside(EPSILON, self.region_at(0))

    def inside(self, rest: Expr, region: int) -> tuple[Thread, ...]:
        """The threads with `rest` of a character still to come."""
        if rest is not EPSILON:
            return (self.builder.one(Counted, self, rest, region),)
        here = () if region == 2 else (self.builder.one(Counted, self, None, region),)
        return here if region == 0 else (*here, *self.then.threads())

    def guard(self, rest: Expr, region: int, limit: int) -> Guard:
        """What is stopped at behind the first byte of a character that may be the last of a region."""
        at = self.inside(rest, self.region_at(limit))
        return self.builder.one(Guard, CHARS, limit, self.inside(rest, region), at)

    def region_at(self, count: int) -> int:
        """How `count` characters stand to the bounds."""
        return 0 if count < self.low else 2 if self.high is not None and count >= self.high else 1

    def limit(self, region: int) -> int | None:
        """The count at which `region` ends."""
        return self.low if region == 0 else self.high


class Builder:
    """Interns the threads and nodes of one grammar, and knows its conventions.

    `space` is what may stand between two tokens of JSON; `key_order` whether keys come in the order of the schema.
    """

    def __init__(self, space: Expr, key_order: KeyOrder) -> None:
        self.space = space
        self.key_order = key_order
        self.colon = concat(literal(b'"'), space, literal(b":"), space)
        self.comma = concat(space, literal(b","))
        self.open_key = concat(space, literal(b'"'))
        self.end = End()
        self.may_clash = False
        """Whether a byte may be a bracket of JSON in one reading of a text and text in another: `brackets.py` looks."""
        self._made: dict[tuple[object, ...], object] = {}

    def one(self, kind: Callable[..., T], *parts: object) -> T:
        """kind(*parts), one object for each."""
        key = (kind, *parts)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = kind(*parts)
        return cast(T, found)

    def lexeme(self, expr: Expr, target: Target) -> Thread:
        """The thread with `expr` still to come before `target`."""
        return self.one(Lexeme, self, expr, target)

    def enter(self, expr: Expr, target: Target) -> tuple[Thread, ...]:
        """The threads at the start of a lexeme, which may be empty if a node follows."""
        if expr is EMPTY:
            return ()
        here = () if expr is EPSILON else (self.lexeme(expr, target),)
        return (*here, *target.threads()) if isinstance(target, Node) and expr.nullable else here

    def after(self, expr: Expr, then: Node) -> Node:
        """The node where `expr` stands before `then`."""
        return then if expr is EPSILON else self.one(After, self, expr, then)


class After(Node):
    """A lexeme before another node."""

    def __init__(self, builder: Builder, expr: Expr, then: Node) -> None:
        self.builder = builder
        self.expr = expr
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        return self.builder.enter(self.expr, self.then)
