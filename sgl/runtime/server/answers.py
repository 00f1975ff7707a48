"""OpenAI choices, whole and as chunks, from native results and stream events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sgl.runtime.server.custom_tools import CustomCalls
from sgl.runtime.server.logprobs import CompletionLogprobs
from sgl.runtime.server.tool_calls import AnswerSplitter, Piece, merged

Result = dict[str, Any]


class Choice(ABC):
    """One sample of one prompt in the API's form."""

    def __init__(
        self,
        index: int,
        *,
        stop_token_ids: Collection[int] | None = None,
        prompt_ids: list[int] | None = None,
        with_token_ids: bool = False,
    ) -> None:
        """`prompt_ids`: sent with the first event. `with_token_ids`: send output ids as they come."""
        self._index = index
        self._stop_token_ids = stop_token_ids or ()
        self._prompt_ids = prompt_ids
        self._with_token_ids = with_token_ids
        self._num_characters = self._num_ids = 0  # already sent
        self.thoughts: list[str] = []
        """What was told apart as reasoning, sent or not."""

    @abstractmethod
    def choice(self, result: Result) -> dict[str, Any]:
        """From a whole result."""

    @abstractmethod
    def deltas(self, event: Result) -> list[dict[str, Any]]:
        """Chunks for the next event; empty if its text is held back."""

    def _text(self, event: Result) -> str:
        """The new text."""
        text: str = event["text"][self._num_characters :]
        self._num_characters = len(event["text"])
        return text

    def _ids(self, event: Result) -> dict[str, Any]:
        """The wanted ids that are new, of prompt and output."""
        fields: dict[str, Any] = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        if self._with_token_ids:
            fields["token_ids"] = event["output_ids"][self._num_ids :]
            self._num_ids = len(event["output_ids"])
        return fields

    def _ending(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Why it ended, or null. `matched_stop` is SGLang's; `stop_reason` vLLM's: null if the model ended itself."""
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


Kind = TypeVar("Kind", bound=Choice, covariant=True)


@dataclass(frozen=True)
class Answers(Generic[Kind]):
    """A request's engine arguments, and how its results become choices."""

    kind: str
    arguments: dict[str, Any]
    num_samples: int
    choice: Callable[[int], Kind]
    """The choice at an index; the same object each time."""
    id: str
    prompt_token_ids: list[int] | None = None
    """Of a chat, if wanted."""


class Completion(Choice):
    """A completion's choice; chunks look like the whole."""

    def __init__(self, index: int, echo: str, logprobs: CompletionLogprobs | None, **wanted: Any) -> None:
        super().__init__(index, **wanted)
        self._echo = echo
        self._logprobs = logprobs

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        choice = self.choice(event)
        says_more = choice["finish_reason"] is not None or choice["logprobs"] is not None or "token_ids" in choice
        return [choice] if choice["text"] or says_more else []

    def choice(self, result: Result) -> dict[str, Any]:
        meta = result["meta_info"]
        text, self._echo = self._echo + self._text(result), ""
        logprobs = None if self._logprobs is None else self._logprobs.of(meta)
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            **self._ending(meta),
            **self._ids(result),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """What an event adds to a turn, in order, for protocols that do not have OpenAI's chunks."""

    pieces: list[Piece]
    logprobs: list[dict[str, Any]]
    """Of the event's tokens, wherever they ended up."""
    ending: dict[str, Any]
    """With a `finish_reason` that is null until the last event."""


class Turn(Choice):
    """A chat's choice."""

    def __init__(
        self,
        index: int,
        splitter: AnswerSplitter,
        logprobs: Callable[[dict[str, Any]], list[Any]] | None,
        *,
        with_reasoning: bool,
        custom: Collection[str] = (),
        as_function: bool = False,
        **wanted: Any,
    ) -> None:
        """`logprobs`: formats a result's or event's meta info. `custom`: names of custom tools. `as_function`: a call
        is the old `function_call`."""
        super().__init__(index, **wanted)
        self._splitter = splitter
        self._logprobs = logprobs
        self._with_reasoning = with_reasoning
        self._custom_calls = CustomCalls(custom)
        self._as_function = as_function
        self._has_begun = False
        self._has_calls = False
        self._in_text = False
        self._blank = ""  # white space that begins a text, or nothing
        self._held: dict[str, list[Any]] = {}  # logprobs and token ids of text held back

    def choice(self, result: Result) -> dict[str, Any]:
        piece = merged(self._pieces(result))
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
        if piece.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in piece.calls]
            message |= {"content": piece.content or None, **self._called(calls)}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        self._hold(result)
        return {"index": self._index, "message": message, **self._ending(result["meta_info"]), **self._let_go()}

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        """The new part of the answer, then an empty delta that says why it ended."""
        piece = merged(self._pieces(event))
        # To clients, "" is a text, which stood empty beside the calls.
        first = {"role": "assistant", "content": None if piece.calls or self._splitter.is_calling else ""}
        delta: dict[str, Any] = {} if self._has_begun else first
        self._has_begun = True
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta |= self._called(piece.calls)
        self._hold(event)
        ended = self._ending(event["meta_info"])
        deltas = [(delta, dict.fromkeys(ended))] if delta else []
        if ended["finish_reason"] is not None:
            deltas.append(({}, ended))
        chunks = [{"index": self._index, "delta": delta, **ended, **self._let_go()} for delta, ended in deltas]
        for chunk in chunks:
            if chunk["logprobs"] and not chunk["logprobs"]["content"]:  # of no token: as OpenAI's last chunk
                chunk["logprobs"] = None
        return chunks

    def part(self, event: Result) -> Part:
        """What the next event adds; a whole result is one event. White space alone is no text, beside a call."""
        meta = event["meta_info"]
        pieces = self._pieces(event)
        for piece in pieces:
            text = self._blank + piece.content
            if self._in_text or text.strip():
                piece.content, self._blank, self._in_text = text, "", True
            else:
                piece.content, self._blank = "", text
            if piece.calls:
                self._blank, self._in_text = "", False
        if meta["finish_reason"] is not None and not self._has_calls:
            pieces.append(Piece(content=self._blank))
        logprobs = [] if self._logprobs is None else self._logprobs(meta)
        return Part(pieces, logprobs, self._ending(meta))

    def _hold(self, event: Result) -> None:
        """Keep the ids and logprobs of an event."""
        held = self._ids(event)
        if self._logprobs is not None:
            held["logprobs"] = self._logprobs(event["meta_info"])
        for name, values in held.items():
            self._held.setdefault(name, []).extend(values)

    def _let_go(self) -> dict[str, Any]:
        """What was kept."""
        held, self._held = self._held, {}
        logprobs = None if self._logprobs is None else {"content": held.pop("logprobs", []), "refusal": None}
        return {"logprobs": logprobs, **({"token_ids": []} if self._with_token_ids else {}), **held}

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The field for calls, or for what is new of them."""
        return {"function_call": calls[0]["function"]} if self._as_function else {"tool_calls": calls}

    def _pieces(self, event: Result) -> list[Piece]:
        is_last = event["meta_info"]["finish_reason"] is not None
        pieces = self._splitter.feed(self._text(event), final=is_last)
        for piece in pieces:
            self._has_calls = self._has_calls or bool(piece.calls)
            piece.calls = self._custom_calls.converted(piece.calls)
            self.thoughts += [piece.reasoning] * bool(piece.reasoning)
            piece.reasoning = piece.reasoning if self._with_reasoning else ""
        return pieces

    def _ending(self, meta: dict[str, Any]) -> dict[str, Any]:
        fields = super()._ending(meta)
        if self._has_calls and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "function_call" if self._as_function else "tool_calls"
        return fields


def transfer_of(result: Result) -> dict[str, Any]:
    """The field for the pages that a prefill engine offers, if it does."""
    return {name: result[name] for name in ("kv_transfer_params",) if name in result}


def usage(results: list[Result], num_samples: int) -> dict[str, Any]:
    """Token counts; each prompt counts once."""
    metas = [result["meta_info"] for result in results]
    prompt = sum(meta["prompt_tokens"] for meta in metas[::num_samples])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::num_samples])},
    }
