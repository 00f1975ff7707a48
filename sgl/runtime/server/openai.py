"""The OpenAI API: models, completions and chat completions, whole and streamed, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cached_property
from typing import Any, Protocol

from aiohttp import web

from sgl.errors import InvalidRequest, SglError
from sgl.lang.tools import CallNotation, call_notation
from sgl.runtime.native import failure_of
from sgl.runtime.server import sse
from sgl.runtime.server.calls import AnswerSplitter, Piece, call_constraint
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.errors import NoSuchModel, json_response
from sgl.runtime.server.logprobs import CompletionLogprobs, chat_logprobs
from sgl.runtime.server.protocol import ChatBody, CompletionBody, SamplingBody
from sgl.runtime.server.service import Route, Service

Result = dict[str, Any]
MAX_CHAT_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat's answer may fill the context


class OpenAIApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Every endpoint of the API."""
        return [
            Route(("GET",), "/v1/models", self.models, "The models that are served: one"),
            Route(("GET",), "/v1/models/{model:.+}", self.model, "One model"),
            Route(("POST",), "/v1/completions", self.completions, "Continue texts", CompletionBody, streams=True),
            Route(("POST",), "/v1/chat/completions", self.chat, "Answer in a conversation", ChatBody, streams=True),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """The list of models."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        """The model of that name."""
        self._check_model(request.match_info["model"])
        return json_response(self._model())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue one prompt or several."""
        body = await self._service.body(request, CompletionBody)
        answers = await self._completion_answers(body)
        return await self._answer(request, body, answers)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Write the next turn."""
        body = await self._service.body(request, ChatBody)
        answers = await self._chat_answers(body)
        return await self._answer(request, body, answers)

    # ── what both share ─────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, request: web.Request, body: SamplingBody, answers: _Answers) -> web.StreamResponse:
        wants_usage = body.wants_usage()
        if body.stream:
            events = self._chunks(answers, wants_usage=wants_usage)
            return await sse.send_events(request, events, self._service.config.write_timeout)
        results = await self._service.generate(**answers.arguments)
        results = results if isinstance(results, list) else [results]
        for error in filter(None, map(failure_of, results)):
            raise error
        choices = [answers.of(i).choice(result) for i, result in enumerate(results)]
        return json_response(
            {**self._head(answers), "choices": choices, "usage": _usage(results, answers.num_samples)}
        )

    async def _chunks(self, answers: _Answers, *, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        head = self._head(answers, streamed=True)
        more = {"usage": None} if wants_usage else {}
        last: dict[int, Result] = {}
        failure: SglError | None = None  # of one choice, told when the others are complete
        async with aclosing(self._service.stream(**answers.arguments)) as events:
            async for event in events:
                index = event.get("index", 0)
                if (error := failure_of(event)) is not None:
                    failure = failure or error
                    continue
                for choice in answers.of(index).deltas(event):
                    yield sse.event({**head, "choices": [choice], **more})
                if event["meta_info"]["finish_reason"] is not None:
                    last[index] = event
        if failure is not None:
            raise failure
        if wants_usage:
            results = [last[index] for index in sorted(last)]
            yield sse.event({**head, "choices": [], "usage": _usage(results, answers.num_samples)})

    def _head(self, answers: _Answers, *, streamed: bool = False) -> dict[str, Any]:
        kind = answers.kind
        return {
            "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if streamed and kind == "chat.completion" else kind,
            "created": int(time.time()),
            "model": self._service.model_name,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._service.model_name
        if name not in (None, "default", served, self._service.engine.config.model_path):
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

    async def _completion_answers(self, body: CompletionBody) -> _Answers:
        self._check_model(body.model)
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("best_of other than n is not supported", param="best_of")
        if body.suffix:
            raise InvalidRequest("suffix is not supported: this model continues texts only", param="suffix")
        tokenizer = self._service.tokenizer
        given: Any = body.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        limit = self._service.engine.config.context_length

        def encoded() -> list[list[int]]:
            return [
                tokenizer.encode(each, limit=limit).tolist() if isinstance(each, str) else each for each in prompts
            ]

        ids = await asyncio.to_thread(encoded)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        arguments = self._arguments(body, ids, body.sampling_params(max_tokens))
        if body.logprobs is not None:
            arguments |= {"return_logprob": True, "top_logprobs_num": body.logprobs}
            arguments |= {"logprob_start_len": 0} if body.echo else {}
        num_samples = body.n or 1

        def choice(index: int) -> _Completion:
            prompt, prompt_ids = prompts[index // num_samples], ids[index // num_samples]
            echo = (prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids)) if body.echo else ""
            logprobs = CompletionLogprobs(tokenizer, prompt_ids, echo=bool(body.echo))
            return _Completion(index, echo, logprobs, body.logprobs, has_output=max_tokens > 0)

        return _Answers("text_completion", arguments, num_samples, choice)

    def _arguments(self, body: SamplingBody, ids: list[Any], params: dict[str, Any]) -> dict[str, Any]:
        """The engine's. One prompt is no list, so that what goes wrong is raised and not reported in its place."""
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

    async def _chat_answers(self, body: ChatBody) -> _Answers:
        self._check_model(body.model)
        service = self._service
        tokenizer = service.tokenizer
        context = service.engine.config.context_length
        ids = await asyncio.to_thread(prompt_ids, tokenizer, service.chat_template, body, context)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = body.sampling_params(context or 1 if limit is None else limit)
        constraint, sure = call_constraint(body, await asyncio.to_thread(lambda: self._notation), params)
        params |= constraint
        arguments = self._arguments(body, [ids], params)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_CHAT_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_CHAT_TOP_LOGPROBS}", param="top_logprobs")
        if body.logprobs:
            arguments |= {"return_logprob": True, "top_logprobs_num": body.top_logprobs or 0}
        parser = service.config.reasoning_parser if body.separate_reasoning is not False else None
        has_tools = bool(body.tools) and body.tool_choice != "none"
        logprobs = (lambda meta: chat_logprobs(tokenizer, meta)) if body.logprobs else None
        return _Answers(
            "chat.completion",
            arguments,
            body.n or 1,
            lambda index: _Turn(index, AnswerSplitter(parser, has_tools=has_tools, sure=sure), logprobs),
        )


