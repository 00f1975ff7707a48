"""Anthropic's Messages API: a translation to chats and back."""

from __future__ import annotations

from aiohttp import web

from sgl.runtime.server.adapters import shown_model
from sgl.runtime.server.conversations import answers_to, num_tokens, reply
from sgl.runtime.server.messages.body import CountBody, MessagesBody
from sgl.runtime.server.messages.replies import (
    AssistantMessage,
    InputTokenCount,
    MessagesError,
    NoThreads,
)
from sgl.runtime.server.messages.translation import chat_of
from sgl.runtime.server.messages.writer import MessageWriter
from sgl.runtime.server.routes import Api, endpoint

_HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


class MessagesApi(Api):
    """The endpoints of messages."""

    failure, names = MessagesError, {"stop": "stop_sequences"}

    @endpoint("POST /v1/messages", example={**_HELLO, "max_tokens": 16}, answer=AssistantMessage, streams=True)
    async def create(self, request: web.Request, body: MessagesBody) -> web.StreamResponse:
        """Answer in a conversation, in Anthropic's form."""
        if body.thread is not None:
            raise NoThreads("no conversations are kept here: send all messages, without thread", param="thread")
        answers = await answers_to(self._service, await self._service.in_thread(chat_of, body))
        writer = MessageWriter(shown_model(self._service, answers.arguments), body.max_tokens)
        return await reply(self._service, request, answers, writer, streams=bool(body.stream))

    @endpoint("POST /v1/messages/count_tokens", example=_HELLO)
    async def count(self, request: web.Request, body: CountBody) -> InputTokenCount:
        """How many tokens the prompt of a message would have."""
        chat = await self._service.in_thread(chat_of, body)
        return {"input_tokens": await num_tokens(self._service, chat)}
