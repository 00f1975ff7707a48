"""The loaded LoRA adapters by name. Each load has a number of its own: a name that comes back with other weights meets
nothing cached of the old ones."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.ir.sampling import shown
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.scheduler.scheduler import Scheduler

_MOST_CHARACTERS = 1024  # of a name or path


@dataclass(frozen=True, slots=True)
class LoraUpdate:
    """What a change left, in the original's words."""

    loaded_adapters: dict[str, str]
    """Paths by name."""
    success: bool = True
    error_message: str = ""


class HoldsAdapters(Protocol):
    """A runner, for what concerns adapters. All but `read_adapter` on the loop's thread."""

    def read_adapter(self, path: str) -> Any:
        """An adapter's folder. Raises AdapterError. Safe from any thread."""

    def add_adapter(self, number: int, adapter: Any) -> None:
        """Keep one that was read."""

    def drop_adapter(self, number: int) -> None:
        """Free one that no step needs any more."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int  # 0: being loaded
    path: str
    pinned: bool


class Adapters:
    """Of one engine. Safe from any thread."""

    def __init__(self, config: EngineConfig, runner: HoldsAdapters, scheduler: Scheduler, loop: EngineLoop) -> None:
        self._is_enabled = bool(config.enable_lora)
        self._num_slots = config.max_loras_per_batch
        self._runner, self._scheduler, self._loop = runner, scheduler, loop
        self._loaded: dict[str, _Loaded] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def number_of(self, name: Any) -> int:
        """The number of a loaded adapter; 0 for None. Raises InvalidRequest."""
        if name is None or name == "":
            return 0
        if not isinstance(name, str):
            raise InvalidRequest(f"lora_path must be the name of an adapter, not {shown(name)}", param="lora_path")
        self._check_enabled("lora_path")
        with self._lock:
            return self._found(name, "lora_path").number

    def name_of(self, number: int) -> str | None:
        """Of a loaded adapter's number; None: it is gone."""
        with self._lock:
            return next((name for name, its in self._loaded.items() if its.number == number), None)

    def namespace(self, name: Any, extra_key: str | None) -> Namespace:
        """Of the cache, for requests with this adapter and key. Raises InvalidRequest."""
        number = self.number_of(name)
        return (number, extra_key) if number else extra_key

    def listed(self) -> list[LoraPath]:
        """Those that requests may name, in order of loading."""
        with self._lock:
            loaded = [(name, its) for name, its in self._loaded.items() if its.number]
        return [LoraPath(name, its.path, its.pinned) for name, its in loaded]

    def update(self) -> LoraUpdate:
        """What the latest change left."""
        return LoraUpdate({its.lora_name: its.lora_path for its in self.listed()})

    def load_all(self, paths: Sequence[LoraPath]) -> None:
        """Load them one after the other. Raises AdapterError."""
        for its in paths:
            self.load(its.lora_name, its.lora_path, pinned=its.pinned)

    def load(self, name: Any, path: Any, *, pinned: bool = False) -> None:
        """Load an adapter under a name that is free. Raises InvalidRequest and AdapterError."""
        self._check_enabled("lora_name")
        _check_text("lora_name", name)
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        _check_text("lora_path", path)
        with self._lock:
            if name in self._loaded:
                raise InvalidRequest(
                    f"there is a LoRA adapter {shown(name)} already: unload it first", param="lora_name"
                )
            num_pinned = sum(its.pinned for its in self._loaded.values())
            if pinned and num_pinned + 1 >= self._num_slots:
                raise InvalidRequest(
                    f"{num_pinned} of the {self._num_slots} slots (max_loras_per_batch) are pinned, and one must be "
                    "left for other adapters",
                    param="pinned",
                )
            self._loaded[name] = _Loaded(0, path, pinned)
        loaded = None
        try:
            adapter = self._runner.read_adapter(path)
            number = next(self._numbers)

            def add() -> None:
                self._runner.add_adapter(number, adapter)
                self._scheduler.adapters.add(number, pinned=pinned)

            self._loop.call(add)
            loaded = _Loaded(number, path, pinned)
        finally:
            with self._lock:
                del self._loaded[name]
                if loaded is not None:
                    self._loaded[name] = loaded

    def unload(self, name: Any) -> None:
        """Refuse new requests at once, wait for those that have the adapter, then free it and what is cached of it.
        Raises InvalidRequest and EngineDead."""
        self._check_enabled("lora_name")
        _check_text("lora_name", name)
        with self._lock:
            number = self._found(name, "lora_name").number
            del self._loaded[name]
        freed: Future[None] = Future()

        def free() -> None:
            self._scheduler.memory.forget(number)
            self._runner.drop_adapter(number)
            freed.set_result(None)

        self._loop.post(lambda: self._scheduler.adapters.remove(number, free))
        self._loop.result_of(freed)

    def _found(self, name: str, param: str) -> _Loaded:
        found = self._loaded.get(name)
        if found is None or not found.number:
            known = [name for name, its in self._loaded.items() if its.number]
            hint = nearest_name(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise InvalidRequest(f"no LoRA adapter {shown(name)} is loaded{hint}", param=param)
        return found

    def _check_enabled(self, param: str) -> None:
        if not self._is_enabled:
            raise InvalidRequest("LoRA adapters are not enabled: start with enable_lora or lora_paths", param=param)


def _check_text(param: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text, not {shown(value)}", param=param)
    if len(value) > _MOST_CHARACTERS:
        raise InvalidRequest(f"{param} may have {_MOST_CHARACTERS} characters at most", param=param)
