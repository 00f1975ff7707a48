"""Whether loading cached pages takes less time than computing them: rates measured at start, and kept up to date."""

from __future__ import annotations

from typing import Final

_KEPT: Final = 0.9  # of what earlier measurements weigh, at each new one
_LATENCY: Final = 5e-4  # seconds to begin a load and to notice its end
_MARGIN: Final = 1.1  # by which a load has to be faster
_LONG_STEP: Final = 64  # prompt tokens; shorter steps tell little of a token's cost
_LONG_LOAD: Final = 64


class Mean:
    """Seconds a token, over recent tokens."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._sum, self._tokens = seconds * _LONG_STEP, float(_LONG_STEP)

    def note(self, seconds: float, tokens: int) -> None:
        """So many tokens took so many seconds."""
        self._sum = self._sum * _KEPT + max(seconds, 0.0)
        self._tokens = self._tokens * _KEPT + tokens
        self.seconds = self._sum / self._tokens


class Rates:
    """Seconds a token of computing, of loading from host memory, and of reading from files into it."""

    def __init__(
        self, compute: float, load: float, read: float = 0.0, step: float = 0.0, beside: float = 0.0
    ) -> None:
        """step: seconds of a step without prompts. beside: seconds to load what
        a prefix needs beside pages: a recurrent state, or the windowed pages that are seen."""
        self.compute, self.load, self.read = Mean(compute), Mean(load), Mean(read)
        self.step = step
        self.beside = beside
        self.is_fixed = False
        """Measurements change nothing: for tests."""

    def note_step(self, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """A step was computed, with so many tokens of prompts."""
        if self.is_fixed:
            return
        if not prompt_tokens:
            self.step = seconds if not self.step else self.step * _KEPT + seconds * (1 - _KEPT)
        elif prompt_tokens >= max(_LONG_STEP, tokens // 2):
            self.compute.note(seconds - min(self.step, seconds / 2), tokens)

    def note_load(self, tokens: int, seconds: float) -> None:
        """Pages of so many tokens were loaded."""
        if not self.is_fixed and tokens >= _LONG_LOAD:
            self.load.note(seconds, tokens)

    def note_read(self, tokens: int, seconds: float) -> None:
        """Pages of so many tokens were read from files."""
        if not self.is_fixed and tokens >= _LONG_LOAD:
            self.read.note(seconds, tokens)

    @property
    def pays(self) -> bool:
        """Whether a load of many tokens may be worth it at all."""
        return self.load.seconds * _MARGIN < self.compute.seconds

    def worth_loading(
        self, cached: int, in_host: int, in_files: int, ahead: int = 0, to_read: int | None = None
    ) -> int:
        """How many first tokens of a prompt to have loaded: `cached` if none. Of them, `cached` need no load; up to
        in_host lie in host memory, and up to in_files there or in files. ahead: tokens of loads under way. to_read:
        tokens whose pages take as many bytes as what is read of files; None: those beyond."""
        gained = in_files - max(cached, in_host)
        to_read = max(0, gained) if to_read is None else to_read
        ends = (in_files, in_host) if in_files > in_host else (in_host,)
        for end in ends:
            read = to_read * self.read.seconds if end > in_host else 0.0
            loaded = end - cached
            seconds = (loaded + ahead) * self.load.seconds + read + _LATENCY + self.step + self.beside
            if loaded > 0 and seconds * _MARGIN < loaded * self.compute.seconds:
                is_worth = (read + gained * self.load.seconds) * _MARGIN < gained * self.compute.seconds
                return end if not read or is_worth else in_host
        return cached
