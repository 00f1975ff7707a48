"""What a program's listener has been told, for when the program is opened again: its values depend on its seeds alone,
so they come again, and the listener gets the rest."""

from __future__ import annotations

from typing import Any


class Told:
    """Events of one program, as JSON has them."""

    def __init__(self) -> None:
        self._told: set[tuple[Any, ...]] = set()
        self._characters: dict[tuple[Any, ...], int] = {}  # of deltas
        self._counted: dict[tuple[Any, ...], int] = {}  # of deltas since it was opened
        self._is_again = False

    def begin_again(self) -> None:
        """The next events are those of the program opened again."""
        self._counted, self._is_again = {}, True

    def has_news(self, event: dict[str, Any]) -> bool:
        """Whether an event has something new, to which a delta's text is cut."""
        kind, place = event["type"], (event.get("row"), event.get("stream"), event.get("index"))
        if kind == "delta":
            key = (*place, event.get("reasoning", False))
            at = self._counted[key] = self._counted.get(key, 0) + len(event["text"])
            had = self._characters.get(key, 0)
            if at <= had and self._is_again:  # an empty one may carry meta info
                return False
            self._characters[key] = at
            event["text"] = event["text"][-(at - had) :] if at > had else ""
            return True
        if (kind, *place) in self._told:
            return False
        self._told.add((kind, *place))
        return True

    def __contains__(self, event: tuple[Any, ...]) -> bool:
        """Whether one of this kind, row, stream and index was told."""
        return event in self._told
