"""A server over HTTP: executes whole programs if it can, else calls of `/generate`, as the original's servers."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, ClassVar

from sgl.errors import BackendError, InvalidRequest, SglError
from sgl.lang.aio import io
from sgl.lang.backends.base import Session
from sgl.lang.backends.http import HttpClient
from sgl.lang.backends.remote import RemoteSession
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, as_template, jinja_template, registry
from sgl.lang.ir.choices import Scores
from sgl.lang.ir.sampling import CONSTRAINT_NAMES, logprob_options, native_sampling

FIRST_SECONDS = 30.0  # the first answer is cheap


class RuntimeEndpoint(TextBackend):
    """A running server. Uses its model's chat template unless `chat_template_name` is given."""

    constraints: ClassVar[frozenset[str]] = frozenset(CONSTRAINT_NAMES)

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float = 600.0,
        max_retries: int = 3,
    ) -> None:
        options: dict[str, Any] = {"api_key": api_key, "timeout": timeout, "max_retries": max_retries}
        self._made_of = {**options, "verify": verify, "chat_template_name": chat_template_name}
        self._http = HttpClient(base_url, verify=verify is not False, **options)
        self.model_info = self._model_info()
        self.model_name = self.model_info.get("model_path")
        self._is_incremental: bool | None = None
        self._seed_name = "seed" if self.model_info.get("engine") == "sgl" else "sampling_seed"
        self._template_name = chat_template_name
        self.chat_template: ChatTemplate | None = None
        if chat_template_name is not None:
            self.chat_template = as_template(chat_template_name)
        elif source := self.model_info.get("chat_template"):
            self.chat_template = jinja_template(source, special_tokens=self.model_info.get("special_tokens"))

    def __reduce__(self) -> Any:
        return partial(type(self), self.base_url, **self._made_of), ()

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        template = program.chat_template or self._template_name
        is_known = template is None or (isinstance(template, str) and template in registry)
        if not (self.model_info.get("programs") and is_known):  # the server does not know it
            return super().open(program, sink)
        program = dataclasses.replace(program, chat_template=template)
        return RemoteSession(self._http, program, sink, self.opened)

    def opened(self, program_id: str) -> None:
        """Called on the io thread with each remote program's id."""

    @property
    def base_url(self) -> str:
        """The server's URL."""
        return self._http.base_url

    def request(self, path: str, body: Any = None) -> Any:
        """An endpoint's JSON: POST of `body`, or GET without one."""
        try:
            return io.wait(self._http.get(path) if body is None else self._http.post(path, body))
        except SglError as error:
            error.__traceback__ = None  # the message suffices
            raise

    def _model_info(self) -> dict[str, Any]:
        try:
            info = io.wait(self._http.get("/get_model_info", seconds=FIRST_SECONDS))
        except InvalidRequest as error:  # another protocol
            raise BackendError(
                f"{error}: is it a server of this protocol? For OpenAI's there is sgl.OpenAI"
            ) from None
        except SglError as error:
            error.__traceback__ = None
            raise
        if not isinstance(info, dict):
            found = "no JSON" if info is None else repr(info)[:80]
            raise BackendError(f"{self.base_url}/get_model_info answers {found}: it is no server of this protocol")
        return info

    def get_model_name(self) -> str:
        """The model's path."""
        return str(self.model_info.get("model_path"))

    def flush_cache(self) -> bool:
        """Drop cached prefixes."""
        self.request("/flush_cache", {})
        return True

    def get_server_info(self) -> dict[str, Any]:
        """The server's options and counters."""
        return dict(self.request("/server_info"))

    def cache_prefix(self, text: str) -> None:
        """Compute the KV of a common prefix."""
        self.request("/generate", {"text": text, "sampling_params": {"max_new_tokens": 0, "temperature": 0}})

    def shutdown(self) -> None:
        """Close connections; the server stays."""
        io.wait(self._http.close())

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        bodies = [self._body(prompt, params, seed) for seed in params.seeds]
        body = bodies[0]
        if len(bodies) > 1:  # a batch: each sample has its seed
            body |= {
                "text": [prompt.text] * len(bodies),
                "sampling_params": [body["sampling_params"] for body in bodies],
            }
        answer = await self._http.post("/generate", body)
        return [_completion(item) for item in (answer if isinstance(answer, list) else [answer])]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        body = self._body(prompt, params, params.seeds[0]) | {"stream": True}
        is_incremental = await self._streams_increments()
        sent = 0
        async for event in self._http.events("/generate", body):
            completion = _completion(event)
            if not is_incremental:
                sent, completion.text = len(completion.text), completion.text[sent:]
            yield completion

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        """Score prompt and choices in one request, from where their tokens first differ: a token may span both."""
        texts = [prompt.text + choice for choice in choices]
        alone, *given = await self._logprobs({"text": [prompt.text, *texts]})
        start = min(min(_common(alone, entries), len(entries) - 1) for entries in given)
        scores = [
            Scores([e[0] or 0.0 for e in entries[start:]], [e[1] for e in entries[start:]]) for entries in given
        ]
        if not unconditional:
            return scores
        without = await self._logprobs({"input_ids": [list(score.token_ids) for score in scores]})
        return [
            Scores(score.logprobs, score.token_ids, [entry[0] for entry in entries])
            for score, entries in zip(scores, without, strict=True)
        ]

    async def _streams_increments(self) -> bool:
        """Whether events hold new text only, an option of the original's servers."""
        if self._is_incremental is None:
            info = await self._http.get("/server_info") or {}
            self._is_incremental = bool(info.get("incremental_streaming_output") or info.get("stream_output"))
        return self._is_incremental

    async def _logprobs(self, prompts: dict[str, Any]) -> list[Any]:
        """[logprob, token id, …] of each prompt's tokens."""
        sampling = {"max_new_tokens": 0, "temperature": 0}
        body = {**prompts, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = await self._http.post("/generate", body)
        if not isinstance(answer, list):
            raise BackendError(f"asked for a list of results, got {str(answer)[:200]}")
        entries = [_input_logprobs(item) for item in answer]
        if not all(entries):
            raise BackendError(
                f"a select needs the log-probabilities of its choices, and {self.base_url} gives none: there are no "
                "input_token_logprobs in its answer. Use a gen with a regex of the choices there, or run the program "
                "on `sgl serve` or SGLang"
            )
        return entries

    def _body(self, prompt: Prompt, params: GenParams, seed: int) -> dict[str, Any]:
        native = native_sampling(params.sampling, params.constraint, seed)
        native[self._seed_name] = native.pop("seed")
        body: dict[str, Any] = {"text": prompt.text, "sampling_params": native}
        body |= logprob_options(params.sampling)
        if prompt.images:
            body["image_data"] = [image.data for image in prompt.images]
        return body | (params.sampling["extra"] or {})


def _completion(item: Any) -> Completion:
    kinds = [type(item.get(name)) for name in ("text", "meta_info")] if isinstance(item, dict) else []
    if kinds != [str, dict]:
        raise BackendError(f"the server's answer has no text or no meta_info: {str(item)[:200]}")
    return Completion(item["text"], item["meta_info"])


def _input_logprobs(item: Any) -> list[Any]:
    """A result's prompt entries; empty if missing."""
    meta = item.get("meta_info") if isinstance(item, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    is_whole = isinstance(entries, list) and all(isinstance(entry, list) and len(entry) > 1 for entry in entries)
    return entries if is_whole else []  # type: ignore[return-value]  # a list


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix of token ids."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a[1] != b[1]), min(len(left), len(right))
    )
