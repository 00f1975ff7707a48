"""Judges what a worker answers. A worker may be broken, or none of ours: nothing that it sends is read without a limit,
and what no server of ours would say is a failure of that worker, which another may make good."""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import re
from dataclasses import MISSING, fields
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sgl.errors import InvalidRequest
from sgl.lang.ir import nodes as ir

MOST_BYTES = 1 << 20
READ_SECONDS = 5.0
"""For an answer that is read whole, once it has begun."""
STALL_SECONDS = 60.0
"""Between two parts of an answer that is no stream: servers send those at once."""
DUE_SECONDS = 5.0
"""Beyond a request's deadline, which its worker keeps unless it is broken."""
STREAMS = ("text/event-stream", "application/x-ndjson")

_COMPUTED = {"/generate", "/encode", "/score", "/rerank", "/v2/rerank"}
_COMPUTED |= {f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings")}
_COMPUTED |= {f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")}
_COMPUTED |= {f"/v1/{name}" for name in ("embeddings", "score", "rerank")}
_JSON = b'{["-0123456789tfn'
_BEGINS = {"application/json": _JSON, "application/x-ndjson": _JSON, "text/event-stream": b":deir"}
"""What an answer's first byte is one of; of events' lines: data, event, id, retry."""
_MOST_HELD = 1 << 20  # of an event; what is longer is passed on in parts
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}


def is_ours(error: BaseException) -> bool:
    """Whether a connection failed for want of files, ports or memory of this machine: it says nothing of a worker."""
    return getattr(getattr(error, "os_error", error), "errno", None) in _OURS


class Lost(Exception):
    """The worker failed."""


class Moved(Lost):
    """It is to go on elsewhere, though its worker is well."""


class Refused(Exception):
    """A worker's answer to a body that it does not take."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


def why_not(answer: aiohttp.ClientResponse, method: str, first: bytes) -> str | None:
    """Why this is no answer of a server, in a few words; None: it may be one. first: its first bytes."""
    status = answer.status
    if not (200 <= status < 300 or 400 <= status < 600):
        return "no status"
    if any(_CONTROLS.search(value) for value in answer.headers.values()):
        return "no headers"
    if method == "POST" and status == 200 and (not first or answer.content_type == "text/html"):
        return "no answer"
    if status == 200 and "Content-Encoding" not in answer.headers:
        first = first.removeprefix(codecs.BOM_UTF8).lstrip()
        if first[:1] not in _BEGINS.get(answer.content_type, first):
            return "no answer"
    return None


def is_computed(answer: aiohttp.ClientResponse, method: str, path: str, first: bytes) -> bool:
    """Whether a worker's engine made this result: tokens are counted, say, without it. path: with its query."""
    is_result = method == "POST" and answer.status < 400 and path.partition("?")[0] in _COMPUTED
    return is_result and b'"done_reason":"load"' not in first  # Ollama's, to a request without a prompt


async def whole(answer: aiohttp.ClientResponse, first: bytes = b"", *, most: int = MOST_BYTES) -> bytes:
    """The rest of an answer after its first bytes. Raises ClientError and TimeoutError."""
    data = bytearray(first)
    async with asyncio.timeout(READ_SECONDS):
        while part := await answer.content.readany():
            data += part
            if len(data) > most:
                raise aiohttp.ClientPayloadError(f"the answer is longer than {most} bytes")
    return bytes(data)


def up_to_last_event(data: bytes) -> int:
    """How much of a stream may be passed on, so that it ends with a whole event wherever it breaks off."""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
    return len(data) if len(data) - end > _MOST_HELD else end


class _Shape(msgspec.Struct):
    """What is needed of an event, whatever it tells."""

    type: str
    row: int | None = None
    stream: int | None = None
    index: int | None = None
    text: str = ""
    reasoning: bool = False
    id: str = ""
    error: dict[str, Any] = {}


_ID = re.compile(r"[\w-]{1,128}", re.ASCII)
_NEEDED = {
    kind: [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
    for kind, cls in ir.EVENTS.items()
}


def event_of(data: bytes | bytearray, number: int, rows: int) -> dict[str, Any]:
    """The event of a program that came as number `number`, of so many rows. Raises InvalidRequest."""
    head, _, text = bytes(data).partition(b"data: ")
    given = re.search(rb"^id: ?(\d{1,12})\s*$", head, re.MULTILINE)
    if given is not None and int(given[1]) != number:
        raise InvalidRequest(f"its event {int(given[1])} came as number {number}")
    try:
        event: dict[str, Any] = json.loads(text)
        shape = msgspec.convert(event, _Shape)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"event {number} is none of a program") from error
    if not 0 <= (shape.row or 0) < rows:
        raise InvalidRequest(f"event {number} is of row {shape.row}, of {rows}")
    has_all = all(name in event for name in _NEEDED.get(shape.type, ("id",)))
    has_id = shape.type in ir.EVENTS or (shape.type == "opened" and _ID.fullmatch(shape.id))
    if not has_all or not has_id or not isinstance(shape.error.get("message", ""), str):
        raise InvalidRequest(f"event {number} lacks what its kind has")
    return event


async def info_of(answer: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """A JSON object that a worker answers, if it is one and not too long."""
    data = await whole(answer)
    try:
        return msgspec.json.decode(data, type=dict[str, Any]) if answer.status == 200 else None
    except (msgspec.MsgspecError, RecursionError):
        return None
