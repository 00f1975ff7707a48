"""OpenAI's Responses API: a translation to chats and back, and the responses that are stored."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web
from pydantic import TypeAdapter

from sgl.errors import EngineDead, InvalidRequest
from sgl.numerals import whole
from sgl.runtime.server.adapters import check_model
from sgl.runtime.server.answers import Result
from sgl.runtime.server.conversations import answers_to, num_tokens, rendered, reply
from sgl.runtime.server.errors import NotThere
from sgl.runtime.server.identity import current_caller
from sgl.runtime.server.protocol import ChatBody
from sgl.runtime.server.reader import is_small
from sgl.runtime.server.responses import replies
from sgl.runtime.server.responses.body import InputBody, Item, ReferenceItem, ResponsesBody
from sgl.runtime.server.responses.store import ResponseStore, Stored
from sgl.runtime.server.responses.translation import chat_of, truncated
from sgl.runtime.server.responses.writer import ResponseWriter
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import Service

_ITEMS = TypeAdapter(list[Item])
_MAX_LISTED = 100
_ONE = "/v1/responses/{id:(?!input_tokens(?:/|$))[^/]+}"  # other methods of input_tokens are not for a response


class PreviousMissing(InvalidRequest):
    """The response to go on from is not stored."""

    code = "previous_response_not_found"


class ResponsesApi(Api):
    """The endpoints of responses, and the stored ones."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._store = ResponseStore()
        self._running: dict[str, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint(
        "POST /v1/responses",
        example={"input": "Hello", "max_output_tokens": 16},
        answer=replies.Response,
        streams=True,
    )
    async def create(self, request: web.Request, body: ResponsesBody) -> web.StreamResponse:
        """Answer in a conversation, whose earlier turns may be stored here."""
        check_model(self._service, body.model)
        chat, own, earlier = await self._chat(body)
        answers = await answers_to(self._service, chat)
        writer = ResponseWriter(self._response(body), self._num_tokens)
        response, owner = writer.response, current_caller.get().name
        rid = answers.arguments.setdefault("rid", response["id"])

        async def keep(result: Result) -> None:
            if response["store"]:
                await self._keep(response, own, earlier, answers.arguments, result["output_ids"])

        self._running[response["id"]] = _Run(response, owner, rid)
        try:
            streams = bool(body.stream)
            return await reply(self._service, request, answers, writer, streams=streams, ended=keep)
        finally:
            del self._running[response["id"]]

    @endpoint("POST /v1/responses/input_tokens", example={"input": "Hello"})
    async def input_tokens(self, request: web.Request, body: InputBody) -> replies.InputTokens:
        """How many tokens the prompt of a response would have."""
        chat, _, _ = await self._chat(body)
        number = await num_tokens(self._service, chat)
        return {"object": "response.input_tokens", "input_tokens": number}

    @endpoint(f"GET {_ONE}", answer=replies.Response)
    async def retrieve(self, request: web.Request) -> Any:
        """A stored response."""
        if request.query.get("stream", "false").lower() != "false":
            raise InvalidRequest("a stored response is not streamed again: leave stream out", param="stream")
        identity = request.match_info["id"]
        run = self._running.get(identity)
        if run is not None and run.response["store"] and current_caller.get().may_reach(run.owner):
            return {**run.response, "output": [*run.response["output"]]}  # it grows
        stored = self._store.find(identity, current_caller.get())
        return await self._service.in_thread(stored.response)

    @endpoint(f"GET {_ONE}/input_items")
    async def input_items(self, request: web.Request) -> replies.Items:
        """The items that a stored response answered, the latest first."""
        stored = self._store.find(request.match_info["id"], current_caller.get())
        return _page(await self._service.in_thread(stored.inputs), request)

    @endpoint(f"DELETE {_ONE}")
    async def delete(self, request: web.Request) -> replies.Deleted:
        """Forget a stored response."""
        identity = request.match_info["id"]
        self._store.delete(identity, current_caller.get())
        self._tell("release_prefix", identity)
        return {"id": identity, "object": "response", "deleted": True}

    @endpoint(f"POST {_ONE}/cancel", answer=replies.Response)
    async def cancel(self, request: web.Request) -> Any:
        """End a response that is being answered."""
        identity = request.match_info["id"]
        run = self._running.get(identity)
        if run is None or not current_caller.get().may_reach(run.owner):
            self._store.find(identity, current_caller.get())
            raise InvalidRequest(f"the response {identity!r} has ended: it cannot be cancelled", param="id")
        await self._service.engine.call("abort", run.rid, run.owner or "")
        return {**run.response, "status": "cancelled"}

    # ── from a body to a response ───────────────────────────────────────────────────────────────────────────────

    def _num_tokens(self, text: str) -> int:
        return len(self._service.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def _chat(self, body: InputBody) -> tuple[ChatBody, list[dict[str, Any]], Stored | None]:
        """The whole chat, the body's own items with ids, and what it goes on from."""
        earlier = None
        if body.previous_response_id is not None:
            try:
                earlier = self._store.find(body.previous_response_id, current_caller.get())
            except NotThere as error:
                raise PreviousMissing(str(error), param="previous_response_id") from None
        given: list[Any] = body.input if isinstance(body.input, list) else []
        holders = {
            item.id: self._store.with_item(item.id, current_caller.get())
            for item in given
            if isinstance(item, ReferenceItem)
        }
        return await self._service.in_thread(self._assembled, body, earlier, holders)

    def _assembled(
        self, body: InputBody, earlier: Stored | None, holders: dict[str, Stored]
    ) -> tuple[ChatBody, list[dict[str, Any]], Stored | None]:
        own: list[dict[str, Any]] = []
        if isinstance(body.input, str):
            own.append({"type": "message", "role": "user", "content": body.input})
        outputs = {stored: stored.response()["output"] for stored in holders.values()}
        for item in body.input if isinstance(body.input, list) else ():
            if isinstance(item, ReferenceItem):
                own.append(next(one for one in outputs[holders[item.id]] if one["id"] == item.id))
            else:
                own.append(item.model_dump(exclude_none=True))
        history = [] if earlier is None else earlier.items()
        chat = chat_of(body, _ITEMS.validate_python([*history, *own]))
        if body.truncation == "auto":
            context = self._service.context_length
            chat = truncated(chat, partial(rendered, self._service, limit=context), context)
        listed = [{**_as_listed(item), "id": item.get("id") or f"msg_{uuid.uuid4().hex}"} for item in own]
        return chat, listed, earlier

    def _response(self, body: ResponsesBody) -> dict[str, Any]:
        """The response before its output."""
        text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
        reasoning = {} if body.reasoning is None else body.reasoning.model_dump(exclude_none=True)
        tools = [tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or ()]
        for tool in tools:
            if tool["type"] == "function":
                tool.setdefault("strict", True)
        choice = body.tool_choice
        sampled = {"temperature": 1.0, "top_p": 1.0, **self._service.sampling_defaults}
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": check_model(self._service, body.model) or self._service.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "store": body.store is not False,
            "temperature": sampled["temperature"] if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": (choice if isinstance(choice, str) else choice.model_dump()) if choice else "auto",
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampled["top_p"] if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(
        self,
        response: dict[str, Any],
        own: list[dict[str, Any]],
        earlier: Stored | None,
        arguments: dict[str, Any],
        output_ids: list[int],
    ) -> None:
        """Store a response, and lease what the engine knows of it."""
        about = (response, own, earlier, current_caller.get())
        self._store.add(Stored(*about) if is_small.get() else await self._service.in_thread(Stored, *about))
        ids = [*arguments["input_ids"], *output_ids]
        self._tell("hold_prefix", response["id"], ids, arguments.get("extra_key"), arguments.get("lora_path"))

    def _tell(self, method: Any, *arguments: Any) -> None:
        """Have the engine do something that nobody waits for."""

        async def tell() -> None:
            with suppress(EngineDead, InvalidRequest):  # an adapter may be gone
                await self._service.engine.call(method, *arguments)

        task = asyncio.get_running_loop().create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Run(NamedTuple):
    """A response that is being answered."""

    response: dict[str, Any]
    owner: str | None
    rid: str


def _as_listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as it is listed: contents are lists of parts."""
    if item.get("type") == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        return {**item, "content": [{"type": kind, "text": item["content"]}]}
    return item


def _page(items: list[dict[str, Any]], request: web.Request) -> replies.Items:
    """A part of a list, as `limit`, `order` and `after` say."""
    query = request.query
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    number = whole(limit, _MAX_LISTED)
    if not number:
        raise InvalidRequest(f"limit must be from 1 to {_MAX_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"there is no item {after!r:.80}", param="after")
        items = items[places[0] + 1 :]
    shown = items[:number]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    has_more = len(items) > len(shown)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}
