"""Keywords that cannot be enforced: errors in strict compilation, records of `Grammar.dropped` in lenient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sgl.errors import UnsupportedSchema
from sgl.grammar.schema.document import Location

_MOST_RECORDS: Final = 10_000
_LONGEST_PATH: Final = 10_000


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced; `path` is the JSON pointer of its schema."""

    path: str
    keyword: str
    reason: str


class Report:
    """Records dropped keywords, or refuses them."""

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.dropped: dict[Dropped, None] = {}
        self._same: dict[int, tuple[Location, Location]] = {}

    def same(self, first: Location, other: Location) -> None:
        """Two places say the same: records of the first hold for the other."""
        self._same[id(other.schema)] = (first, other)

    def records(self) -> tuple[Dropped, ...]:
        """The dropped keywords, at every place that says them."""
        found = dict(self.dropped)
        pairs = [(first.path(), other.path()) for first, other in self._same.values()] if found else []
        waiting = list(found)
        for record in waiting:
            for first, other in pairs:
                # A schema that equals one around it differs from that in its definitions.
                is_within = record.path.startswith(first + "/") and not other.startswith(first + "/")
                path = other + record.path[len(first) :]
                if (record.path == first or is_within) and len(path) <= _LONGEST_PATH:
                    copy = replace(record, path=path)
                    if copy not in found and len(found) < _MOST_RECORDS:
                        found[copy] = None
                        waiting.append(copy)
        return tuple(found)

    def problem(self, path: str, keyword: str, reason: str, cause: Exception | None = None) -> Dropped:
        """Report a keyword that cannot be enforced. Raises UnsupportedSchema unless lenient."""
        if not self.lenient:
            raise UnsupportedSchema(
                f"{keyword!r} at {path or '/'!r} cannot be enforced: {reason}", path=path, keyword=keyword
            ) from cause
        return self.note(path, keyword, reason)

    def note(self, path: str, keyword: str, reason: str) -> Dropped:
        """Record a keyword that is not enforced although it is no error."""
        record = Dropped(path, keyword, reason)
        self.dropped[record] = None
        return record
