"""The native API: /generate as the original client reads it, and engine controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import create_model

from sgl.errors import InvalidRequest
from sgl.runtime.requests.arguments import body_fields
from sgl.runtime.requests.builder import MAX_LOGPROBS
from sgl.runtime.requests.results import failure_of
from sgl.runtime.requests.threads import FEW, in_thread, in_turns
from sgl.runtime.server import encoding, replies, sse
from sgl.runtime.server.bodies import Bounded
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import described
from sgl.runtime.server.fields import Anything, ForeignArguments, Lenient, Off, UntilStopped, also_takes
from sgl.runtime.server.identity import current_caller
from sgl.runtime.server.images import all_located
from sgl.runtime.server.origins import check_no_browser
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import VERSION
from sgl.runtime.server.texts import MAX_DETOKENIZED, MAX_TOKENIZED, checked_size, in_batches, pool_for
from sgl.runtime.text.tokenizer import Tokenizer

UNRESPONSIVE_SECONDS = 20.0
"""A longer step makes /health fail; long prompts take a second or two."""
SILENT_SECONDS = 5.0
"""So does silence of the engine process; ten beats are missing then."""

GenerateBody: type[Bounded] = create_model(
    "GenerateBody",
    __base__=ForeignArguments,
    __module__=__name__,
    __doc__="A null means the default; unknown fields are ignored, unknown sampling parameters refused, and so is what "
    "SGLang would do and this server does not.",
    text=(str | list[str] | None, None),
    image_data=(Any, None),
    video_data=(Any, None),
    **body_fields(),
)


class AbortBody(Lenient):
    """Abort the requests of one rid, or all."""

    rid: str | None = None
    abort_all: bool = False


class TransferBody(Lenient):
    """What a prefill engine answered, of one prompt or of several."""

    kv_transfer_params: dict[str, Any] | list[dict[str, Any]]


@also_takes((Anything, "activities with_stack record_shapes output_dir"), (Off, "profile_by_stage merge_profiles"))
@also_takes((UntilStopped, "start_step num_steps profile_stages"))
class ProfileBody(Lenient):
    """SGLang's options of a profile. What it holds, and where it is, is the server's to say."""


class TokenizeBody(Lenient):
    """One text or several."""

    text: str | list[str] | None = None
    prompt: str | list[str] | None = None
    add_special_tokens: bool = True
    allow_special: bool = True


class DetokenizeBody(Lenient):
    """Token ids of one text or several."""

    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool = True


class NativeApi(Api):
    """The native endpoints."""

    @endpoint(
        "POST /generate",
        "PUT /generate",
        body=GenerateBody,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        answer=replies.Result | list[replies.Result],
        streams=True,
    )
    async def generate(self, request: web.Request, body: Bounded) -> web.StreamResponse:
        """Generate for one prompt or a list; whole or streamed."""
        arguments = _arguments(body)
        if arguments.pop("stream", False):
            timeout = self._service.config.write_timeout
            return await sse.send_events(request, self._events(arguments), timeout)
        results = await self._service.generate(**arguments)
        several = results if isinstance(results, list) else [results]
        failures = [failure for failure in map(failure_of, several) if failure is not None]
        if failures and len(failures) == len(several):
            raise failures[0]
        size = 0
        async for result in in_turns(several):
            self._finish_logprobs(result)
            size += encoding.size_of_result(result)
        return await encoding.answer(lambda: results, size)

    async def _events(self, arguments: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        config = self._service.config
        is_incremental = config.incremental_streaming_output
        sent: dict[int, tuple[int, int]] = {}
        logprobs: dict[tuple[int, str], list[Any]] = {}
        async with aclosing(self._service.stream(**arguments)) as events:
            async for event in events:
                self._finish_logprobs(event)
                if is_incremental:
                    index, text, ids = event.get("index", 0), event["text"], event["output_ids"]
                    num_chars, num_ids = sent.get(index, (0, 0))
                    sent[index] = len(text), len(ids)
                    event["text"], event["output_ids"] = text[num_chars:], ids[num_ids:]
                elif config.parity_logprobs:
                    _add_earlier(event, logprobs)
                yield await in_thread(partial(sse.event, event), encoding.size_of_result(event))

    def _finish_logprobs(self, result: dict[str, Any]) -> None:
        """Drop the leading null of prompt logprobs that start after the first token, as the original client expects."""
        meta = result["meta_info"]
        entries = meta.get("input_token_logprobs")
        if not entries or self._service.config.parity_logprobs or len(entries) >= meta["prompt_tokens"]:
            return
        for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            if name in meta:
                meta[name] = meta[name][1:]

    @endpoint("GET /get_model_info", "GET /model_info")
    async def model_info(self, request: web.Request) -> replies.ModelInfo:
        """The served model and its chat template."""
        service = self._service
        tokenizer, config = service.engine.tokenizer, service.engine.config
        template = service.chat_template
        if template is None and tokenizer is not None:
            template = tokenizer.chat_template
        special = {} if tokenizer is None else tokenizer.hf.special_tokens_map
        info = await service.info()
        return {
            "model_path": config.model_path,
            "tokenizer_path": config.tokenizer_path or config.model_path,
            "served_model_name": service.model_name,
            "is_generation": True,
            "preferred_sampling_params": service.sampling_defaults or None,
            "context_length": service.context_length,
            "has_image_understanding": info["has_image_understanding"],
            "weight_version": info["weight_version"],
            "reasoning_parser": service.config.reasoning_parser,
            "chat_template": template,
            "special_tokens": {name: token for name, token in special.items() if isinstance(token, str)},
            "engine": "sgl",
            "programs": tokenizer is not None,
            "version": VERSION,
        }

    @endpoint("GET /server_info", "GET /get_server_info")
    async def server_info(self, request: web.Request) -> replies.ServerInfo:
        """Options, version and current state of the engine."""
        service = self._service
        own = {
            "served_model_name": service.model_name,
            "grpc_port": service.grpc_port,
            "incremental_streaming_output": service.config.incremental_streaming_output,
            "reasoning_parser": service.config.reasoning_parser,
            "startup_time": service.started,
            "version": VERSION,
        }
        info: replies.ServerInfo = await service.info() | own  # type: ignore[assignment]  # it has more
        return info

    @endpoint("GET /health", "GET /health_generate", "GET /ready", "GET /ping", is_open=True)
    async def health(self, request: web.Request) -> replies.Ok:
        """200 while the engine's loop moves, else 503. Reads the heartbeat only."""
        self._service.check_is_up(within=UNRESPONSIVE_SECONDS, heard_within=SILENT_SECONDS)
        return {"status": "ok"}

    @endpoint("GET /version", is_open=True)
    async def version(self, request: web.Request) -> replies.Version:
        """The release that serves."""
        return {"version": VERSION}

    @endpoint("POST /flush_cache", "GET /flush_cache", content_type="text/plain", for_admin=True)
    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop cached prefixes. 400 if running requests hold some; the others are dropped. GET is for trainers: what a
        browser sends by it is refused, since any page may have it do so."""
        if request.method == "GET":
            check_no_browser(request)
        if await self._service.engine.call("flush_cache"):
            return web.Response(text="Cache flushed.\n")
        message = "running requests hold some cached prefixes; the others were forgotten"
        return json_response(described(message, 400, "busy"), 400)

    @endpoint("POST /abort_request", example={"rid": "mine"})
    async def abort(self, request: web.Request, body: AbortBody) -> replies.Ok:
        """Abort requests by rid and wait for their end. Callers reach only their own."""
        if body.rid is None and not body.abort_all:
            raise InvalidRequest("rid or abort_all is needed", param="rid")
        await self._service.abort(None if body.abort_all else body.rid, current_caller.get())
        return {"status": "ok"}

    @endpoint("POST /end_kv_transfer", example={"kv_transfer_params": []})
    async def end_kv_transfer(self, request: web.Request, body: TransferBody) -> replies.EndedTransfers:
        """Offer a prompt's pages no longer: no decode engine will pull them."""
        ended = await self._service.engine.call("end_kv_transfer", body.kv_transfer_params)
        return {"ended": ended}

    @endpoint("POST /start_profile", for_admin=True)
    async def start_profile(self, request: web.Request) -> replies.Ok:
        """Start recording a profile of steps. 400 if one is running."""
        if request.can_read_body:
            await self._service.body(request, ProfileBody)
        await self._service.engine.call("start_profile")
        return {"status": "ok"}

    @endpoint("POST /stop_profile", for_admin=True)
    async def stop_profile(self, request: web.Request) -> replies.Profile:
        """Write the profile for Chrome or Perfetto; returns its path on the server. 400 if none is running."""
        return {"path": await self._service.engine.call("stop_profile")}

    @endpoint("POST /tokenize", "POST /v1/tokenize", example={"text": "Hello"}, answer=replies.Tokens)
    async def tokenize(self, request: web.Request, body: TokenizeBody) -> web.Response:
        """Token ids of texts, and their number."""
        texts = body.text if body.text is not None else body.prompt
        if texts is None:
            raise InvalidRequest("text is needed", param="text")
        is_one, several = isinstance(texts, str), [texts] if isinstance(texts, str) else texts
        size = checked_size(several, MAX_TOKENIZED, "characters are to be tokenized, {} more for each text", "text")
        encode = partial(
            self._service.tokenizer.encode_all,
            add_special_tokens=body.add_special_tokens,
            allow_special=body.allow_special,
        )
        ids = await asyncio.get_running_loop().run_in_executor(pool_for(size), in_batches, encode, several)
        counts = [len(each) for each in ids]

        def answer() -> dict[str, Any]:
            return {
                "tokens": ids[0] if is_one else ids,
                "count": counts[0] if is_one else counts,
                "max_model_len": self._service.context_length,
            }

        return await encoding.answer(answer, sum(counts) + len(counts))

    @endpoint("POST /detokenize", "POST /v1/detokenize", example={"tokens": [5, 6, 7]}, answer=replies.Texts)
    async def detokenize(self, request: web.Request, body: DetokenizeBody) -> web.Response:
        """Texts of token ids."""
        is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
        several: Any = body.tokens if is_list else [body.tokens]
        size = checked_size(
            several, MAX_DETOKENIZED, "tokens are to be detokenized, {} more for each list", "tokens"
        )
        decode = partial(_decoded, self._service.tokenizer, several, skip_special_tokens=body.skip_special_tokens)
        texts = await asyncio.get_running_loop().run_in_executor(pool_for(size), decode)
        return await encoding.answer(lambda: {"text": texts if is_list else texts[0]}, size)

    @endpoint("POST /concate_and_append_request")
    async def concatenate(self, request: web.Request) -> dict[str, Any]:
        """Does nothing: the original client has joined its forks' texts."""
        # The next request sends that text and hits the radix cache.
        return {}


