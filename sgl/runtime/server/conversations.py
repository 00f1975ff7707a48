"""Chats as arguments of the engine, and its results as turns: what the protocols for conversations share. Each of them
translates its body to a ChatBody, and a Turn's parts to its own answer."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

from aiohttp import web

from sgl.errors import InvalidRequest
from sgl.runtime.requests.builder import MAX_LOGPROBS
from sgl.runtime.requests.results import failure_of
from sgl.runtime.requests.threads import in_thread
from sgl.runtime.server import encoding, sse
from sgl.runtime.server.adapters import adapter_options, check_model
from sgl.runtime.server.answers import Answers, Choice, Part, Result, Turn, transfer_of
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.images import images_of
from sgl.runtime.server.logprobs import chat_logprobs
from sgl.runtime.server.protocol import ChatBody, CustomTool, SamplingBody
from sgl.runtime.server.service import Service
from sgl.runtime.server.thinking import Thinking, block_begun, in_last_channel
from sgl.runtime.server.tool_calls import AnswerSplitter, call_constraint, loosenings

MAX_CHAT_TOP_LOGPROBS = 20
_COUNTED = 1 << 18  # tokens that are counted whatever the context, for who is to learn how much too long a chat is


Ended = Callable[[Result], Awaitable[None]]


async def _nothing(result: Result) -> None:
    pass


class Writer(ABC):
    """Writes a turn in a protocol's form: a whole answer is what the events of a stream add up to."""

    headers: ClassVar[Mapping[str, str]] = sse.HEADERS

    def begin(self, first: Result) -> Iterable[dict[str, Any]]:
        """Events before those of the engine's first event."""
        return ()

    @abstractmethod
    def add(self, part: Part) -> Iterable[dict[str, Any]]:
        """Events of what an event of the engine adds."""

    @abstractmethod
    def end(self, part: Part, result: Result) -> Iterable[dict[str, Any]]:
        """The last events. Raises what the protocol has no end for."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer, after its end."""

    @abstractmethod
    def failure(self, error: Exception) -> bytes:
        """The end of a stream that failed."""

    def encoded(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Events as a stream has them."""
        return sse.named(events)


async def answers_to(service: Service, body: ChatBody, ids: list[int] | None = None) -> Answers[Turn]:
    """Render, constrain and check a chat. `ids`: its prompt, if it is not rendered from the messages. Raises
    InvalidRequest, NoSuchModel and ContextTooLong."""
    adapter = adapter_options(service, body.model, body.lora_path, 1)
    as_function, body = bool(body.functions), body.with_tools()
    num_top = _top_logprobs(body)
    tokenizer = service.tokenizer
    context = service.context_length
    images = images_of(body)
    if images and not await service.takes_images():
        raise InvalidRequest("this model takes texts only, no images", param="messages")
    style = None if ids is not None else await service.in_thread(lambda: service.call_style)
    if ids is None:
        ids = await service.in_thread(rendered, service, body, context)
        if body.tools:
            await service.in_thread(lambda: service.shows_tools)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if limit is None:  # what fits into the context and an answer
        limit = max(1, min(context, MAX_LOGPROBS // max(1, (num_top or 0) * (body.n or 1))))
    params = service.sampling_defaults | body.sampling_params(limit)
    has_tags = service.engine.config.grammar_backend == "sgl"
    begun = block_begun(None if style is None else style.format, tokenizer, ids, _continued(body))
    constrain = partial(call_constraint, body, style, params, has_tags=has_tags, begun=begun)
    constraint, reading = constrain()
    separates, streams = body.separate_reasoning is not False, body.stream_reasoning is not False
    marks = () if reading.format is None else reading.format.marks()
    thinking = None
    if reading.format is not None and reading.format.has_channels:
        params = in_last_channel(params, reading.format, begun) if has_tags and not constraint else params
        reading = replace(reading, separates_reasoning=separates, streams_reasoning=streams, begun=begun)
    elif (parser := service.config.reasoning_parser) is not None and separates:
        thinking = Thinking.of(parser, tokenizer, ids, streams=streams, said=_continued(body))
        marks = (*marks, *thinking.marks)
    params["shown_special_tokens"] = tokenizer.special_tokens_in(marks)

    def held_to(constraint: dict[str, Any]) -> dict[str, Any]:
        held = params | constraint
        return held if thinking is None or not has_tags else thinking.before(held)

    def looser() -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
        assert reading.format is not None, "there is a constraint on calls"
        for names in loosenings(body, reading.format, service.engine.config.json_additional_properties):
            yield names, held_to(constrain(loosened=names)[0])

    arguments = engine_arguments(body, [ids], held_to(constraint)) | adapter
    if constraint and constrain(loosened=reading.schemas)[0] != constraint:
        arguments["otherwise"] = looser
    if images:
        arguments["image_data"] = images
    if num_top is not None:
        arguments |= {"return_logprob": True, "top_logprobs_num": num_top}
    custom = {tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool)}
    logprobs = None
    if num_top is not None:
        logprobs = partial(chat_logprobs, tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    told = ids if body.return_token_ids or body.return_prompt_token_ids else None

    @cache
    def choice(index: int) -> Turn:
        return Turn(
            index,
            AnswerSplitter(None if thinking is None else thinking.splitter(), reading),
            logprobs,
            with_reasoning=body.include_reasoning is not False,
            custom=custom,
            as_function=as_function,
            stop_token_ids=body.stop_token_ids,
            prompt_ids=told,
            with_token_ids=bool(body.return_token_ids),
        )

    return Answers("chat.completion", arguments, body.n or 1, choice, answer_id("chatcmpl", body), told)


async def reply(
    service: Service,
    request: web.Request,
    answers: Answers[Turn],
    writer: Writer,
    *,
    streams: bool,
    ended: Ended = _nothing,
) -> web.StreamResponse:
    """Generate and answer, whole or in events. `ended` is called before the end is told. Raises what fails before
    the first event."""
    if streams:
        events, timeout = _events(service, answers, writer, ended), service.config.write_timeout
        return await sse.send_events(
            request, events, timeout, done=b"", failure=writer.failure, headers=writer.headers
        )
    [result] = await whole(service, answers)
    size = encoding.size_of_result(result)
    await in_thread(partial(_written, answers.choice(0), writer, result), size)
    await ended(result)
    return await encoding.answer(lambda: writer.whole() | transfer_of(result), size)


async def _events(
    service: Service, answers: Answers[Turn], writer: Writer, ended: Ended
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(service.stream(**answers.arguments)) as events:
        async for event in events:
            if (error := failure_of(event)) is not None:
                raise error
            begun = b"" if has_begun else writer.encoded(writer.begin(event))
            write = partial(_written, answers.choice(0), writer, event, begun)
            data = await in_thread(write, encoding.size_of_result(event))
            if event["meta_info"]["finish_reason"] is not None:
                await ended(event)
            has_begun = True
            if data:
                yield data


async def num_tokens(service: Service, body: ChatBody) -> int:
    """The length of a chat's prompt. Raises InvalidRequest, also for images, NoSuchModel, and ContextTooLong for one
    that is far too long to be counted."""
    check_model(service, body.model)
    if images_of(body):
        raise InvalidRequest("tokens of images are counted by generating only: see usage there", param="messages")
    limit = max(service.context_length, _COUNTED // 2)
    return len(await service.in_thread(rendered, service, body, limit))


def rendered(service: Service, body: ChatBody, limit: int | None = None) -> list[int]:
    """See `prompt_ids`. It takes a while."""
    return prompt_ids(service.tokenizer, service.chat_template, body, limit, service.call_style)


def engine_arguments(body: SamplingBody, ids: list[Any], params: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments. A single prompt is no list, so its errors are raised."""
    options = body.options()
    if len(ids) > 1:
        options.pop("rid", None)
    return {"input_ids": ids[0] if len(ids) == 1 else ids, "sampling_params": params, **options}


def answer_id(kind: str, body: SamplingBody) -> str:
    """The caller's id as it is, or a new one."""
    return body.rid or f"{kind}-{body.request_id or uuid.uuid4().hex}"


async def whole(service: Service, answers: Answers[Choice]) -> list[Result]:
    """All samples. Raises the first failure of one."""
    results = await service.generate(**answers.arguments)
    results = results if isinstance(results, list) else [results]
    for error in filter(None, map(failure_of, results)):
        raise error
    return results


def _written(turn: Turn, writer: Writer, result: Result, begun: bytes = b"") -> bytes:
    """A result, or one of the engine's events, behind what was begun."""
    part = turn.part(result)
    data = begun + writer.encoded(writer.add(part))
    return data if part.ending["finish_reason"] is None else data + writer.encoded(writer.end(part, result))


def _continued(body: ChatBody) -> str | None:
    """The text of the answer that is to be continued."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def _top_logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; None: no logprobs."""
    number = body.top_logprobs or 0
    if number and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= number <= MAX_CHAT_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_CHAT_TOP_LOGPROBS}", param="top_logprobs")
    return number if body.logprobs else None
