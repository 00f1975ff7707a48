"""Choices of the OpenAI API, whole and in chunks, from native results and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from sgl.runtime.server.calls import AnswerSplitter, Piece
from sgl.runtime.server.logprobs import CompletionLogprobs

Result = dict[str, Any]


class Choice(Protocol):
    """One sample of one prompt, as the API writes it."""

    def choice(self, result: Result) -> dict[str, Any]:
        """Of a whole result."""

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        """Of a stream's next event; nothing if all that it brings is held back."""


class Answers:
    """What a request asks of the engine, and the choices that its results become."""

    def __init__(
        self,
        kind: str,
        arguments: dict[str, Any],
        num_samples: int,
        make: Callable[[int], Choice],
        *,
        answer_id: str,
        prompt_token_ids: list[int] | None = None,
    ) -> None:
        """prompt_token_ids: of a chat, if they are wanted."""
        self.kind = kind
        self.arguments = arguments
        self.num_samples = num_samples
        self.id = answer_id
        self.prompt_token_ids = prompt_token_ids
        self._make = make
        self._choices: dict[int, Choice] = {}

    def of(self, index: int) -> Choice:
        """The choice of that number, the same one each time."""
        if index not in self._choices:
            self._choices[index] = self._make(index)
        return self._choices[index]


class Ending:
    """How a choice says why it ended: `matched_stop` is SGLang's, the stop string, the source of the stop regex or the
    token that did it; `stop_reason` is vLLM's, which is null where the model ended by itself."""

    def __init__(self, stop_token_ids: Collection[int] | None) -> None:
        self._stop_token_ids = stop_token_ids or ()

    def of(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The fields, all of them null until the last event."""
        reason = meta["finish_reason"]
        if reason is None:
            return {"finish_reason": None, "matched_stop": None, "stop_reason": None}
        matched = meta.get("matched_regex", reason.get("matched"))
        by_model = isinstance(matched, int) and matched not in self._stop_token_ids
        return {
            "finish_reason": str(reason["type"]),
            "matched_stop": matched,
            "stop_reason": None if by_model else matched,
        }


class TokenIds:
    """The token ids of a choice, if they are wanted: the prompt's with the first event, the output's as they come."""

    def __init__(self, prompt_ids: list[int] | None, *, with_output: bool) -> None:
        self._prompt_ids = prompt_ids
        self.with_output = with_output
        self._sent = 0

    def of(self, event: Result) -> dict[str, Any]:
        """The fields that the event brings."""
        fields: dict[str, Any] = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        if self.with_output:
            fields["token_ids"] = event["output_ids"][self._sent :]
            self._sent = len(event["output_ids"])
        return fields


class Completion(Choice):
    """One choice of a completion; whole or in pieces it looks alike."""

    def __init__(
        self,
        index: int,
        echo: str,
        logprobs: CompletionLogprobs,
        num_top: int | None,
        ending: Ending,
        token_ids: TokenIds,
        *,
        has_output: bool,
    ) -> None:
        self._index = index
        self._text = echo
        self._logprobs = logprobs
        self._num_top = num_top
        self._ending = ending
        self._token_ids = token_ids
        self._has_output = has_output
        self._sent = 0

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        choice = self.choice(event)
        says_more = choice["finish_reason"] is not None or choice["logprobs"] is not None or "token_ids" in choice
        return [choice] if choice["text"] or says_more else []

    def choice(self, event: Result) -> dict[str, Any]:
        """What the event brings."""
        meta = event["meta_info"]
        text, self._text = self._text + event["text"][self._sent :], ""
        self._sent = len(event["text"])
        logprobs = None
        if self._num_top is not None:
            logprobs = self._logprobs.of(meta, num_top=self._num_top, has_output=self._has_output)
        ids = self._token_ids.of(event)
        return {"index": self._index, "text": text, "logprobs": logprobs, **self._ending.of(meta), **ids}


class Turn(Choice):
    """One choice of a chat."""

    def __init__(
        self,
        index: int,
        splitter: AnswerSplitter,
        logprobs: Callable[[dict[str, Any]], list[Any]] | None,
        ending: Ending,
        token_ids: TokenIds,
        *,
        with_reasoning: bool,
    ) -> None:
        """logprobs: of the tokens that a result or an event brought; None where they are not wanted."""
        self._index = index
        self._splitter = splitter
        self._logprobs = logprobs
        self._ending = ending
        self._token_ids = token_ids
        self._with_reasoning = with_reasoning
        self._sent = 0
        self._has_begun = False
        self._has_calls = False
        self._held: dict[str, list[Any]] = {}  # logprobs and token ids of text that is held back

    def choice(self, result: Result) -> dict[str, Any]:
        piece = self._piece(result)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
        if piece.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in piece.calls]
            message |= {"content": piece.content or None, "tool_calls": calls}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        logprobs = self._logprobs_of(self._logprobs(result["meta_info"])) if self._logprobs is not None else None
        ids = self._token_ids.of(result)
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            **self._ended(result["meta_info"]),
            **ids,
        }

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        """What is new of the answer, then, in a delta of its own that is empty, why it ended."""
        piece = self._piece(event)
        delta: dict[str, Any] = {}
        if not self._has_begun:
            self._has_begun = True
            delta = {"role": "assistant", "content": ""}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = piece.calls
        if self._logprobs is not None:
            self._held.setdefault("logprobs", []).extend(self._logprobs(event["meta_info"]))
        for name, values in self._token_ids.of(event).items():
            self._held.setdefault(name, []).extend(values)
        ended = self._ended(event["meta_info"])
        chunks = []
        if delta:
            chunks.append(self._chunk(delta, dict.fromkeys(ended)))
        if ended["finish_reason"] is not None:
            chunks.append(self._chunk({}, ended))
        return chunks

    def _chunk(self, delta: dict[str, Any], ended: dict[str, Any]) -> dict[str, Any]:
        """A chunk that carries what was held, too."""
        held, self._held = self._held, {}
        logprobs = None if self._logprobs is None else self._logprobs_of(held.pop("logprobs", []))
        if "token_ids" not in held and self._token_ids.with_output:
            held["token_ids"] = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, **ended, **held}

    def _logprobs_of(self, content: list[Any]) -> dict[str, Any]:
        return {"content": content, "refusal": None}

    def _piece(self, event: Result) -> Piece:
        text = event["text"][self._sent :]
        self._sent = len(event["text"])
        is_last = event["meta_info"]["finish_reason"] is not None
        piece = self._splitter.feed(text, final=is_last)
        self._has_calls = self._has_calls or bool(piece.calls)
        if not self._with_reasoning:
            piece.reasoning = ""
        return piece

    def _ended(self, meta: dict[str, Any]) -> dict[str, Any]:
        fields = self._ending.of(meta)
        if self._has_calls and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields


def usage(results: list[Result], num_samples: int) -> dict[str, Any]:
    """Tokens of prompts, once each, and of all samples."""
    metas = [result["meta_info"] for result in results]
    prompt = sum(meta["prompt_tokens"] for meta in metas[::num_samples])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::num_samples])},
    }
