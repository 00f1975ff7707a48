"""Ollama's API: chats and prompts are our chats, answered in lines of JSON. There is one model, and it stays."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import Any

from aiohttp import web

from sgl.errors import InvalidRequest
from sgl.runtime.server import encoding
from sgl.runtime.server.adapters import check_model
from sgl.runtime.server.answers import Answers, Turn
from sgl.runtime.server.conversations import answers_to, reply
from sgl.runtime.server.embeddings.api import embed
from sgl.runtime.server.embeddings.bodies import listed
from sgl.runtime.server.embeddings.replies import OllamaEmbedding, OllamaEmbeddings
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.ollama import bodies, replies
from sgl.runtime.server.replies import Version
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import VERSION

_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
_HELLO = {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 16}, "stream": False}
_ONCE = {"prompt": "Once upon a time", "options": {"num_predict": 16}, "stream": False}


class OllamaApi(Api):
    """Ollama's endpoints."""

    failure, names = replies.OllamaError, {"repetition_penalty": "repeat_penalty"}

    @endpoint("POST /api/chat", example=_HELLO, answer=replies.OllamaChat, lines=True)
    async def chat(self, request: web.Request, body: bodies.OllamaChatBody) -> web.StreamResponse:
        """Answer in a conversation; in lines unless stream is false."""
        answers = None
        if body.messages:
            self._check_thinking(body.think)
            answers = await answers_to(self._service, body.chat())
        return await self._answer(request, body, answers)

    @endpoint("POST /api/generate", example=_ONCE, answer=replies.OllamaGenerated, lines=True)
    async def generate(self, request: web.Request, body: bodies.OllamaGenerateBody) -> web.StreamResponse:
        """Answer a prompt; in lines unless stream is false. Raw, or without a chat template, continue it."""
        answers = None
        if body.prompt:
            tokenizer = self._service.tokenizer
            has_template = self._service.chat_template is not None or tokenizer.has_chat_template
            if body.raw or not has_template:
                limit = self._service.context_length
                ids = await self._service.in_thread(partial(tokenizer.encode, body.prompt, limit=limit))
                answers = await answers_to(self._service, body.raw_chat(), ids.tolist())
            else:
                self._check_thinking(body.think)
                answers = await answers_to(self._service, body.chat())
        return await self._answer(request, body, answers)

    def _check_thinking(self, think: bool | str | None) -> None:
        """Raise InvalidRequest for thinking that nobody would find in the answer."""
        if think and self._service.config.reasoning_parser is None:
            message = "this server does not tell thinking from answers: start it with --reasoning-parser"
            raise InvalidRequest(message, param="think")

    async def _answer(
        self,
        request: web.Request,
        body: bodies.OllamaChatBody | bodies.OllamaGenerateBody,
        answers: Answers[Turn] | None,
    ) -> web.StreamResponse:
        writer = replies.LineWriter(
            body.model or self._service.model_name, is_chat=isinstance(body, bodies.OllamaChatBody)
        )
        if answers is None:  # clients load and unload models like this
            check_model(self._service, body.model)
            if str(body.keep_alive) in ("0", "0s", "0.0"):
                raise InvalidRequest("the model stays: stop the server to unload it", param="keep_alive")
            return json_response(writer.empty())
        return await reply(self._service, request, answers, writer, streams=body.stream is not False)

    @endpoint("POST /api/embed", example={"input": "Hello"}, answer=OllamaEmbeddings)
    async def embed(self, request: web.Request, body: bodies.OllamaEmbedBody) -> web.Response:
        """Vectors of texts."""
        adapter = check_model(self._service, body.model)
        began = time.monotonic()
        found = await embed(
            self._service,
            listed(body.input),
            param="input",
            dimensions=body.dimensions,
            adapter=adapter,
            is_cut=body.truncate is not False,
        )
        head = {"model": body.model or self._service.model_name, "load_duration": 0}
        count, taken = found.usage["prompt_tokens"], round(1e9 * (time.monotonic() - began))

        def answer() -> dict[str, Any]:
            vectors = [vector.tolist() for vector in found.vectors]
            return {**head, "embeddings": vectors, "total_duration": taken, "prompt_eval_count": count}

        return await encoding.answer(answer, found.size)

    @endpoint("POST /api/embeddings", example={"prompt": "Hello"}, answer=OllamaEmbedding)
    async def embedding(self, request: web.Request, body: bodies.OllamaEmbeddingBody) -> web.Response:
        """The vector of a text, of any length, as Ollama's old endpoint has it."""
        adapter = check_model(self._service, body.model)
        found = await embed(self._service, [body.prompt], param="prompt", normalize=False, adapter=adapter)
        return await encoding.answer(lambda: {"embedding": found.vectors[0].tolist()}, found.size)

    # ── models ──────────────────────────────────────────────────────────────────────────────────────────────────

    @endpoint("GET /api/tags")
    async def tags(self, request: web.Request) -> replies.OllamaModels:
        """The served model, as a list."""
        return {"models": [await self._model()]}

    @endpoint("GET /api/ps")
    async def running(self, request: web.Request) -> replies.OllamaModels:
        """The same: it is always loaded."""
        info, model = await self._service.info(), await self._model()
        model["size"] = info["weight_bytes"] + info["kv_bytes"]
        model["size_vram"] = model["size"] if str(info["device"]).startswith("cuda") else 0
        model |= {"expires_at": _NEVER, "context_length": info["context_length"]}
        return {"models": [model]}

    @endpoint("POST /api/show", example={"model": ""})
    async def show(self, request: web.Request, body: bodies.OllamaShowBody) -> replies.OllamaShown:
        """The served model's kind, chat template and abilities."""
        service = self._service
        check_model(service, body.model or body.name)
        info, model = await self._service.info(), await self._model()
        template = service.chat_template
        if template is None and service.engine.tokenizer is not None:
            template = service.engine.tokenizer.chat_template
        has_tools = bool(template) and await service.in_thread(lambda: service.shows_tools)
        abilities = ["completion", *(["tools"] if has_tools else []), "embedding"]
        abilities += ["thinking"] if service.config.reasoning_parser is not None else []
        abilities += ["vision"] if await service.takes_images() else []
        family = model["details"]["family"]
        return {
            "modelfile": f"FROM {info['model_path']}\n",
            "parameters": "",
            "template": template or "",
            "details": model["details"],
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": info["num_weights"],
                f"{family}.context_length": info["context_length"],
            },
            "capabilities": abilities,
            "modified_at": model["modified_at"],
        }

    @endpoint("GET /api/version", is_open=True)
    async def version(self, request: web.Request) -> Version:
        """Our own release."""
        return {"version": VERSION}

    async def _model(self) -> replies.OllamaModel:
        info, name = await self._service.info(), self._service.model_name
        family = info["architecture"].removesuffix("ForCausalLM").lower()
        details: replies.OllamaDetails = {
            "parent_model": "",
            "format": info["checkpoint_format"].partition(":")[0].lower(),
            "family": family,
            "families": [family],
            "parameter_size": _size(info["num_weights"]),
            "quantization_level": (info["quantization"] or info["dtype"]).upper(),
        }
        return {
            "name": name,
            "model": name,
            "modified_at": replies.timestamp(self._service.started),
            "size": info["weight_bytes"],
            "digest": hashlib.sha256(name.encode()).hexdigest(),  # tells models apart; weights are not read for it
            "details": details,
        }


def _size(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
