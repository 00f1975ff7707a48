"""What Ollama's endpoints answer, for /openapi.json, and how its answers are written. Durations are nanoseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from sgl.formats.value_types import parsed
from sgl.runtime.server import sse
from sgl.runtime.server.answers import Part, Result
from sgl.runtime.server.conversations import Writer
from sgl.runtime.server.encoding import json_bytes
from sgl.runtime.server.errors import error_body
from sgl.runtime.server.replies import ChatTokenLogprob
from sgl.runtime.server.tool_calls import Piece, merged


class OllamaError(TypedDict):
    """A request that failed."""

    error: str


class OllamaFunctionCall(TypedDict):
    """The called function."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    """A call."""

    id: str
    function: OllamaFunctionCall


class OllamaTurn(TypedDict):
    """The answer's turn, or what a line adds to it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class _Answer(TypedDict):
    """What every answer and line of a stream has; the last has the counts."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class OllamaChat(_Answer):
    """The answer of /api/chat."""

    message: OllamaTurn


class OllamaGenerated(_Answer):
    """The answer of /api/generate."""

    response: str
    thinking: NotRequired[str]


class OllamaDetails(TypedDict):
    """A model's kind."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """A model; while it runs, also until when."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class OllamaModels(TypedDict):
    """All of them: one."""

    models: list[OllamaModel]


class OllamaShown(TypedDict):
    """More of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def error_shape(body: dict[str, Any]) -> dict[str, Any]:
    """Ollama's error of ours."""
    return {"error": body["error"]["message"]}


def timestamp(seconds: float | None = None) -> str:
    """A time, or the present one."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


_HEADERS = {**sse.HEADERS, "Content-Type": "application/x-ndjson"}


class LineWriter(Writer):
    """Writes one answer as lines of JSON. Calls of tools are whole."""

    headers = _HEADERS

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._calls: list[dict[str, Any]] = []
        self._pieces: list[Piece] = []
        self._logprobs: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        piece = merged(part.pieces)
        self._collect(piece.calls)
        self._pieces.append(piece)
        self._logprobs += part.logprobs
        if piece.content or piece.reasoning or part.logprobs:
            yield self._line(piece, logprobs=part.logprobs)

    def end(self, part: Part, result: Result) -> Iterator[dict[str, Any]]:
        calls, rest = self._called()
        self._calls = calls
        if calls:
            yield self._line(Piece(), calls)
        self._pieces.append(Piece(content=rest))
        self._last = _counts(result["meta_info"])
        yield {**self._line(self._pieces[-1]), **self._last}

    def whole(self) -> dict[str, Any]:
        return {**self._line(merged(self._pieces), self._calls, self._logprobs), **self._last}

    def empty(self) -> dict[str, Any]:
        """The answer to a request for nothing."""
        return {**self._line(Piece()), "done": True, "done_reason": "load"}

    def failure(self, error: Exception) -> bytes:
        return self.encoded([error_shape(error_body(error))])

    def encoded(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join([json_bytes(each) + b"\n" for each in events])

    def _line(
        self, said: Piece, calls: Sequence[dict[str, Any]] = (), logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": timestamp(), "done": False}
        more: dict[str, Any] = {"thinking": said.reasoning} if said.reasoning else {}
        if self._is_chat:
            more |= {"tool_calls": calls} if calls else {}
            line["message"] = {"role": "assistant", "content": said.content, **more}
        else:
            line |= {"response": said.content, **more}
        return line | ({"logprobs": logprobs} if logprobs else {})

    def _collect(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            if "id" in call:
                self._calls.append({"id": call["id"], "function": {**call["function"]}})
            else:  # more of the last one's arguments
                self._calls[-1]["function"]["arguments"] += call["function"]["arguments"]

    def _called(self) -> tuple[list[dict[str, Any]], str]:
        """The calls, with arguments as objects, and the text of one that was cut off."""
        found, rest = [], ""
        for call in self._calls:
            name, text = call["function"]["name"], call["function"]["arguments"]
            try:
                found.append({**call, "function": {"name": name, "arguments": parsed(text)}})
            except (ValueError, RecursionError):
                rest += f'{{"name": {json.dumps(name)}, "arguments": {text}'
        return found, rest


def _counts(meta: dict[str, Any]) -> dict[str, Any]:
    total, before = meta["e2e_latency"], meta["queue_time"] or 0.0
    prefill = meta["prefill_time"] or 0.0
    return {
        "done": True,
        "done_reason": meta["finish_reason"]["type"],
        "total_duration": round(1e9 * total),
        "load_duration": 0,
        "prompt_eval_count": meta["prompt_tokens"],
        "prompt_eval_duration": round(1e9 * prefill),
        "eval_count": meta["completion_tokens"],
        "eval_duration": max(1, round(1e9 * (total - before - prefill))),
    }
