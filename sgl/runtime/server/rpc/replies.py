"""Results of the engine as messages of the gRPC service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from sgl.runtime.requests.results import failure_of

Entry = Sequence[Any]  # logprob | None, token id, text | None


@dataclass(slots=True)
class _Output:
    """What was sent of one output of a stream, and what is to be sent."""

    num_sent: int = 0
    prompt: Any = None  # InputLogProbs, until a chunk carries them
    unsent: Any = field(default_factory=pb.OutputLogProbs)
    every: Any = field(default_factory=pb.OutputLogProbs)


class Stream:
    """Turns a request's events into its stream's messages."""

    def __init__(self, request_id: str, interval: int) -> None:
        """interval: tokens of a chunk, at least; its last has those that are left."""
        self._request_id, self._interval = request_id, interval
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)

    def messages(self, event: dict[str, Any]) -> list[Any]:
        """A chunk if there is enough for one, and the end if it has come. Raises what ended it otherwise."""
        index, meta, ids = event.get("index", 0), event["meta_info"], event["output_ids"]
        output = self._outputs[index]
        has_logprobs, is_over = "output_token_logprobs" in meta, meta["finish_reason"] is not None
        if has_logprobs:
            added = output_logprobs(meta, len(ids))
            output.unsent.MergeFrom(added)
            output.every.MergeFrom(added)
            if meta["input_token_logprobs"]:
                output.prompt = input_logprobs(meta)
        found = []
        num_new = len(ids) - output.num_sent
        if num_new >= self._interval or (is_over and num_new):
            chunk = pb.GenerateStreamChunk(
                token_ids=ids[output.num_sent :],
                prompt_tokens=meta["prompt_tokens"],
                completion_tokens=meta["completion_tokens"],
                cached_tokens=meta["cached_tokens"],
                output_logprobs=output.unsent if has_logprobs else None,
                input_logprobs=output.prompt if not output.num_sent else None,
                index=index,
            )
            output.num_sent, output.unsent = len(ids), pb.OutputLogProbs()
            found.append(pb.GenerateResponse(request_id=self._request_id, chunk=chunk))
        if is_over:
            every = output.every if has_logprobs else None
            found.append(_complete(self._request_id, event, index, every, output.prompt))
            del self._outputs[index]
        return found


def completions(request_id: str, results: Iterable[dict[str, Any]]) -> list[Any]:
    """The only messages of a request that is not streamed, one for each output. Raises what ended one otherwise."""
    found = []
    for index, result in enumerate(results):
        meta = result["meta_info"]
        has_logprobs = "output_token_logprobs" in meta
        output = output_logprobs(meta, len(result["output_ids"])) if has_logprobs else None
        prompt = input_logprobs(meta) if has_logprobs and meta["input_token_logprobs"] else None
        found.append(_complete(request_id, result, index, output, prompt))
    return found


def _complete(request_id: str, result: dict[str, Any], index: int, output: Any, prompt: Any) -> Any:
    if (failure := failure_of(result)) is not None:
        raise failure
    meta = result["meta_info"]
    reason = meta["finish_reason"]
    complete = pb.GenerateComplete(
        output_ids=result["output_ids"],
        finish_reason=reason["type"],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        cached_tokens=meta["cached_tokens"],
        output_logprobs=output,
        input_logprobs=prompt,
        index=index,
        spec_accepted_tokens=meta.get("accepted_tokens", 0),
        spec_draft_tokens=meta.get("drafted_tokens", 0),
    )
    matched = reason.get("matched")
    if isinstance(matched, str):
        complete.matched_stop_str = matched
    elif matched is not None:
        complete.matched_token_id = matched
    return pb.GenerateResponse(request_id=request_id, complete=complete)


def output_logprobs(meta: dict[str, Any], num_tokens: int) -> Any:
    """Of tokens of a result or event. A prompt without an output has what follows it, of given tokens alone."""
    has_tokens = num_tokens > 0
    entries = meta["output_token_logprobs"] if has_tokens else ()
    tops = meta.get("output_top_logprobs") if has_tokens else None
    return pb.OutputLogProbs(
        token_logprobs=[entry[0] for entry in entries],
        token_ids=[entry[1] for entry in entries],
        top_logprobs=_rows(tops),
        token_ids_logprobs=_rows(meta.get("output_token_ids_logprobs")),
    )


def input_logprobs(meta: dict[str, Any]) -> Any:
    """Of a prompt's tokens; the first has none."""
    wrap: Callable[..., Any] = pb.InputTokenLogProb
    entries = meta["input_token_logprobs"]
    return pb.InputLogProbs(
        token_logprobs=[wrap() if entry[0] is None else wrap(value=entry[0]) for entry in entries],
        token_ids=[entry[1] for entry in entries],
        top_logprobs=_rows(meta.get("input_top_logprobs")),
    )


def _rows(rows: Iterable[Sequence[Entry] | None] | None) -> list[Any]:
    make = partial(pb.TopLogProbs)
    return [
        make(values=[entry[0] for entry in row or ()], token_ids=[entry[1] for entry in row or ()])
        for row in rows or ()
    ]
