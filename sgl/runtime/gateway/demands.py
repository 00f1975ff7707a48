"""What a request's placement needs of its body: its beginning, its length, and whose session it is. A body that cannot
be read is the worker's to refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sgl.errors import SglError
from sgl.runtime.gateway.index import namespace_of
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.server.placement import CHARACTERS, Future, future_of, future_of_prompts

SESSION_HEADERS = ("x-session-id", "x-sgl-session", "x-smg-routing-key")  # the last is slime's and bench_serving's
_NAME_CHARACTERS = 200
_MODEL_CHARACTERS = 4096  # of a model's name; an adapter's has 1024 at most
_MOST_SAMPLES = 128


Pages = Literal["none", "could", "wanted"]
"""Of a request's prompt, between a prefill and a decode worker: its client arranges that or it cannot be, they could
be asked of a prefill worker, or they are what the client wants of one."""
PAIRED = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_UNPAIRED = ("lora_path", "image_data", "video_data", "echo", "previous_response_id", "thread")
_UNSENT = ("image", "video", "audio", "file", "item_reference")  # may be in the type of a part or an item
_DEEPEST = 4  # a part in the result of a tool in a message


@dataclass(frozen=True, slots=True)
class Facts:
    """What a gateway needs to know of a body."""

    demand: Demand
    timeout: float | None = None  # seconds, unchecked
    previous: str | None = None
    """The stored response that it goes on from."""
    pages: Pages = "none"


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session that a request's headers name."""
    return _name(next((headers[name] for name in SESSION_HEADERS if name in headers), None))


def facts_of(
    data: bytes | bytearray, path: str, session: str | None, adapters: Collection[str] = frozenset()
) -> Facts:
    """Of a body sent to that path. adapters: LoRA adapters' names, which may stand in that of a model."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return unread(data, session)
    if not isinstance(body, dict):
        return unread(data, session)
    timeout, previous = body.get("timeout"), body.get("previous_response_id")
    return Facts(
        demand_of(path, body, session, adapters),
        timeout if isinstance(timeout, (int, float)) else None,
        previous if isinstance(previous, str) else None,
        _pages(path, body),
    )


def _pages(path: str, body: Mapping[str, Any]) -> Pages:
    if path not in PAIRED or any(body.get(name) for name in _UNPAIRED) or "kv_transfer_params" in body:
        return "none"
    if body.get("return_kv_transfer_params"):
        return "wanted"
    start = body.get("logprob_start_len")
    has_prompt_logprobs = start is not None and start != -1  # which are computed where they are answered
    is_sent = _is_sent(body.get("messages", body.get("input")))
    return "could" if is_sent and not has_prompt_logprobs else "none"


def _is_sent(items: Any, depth: int = 0) -> bool:
    """Whether messages, items or their parts are texts: their prompt is known, and its pages are sent."""
    if not isinstance(items, list) or depth > _DEEPEST:
        return depth <= _DEEPEST
    for item in items:
        if isinstance(item, dict):
            kind = str(item.get("type", "item_reference" if item.keys() == {"id"} else ""))
            inside = [item.get(name) for name in ("content", "output")]
            if any(word in kind for word in _UNSENT) or not all(_is_sent(each, depth + 1) for each in inside):
                return False
    return True


def unread(data: bytes | bytearray, session: str | None) -> Facts:
    """Of a body that is not read: its length."""
    return Facts(Demand(prompt=len(data) / CHARACTERS, session=session))


def demand_of(
    path: str, body: dict[str, Any], session: str | None, adapters: Collection[str] = frozenset()
) -> Demand:
    """Of a request to that path, with this JSON."""
    try:
        future = _future(path, body, adapters)
    except (SglError, TypeError, ValueError, AttributeError, KeyError, RecursionError):
        future = None  # the worker says what is wrong
    session = session or _name(body.get("previous_response_id")) or _name(body.get("conversation"))
    asked = _asked(body, adapters)
    if future is None:
        return Demand(session=session, adapters=asked)
    requests = _requests(body)
    return Demand(future.blocks, future.block_tokens, future.prompt, future.generated, session, requests, asked)


def _asked(body: Mapping[str, Any], adapters: Collection[str]) -> frozenset[str]:
    given = body.get("lora_path")
    names = given if isinstance(given, list) else [_adapter(body, adapters)]
    return frozenset(name for name in names if isinstance(name, str) and name in adapters)


def _requests(body: Mapping[str, Any]) -> int:
    """Of an engine: for each prompt, and each sample of it."""
    params, prompts = body.get("sampling_params"), _prompt(body)
    number = body.get("n") or (params.get("n") if isinstance(params, dict) else None)
    samples = number if isinstance(number, int) and 0 < number <= _MOST_SAMPLES else 1
    return samples * (len(prompts) if _are_several(prompts) else 1)


def _prompt(body: Mapping[str, Any]) -> Any:
    """Of a request without messages, or several."""
    return next((body[name] for name in ("input_ids", "text", "prompt") if body.get(name) is not None), None)


def _are_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _future(path: str, body: Mapping[str, Any], adapters: Collection[str]) -> Future | None:
    salts = [each for name in ("cache_salt", "extra_key") if (each := body.get(name)) is not None]
    salt = "\0".join(salts) if salts else None
    params, prompt = body.get("sampling_params"), _prompt(body)
    if path != "/generate":
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
        params, prompt = {} if limit is None else {"max_new_tokens": limit}, body.get("prompt")
    if path == "/generate" or prompt is not None:
        prompts = prompt if _are_several(prompt) else [prompt]
        are_ids = isinstance(prompts[0], list)  # whose blocks KV events name
        space = namespace_of(salt, _adapter(body, adapters)) if are_ids else _space(body, salt)
        if _are_several(prompt):
            return future_of_prompts(prompt, params, [1] * len(prompt), space)
        return future_of(prompt, params, space)
    messages = body.get("messages", body.get("input"))
    if messages is None:
        return None
    parts = body.get("system"), body.get("instructions"), body.get("tools"), messages
    return future_of("".join(map(_text, parts)), params, _space(body, salt))


def _space(body: Mapping[str, Any], salt: str | None) -> str:
    return json.dumps([body.get("model"), salt, body.get("lora_path")])


def _adapter(body: Mapping[str, Any], adapters: Collection[str]) -> str | None:
    """The LoRA adapter that a body, or its first prompt, asks for: by itself, or in the name of a model, `NAME` or
    `MODEL:NAME`."""
    given, model = body.get("lora_path"), body.get("model")
    if isinstance(given, list):
        given = given[0] if given else None
    if given or not isinstance(model, str) or len(model) > _MODEL_CHARACTERS or not adapters:
        return given or None
    ends = [place + 1 for place, letter in enumerate(model) if letter == ":"]
    return next((model[place:] for place in (0, *ends) if model[place:] in adapters), None)


def _text(part: Any) -> str:
    """Messages so that a longer conversation begins with the shorter one."""
    if part is None:
        return ""
    if isinstance(part, str):
        return part
    if isinstance(part, Sequence):
        return "".join(_text(each) for each in part)
    if isinstance(part, Mapping) and "content" in part:
        return f"<{part.get('role', '')}>{_text(part['content'])}"
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(part)


def _name(value: Any) -> str | None:
    """A session's. A long one is remembered by its hash: clients choose them."""
    if not isinstance(value, str) or len(value) <= _NAME_CHARACTERS:
        return value if isinstance(value, str) else None
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
