"""The OpenAI API: models, completions and chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache, cached_property, partial
from typing import Any

from aiohttp import web

from sgl.errors import InvalidRequest, SglError
from sgl.lang.typed.tools import CallNotation, call_notation
from sgl.runtime.requests.aside import aside
from sgl.runtime.requests.builder import MAX_LOGPROBS, MAX_TOP_LOGPROBS
from sgl.runtime.requests.results import failure_of
from sgl.runtime.server import encoding, sse
from sgl.runtime.server.answers import Answers, Choice, Completion, Result, Turn, usage
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import NoSuchModel
from sgl.runtime.server.logprobs import CompletionLogprobs, chat_logprobs
from sgl.runtime.server.protocol import ChatBody, CompletionBody, SamplingBody
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.tool_calls import AnswerSplitter, call_constraint

MAX_CHAT_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may fill the context


class OpenAIApi(Api):
    """The OpenAI endpoints."""

    @endpoint("GET /v1/models")
    async def models(self, request: web.Request) -> web.Response:
        """The served model, as a list."""
        return json_response({"object": "list", "data": [self._model()]})

    @endpoint("GET /v1/models/{model:.+}")
    async def model(self, request: web.Request) -> web.Response:
        """The model of that name."""
        self._check_model(request.match_info["model"])
        return json_response(self._model())

    @endpoint("POST /v1/completions", body=CompletionBody, streams=True)
    async def completions(self, request: web.Request, body: CompletionBody) -> web.StreamResponse:
        """Continue one text or several."""
        return await self._answer(request, body, await self._completion_answers(body))

    @endpoint("POST /v1/chat/completions", body=ChatBody, streams=True)
    async def chat(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        """Answer in a conversation."""
        return await self._answer(request, body, await self._chat_answers(body))

    # ── what both share ─────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, request: web.Request, body: SamplingBody, answers: Answers) -> web.StreamResponse:
        each, at_end = body.usage_wanted()
        if body.stream:
            events = self._chunks(answers, usage_in_each=each, usage_at_end=at_end)
            return await sse.send_events(request, events, self._service.config.write_timeout)
        results = await self._service.generate(**answers.arguments)
        results = results if isinstance(results, list) else [results]
        for error in filter(None, map(failure_of, results)):
            raise error

        def whole() -> dict[str, Any]:
            choices = [answers.choice(i).choice(result) for i, result in enumerate(results)]
            more = {} if answers.prompt_token_ids is None else {"prompt_token_ids": answers.prompt_token_ids}
            return {**self._head(answers), "choices": choices, "usage": usage(results, answers.num_samples), **more}

        return await encoding.answer(whole, sum(map(encoding.size_of_result, results)))

    async def _chunks(
        self, answers: Answers, *, usage_in_each: bool, usage_at_end: bool
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(answers, streamed=True)
        more: dict[str, Any] = {"usage": None} if usage_at_end else {}
        first = {} if answers.prompt_token_ids is None else {"prompt_token_ids": answers.prompt_token_ids}
        last: dict[int, Result] = {}
        failure: SglError | None = None  # of one choice; raised after the others completed
        async with aclosing(self._service.stream(**answers.arguments)) as events:
            async for event in events:
                index = event.get("index", 0)
                if (error := failure_of(event)) is not None:
                    failure = failure or error
                    continue
                if usage_in_each:
                    more = {"usage": usage([event], 1)}
                for chunk in await aside(
                    partial(_written, answers.choice(index), event, {**head, **more}, first),
                    encoding.size_of_result(event),
                ):
                    first = {}
                    yield chunk
                if event["meta_info"]["finish_reason"] is not None:
                    last[index] = event
        if failure is not None:
            raise failure
        if usage_at_end:
            results = [last[index] for index in sorted(last)]
            yield sse.event({**head, "choices": [], "usage": usage(results, answers.num_samples)})

    def _head(self, answers: Answers, *, streamed: bool = False) -> dict[str, Any]:
        kind = answers.kind
        return {
            "id": answers.id,
            "object": f"{kind}.chunk" if streamed and kind == "chat.completion" else kind,
            "created": int(time.time()),
            "model": self._service.model_name,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._service.model_name
        if name not in (None, "", "default", served, self._service.engine.config.model_path):
            raise NoSuchModel(f"the model {name!r} does not exist: this server has {served!r}", param="model")

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "sgl",
            "root": service.engine.config.model_path,
            "max_model_len": service.engine.config.context_length,
        }

    # ── completions ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _completion_answers(self, body: CompletionBody) -> Answers:
        self._check_model(body.model)
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("best_of other than n is not supported", param="best_of")
        if body.suffix:
            raise InvalidRequest("suffix is not supported: this model continues texts only", param="suffix")
        if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="logprobs")
        tokenizer = self._service.tokenizer
        given: Any = body.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        encode = partial(
            tokenizer.encode,
            add_special_tokens=body.add_special_tokens is not False,
            limit=self._service.engine.config.context_length,
        )
        ids = await self._service.aside(
            lambda: [encode(each).tolist() if isinstance(each, str) else each for each in prompts]
        )
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        arguments = self._arguments(body, ids, body.sampling_params(max_tokens))
        if body.logprobs is not None:
            arguments |= {"return_logprob": True, "top_logprobs_num": body.logprobs}
            arguments |= {"logprob_start_len": 0} if body.echo else {}
        num_samples, wants_ids = body.n or 1, bool(body.return_token_ids)

        @cache
        def choice(index: int) -> Choice:
            prompt, prompt_ids = prompts[index // num_samples], ids[index // num_samples]
            logprobs = None
            if body.logprobs is not None:
                logprobs = CompletionLogprobs(
                    tokenizer,
                    prompt_ids,
                    num_top=body.logprobs,
                    echo=bool(body.echo),
                    has_output=max_tokens > 0,
                    as_ids=bool(body.return_tokens_as_token_ids),
                )
            return Completion(
                index,
                (prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids)) if body.echo else "",
                logprobs,
                stop_token_ids=body.stop_token_ids,
                prompt_ids=prompt_ids if wants_ids else None,
                with_token_ids=wants_ids,
            )

        return Answers("text_completion", arguments, num_samples, choice, _answer_id("cmpl", body))

    def _arguments(self, body: SamplingBody, ids: list[Any], params: dict[str, Any]) -> dict[str, Any]:
        """Engine arguments. A single prompt is no list, so its errors are raised."""
        options = body.options()
        if len(ids) > 1:
            options.pop("rid", None)
        return {"input_ids": ids[0] if len(ids) == 1 else ids, "sampling_params": params, **options}

    @cached_property
    def _notation(self) -> CallNotation | None:
        tokenizer, template = self._service.tokenizer, self._service.chat_template
        options: dict[str, Any] = {} if template is None else {"chat_template": template}
        return call_notation(
            lambda turns: tokenizer.apply_chat_template(turns, **options), tokenizer.control_tokens
        )

    # ── chats ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _chat_answers(self, body: ChatBody) -> Answers:
        self._check_model(body.model)
        num_top = _top_logprobs(body)
        service = self._service
        tokenizer = service.tokenizer
        context = service.engine.config.context_length or 1
        ids = await service.aside(prompt_ids, tokenizer, service.chat_template, body, context)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if limit is None:  # what fits into the context and an answer
            limit = max(1, min(context, MAX_LOGPROBS // max(1, (num_top or 0) * (body.n or 1))))
        params = body.sampling_params(limit)
        constraint, sure = call_constraint(body, await service.aside(lambda: self._notation), params)
        params |= constraint
        arguments = self._arguments(body, [ids], params)
        if num_top is not None:
            arguments |= {"return_logprob": True, "top_logprobs_num": num_top}
        parser = service.config.reasoning_parser if body.separate_reasoning is not False else None
        has_tools = bool(body.tools) and body.tool_choice != "none"
        logprobs = None
        if num_top is not None:
            logprobs = partial(chat_logprobs, tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        told = ids if body.return_token_ids or body.return_prompt_token_ids else None

        @cache
        def choice(index: int) -> Choice:
            return Turn(
                index,
                AnswerSplitter(parser, has_tools=has_tools, sure=sure),
                logprobs,
                with_reasoning=body.include_reasoning is not False,
                stop_token_ids=body.stop_token_ids,
                prompt_ids=told,
                with_token_ids=bool(body.return_token_ids),
            )

        return Answers("chat.completion", arguments, body.n or 1, choice, _answer_id("chatcmpl", body), told)


def _written(choice: Choice, event: Result, head: dict[str, Any], first: dict[str, Any]) -> list[bytes]:
    """An event's chunks; the first one carries the fields `first`."""
    chunks = []
    for delta in choice.deltas(event):
        chunks.append(sse.event({**head, **first, "choices": [delta]}))
        first = {}
    return chunks


def _answer_id(kind: str, body: SamplingBody) -> str:
    """The caller's id as it is, or a new one."""
    return body.rid or f"{kind}-{body.request_id or uuid.uuid4().hex}"


def _top_logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; None: no logprobs."""
    number = body.top_logprobs or 0
    if number and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= number <= MAX_CHAT_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_CHAT_TOP_LOGPROBS}", param="top_logprobs")
    return number if body.logprobs else None
