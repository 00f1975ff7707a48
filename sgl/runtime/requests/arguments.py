"""The arguments of a generation: names, types over HTTP, and which may differ between prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import GenericAlias
from typing import Any, TypedDict

from sgl.errors import InvalidRequest, nearest_name
from sgl.runtime.media.layout import Layout
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import Pooling

Params = SamplingParams | Mapping[str, Any]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of Engine.generate, for type checkers. A list holds one value for each prompt."""

    image_data: Any
    """Images of the prompt: a path, URL, base64, bytes or Pillow image, or a list of them; for several prompts, a list
    with one of these, or None, for each."""
    video_data: Any
    """Videos likewise, each a list of frames, which are images, or {"frames": a list, "fps": frames a second}."""
    return_logprob: bool | Sequence[bool]
    logprob_start_len: int | Sequence[int] | None
    """First prompt position with input logprobs; -1: none."""
    top_logprobs_num: int | Sequence[int] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None
    return_text_in_logprobs: bool
    rid: str | Sequence[str] | None
    owner: str | None
    """Each owner has its own rids."""
    priority: int
    extra_key: str | None
    """Only requests with the same key share cached prefixes."""
    lora_path: str | Sequence[str | None] | None
    """The name of a loaded LoRA adapter. None: the model alone."""
    return_kv_transfer_params: bool
    """Of a prefill engine, with max_new_tokens=0: answer what a decode engine takes as kv_transfer_params."""
    kv_transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    """For a decode engine: what a prefill engine answered for this prompt, whose pages are pulled from there."""
    timeout: float | None
    """Seconds until RequestTimeout; in a list, only the late ones end, with finish_reason "abort"."""
    stream: bool


def _one(over_http: Any) -> dict[str, Any]:
    """Metadata of an argument common to all prompts: its type in a body."""
    return {"over_http": over_http, "per_prompt": False}


def _each(over_http: Any = None) -> dict[str, Any]:
    """Metadata of an argument that may be a list: the type of one item in a body, if it has one."""
    return {"over_http": over_http, "per_prompt": True}


@dataclass(slots=True)
class GenerateRequest:
    """One prompt and its options, unchecked; see Engine.generate."""

    prompt: str | None = field(default=None, metadata=_each())
    input_ids: Any = field(default=None, metadata=_each(list[int]))
    image_data: Any = field(default=None, metadata=_each())
    video_data: Any = field(default=None, metadata=_each())
    layout: Layout | None = None
    """Of images in input_ids; it takes the place of image_data."""
    sampling_params: Params | None = field(default=None, metadata=_each(dict[str, Any]))
    return_logprob: bool = field(default=False, metadata=_each(bool))
    logprob_start_len: int | None = field(default=None, metadata=_each(int))
    top_logprobs_num: int | None = field(default=None, metadata=_each(int))
    token_ids_logprob: Sequence[int] | None = field(default=None, metadata=_each(list[int]))
    return_text_in_logprobs: bool = field(default=False, metadata=_one(bool))
    rid: str | None = field(default=None, metadata=_each(str))
    owner: str | None = None
    priority: int = field(default=0, metadata=_one(int))
    extra_key: str | None = field(default=None, metadata=_one(str))
    lora_path: str | None = field(default=None, metadata=_each(str | None))
    return_kv_transfer_params: bool = field(default=False, metadata=_one(bool))
    kv_transfer_params: Any = field(default=None, metadata=_each(dict[str, Any]))
    timeout: float | None = field(default=None, metadata=_one(float))
    stream: bool = field(default=False, metadata=_one(bool))
    origin: tuple[str, ...] | None = None
    """The gen of a program that it is one of; None: it is told by its constraint, or else by its prompt's beginning."""
    pooling: Pooling | None = None
    """The prompt's embedding is wanted, and no tokens."""
    limits_logprobs: bool = True
    """False for candidates, whose logprobs are not reported one by one."""
    arrived: float = field(default_factory=time.monotonic)  # start of the timeout


