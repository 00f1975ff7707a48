"""What a program's listener has been told, for when the program is opened again: its values depend on its seeds alone,
so they come again, and the listener gets the rest. Of texts and values digests are kept, which show whether they do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sgl.errors import BackendError


class Told:
    """Events of one program, as JSON has them."""

    def __init__(self) -> None:
        self._told: dict[tuple[Any, ...], bytes] = {}  # values' digests
        self._texts: dict[tuple[Any, ...], _Text] = {}  # deltas of nodes that are not done
        self._again: dict[tuple[Any, ...], _Text] = {}
        """Since it was opened again; the same object once all has come."""
        self._is_again = False

    def begin_again(self) -> None:
        """The next events are those of the program opened again."""
        self._again, self._is_again = {}, True

    def has_news(self, event: dict[str, Any]) -> bool:
        """Whether an event has something new, to which a delta's text is cut. Raises BackendError if what was told
        comes out otherwise."""
        kind, place = event["type"], (event.get("row"), event.get("stream"), event.get("index"))
        if kind == "delta":
            is_done = ("node_done", *place) in self._told  # its value is compared
            return not is_done and self._has_text(event, (*place, event.get("reasoning", False)))
        if kind == "node_done":
            for key in ((*place, False), (*place, True)):
                self._check_whole(event, self._texts.pop(key, None), self._again.pop(key, None))
        value = event.get("value")
        value = _Text(value if isinstance(value, str) else json.dumps(value, sort_keys=True)).digest()
        if (told := self._told.get((kind, *place))) is not None:
            if told != value:
                raise _otherwise()
            return False
        self._told[kind, *place] = value
        return True

    def _has_text(self, event: dict[str, Any], key: tuple[Any, ...]) -> bool:
        told, text = self._texts.setdefault(key, _Text()), event["text"]
        again = self._again.setdefault(key, _Text()) if self._is_again else told
        if again is told:
            told.add(text)
            return True  # an empty one may carry meta info
        left = told.length - again.length
        again.add(text[:left])
        if again.length < told.length:
            return False
        if again.digest() != told.digest():
            raise _otherwise()
        self._again[key] = told
        event["text"] = text[left:]
        told.add(event["text"])
        return bool(event["text"])

    def _check_whole(self, event: dict[str, Any], told: _Text | None, again: _Text | None) -> None:
        """A node that is done before all its deltas have come again begins with them."""
        if not self._is_again or told is None or told is again:
            return
        meta = event.get("meta")
        texts = [
            event.get("text"),
            event.get("value"),
            meta.get("reasoning_content") if isinstance(meta, dict) else "",
        ]
        begins = (_Text(text[: told.length]).digest() for text in texts if isinstance(text, str))
        if told.digest() not in begins:
            raise _otherwise()

    def __contains__(self, event: tuple[Any, ...]) -> bool:
        """Whether one of this kind, row, stream and index was told."""
        return event in self._told


class _Text:
    """What is kept of a text."""

    def __init__(self, text: str = "") -> None:
        self.length = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(text)

    def add(self, text: str) -> None:
        self.length += len(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def digest(self) -> bytes:
        return self._hash.digest()


def _otherwise() -> BackendError:
    return BackendError(
        "the program was opened again, as its server was restarted or failed, and its values come out otherwise: "
        "another model, or rounding, which deterministic=True has alike"
    )
