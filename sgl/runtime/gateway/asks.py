"""What a request's placement needs of its body: its beginning, its length, and whose session it is. A body that cannot
be read is the worker's to refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sgl.errors import SglError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.runtime.gateway.policy import Ask
from sgl.runtime.server.placement import GENERATED, Future, future_of, future_of_program, future_of_prompts

SESSION_HEADERS = ("x-session-id", "x-sgl-session")
LARGE = 4 << 20
"""Bytes of a body from which on only its length is used: reading it would hold up other requests."""

_NAME_CHARACTERS = 200


def ask_of(path: str, body: Any, headers: Mapping[str, str]) -> Ask:
    """Of a request to that path; body: its JSON, or None."""
    session = _name(next((headers[name] for name in SESSION_HEADERS if name in headers), None))
    if not isinstance(body, dict):
        return Ask(session=session)
    try:
        future = _future(path, body)
    except (
        SglError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        RecursionError,
    ):  # the worker says what is wrong
        future = None
    session = session or _name(body.get("previous_response_id")) or _name(body.get("conversation"))
    if future is None:
        return Ask(session=session)
    return Ask(future.blocks, future.block_tokens, future.prompt, future.generated, session)


def program_of(body: Mapping[str, Any]) -> tuple[ir.Program, ir.Segment]:
    """The program that a body opens, with the arguments of its first row, and its first segment. Raises
    InvalidRequest."""
    program = program_from_wire(body["program"])
    rows = body.get("rows") or [{}]
    program = dataclasses.replace(program, args={**program.args, **(rows[0].get("args") or {})})
    segment = ir.Segment()
    if body.get("segment") is not None:
        segment = Checker(program, rows=len(rows)).segment(body["segment"])
    return program, segment


def shared_out(
    body: dict[str, Any], headers: Mapping[str, str], workers: int
) -> list[tuple[dict[str, Any], int | None]]:
    """A body for each worker that gets some of a program's rows, and its first row. With k workers, n rows take the
    time of n / k of them and k times that of their shared beginning: least for the root of n rows / beginning."""
    rows = body.get("rows")
    if not isinstance(rows, list) or not rows:
        return [(body, None)]
    ask = ask_of("/v1/programs", {**body, "rows": rows[:1]}, headers)
    shared = max(1.0, float(len(ask.blocks) * ask.block_tokens))
    own = max(0.0, ask.prompt - shared) + GENERATED * ask.generated
    number = max(1, min(round(math.sqrt(len(rows) * own / shared)), workers, len(rows)))
    size = -(-len(rows) // number)
    return [({**body, "rows": rows[first : first + size]}, first) for first in range(0, len(rows), size)]


def _future(path: str, body: Mapping[str, Any]) -> Future | None:
    if path == "/v1/programs":
        return future_of_program(*program_of(body))
    space = json.dumps([body.get("model"), body.get("extra_key") or body.get("cache_salt"), body.get("lora_path")])
    if path == "/generate":
        prompt = body.get("input_ids")
        if prompt is None:
            prompt = body.get("text") if body.get("text") is not None else body.get("prompt")
        params = body.get("sampling_params")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            return future_of_prompts(prompt, params, [1] * len(prompt), space)
        return future_of(prompt, params, space)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    params = {} if limit is None else {"max_new_tokens": limit}
    prompt = body.get("prompt")
    if prompt is not None:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            return future_of_prompts(prompt, params, [1] * len(prompt), space)
        return future_of(prompt, params, space)
    parts = [
        body.get("system"),
        body.get("instructions"),
        body.get("tools"),
        body.get("messages", body.get("input")),
    ]
    if parts[-1] is None:
        return None
    return future_of("".join(_text(part) for part in parts), params, space)


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
