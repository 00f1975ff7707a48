"""A turn as Anthropic's content blocks, and as the events that tell of them: a whole answer is what its events add up
to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from sgl.errors import RequestAborted
from sgl.formats.value_types import parsed
from sgl.runtime.server import sse
from sgl.runtime.server.answers import Part, Result
from sgl.runtime.server.conversations import Writer
from sgl.runtime.server.errors import error_body
from sgl.runtime.server.messages.replies import error_shape

Event = dict[str, Any]


class MessageWriter(Writer):
    """Writes one message."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._max_tokens = max_tokens
        self._block: dict[str, Any] | None = None  # being written
        self._texts: list[str] = []  # of it

    def begin(self, first: Result) -> Iterator[Event]:
        usage = {**_usage(first), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self.message, "content": [], "usage": usage}}

    def add(self, part: Part) -> Iterator[Event]:
        for piece in part.pieces:
            if piece.reasoning:
                yield from self._add_text("thinking", piece.reasoning)
            if piece.content:
                yield from self._add_text("text", piece.content)
            for call in piece.calls:
                yield from self._add_call(call)

    def end(self, part: Part, result: Result) -> Iterator[Event]:
        if part.ending["finish_reason"] == "abort":
            raise RequestAborted("the request was aborted")
        yield from self._close()
        usage = _usage(result)
        reason = _STOP_REASONS[part.ending["finish_reason"]]
        matched = part.ending["stop_reason"]
        if reason == "end_turn" and isinstance(matched, str):
            reason = "stop_sequence"
        if reason == "max_tokens" and usage["output_tokens"] < self._max_tokens:
            reason = "model_context_window_exceeded"
        ending = {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}
        self.message |= {**ending, "usage": usage}
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        return self.message

    def failure(self, error: Exception) -> bytes:
        return sse.event(error_shape(error_body(error)), name="error")

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._block is None or self._block["type"] != kind:
            yield from self._close()
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **more})
        self._texts.append(text)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        """A call's first delta, or more of its arguments."""
        function = call["function"]
        if "id" in call:
            yield from self._close()
            identity = "toolu_" + call["id"].removeprefix("call_")
            yield from self._open({"type": "tool_use", "id": identity, "name": function["name"], "input": {}})
        if text := function["arguments"]:
            self._texts.append(text)
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._block, self._texts = block, []
        yield {"type": "content_block_start", "index": len(self.message["content"]), "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.message["content"]), "delta": delta}

    def _close(self) -> Iterator[Event]:
        block, text = self._block, "".join(self._texts)
        if block is None:
            return
        if block["type"] == "tool_use":
            try:
                block["input"] = parsed(text or "{}")
            except (ValueError, RecursionError):  # cut off
                block["input"] = from_json(text, allow_partial=True)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self.message["content"])}
        self.message["content"].append(block)
        self._block = None


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _usage(result: Result) -> dict[str, int]:
    """Token counts: cached ones are not among the input's."""
    meta = result["meta_info"]
    return {
        "input_tokens": meta["prompt_tokens"] - meta["cached_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": meta["cached_tokens"],
        "output_tokens": meta["completion_tokens"],
    }
