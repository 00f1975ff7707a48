"""Requests of the gRPC service as arguments of the engine. What would be left undone is refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl.errors import ContextTooLong, InvalidRequest
from sgl.runtime.sampling_params import integer

_REFUSED = {
    "mm_inputs": "images and videos come over HTTP",
    "return_hidden_states": "hidden states are not returned",
    "disaggregated_params": "prompts are computed where their outputs are",
    "custom_logit_processor": "no code comes with a request",
    "input_embeds": "prompts are token ids",
}
_REFUSED_PARAMS = {"custom_params": "they are for a custom logit processor"}
_HERE = "this server records all that a step does, from now on, into a folder of its own"
UNDONE_PROFILE = dict.fromkeys(
    ("output_dir", "start_step", "num_steps", "activities", "with_stack", "record_shapes", "profile_by_stage"),
    _HERE,
)
"""Fields of a StartProfileRequest."""
_CONSTRAINTS = {"ebnf_grammar": "ebnf"}  # their names here, where they differ
_MAX_INTERVAL = 1 << 20


def generate_arguments(request: Any, *, context_length: int, dp_size: int) -> dict[str, Any]:
    """Arguments of Engine.generate for a GenerateRequest. Raises InvalidRequest."""
    refuse(request, _REFUSED)
    check_rank(request, dp_size)
    arguments: dict[str, Any] = {
        "input_ids": ids_of(request, context_length),
        "sampling_params": sampling_params(request.sampling_params, context_length)
        if request.HasField("sampling_params")
        else {"max_new_tokens": context_length},
    }
    if request.return_logprob:
        arguments |= {
            "return_logprob": True,
            "logprob_start_len": request.logprob_start_len,
            "top_logprobs_num": request.top_logprobs_num,
            "token_ids_logprob": list(request.token_ids_logprob) or None,
        }
    else:
        for name in ("top_logprobs_num", "token_ids_logprob"):
            if getattr(request, name):
                raise InvalidRequest(f"{name} needs return_logprob", param=name)
    return {**arguments, "rid": request.request_id} if request.request_id else arguments


def ids_of(request: Any, context_length: int) -> list[int]:
    """The prompt. Raises InvalidRequest, and ContextTooLong."""
    ids = request.tokenized.input_ids
    if not ids:
        raise InvalidRequest(
            "tokenized.input_ids is empty: this service takes token ids, HTTP takes texts", param="tokenized"
        )
    if len(ids) > context_length:  # before a list is made of them
        raise ContextTooLong.of(len(ids), context_length, param="tokenized")
    return list(ids)


def check_rank(request: Any, dp_size: int) -> None:
    """Raise InvalidRequest for a request that is for one of several engines."""
    if request.HasField("data_parallel_rank") and (dp_size > 1 or request.data_parallel_rank):
        raise InvalidRequest(
            f"data_parallel_rank={request.data_parallel_rank}: which of the {dp_size} engines computes a request is "
            "this server's to say",
            param="data_parallel_rank",
        )


def stream_interval(request: Any) -> int:
    """Tokens between two chunks. Raises InvalidRequest."""
    params = request.sampling_params
    if not params.HasField("stream_interval"):
        return 1
    return integer("stream_interval", params.stream_interval, 1, _MAX_INTERVAL)


def sampling_params(params: Any, context_length: int) -> dict[str, Any]:
    """Our names and defaults. A zero that means nothing, which is what a client sends that leaves the field alone, is
    the default; max_new_tokens that is left out is what the context has room for."""
    refuse(params, _REFUSED_PARAMS)
    found = {
        "temperature": _number(params.temperature),
        "top_p": _number(params.top_p) or 1.0,
        "top_k": params.top_k,
        "min_p": _number(params.min_p),
        "frequency_penalty": _number(params.frequency_penalty),
        "presence_penalty": _number(params.presence_penalty),
        "repetition_penalty": _number(params.repetition_penalty) or 1.0,
        "max_new_tokens": params.max_new_tokens if params.HasField("max_new_tokens") else context_length,
        "min_new_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "n": params.n or 1,
        "ignore_eos": params.ignore_eos,
        "no_stop_trim": params.no_stop_trim,
        "logit_bias": {token: _number(bias) for token, bias in params.logit_bias.items()},
    }
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        found[_CONSTRAINTS.get(constraint, constraint)] = getattr(params, constraint)
    return found


def refuse(message: Any, refused: dict[str, str]) -> None:
    """Raise InvalidRequest for a message with any of these fields, which says why."""
    for field, _ in message.ListFields():  # those that are not their defaults
        if field.name in refused:
            raise InvalidRequest(f"{field.name} is not supported here: {refused[field.name]}", param=field.name)


def _number(value: float) -> float:
    """What a client wrote before it became a 32-bit float: 0.7, not 0.699999988."""
    return float(str(np.float32(value)))
