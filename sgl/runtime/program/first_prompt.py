"""The beginning of a program: the prompt of its first request, told without running any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate
from sgl.lang.ir.interpreter import Interpreter, Steps, StreamFailedError, Turns
from sgl.runtime.program.stream import Stream
from sgl.runtime.program.tokens import Encoder


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The first prompt's tokens, and the engine's `extra_key` that goes with them."""

    ids: list[int]
    extra_key: str | None


def first_prompt_of(
    program: ir.Program, segment: ir.Segment, template: ChatTemplate | None, encoder: Encoder
) -> FirstPrompt | None:
    """Of a checked program and its first segment: its text up to the first gen, select or image; of branches, the one
    that gets there first. None: there is no text, or an adapter computes it. Raises InvalidRequest for text that
    cannot be encoded."""
    return _Reading(program, template, encoder).read(segment)


class _Reading(Interpreter[Stream]):
    """Executes a program until something would run."""

    def __init__(self, program: ir.Program, template: ChatTemplate | None, encoder: Encoder) -> None:
        self._order = _Order()
        super().__init__(program, template, self._order)
        self._encoder = encoder
        self._found: tuple[Stream, dict[str, Any]] | None = None

    def read(self, segment: ir.Segment) -> FirstPrompt | None:
        self._receive(segment)
        while self._found is None and self._order.step():
            pass
        stream, extra = self._found or (self._streams[0], self._program.defaults.get("extra") or {})
        if extra.get("lora_path") is not None or not stream.unencoded:
            return None
        return FirstPrompt(
            self._encoder.extend(stream.tokens, stream.unencoded).ids.tolist(), extra.get("extra_key")
        )

    def _new_stream(self, stream_id: int, path: str, parent: Stream | None) -> Stream:
        return Stream(stream_id, path, parent)

    def _gen(self, stream: Stream, node: ir.Gen) -> Steps[None]:
        given, _ = self._params_and_seeds(stream, node)
        self._stop(stream, given["extra"] or {})

    def _select(self, stream: Stream, node: ir.Select) -> Steps[None]:
        extra = self._program.defaults.get("extra") or {}
        self._stop(stream, {"lora_path": extra.get("lora_path")})

    def _media(self, stream: Stream, node: ir.Media) -> Steps[None]:
        self._stop(stream, self._program.defaults.get("extra") or {})

    def _stop(self, stream: Stream, extra: dict[str, Any]) -> NoReturn:
        self._found = self._found or (stream, extra)
        raise StreamFailedError


class _Order(Turns[Stream]):
    """Resumes streams in the order in which an engine does; nobody hears of it."""

    def __init__(self) -> None:
        super().__init__(lambda event: None)

    def step(self) -> bool:
        """Resume the next stream, if there is one."""
        if self._ready:
            self._resume(self._ready.popleft())
            return True
        return False
