"""Anthropic's Messages API: a translation to chats and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial

from aiohttp import web

from sgl.runtime.requests.threads import in_thread
from sgl.runtime.server import encoding, sse
from sgl.runtime.server.adapters import shown_model
from sgl.runtime.server.answers import Answers, Result, Turn, transfer_of
from sgl.runtime.server.conversations import Conversations, streamed, whole
from sgl.runtime.server.errors import error_body
from sgl.runtime.server.messages.body import CountBody, MessagesBody
from sgl.runtime.server.messages.replies import (
    AssistantMessage,
    InputTokenCount,
    MessagesError,
    NoThreads,
    error_shape,
)
from sgl.runtime.server.messages.translation import chat_of
from sgl.runtime.server.messages.writer import Event, MessageWriter
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import Service

_HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


class MessagesApi(Api):
    """The endpoints of messages."""

    failure = MessagesError

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._conversations = Conversations(service)

    @endpoint("POST /v1/messages", example={**_HELLO, "max_tokens": 16}, answer=AssistantMessage, streams=True)
    async def create(self, request: web.Request, body: MessagesBody) -> web.StreamResponse:
        """Answer in a conversation, in Anthropic's form."""
        if body.thread is not None:
            raise NoThreads("no conversations are kept here: send all messages, without thread", param="thread")
        answers = await self._conversations.answers(await self._service.in_thread(chat_of, body))
        writer = MessageWriter(shown_model(self._service, answers.arguments), body.max_tokens)
        if body.stream:
            events = self._events(answers, writer)
            timeout = self._service.config.write_timeout
            return await sse.send_events(request, events, timeout, done=b"", failure=_failure)
        [result] = await whole(self._service, answers)
        size = encoding.size_of_result(result)
        await in_thread(lambda: list(_written(answers.choice(0), writer, result)), size)
        return await encoding.answer(lambda: writer.message | transfer_of(result), size)

    @endpoint("POST /v1/messages/count_tokens", example=_HELLO)
    async def count(self, request: web.Request, body: CountBody) -> InputTokenCount:
        """How many tokens the prompt of a message would have."""
        chat = await self._service.in_thread(chat_of, body)
        return {"input_tokens": await self._conversations.num_tokens(chat)}

    async def _events(self, answers: Answers[Turn], writer: MessageWriter) -> AsyncGenerator[bytes, None]:
        begun = b""
        async with aclosing(streamed(self._service, answers)) as events:
            async for event in events:
                if not begun:  # errors before the first have their HTTP status
                    begun = sse.named(writer.begin(event))
                    yield begun
                written = _written(answers.choice(0), writer, event)
                if data := await in_thread(partial(sse.named, written), encoding.size_of_result(event)):
                    yield data


def _written(turn: Turn, writer: MessageWriter, result: Result) -> Iterator[Event]:
    """Events of a result, or of one of the engine's events."""
    part = turn.part(result)
    yield from writer.add(part)
    if part.ending["finish_reason"] is not None:
        yield from writer.end(part, result)


def _failure(error: Exception) -> bytes:
    return sse.event(error_shape(error_body(error)), name="error")
