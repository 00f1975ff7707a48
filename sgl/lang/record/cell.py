"""What a recorded node yields: known text, a pending answer, or a value computed from answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sgl.errors import ProgramError, ServerUnreachable
from sgl.lang.aio import Watched
from sgl.lang.ir import nodes as ir
from sgl.lang.record.place import Place, place_text, with_place

NO_META: dict[str, Any] = {}  # of pending cells; never written to


@dataclass(slots=True, eq=False)
class Failure:
    """Why a node has no value: `what` failed, or with None, the body raised `cause`. `is_seen`: it was looked at."""

    what: str | None
    cause: BaseException
    node: str | None = None
    variable: str | None = None
    place: Place | None = None
    is_seen: bool = False

    def exception(self) -> BaseException:
        """The exception to raise: a new one chained to the cause, or a body's own error."""
        self.is_seen = True
        if self.what is None:
            return self.cause
        place = place_text(self.place)
        error = ProgramError(with_place(self.text(), place), node=self.node, variable=self.variable)
        error.place = place
        if isinstance(self.cause, ServerUnreachable):
            self.cause.__traceback__ = None  # our client's frames; the message suffices
        error.__cause__ = self.cause
        return error

    def text(self) -> str:
        """The exception's message; a body's error includes its class."""
        kind, message = type(self.cause).__name__, str(self.cause)
        if self.what is None:
            return f"{kind}: {message}" if message else kind
        return f"{self.what} failed: {message or kind}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A non-empty piece of streamed text, and its meta info."""

    text: str
    meta: dict[str, Any]
    is_reasoning: bool = False


class Cell(Watched):
    """One node's answer: pending, then done with text and value or a failure. Chunks may come first."""

    __slots__ = ("_untold", "address", "chunks", "done", "failure", "meta", "text", "value")

    def __init__(self, address: tuple[int, int] | None = None) -> None:
        self._wakers = []
        self.address = address  # of a node that a `Ref` may repeat
        self.done = False
        self.text = ""
        self.value: Any = None
        self.meta: dict[str, Any] = NO_META
        self.failure: Failure | None = None
        self.chunks: list[Chunk] = []
        self._untold = NO_META  # meta info without text since the last chunk

    def add(self, event: ir.Delta) -> None:
        """Add a streamed piece. Meta info without text joins the next piece."""
        if event.text:
            self._add_chunk(event.text, event.meta or {}, event.reasoning)
            self.wake()
        else:
            self._untold = _merged(self._untold, event.meta or {})

    def _add_chunk(self, text: str, meta: dict[str, Any], is_reasoning: bool) -> None:
        if self._untold:
            meta, self._untold = _merged(self._untold, meta), NO_META
        self.chunks.append(Chunk(text, meta, is_reasoning))

    def resolve(self, event: ir.NodeDone) -> None:
        """Take the answer and complete the streamed pieces. Meta info after the last piece joins it."""
        self.text, self.value, self.meta = event.text, event.value, event.meta
        if self.chunks:
            self._add_rest(event.meta.get("reasoning_content", ""), is_reasoning=True)
            self._add_rest(event.text, is_reasoning=False)
            if self._untold:
                last = self.chunks[-1]
                last.meta.update(_merged(last.meta, self._untold))
        self.done = True
        self.wake()

    def _add_rest(self, whole: str, *, is_reasoning: bool) -> None:
        """Add what the pieces lack of the final text."""
        sent = sum(len(chunk.text) for chunk in self.chunks if chunk.is_reasoning is is_reasoning)
        if len(whole) > sent:  # logprobs came with the pieces
            meta = {key: value for key, value in self.meta.items() if not key.endswith("logprobs")}
            self._add_chunk(whole[sent:], meta, is_reasoning)

    def fail(self, failure: Failure) -> None:
        """Fail, unless answered."""
        if not self.done:
            self.failure, self.done = failure, True
            self.wake()

    def is_done(self) -> bool:
        """Whether there is an answer or failure."""
        return self.done

    @property
    def cells(self) -> tuple[Cell]:
        """See Lazy."""
        return (self,)

    def get(self) -> Any:
        """See Lazy."""
        return self.value


@dataclass(frozen=True, slots=True)
class Lazy:
    """A value computed from finished `cells`; `source` streams it, if given."""

    cells: Sequence[Cell]
    get: Callable[[], Any]
    source: Cell | None = None
    address: tuple[int, int] | None = None
    items: Sequence[Any] | None = None  # branches' values, of a join's list


Part: TypeAlias = str | Cell | Lazy  # the text of one node


def gathered(values: list[Any]) -> Lazy:
    """A list of values that may be pending."""
    return Lazy(
        cells_of(values),
        lambda: [value.get() if isinstance(value, Cell | Lazy) else value for value in values],
        items=values,
    )


def _merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Meta info of two events: the later wins; lists of logprobs are joined."""
    merged = {**before, **after}
    for key, value in before.items():
        if key.endswith("logprobs") and isinstance(value, list) and isinstance(after.get(key), list):
            merged[key] = value + after[key]
    return merged


def has_news(cell: Cell, seen: int) -> bool:
    """Whether chunks beyond `seen` exist or none will come."""
    return cell.done or len(cell.chunks) > seen


def cells_of(values: Iterable[Any]) -> list[Cell]:
    """All answers that values or parts need."""
    return [cell for value in values if isinstance(value, Cell | Lazy) for cell in value.cells]


def text_of(parts: Iterable[Part]) -> str:
    """The parts' text; pending ones are empty."""
    return "".join(
        [part if isinstance(part, str) else part.text if isinstance(part, Cell) else part.get() for part in parts]
    )