def _add_earlier(event: dict[str, Any], so_far: dict[tuple[int, str], list[Any]]) -> None:
    """Put the logprobs of earlier events before this one's. Raises InvalidRequest for more than an answer holds."""
    index, meta = event.get("index", 0), event["meta_info"]
    for name, entries in meta.items():
        if name.endswith("_logprobs"):
            meta[name] = so_far.setdefault((index, name), [])
            meta[name] += entries
    if encoding.size_of_result(event) > 4 * MAX_LOGPROBS:  # an entry has three values
        message = (
            f"an event would have more than {MAX_LOGPROBS} log-probabilities: ask for fewer, or without stream"
        )
        raise InvalidRequest(message, param="top_logprobs_num")


def _decoded(tokenizer: Tokenizer, several: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
    """Raises InvalidRequest for unknown ids. Long lists go token by token: a single call holds the GIL."""
    texts = []
    for ids in several:
        for token_id in ids:
            if not 0 <= token_id < tokenizer.vocab_size:
                message = f"token id {token_id} is out of range: there are 0 to {tokenizer.vocab_size - 1}"
                raise InvalidRequest(message, param="tokens")
        if len(ids) <= FEW:
            texts.append(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        else:
            detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip_special_tokens)
            texts.append("".join(map(detokenizer.feed, ids)) + detokenizer.flush())
    return texts


def _arguments(body: Bounded) -> dict[str, Any]:
    """Arguments of Engine.generate."""
    given = {name: value for name, value in body if value is not None and name not in ForeignArguments.model_fields}
    for name in ("image_data", "video_data"):
        if name in given:
            given[name] = all_located(given[name], name)
    if "text" in given:  # it wins over ids
        given["prompt"] = given.pop("text")
        given.pop("input_ids", None)
    elif "input_ids" not in given:
        raise InvalidRequest("text or input_ids is needed", param="text")
    elif given.get("return_logprob") and _computes_prompts_only(given.get("sampling_params")):
        # the original client scores choices like this
        given.setdefault("logprob_start_len", 0)
    return given


def _computes_prompts_only(params: Any) -> bool:
    each = params if isinstance(params, list) else [params or {}]
    return all(one.get("max_new_tokens") == 0 for one in each)
