"""The text of one output: detokenised, cut at the first stop, final once sent."""

from __future__ import annotations

from collections.abc import Callable

from sgl.runtime.text.detokenizer import Detokenizer
from sgl.runtime.text.stop import StopMatcher


class TextOutput:
    """Feeds tokens through a detokenizer and a stop matcher."""

    __slots__ = ("_detokenizer", "_keep_match", "_min_tokens", "_num_tokens", "_stops", "feed", "matched", "stop")

    def __init__(
        self, detokenizer: Detokenizer, stops: StopMatcher | None, *, keep_match: bool = False, min_tokens: int = 0
    ) -> None:
        """min_tokens: the text of the first min_tokens tokens is not searched for stops."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._keep_match = keep_match
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.feed: Callable[[int], str] = detokenizer.feed if stops is None else self._feed_and_scan
        """feed(token_id): newly certain text. Raises InvalidRequest if a stop regex takes too long."""
        self.matched: str | None = None
        """The text that matched a stop, if any."""
        self.stop: str | None = None
        """The stop string, or the source of the stop regex."""

    @property
    def has_stops(self) -> bool:
        """Whether it has a stop string or stop regex."""
        return self._stops is not None

    def flush(self) -> str:
        """The withheld rest at the end."""
        text = self._scan(self._detokenizer.flush())
        if self._stops is not None and self.matched is None:
            text += self._stops.flush()
        return text

    def _feed_and_scan(self, token_id: int) -> str:
        self._num_tokens += 1
        return self._scan(self._detokenizer.feed(token_id))

    def _scan(self, text: str) -> str:
        if self._stops is None or not text or self._num_tokens < self._min_tokens:
            return text
        safe, match = self._stops.feed(text)
        if match is not None:
            self.matched, self.stop = match.text, match.stop
            return safe + match.text if self._keep_match else safe
        return safe
