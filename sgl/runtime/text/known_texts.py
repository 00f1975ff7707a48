"""A bounded cache of token ids by text, for forced texts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence


class KnownTexts:
    """An LRU cache of tokenised texts. Safe from any thread."""

    def __init__(
        self, encode: Callable[[Sequence[str]], list[list[int]]], most: int, most_characters: int = 1 << 21
    ) -> None:
        """encode: called once for a call's unknown texts. most: texts to keep. most_characters: of all of them."""
        self._encode = encode
        self._most = most
        self._left = most_characters
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
                self._left -= sum(len(text) for text in missing if text not in self._known)
                self._known.update(new)
                while len(self._known) > self._most or self._left < 0:
                    oldest, _ = self._known.popitem(last=False)
                    self._left += len(oldest)
        return [found[text] for text in texts]
