"""Runs subclasses of the original's `BaseBackend`, whose blocking methods see the stream as their executor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from sgl.errors import BackendError
from sgl.lang.aio import outcome
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, get_chat_template
from sgl.lang.ir.choices import ChoicesDecision, method_named
from sgl.lang.ir.sampling import RENAMED

_NAMES = {name: original for original, name in RENAMED.items()}


@dataclass
class StreamView:
    """What the original's backends read of an executor."""

    text_: str
    messages_: list[dict[str, Any]]
    cur_role: str | None
    images_: list[tuple[str, str]]
    chat_template: Any
    variables: dict[str, Any] = field(default_factory=dict)
    sid: str = ""

    def text(self) -> str:
        """All text so far."""
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        """The closed turns."""
        return self.messages_


class BaseBackend(TextBackend):
    """Subclasses implement `generate(s, sampling_params) -> (text, meta)`, and optionally `generate_stream`, which
    yields such pairs, and `select(s, choices, temperature, choices_method) -> ChoicesDecision`."""

    support_concate_and_append = False
    max_threads: ClassVar[int] = 128
    constraints: ClassVar[frozenset[str]] = frozenset({"regex", "json", "ebnf"})  # passed to the subclass

    def __init__(self) -> None:
        self.chat_template: ChatTemplate = get_chat_template("default")

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Threads for blocking methods; a forked child gets its own."""
        of_process: dict[int, ThreadPoolExecutor] = self.__dict__.setdefault("_threads", {})
        if os.getpid() not in of_process:
            of_process[os.getpid()] = ThreadPoolExecutor(self.max_threads, thread_name_prefix="sgl-backend")
        return of_process[os.getpid()]

    def get_model_name(self) -> str:
        """The model's name."""
        return type(self).__name__

    def get_chat_template(self) -> ChatTemplate:
        """The chat template."""
        return self.chat_template

    def generate(self, s: StreamView, sampling_params: Any) -> Any:  # type: ignore[override]
        """(text, meta info), or two lists for n > 1."""
        raise BackendError(f"{type(self).__name__} does not generate")

    def generate_stream(self, s: StreamView, sampling_params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """(piece, meta info) pairs; by default all of `generate`."""
        yield self.generate(s, sampling_params)

    def select(self, s: StreamView, choices: list[str], temperature: float, choices_method: Any) -> ChoicesDecision:
        """The choice and its meta info."""
        raise BackendError(f"{type(self).__name__} does not select")

    def open(self, program: ir.Program, sink: ir.Sink) -> Any:
        return _Adapter(self).open(program, sink)


class _Adapter(TextBackend):
    """The backend as called from the io thread."""

    def __init__(self, backend: BaseBackend) -> None:
        self._backend = backend
        template = backend.chat_template if hasattr(backend, "chat_template") else backend.get_chat_template()
        self.chat_template = template
        self.constraints = backend.constraints  # type: ignore[misc]

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        text, meta = await self._call(self._backend.generate, self._view(prompt), _sampling(params))
        if isinstance(text, list):
            metas = meta if isinstance(meta, list) else [meta] * len(text)
            return [Completion(one, dict(info or {})) for one, info in zip(text, metas, strict=True)]
        return [Completion(text, dict(meta or {}))]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        pieces = self._backend.generate_stream(self._view(prompt), _sampling(params))
        end = object()
        while (piece := await self._call(next, pieces, end)) is not end:
            yield Completion(piece[0], dict(piece[1] or {}))

    async def choose(self, prompt: Prompt, node: ir.Select) -> Completion:
        method = method_named(node.method)
        decision = await self._call(self._backend.select, self._view(prompt), list(node.choices), 0.0, method)
        return Completion(decision.decision, dict(decision.meta_info or {}))

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._backend.threads, outcome, function, *args)

    def _view(self, prompt: Prompt) -> StreamView:
        images = [("", image.data) for image in prompt.images]
        return StreamView(prompt.text, list(prompt.messages), prompt.role, images, self.chat_template)


def _sampling(params: GenParams) -> SimpleNamespace:
    """Parameters as attributes under the original's names."""
    named = {_NAMES.get(key, key): value for key, value in params.sampling.items()}
    kind, value = params.constraint or (None, None)
    constraints = {"regex": value if kind == "regex" else None, "json_schema": value if kind == "json" else None}
    return SimpleNamespace(**named, **constraints, dtype=params.node.dtype)
