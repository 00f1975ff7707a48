"""The OpenAI API: models, completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from aiohttp import web

from sgl.errors import InvalidRequest, SglError
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.requests.arguments import too_many
from sgl.runtime.requests.builder import MAX_TOP_LOGPROBS
from sgl.runtime.requests.results import failure_of
from sgl.runtime.requests.threads import in_thread
from sgl.runtime.server import encoding, replies, sse
from sgl.runtime.server.adapters import adapter_options, check_model, shown_model
from sgl.runtime.server.answers import Answers, Choice, Completion, Result, usage
from sgl.runtime.server.conversations import answer_id, answers_to, engine_arguments, whole
from sgl.runtime.server.logprobs import CompletionLogprobs
from sgl.runtime.server.protocol import ChatBody, CompletionBody, SamplingBody
from sgl.runtime.server.routes import Api, endpoint

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may fill the context


class OpenAIApi(Api):
    """The OpenAI endpoints."""

    @endpoint("GET /v1/models")
    async def models(self, request: web.Request) -> replies.Models:
        """The served model and its LoRA adapters, as a list."""
        models = [await self._model(its) for its in (None, *self._service.adapters)]
        first, last = models[0]["id"], models[-1]["id"]  # Anthropic's
        return {"object": "list", "data": models, "first_id": first, "last_id": last, "has_more": False}

    @endpoint("GET /v1/models/{model:.+}")
    async def model(self, request: web.Request) -> replies.Model:
        """The model of that name."""
        name = check_model(self._service, request.match_info["model"])
        found = next((its for its in self._service.adapters if its.lora_name == name), None)
        return await self._model(found)

    @endpoint(
        "POST /v1/completions",
        example={"prompt": "Once upon a time", "max_tokens": 16},
        answer=replies.Completion,
        streams=True,
    )
    async def completions(self, request: web.Request, body: CompletionBody) -> web.StreamResponse:
        """Continue one text or several."""
        return await self._answer(request, body, await self._completion_answers(body))

    @endpoint(
        "POST /v1/chat/completions",
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
        answer=replies.ChatCompletion,
        streams=True,
    )
    async def chat(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        """Answer in a conversation."""
        return await self._answer(request, body, await answers_to(self._service, body))

    # ── what both share ─────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(
        self, request: web.Request, body: SamplingBody, answers: Answers[Choice]
    ) -> web.StreamResponse:
        each, at_end = body.usage_wanted()
        if body.stream:
            events = self._chunks(answers, usage_in_each=each, usage_at_end=at_end)
            return await sse.send_events(request, events, self._service.config.write_timeout)
        results = await whole(self._service, answers)

        def reply() -> dict[str, Any]:
            choices = [answers.choice(i).choice(result) for i, result in enumerate(results)]
            more: dict[str, Any] = {}
            if answers.prompt_token_ids is not None:
                more["prompt_token_ids"] = answers.prompt_token_ids
            transfers = [result["kv_transfer_params"] for result in results if "kv_transfer_params" in result]
            if transfers:
                more["kv_transfer_params"] = transfers if len(transfers) > 1 else transfers[0]
            return {**self._head(answers), "choices": choices, "usage": self._usage(answers, results), **more}

        return await encoding.answer(reply, sum(map(encoding.size_of_result, results)))

    async def _chunks(
        self, answers: Answers[Choice], *, usage_in_each: bool, usage_at_end: bool
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
                for chunk in await in_thread(
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
            counts = await in_thread(
                partial(self._usage, answers, results), sum(map(encoding.size_of_result, results))
            )
            yield sse.event({**head, "choices": [], "usage": counts})

    def _usage(self, answers: Answers[Choice], results: list[Result]) -> dict[str, Any]:
        """Token counts of all samples, reasoning's among them."""
        thoughts = ["".join(answers.choice(index).thoughts) for index in range(len(results))]
        num_thought = sum(
            len(self._service.tokenizer.encode(each, add_special_tokens=False)) for each in thoughts if each
        )
        counts = usage(results, answers.num_samples)
        if num_thought:  # as they would be cut, which may be into more than were generated
            num_thought = min(num_thought, counts["completion_tokens"])
            counts["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        return counts

    def _head(self, answers: Answers[Choice], *, streamed: bool = False) -> dict[str, Any]:
        kind = answers.kind
        return {
            "id": answers.id,
            "object": f"{kind}.chunk" if streamed and kind == "chat.completion" else kind,
            "created": int(time.time()),
            "model": shown_model(self._service, answers.arguments),
        }

    async def _model(self, adapter: LoraPath | None = None) -> replies.Model:
        service = self._service
        name = service.model_name if adapter is None else adapter.lora_name
        sees = await service.takes_images()
        return {
            "id": name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "sgl",
            "type": "model",  # from here on Anthropic's
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(timespec="seconds"),
            "root": service.engine.config.model_path if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else service.model_name,
            "max_model_len": service.context_length,
            "input_modalities": ["text", "image", "video"] if sees else ["text"],
        }

    # ── completions ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _completion_answers(self, body: CompletionBody) -> Answers[Completion]:
        check_model(self._service, body.model)  # before its prompts are read
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("best_of other than n is not supported", param="best_of")
        if body.suffix:
            raise InvalidRequest("suffix is not supported: this model continues texts only", param="suffix")
        if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="logprobs")
        tokenizer = self._service.tokenizer
        given: Any = body.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        number, most = len(prompts) * (body.n or 1), self._service.engine.config.max_requests_per_call
        if number > most:  # before all are encoded
            raise too_many(number, most, "prompt" if len(prompts) > most else "n")
        encode = partial(
            tokenizer.encode,
            add_special_tokens=body.add_special_tokens is not False,
            limit=self._service.context_length,
        )
        ids = await self._service.in_thread(
            lambda: [encode(each).tolist() if isinstance(each, str) else each for each in prompts]
        )
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = self._service.sampling_defaults | body.sampling_params(max_tokens)
        arguments = engine_arguments(body, ids, params)
        arguments |= adapter_options(self._service, body.model, body.lora_path, len(ids))
        if body.logprobs is not None:
            arguments |= {"return_logprob": True, "top_logprobs_num": body.logprobs}
            arguments |= {"logprob_start_len": 0} if body.echo else {}
        num_samples, wants_ids = body.n or 1, bool(body.return_token_ids)

        @cache
        def choice(index: int) -> Completion:
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

        return Answers("text_completion", arguments, num_samples, choice, answer_id("cmpl", body))


def _written(choice: Choice, event: Result, head: dict[str, Any], first: dict[str, Any]) -> list[bytes]:
    """An event's chunks; the first one carries the fields `first`."""
    chunks = []
    for delta in choice.deltas(event):
        chunks.append(sse.event({**head, **first, "choices": [delta]}))
        first = {}
    return chunks