_ARGUMENTS = {each.name: each.metadata for each in fields(GenerateRequest)}


def body_fields() -> dict[str, Any]:
    """The fields of a request body as pydantic takes them: null means the default."""
    found: dict[str, Any] = {}
    for name, argument in _ARGUMENTS.items():
        if (kind := argument.get("over_http")) is not None:
            several = GenericAlias(list, (kind,)) if argument["per_prompt"] else None
            found[name] = kind | several | None, None
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown keyword of Engine.generate."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            hint = nearest_name(name, GenerateOptions.__annotations__)
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}{hint}")


def has_list_of_prompts(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments returns a list."""
    return any(_is_per_prompt(name, arguments.get(name)) for name in ("prompt", "input_ids"))


def requests_of(arguments: Mapping[str, Any], most: int) -> list[GenerateRequest]:
    """One request for each prompt. Raises InvalidRequest, also for more than `most`."""
    if not has_list_of_prompts(arguments):
        return [GenerateRequest(**arguments)]
    if arguments.get("prompt") is not None and arguments.get("input_ids") is not None:
        raise InvalidRequest("give either prompt or input_ids, not both", param="prompt")
    if (rid := arguments.get("rid")) is not None and not is_list(rid):
        raise InvalidRequest("for a list of prompts, rid must be a list too", param="rid")
    count = len(arguments["input_ids"] if arguments.get("prompt") is None else arguments["prompt"])
    if not count:
        raise InvalidRequest("the list of prompts is empty", param="prompt")
    if count > most:
        raise too_many(count, most, "prompt")
    listed = {name: value for name, value in arguments.items() if _is_per_prompt(name, value)}
    for name, values in listed.items():
        if len(values) != count:
            raise InvalidRequest(f"{name} has {len(values)} values for {count} prompts", param=name)
    return [
        GenerateRequest(**{**arguments, **{name: values[i] for name, values in listed.items()}})
        for i in range(count)
    ]


def samples_of(arguments: Mapping[str, Any]) -> list[int] | None:
    """The number of samples of each prompt of a list; None unless it is plain that all lists fit together."""
    prompts = [arguments[name] for name in ("prompt", "input_ids") if arguments.get(name) is not None]
    listed = [value for name, value in arguments.items() if _is_per_prompt(name, value)]
    if len(prompts) != 1 or len({len(value) for value in listed}) != 1:
        return None
    params: Any = arguments.get("sampling_params")
    times = 1
    if not is_list(params):
        params, times = [params], len(prompts[0])
    # Most are dicts; isinstance of a Mapping takes several times as long.
    samples = [(its.get("n") or 1) if type(its) is dict else _samples(its) for its in params]
    return samples * times if set(map(type, samples)) <= {int} and min(samples, default=1) > 0 else None


def _samples(params: Any) -> Any:
    if isinstance(params, SamplingParams):
        return params.n
    return (params.get("n") or 1) if isinstance(params, Mapping) else 1


def part_of(arguments: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The arguments of some prompts of a list."""
    return {
        name: [value[i] for i in chosen] if _is_per_prompt(name, value) else value
        for name, value in arguments.items()
    }


def too_many(number: int, most: int, param: str) -> InvalidRequest:
    """The error of a call with too many requests."""
    return InvalidRequest(
        f"this call asks for {number} requests (prompts x n), and max_requests_per_call is {most}: send several calls",
        param=param,
    )


def is_list(value: Any) -> bool:
    """Whether it is a list, tuple, array or the like."""
    if value is None or isinstance(value, (str, bytes, Mapping)):
        return False
    return hasattr(value, "__len__") and bool(getattr(value, "ndim", 1))  # an array of no dimension has no length


def _is_per_prompt(name: str, value: Any) -> bool:
    if not _ARGUMENTS[name].get("per_prompt") or not is_list(value):
        return False
    return _ARGUMENTS[name]["over_http"] != list[int] or (len(value) > 0 and is_list(value[0]))
