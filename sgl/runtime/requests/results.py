"""Assembles the native results of requests and calls from the loop's outputs.

{"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", …}}. A
log-probability is a triple [logprob | None, token id, text | None].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgl.errors import EngineDead, GrammarError, InvalidRequest, QueueFull, RequestAborted, RequestTimeout, SglError
from sgl.runtime.batch import Int32Array, Logprobs
from sgl.runtime.loop.submission import Detail, Output, Submission
from sgl.runtime.requests.arguments import GenerateRequest
from sgl.runtime.requests.threads import FIELDS, in_thread
from sgl.runtime.requests.waiting import check
from sgl.runtime.scheduler.request import FinishReason

Rid = tuple[str | None, str]  # with its owner
Entry = list[Any] | tuple[Any, ...]  # logprob | None, token id, text | None


class Header(NamedTuple):
    """What a result needs of its request. A plain tuple, since pickling one takes a tenth of the time."""

    uid: int
    rid: str
    prompt_len: int
    scored: Int32Array | None  # prompt tokens with logprobs
    top_logprobs: int  # number of likeliest tokens; -1: no logprobs at all
    given: Int32Array | None  # tokens with logprobs at every position
    with_text: bool = False  # whether logprobs carry token texts


@dataclass(slots=True)
class NativeResult:
    """Collects one request's outputs. `text` and `output_ids` are cumulative; `result` has all logprobs, `event`
    the new ones."""

    header: Header
    token_text: Callable[[int], str] | None  # if logprobs carry token texts
    started: float = field(default_factory=time.monotonic)
    as_tuples: bool = False
    """Whether entries are tuples, for JSON: the GC untracks these, but scans a million lists for 0.5 s."""
    index: int = 0  # in its call
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _detail: Detail | None = None
    _input: list[Logprobs] = field(default_factory=list)
    _output: list[Logprobs] = field(default_factory=list)
    _num_sent: int = 0  # output logprobs already in events
    _has_sent_input: bool = False

    def add(self, output: Output) -> None:
        """Add the request's next output."""
        self.text += output.text
        self.output_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if output.detail is not None:
            self._detail = output.detail
            self._input += output.detail.input_logprobs
            self._output += output.detail.output_logprobs

    def result(self) -> dict[str, Any]:
        """Everything so far."""
        return self._as_dict(0, with_input=True)

    def event(self) -> dict[str, Any]:
        """The stream's event for outputs since the previous one."""
        event = self._as_dict(self._num_sent, with_input=not self._has_sent_input)
        self._num_sent, self._has_sent_input = len(self._output), True
        return event

    def num_logprobs(self, *, of_event: bool = False) -> int:
        """Log-probabilities in `result`, or in the next `event`."""
        if self.header.top_logprobs < 0:
            return 0
        scored, output = self.header.scored, len(self._output)
        if of_event:
            scored, output = None if self._has_sent_input else scored, output - self._num_sent
        given = self.header.given
        width = 1 + self.header.top_logprobs + (0 if given is None else len(given))
        return (output + (0 if scored is None else len(scored))) * width

    def _as_dict(self, first_logprob: int, *, with_input: bool) -> dict[str, Any]:
        detail = self._detail
        assert detail is not None, "the first output brings it"
        meta: dict[str, Any] = {
            "id": self.header.rid,
            "finish_reason": _finish_reason(self.finish_reason, len(self.output_ids)),
            **_matched_regex(self.finish_reason),
            "prompt_tokens": self.header.prompt_len,
            "completion_tokens": len(self.output_ids),
            "forced_tokens": detail.num_forced,
            "cached_tokens": detail.cached_len,
            "num_retractions": detail.num_retractions,
            "queue_time": detail.queue_seconds,
            "prefill_time": detail.prefill_seconds,
            "e2e_latency": time.monotonic() - self.started,
            "weight_version": detail.weight_version,
        }
        if detail.num_drafted:
            meta |= {"drafted_tokens": detail.num_drafted, "accepted_tokens": detail.num_accepted}
        if detail.ranks is not None:
            meta["ranks"] = detail.ranks
        if self.header.top_logprobs >= 0:
            meta.update(self._logprobs(first_logprob, with_input=with_input))
        result: dict[str, Any] = {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}
        if detail.transfer is not None:
            result["kv_transfer_params"] = detail.transfer
        return result if detail.embedding is None else {**result, "embedding": detail.embedding}

    def _logprobs(self, first: int, *, with_input: bool) -> dict[str, Any]:
        of_prompt = self._input if with_input else []
        scored = [] if self.header.scored is None or not with_input else self.header.scored.tolist()
        output = self._output[first:]
        sampled = self.output_ids[first : first + len(output)] or [0] * len(output)
        fields: dict[str, Any] = {
            "input_token_logprobs": self._entries([None, *_flat(of_prompt)], scored),
            "output_token_logprobs": self._entries(_flat(output), sampled),
            "output_token_logprobs_length": len(self._output),
        }
        if self.header.top_logprobs > 0:
            head: list[list[Entry] | None] = [None] if scored else []
            fields["input_top_logprobs"] = head + self._top(of_prompt)
            fields["output_top_logprobs"] = self._top(output)
        given = self.header.given
        if given is not None:
            head = [None] if scored else []
            fields["input_token_ids_logprobs"] = head + self._given(of_prompt, given.tolist())
            fields["output_token_ids_logprobs"] = self._given(output, given.tolist())
        return fields

    def _entries(self, logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[Entry]:
        pairs = zip(logprobs, token_ids, strict=False)
        if self.as_tuples:
            return [(logprob, token, self._text_of(token)) for logprob, token in pairs]
        return [[logprob, token, self._text_of(token)] for logprob, token in pairs]

    def _top(self, parts: list[Logprobs]) -> list[list[Entry] | None]:
        rows: list[list[Entry] | None] = []
        for part in parts:
            assert part.top_values is not None, "top logprobs were asked for"
            assert part.top_ids is not None, "top logprobs were asked for"
            rows += map(self._entries, part.top_values.tolist(), part.top_ids.tolist())
        return rows

    def _given(self, parts: list[Logprobs], token_ids: list[int]) -> list[list[Entry] | None]:
        asked_for = [part.given for part in parts if part.given is not None]
        return [self._entries(values, token_ids) for given in asked_for for values in given.tolist()]

    def _text_of(self, token_id: int) -> str | None:
        return None if self.token_text is None else self.token_text(token_id)


@dataclass(eq=False)
class CallResults:
    """The results of one call, filled as outputs arrive."""

    is_list: bool  # return a list even for one result
    results: dict[int, NativeResult] = field(default_factory=dict)  # by uid, ordered by prompt, then sample
    unfinished: int = 0

    def add(self, result: NativeResult) -> None:
        """Expect another result."""
        result.index = len(self.results)
        self.results[result.header.uid] = result
        self.unfinished += 1
        self.is_list = self.is_list or len(self.results) > 1

    def absorb(self, output: Output) -> None:
        """Add an output to its result. Raises errors of the call as a whole."""
        self.results[output.uid].add(output)
        if output.finish_reason is not None:
            self.unfinished -= 1
            error = output.finish_reason.error
            if isinstance(error, (EngineDead, QueueFull)):
                raise error
            if error is not None and not self.is_list and not isinstance(error, RequestAborted):
                raise error

    def event(self, uid: int) -> dict[str, Any]:
        """A request's event since its previous one."""
        event = self.results[uid].event()
        if self.is_list:
            event["index"] = self.results[uid].index
        return event

    def result(self) -> Any:
        """The result, or the list of results in the call's order."""
        results = [result.result() for result in self.results.values()]
        return results if self.is_list else results[0]

    async def async_event(self, uid: int) -> dict[str, Any]:
        """`event`, without blocking the event loop. Add nothing meanwhile."""
        return await in_thread(lambda: self.event(uid), self.results[uid].num_logprobs(of_event=True))

    async def async_result(self) -> Any:
        """`result`, without blocking the event loop."""
        return await in_thread(self.result, sum(FIELDS + result.num_logprobs() for result in self.results.values()))


@dataclass(eq=False)
class PreparedCall(CallResults):
    """A call ready to be queued, with its results."""

    submissions: list[Submission] = field(default_factory=list)
    compiling: list[Future[Any]] = field(default_factory=list)  # the constraints' futures
    rids: dict[Rid, list[Submission]] = field(default_factory=dict)  # each sample, and all samples of a prompt

    @property
    def uids(self) -> list[int]:
        """Of all requests."""
        return [submission.request.uid for submission in self.submissions]

    @property
    def deadline(self) -> float | None:
        """Of the whole call, in monotonic seconds."""
        return self.submissions[0].request.deadline

    def add_prompt(self, wanted: GenerateRequest, pairs: list[tuple[Submission, NativeResult]]) -> None:
        """Add the samples of one prompt. Raises InvalidRequest if its rid is taken."""
        if (wanted.owner, wanted.rid) in self.rids:
            raise InvalidRequest(f"rid {wanted.rid!r} is given to two requests", param="rid")
        for submission, result in pairs:
            self.submissions.append(submission)
            self.add(result)
            self.rids[wanted.owner, result.header.rid] = [submission]
            if submission.matcher is not None:
                self.compiling.append(submission.matcher.compilation)
        if wanted.rid is not None:
            self.rids[wanted.owner, wanted.rid] = [submission for submission, _ in pairs]

    def absorb(self, output: Output) -> None:
        """Like CallResults.absorb. Also raises the errors of constraints."""
        super().absorb(output)
        if output.finish_reason is not None and output.finish_reason.error is not None:
            check(self.compiling)


def _flat(parts: list[Logprobs]) -> list[float | None]:
    return [value for part in parts for value in part.chosen.tolist()]


def failure_of(result: dict[str, Any]) -> SglError | None:
    """The error of one result in a list, unless it goes on or was aborted on demand."""
    reason = result["meta_info"]["finish_reason"] or {}
    match reason.get("status_code"):
        case 400:
            is_grammar = reason["err_type"] != InvalidRequest.__name__
            return (GrammarError if is_grammar else InvalidRequest)(reason["message"])
        case 408:
            return RequestTimeout(reason["message"], seconds=result["meta_info"]["e2e_latency"])
    return None


def check_all(results: Iterable[dict[str, Any]]) -> None:
    """Raise the first failure. One that was aborted failed, too: for callers to whom a part is of no use."""
    for result in results:
        if (failure := failure_of(result)) is not None:
            raise failure
        if (reason := result["meta_info"]["finish_reason"])["type"] == "abort":
            raise RequestAborted(reason["message"])


def _matched_regex(reason: FinishReason | None) -> dict[str, Any]:
    if reason is None or reason.stop is None or reason.stop == reason.matched:
        return {}
    return {"matched_regex": reason.stop}


def _finish_reason(reason: FinishReason | None, num_tokens: int) -> dict[str, Any] | None:
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": num_tokens}
    error = reason.error
    return {
        "type": "abort",
        "message": str(error) if error is not None else "aborted",
        "status_code": getattr(error, "http_status", RequestAborted.http_status),
        "err_type": type(error).__name__ if error is not None else "RequestAborted",
    }
