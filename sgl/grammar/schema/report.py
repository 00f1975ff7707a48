"""What becomes of a keyword that cannot be enforced: an error in strict compilation, a record in lenient.

Everything that reads or works out schemas reports here; `Grammar.dropped` shows the records to the user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sgl.errors import UnsupportedSchema
from sgl.grammar.schema.document import Location

_MOST_RECORDS: Final = 10_000
_LONGEST_PATH: Final = 10_000


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced: `path` is the JSON pointer of the schema that holds it."""

    path: str
    keyword: str
    reason: str


class Report:
    """Collects what is dropped, or refuses it."""

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.dropped: dict[Dropped, None] = {}
        self._same: dict[int, tuple[Location, Location]] = {}

    def same(self, first: Location, other: Location) -> None:
        """Two places say the same: it is worked out at the first only, and holds for the other."""
        self._same[id(other.schema)] = (first, other)

    def records(self) -> tuple[Dropped, ...]:
        """What is not enforced, at every place that says it."""
        found = dict(self.dropped)
        pairs = [(first.path(), other.path()) for first, other in self._same.values()] if found else []
        waiting = list(found)
        for record in waiting:
            for first, other in pairs:
                # What equals a schema around it differs in what it defines, and stands there.
                is_within = record.path.startswith(first + "/") and not other.startswith(first + "/")
                path = other + record.path[len(first) :]
                if (record.path == first or is_within) and len(path) <= _LONGEST_PATH:
                    copy = replace(record, path=path)
                    if copy not in found and len(found) < _MOST_RECORDS:
                        found[copy] = None
                        waiting.append(copy)
        return tuple(found)

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
