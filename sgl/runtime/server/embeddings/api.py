"""Embeddings of prompts, and what follows from them: how alike texts are, and which documents fit a query."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from sgl.errors import InvalidRequest
from sgl.runtime.batch import Float32Array
from sgl.runtime.requests.embeddings import check_dimensions, embedding_arguments, finished
from sgl.runtime.requests.results import check_all
from sgl.runtime.server import encoding
from sgl.runtime.server.adapters import adapter_options, check_model, shown_model
from sgl.runtime.server.conversations import rendered
from sgl.runtime.server.embeddings import bodies, replies
from sgl.runtime.server.embeddings.truncation import first_tokens, last_tokens
from sgl.runtime.server.images import images_of
from sgl.runtime.server.protocol import ChatBody
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import Service
from sgl.runtime.server.texts import MAX_TOKENIZED, checked_size, pool_for


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings of a call, and the results that brought them."""

    vectors: list[Float32Array]
    results: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(map(len, self.vectors))

    @property
    def usage(self) -> replies.PromptUsage:
        """Tokens of all prompts."""
        return prompt_usage(self.results)


async def embed(
    service: Service,
    texts: Sequence[Any],
    *,
    param: str,
    pooling: str | None = None,
    dimensions: int | None = None,
    normalize: bool = True,
    adapter: str | None = None,
    truncate: int | None = None,
    is_cut: bool = False,
) -> Vectors:
    """Of texts, or of lists of token ids. adapter: a LoRA adapter's. truncate: as in `cut`. is_cut: texts to
    what fits of their beginnings. Raises InvalidRequest, which names `param`."""
    width = int(await service.constant("hidden_size"))
    check_dimensions(dimensions, width)
    if len(texts) * width > bodies.MAX_NUMBERS:
        most = bodies.MAX_NUMBERS // width
        message = f"{len(texts)} embeddings of {width} numbers: one request has {most} at most, send several"
        raise InvalidRequest(message, param=param)
    if not texts:
        raise InvalidRequest(f"{param} is empty: it needs at least one text", param=param)
    if is_cut:
        first = await service.in_thread(first_tokens, service.tokenizer, texts, service.context_length)
        prompts: dict[str, list[Any]] = {"input_ids": first}
    else:
        prompts = await cut(service, texts, truncate)
    arguments = embedding_arguments(pooling or service.config.pooling, prompts)
    try:
        results = await service.generate(**arguments, lora_path=adapter)
        check_all(results)
    except InvalidRequest as error:
        error.param = param if error.param in ("prompt", "input_ids") else error.param
        raise
    finish = partial(finished, normalize=normalize, dimensions=dimensions)
    return Vectors([finish(result.pop("embedding")) for result in results], results)


async def cut(service: Service, texts: Sequence[Any], most: int | None) -> dict[str, list[Any]]:
    """The engine's argument for texts or lists of token ids, of each the last `most` tokens; -1: as many as fit.
    Raises InvalidRequest."""
    if most is None:
        return {"prompt" if isinstance(texts[0], str) else "input_ids": list(texts)}
    if most < 1 and most != -1:
        message = f"truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not {most}"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    most = service.context_length if most == -1 else most
    size = 0
    if isinstance(texts[0], str):
        what = "characters are to be cut by tokens, {} more for each text"
        size = checked_size(texts, MAX_TOKENIZED, what, "truncate_prompt_tokens")
    cut_all = partial(last_tokens, service.tokenizer, texts, most)
    return {"input_ids": await asyncio.get_running_loop().run_in_executor(pool_for(size), cut_all)}


