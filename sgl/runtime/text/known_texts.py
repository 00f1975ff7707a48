"""A bounded cache of token ids by text, for forced texts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence


class KnownTexts:
    """An LRU cache of tokenised texts. Safe from any thread."""

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]], most: int) -> None:
        """encode: called once for a call's unknown texts. most: texts to keep."""
        self._encode = encode
        self._most = most
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # most recent last
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The token ids of each text. If encoding raises, nothing has changed."""
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            for text in texts:
                if text in self._known:
                    self._known.move_to_end(text)
                    found[text] = self._known[text]
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            # tuples: the GC does not scan their items
            new = dict(zip(missing, map(tuple, self._encode(missing)), strict=True))
            found.update(new)
            with self._lock:
                self._known.update(new)
                while len(self._known) > self._most:
                    self._known.popitem(last=False)
        return [found[text] for text in texts]
