"""A turn as items of a response, and as the events that tell of them: a whole answer is what its events add up to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from sgl.runtime.server import sse
from sgl.runtime.server.answers import Part, Result
from sgl.runtime.server.conversations import Writer
from sgl.runtime.server.errors import error_body

Event = dict[str, Any]


class ResponseWriter(Writer):
    """Writes one response. Its items follow each other: one is done before the next is added."""

    def __init__(self, response: dict[str, Any], num_tokens: Callable[[str], int]) -> None:
        """`response`: without output, of status in_progress; it is filled. `num_tokens`: of a text."""
        self.response = response
        self._num_tokens = num_tokens
        self._item: dict[str, Any] | None = None  # being written
        self._texts: list[str] = []  # of it
        self._written: list[dict[str, Any]] = []  # its logprobs
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text did not come yet
        self._reasoning: list[str] = []
        self._number = 0

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    def begin(self, first: Result) -> Iterator[Event]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=dict(self.response))

    def add(self, part: Part) -> Iterator[Event]:
        self._logprobs += part.logprobs
        for piece in part.pieces:
            if piece.reasoning:
                yield from self._add_text("reasoning", piece.reasoning)
            if piece.content:
                yield from self._add_text("message", piece.content)
            for call in piece.calls:
                yield from self._add_call(call)

    def end(self, part: Part, result: Result) -> Iterator[Event]:
        status = _STATUSES.get(part.ending["finish_reason"], "completed")
        if self._item is None and not self.response["output"]:  # an empty text is an answer
            yield from self._add_text("message", "")
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"usage": self._usage(result["meta_info"]), "status": status}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "completed":
            self.response["completed_at"] = int(time.time())
        last = "completed" if status == "completed" else "incomplete"  # there is no event of its own for cancelled
        yield self._event(f"response.{last}", response=self.response)

    def whole(self) -> dict[str, Any]:
        return self.response

    def failure(self, error: Exception) -> bytes:
        told = error_body(error)["error"]
        self._item = None
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": told["message"]}}
        few = {name: told[name] for name in ("code", "message", "param")}
        return sse.named(
            [self._event("response.failed", response=self.response), self._event("error", **few, error=told)]
        )

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        """Text of a message or of reasoning."""
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            yield from self._open(_MESSAGE if kind == "message" else _REASONING)
            yield self._event("response.content_part.added", content_index=0, part=_part(kind, "", []))
        self._texts.append(text)
        if kind == "reasoning":
            self._reasoning.append(text)
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            return
        logprobs = self._logprobs_of(text)
        self._written += logprobs
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        """A call's first delta, or more of its arguments."""
        kind, field, event = _FUNCTION if "function" in call else _CUSTOM
        called = call.get("function") or call["custom"]
        if "id" in call:
            yield from self._close()
            about = {"call_id": call["id"], "name": called["name"], field: ""}
            yield from self._open({"type": kind, "status": "in_progress", **about})
        if text := called[field]:
            self._texts.append(text)
            yield self._event(f"{event}.delta", delta=text)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self._item = {"id": _PREFIXES[item["type"]] + uuid.uuid4().hex, **item}
        self._texts, self._written = [], []
        yield self._event("response.output_item.added", item=dict(self._item))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Finish the item that is open."""
        item = self._item
        if item is None:
            return
        kind, text = item["type"], "".join(self._texts)
        if kind in (_FUNCTION[0], _CUSTOM[0]):
            _, field, event = _FUNCTION if kind == _FUNCTION[0] else _CUSTOM
            yield self._event(f"{event}.done", name=item["name"], **{field: text})
            item[field] = text
        else:
            part = _part(kind, text, self._written)
            done = {"content_index": 0, "text": text}
            if kind == "message":
                done["logprobs"] = self._written
            name = "output_text" if kind == "message" else "reasoning_text"
            yield self._event(f"response.{name}.done", **done)
            yield self._event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        yield self._event("response.output_item.done", item=item)
        self.response["output"].append(item)
        self._item = None

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Those of the tokens of a text; tokens before it belong to reasoning, calls or tags."""
        joined = b"".join([bytes(entry["bytes"]) for entry in self._logprobs])
        data = text.encode("utf-8", "surrogatepass")
        start = joined.find(data)
        end = start + len(data)
        found, left, offset = [], [], 0
        for entry in self._logprobs:
            if offset >= end and start >= 0:
                left.append(entry)
            elif offset + len(entry["bytes"]) > start:  # if the text is none of theirs (a broken character): all
                found.append(entry)
            offset += len(entry["bytes"])
        self._logprobs = left
        return found

    def _usage(self, meta: dict[str, Any]) -> dict[str, Any]:
        num_reasoning = min(self._num_tokens(self.reasoning), meta["completion_tokens"])
        return {
            "input_tokens": meta["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": meta["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": meta["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": meta["prompt_tokens"] + meta["completion_tokens"],
        }

    def _event(self, kind: str, /, **fields: Any) -> Event:
        event: Event = {"type": kind, "sequence_number": self._number}
        self._number += 1
        if self._item is not None:
            event["output_index"] = len(self.response["output"])
            if "item" not in fields:
                event["item_id"] = self._item["id"]
        return {**event, **fields}


_STATUSES = {"length": "incomplete", "abort": "cancelled"}
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_MESSAGE = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
_REASONING = {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
# of calls: the item's type, the field of what is given, and the events that tell of it
_FUNCTION = "function_call", "arguments", "response.function_call_arguments"
_CUSTOM = "custom_tool_call", "input", "response.custom_tool_call_input"


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
