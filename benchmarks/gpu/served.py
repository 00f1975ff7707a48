"""What the benchmarks over HTTP share: a server in a process of its own, and the texts that are sent to it."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.workloads import cut_tokenizer
from sgl import Runtime
from sgl.bench.datasets import random_jobs
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig

CONTEXT_LENGTH = 8192
START_SECONDS = 600.0
NUM_QUESTIONS, NUM_TOPICS = 512, 64


@contextlib.contextmanager
def served(model: str, tokenizer: Path | None, options: list[str]) -> Iterator[str]:
    """The URL of an `sgl serve`, which lasts as long as the context; of one that runs already where that is the model.

    With a tokenizer, the server makes up random weights for the model folder's config.json and gets the tokenizer cut
    to that vocabulary; without, it reads both from the model's folder. options: NAME=VALUE, of the engine.
    """
    if model.startswith(("http://", "https://")):
        yield model
        return
    given = parse_options(EngineConfig, dict(option.split("=", 1) for option in options))
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            cut_tokenizer(tokenizer, ModelConfig.from_pretrained(model).vocab_size, Path(folder))
            random_model = {"load_format": "dummy", "tokenizer_path": folder, "context_length": CONTEXT_LENGTH}
            given = {**random_model, **given}
        runtime = Runtime("warning", START_SECONDS, model_path=model, **given)
        try:
            yield runtime.url
        finally:
            runtime.shutdown()


def texts(path: Path | None) -> dict[str, Any]:
    """Questions, examples, chats and articles: those of a JSON file, or made-up words in about the same lengths."""
    if path is not None:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    rng = random.Random(0)

    def words(count: int) -> str:
        return random_jobs(1, count, 1, 0.5, rng)[0].prompt

    def many(count: int, length: int) -> list[str]:
        return [words(length) for _ in range(count)]

    return {
        "gsm8k_shots": words(900),
        "gsm8k": many(NUM_QUESTIONS, 45),
        "hella_shots": words(1200),
        "hella": [(words(40), [" " + ending for ending in many(4, 20)]) for _ in range(NUM_QUESTIONS // 2)],
        "topics": many(NUM_TOPICS, 4),
        "names": many(NUM_TOPICS, 2),
        "articles": many(NUM_TOPICS // 2, 700),
        "chats": [many(5, 45) for _ in range(NUM_QUESTIONS // 4)],
        "react_shots": words(1500),
        "react": [(words(20), many(4, 60)) for _ in range(NUM_QUESTIONS // 4)],
        "json_shots": words(120),
    }
