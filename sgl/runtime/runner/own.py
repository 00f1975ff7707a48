"""Platforms whose steps are not torch's: they bring a model and a runner of their own, and torch only reads
checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn, Protocol

import torch

from sgl.grammar.automaton.finished import Configuration
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.runtime.batch import PageMoves, Runner
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.base import Config, SizedModel
from sgl.runtime.platform.base import Platform


class EngineRunner(Runner, Protocol):
    """What an engine calls of its runner."""

    @property
    def num_encoded(self) -> int:
        """Images that the model's vision tower has embedded."""

    def is_launching(self) -> bool:
        """Whether kernels are being launched one by one: see `ModelRunner`. Safe from any thread."""
        ...

    def enable_device_masks(self, vocabulary: Vocabulary, example: Configuration) -> None:
        """Accept places in finished automata as token masks, if the platform's `masks_on_device` says so."""

    def read_adapter(self, path: str) -> Any:
        """A LoRA adapter's folder. Raises AdapterError. Safe from any thread."""

    def add_adapter(self, number: int, adapter: Any) -> None:
        """Keep an adapter for later steps."""

    def drop_adapter(self, number: int) -> None:
        """Free an adapter that no step needs any more."""

    def close(self) -> None:
        """Let go of the device, after the last step."""


class PlainRunner:
    """An EngineRunner but for `forward` and `sample`, where its platform's `check` refuses images, LoRA and host memory
    for copies."""

    num_encoded = 0

    def is_launching(self) -> bool:
        """A step is one call."""
        return False

    def close(self) -> None:
        """Nothing is held beside the runner."""

    def enable_device_masks(self, vocabulary: Vocabulary, example: Configuration) -> None:
        """Never called: masks come from the host."""
        self._refuse()

    def move(self, moves: PageMoves) -> NoReturn:
        """Never called."""
        self._refuse()

    def read_adapter(self, path: str) -> NoReturn:
        """Never called."""
        self._refuse()

    def add_adapter(self, number: int, adapter: Any) -> None:
        """Never called."""
        self._refuse()

    def drop_adapter(self, number: int) -> None:
        """Never called."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("the platform's check refuses what asks for it")


class OwnRunner(Platform):
    """A platform with a runner of its own. One process computes on all of an engine's devices, also with tp_size."""

    @abstractmethod
    def check(self, config: EngineConfig, model: Config) -> None:
        """Raise ConfigError or UnsupportedModel for what cannot be served, by its name."""

    @abstractmethod
    def load(self, config: EngineConfig, model: Config, device: torch.device) -> SizedModel:
        """The model on its devices. Raises ModelError."""

    @abstractmethod
    def runner(
        self, config: EngineConfig, model: SizedModel, num_pages: int, eos_ids: frozenset[int]
    ) -> EngineRunner:
        """With so many pages of keys and values, the first of which is the dummy page, for all layers. config: with
        every None resolved. model: of `load`."""