class _Choice(Protocol):
    """One sample of one prompt, as the API writes it."""

    def choice(self, result: Result) -> dict[str, Any]:
        """Of a whole result."""

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        """Of a stream's next event; nothing if all that it brings is held back."""


class _Answers:
    """What a request asks of the engine, and the choices that its results become."""

    def __init__(
        self, kind: str, arguments: dict[str, Any], num_samples: int, make: Callable[[int], _Choice]
    ) -> None:
        self.kind = kind
        self.arguments = arguments
        self.num_samples = num_samples
        self._make = make
        self._choices: dict[int, _Choice] = {}

    def of(self, index: int) -> _Choice:
        """The choice of that number, the same one each time."""
        if index not in self._choices:
            self._choices[index] = self._make(index)
        return self._choices[index]


class _Completion(_Choice):
    """One choice of a completion; whole or in pieces it looks alike."""

    def __init__(
        self, index: int, echo: str, logprobs: CompletionLogprobs, num_top: int | None, *, has_output: bool
    ) -> None:
        self._index = index
        self._text = echo
        self._logprobs = logprobs
        self._num_top = num_top
        self._has_output = has_output
        self._sent = 0

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        return [self.choice(event)]

    def choice(self, event: Result) -> dict[str, Any]:
        """What the event brings."""
        meta = event["meta_info"]
        text, self._text = self._text + event["text"][self._sent :], ""
        self._sent = len(event["text"])
        logprobs = None
        if self._num_top is not None:
            logprobs = self._logprobs.of(meta, num_top=self._num_top, has_output=self._has_output)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": _reason(meta)}


class _Turn(_Choice):
    """One choice of a chat."""

    def __init__(
        self, index: int, splitter: AnswerSplitter, logprobs: Callable[[dict[str, Any]], dict[str, Any]] | None
    ) -> None:
        self._index = index
        self._splitter = splitter
        self._logprobs = logprobs
        self._sent = 0
        self._has_begun = False
        self._has_calls = False

    def choice(self, result: Result) -> dict[str, Any]:
        piece = self._piece(result)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
        if piece.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in piece.calls]
            message |= {"content": piece.content or None, "tool_calls": calls}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        return {"index": self._index, "message": message, **self._rest(result["meta_info"])}

    def deltas(self, event: Result) -> list[dict[str, Any]]:
        piece = self._piece(event)
        delta: dict[str, Any] = {}
        if not self._has_begun:
            self._has_begun = True
            delta = {"role": "assistant", "content": ""}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = piece.calls
        rest = self._rest(event["meta_info"])
        if not delta and rest["finish_reason"] is None and rest["logprobs"] is None:
            return []
        return [{"index": self._index, "delta": delta, **rest}]

    def _piece(self, event: Result) -> Piece:
        text = event["text"][self._sent :]
        self._sent = len(event["text"])
        is_last = event["meta_info"]["finish_reason"] is not None
        piece = self._splitter.feed(text, final=is_last)
        self._has_calls = self._has_calls or bool(piece.calls)
        return piece

    def _rest(self, meta: dict[str, Any]) -> dict[str, Any]:
        reason = _reason(meta)
        return {
            "logprobs": None if self._logprobs is None else self._logprobs(meta),
            "finish_reason": "tool_calls" if self._has_calls and reason == "stop" else reason,
        }


def _reason(meta: dict[str, Any]) -> str | None:
    reason = meta["finish_reason"]
    return None if reason is None else str(reason["type"])


def _usage(results: list[Result], num_samples: int) -> dict[str, Any]:
    """Tokens of prompts, once each, and of all samples."""
    metas = [result["meta_info"] for result in results]
    prompt = sum(meta["prompt_tokens"] for meta in metas[::num_samples])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::num_samples])},
    }
