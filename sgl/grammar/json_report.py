"""What becomes of a keyword that cannot be enforced: an error in strict compilation, a record in lenient.

Everything that reads or works out schemas reports here; `Grammar.dropped` shows the records to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl.errors import UnsupportedSchema


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced: `path` is the JSON pointer of the schema that holds it."""

    path: str
    keyword: str
    reason: str


class Report:
    """Collects what is dropped, or refuses it; also passes on the heartbeat that enforces the deadline."""

    def __init__(self, *, lenient: bool, tick: Callable[[], None] | None) -> None:
        self.lenient = lenient
        self.tick = tick or _no_tick
        self.dropped: dict[Dropped, None] = {}

    def problem(self, path: str, keyword: str, reason: str, cause: Exception | None = None) -> Dropped:
        """A keyword cannot be enforced. Raises UnsupportedSchema unless lenient."""
        if not self.lenient:
            raise UnsupportedSchema(
                f"{keyword!r} at {path or '/'!r} cannot be enforced: {reason}", path=path, keyword=keyword
            ) from cause
        return self.note(path, keyword, reason)

    def note(self, path: str, keyword: str, reason: str) -> Dropped:
        """Record something that is not enforced although it is no error."""
        record = Dropped(path, keyword, reason)
        self.dropped[record] = None
        return record


def _no_tick() -> None:
    return None