class EmbeddingsApi(Api):
    """The endpoints of OpenAI, SGLang and vLLM."""

    @endpoint("POST /v1/embeddings", example={"input": "Hello"}, answer=replies.Embeddings)
    async def embeddings(self, request: web.Request, body: bodies.EmbeddingBody) -> web.Response:
        """Vectors of texts, or of a conversation."""
        options = adapter_options(self._service, body.model, body.lora_path, 1)
        chat, texts = body.chat(), bodies.listed(body.input)
        found = await embed(
            self._service,
            texts if chat is None else [await self._prompt(chat)],
            param="input" if chat is None else "messages",
            pooling=body.pooling,
            dimensions=body.dimensions,
            normalize=body.normalize,
            adapter=options.get("lora_path"),
            truncate=body.truncate_prompt_tokens,
        )
        written = _base64 if body.encoding_format == "base64" else _list

        def answer() -> replies.Embeddings:
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": written(vector)}
                    for i, vector in enumerate(found.vectors)
                ],
                "model": shown_model(self._service, options),
                "usage": found.usage,
            }

        return await encoding.answer(answer, found.size)

    async def _prompt(self, chat: ChatBody) -> list[int]:
        if images_of(chat):
            raise InvalidRequest("messages are embedded with their texts only, no images", param="messages")
        service = self._service
        return await service.in_thread(rendered, service, chat, service.context_length)

    @endpoint("POST /encode", example={"text": "Hello"}, answer=replies.Encoded | list[replies.Encoded])
    async def encode(self, request: web.Request, body: bodies.EncodeBody) -> web.Response:
        """Vectors of texts or token ids, as the original's server has them."""
        given: Any = body.text if body.text is not None else body.input_ids
        if given is None:
            raise InvalidRequest("text or input_ids is needed", param="text")
        several = bodies.listed(given)
        param = "text" if body.text is not None else "input_ids"
        found = await embed(self._service, several, param=param, pooling=body.pooling, dimensions=body.dimensions)

        def answer() -> Any:
            each = [
                {"embedding": vector.tolist(), "meta_info": result["meta_info"]}
                for vector, result in zip(found.vectors, found.results, strict=True)
            ]
            return each if several is given else each[0]

        return await encoding.answer(answer, found.size)

    @endpoint(
        "POST /v1/score",
        "POST /score",
        example={"text_1": "a cat", "text_2": ["a kitten", "a car"]},
        answer=replies.PairScores | replies.LabelScores,
    )
    async def score(self, request: web.Request, body: bodies.ScoreBody) -> web.Response:
        """How alike pairs of texts are, by the cosine of their embeddings; or how likely labels are behind items."""
        adapter = check_model(self._service, body.model)
        if body.query is not None or body.items is not None or body.label_token_ids is not None:
            return await self._label_scores(body, adapter)
        if body.text_1 is None or body.text_2 is None:
            message = "text_1 and text_2 are needed, or query, items and label_token_ids"
            raise InvalidRequest(message, param="text_1" if body.text_1 is None else "text_2")
        first, second = bodies.listed(body.text_1), bodies.listed(body.text_2)
        compared = bodies.pairs(body.text_1, body.text_2)
        found = await embed(
            self._service,
            [*first, *second],
            param="text_2",
            pooling=body.pooling,
            adapter=adapter,
            truncate=body.truncate_prompt_tokens,
        )
        vectors, head = found.vectors, self._head("score")

        def answer() -> dict[str, Any]:
            data = [
                {"object": "score", "index": i, "score": _cosine(vectors[left], vectors[len(first) + right])}
                for i, (left, right) in enumerate(compared)
            ]
            return {**head, "object": "list", "data": data, "usage": found.usage}

        return await encoding.answer(answer, 4 * len(compared))

    @endpoint(
        "POST /v1/rerank",
        "POST /rerank",
        "POST /v2/rerank",
        example={"query": "a cat", "documents": ["a car", "a kitten"]},
        answer=replies.Ranks,
    )
    async def rerank(self, request: web.Request, body: bodies.RerankBody) -> web.Response:
        """Documents by the cosine of their embedding and the query's, the best first."""
        adapter = check_model(self._service, body.model)
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequest(f"top_n must be 0 or more, not {body.top_n}", param="top_n")
        texts = body.texts()
        found = await embed(
            self._service,
            [body.query, *texts],
            param="documents",
            pooling=body.pooling,
            adapter=adapter,
            truncate=body.truncate_prompt_tokens,
        )
        query, *vectors = found.vectors
        head = self._head("rerank")

        def answer() -> dict[str, Any]:
            scores = [_cosine(query, vector) for vector in vectors]
            order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
            ranks: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
            for rank in ranks if body.return_documents else ():
                rank["document"] = {"text": texts[rank["index"]]}
            return {**head, "results": ranks, "usage": found.usage}

        return await encoding.answer(answer, 4 * len(texts))

    async def _label_scores(self, body: bodies.ScoreBody, adapter: str | None) -> web.Response:
        missing = [name for name in ("query", "items", "label_token_ids") if getattr(body, name) is None]
        if missing:
            raise InvalidRequest(f"{missing[0]} is needed beside the others of its kind", param=missing[0])
        assert body.query is not None
        assert body.label_token_ids is not None
        items = bodies.listed(body.items)
        query: Any = body.query
        if any(isinstance(item, str) != isinstance(query, str) for item in items):
            message = "query and items must both be texts or both be token ids"
            raise InvalidRequest(message, param="items")
        if not items:
            raise InvalidRequest("items is empty: it needs at least one", param="items")
        given = [item + query if body.item_first else query + item for item in items]
        prompts = await cut(self._service, given, body.truncate_prompt_tokens)
        try:
            results = await self._service.generate(
                **prompts,
                sampling_params={"max_new_tokens": 0, "temperature": 0.0},
                return_logprob=True,
                token_ids_logprob=body.label_token_ids,
                lora_path=adapter,
            )
            check_all(results)
        except InvalidRequest as error:
            names = {"token_ids_logprob": "label_token_ids", "prompt": "items", "input_ids": "items"}
            error.param = names.get(error.param or "", error.param)
            raise
        model = self._service.model_name

        def answer() -> dict[str, Any]:
            scores = []
            for result in results:
                [entries] = result["meta_info"]["output_token_ids_logprobs"]
                logprobs = np.array([entry[0] for entry in entries])
                likely = np.exp(logprobs - logprobs.max() if body.apply_softmax else logprobs)
                scores.append((likely / likely.sum() if body.apply_softmax else likely).tolist())
            return {"object": "scoring", "model": model, "scores": scores, "usage": prompt_usage(results)}

        return await encoding.answer(answer, len(results) * len(body.label_token_ids))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._service.model_name,
        }


def prompt_usage(results: Sequence[dict[str, Any]]) -> replies.PromptUsage:
    """Tokens of the prompts of some results."""
    number = sum(result["meta_info"]["prompt_tokens"] for result in results)
    return {"prompt_tokens": number, "total_tokens": number}


def _cosine(one: Float32Array, other: Float32Array) -> float:
    """Of vectors of length 1; rounding may not take it beyond."""
    return float(np.clip(one @ other, -1.0, 1.0))


def _list(vector: Float32Array) -> list[float]:
    found: list[float] = vector.tolist()
    return found


def _base64(vector: Float32Array) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
