"""What completions and chats are sampled with where a request does not say: what the model's authors recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl.errors import ConfigError
from sgl.runtime.config import ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.sampling_defaults import sampling_defaults
from tests.live_server import served
from tests.tiny_models import edit_json, tiny_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, with_tokenizer=True)


def read(folder: Path, **fields: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return sampling_defaults(ServerConfig(), str(folder))


def test_defaults_are_those_of_the_checkpoint(folder: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert read(folder, **given, do_sample=True, max_length=20, eos_token_id=[2]) == given
    assert read(folder, temperature=0.7, top_p=None, top_k=0) == {"temperature": 0.7, "top_k": -1}
    assert read(folder) == {}
    assert sampling_defaults(ServerConfig(sampling_defaults="openai"), str(folder)) == {}
    (folder / "generation_config.json").unlink()
    assert sampling_defaults(ServerConfig(), str(folder)) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"temperature": "hot"}', "temperature"),
        ('{"top_p": 1.5}', "top_p"),
        ("[]", "generation_config.json cannot be sampled with"),
        ("{", "generation_config.json cannot be sampled with"),
        ("[" * 100_000, "generation_config.json cannot be sampled with"),
    ],
)
def test_values_that_cannot_be_sampled_with_are_named(folder: Path, content: str, words: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"(?s){words}.*sampling_defaults='openai' does without it") as caught:
        sampling_defaults(ServerConfig(), str(folder))
    assert caught.value.option == "sampling_defaults"


def test_requests_are_sampled_by_them_unless_they_say_otherwise(folder: Path) -> None:
    edit_json(folder / "generation_config.json", temperature=0.0, repetition_penalty=1.5)
    template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    body = {"prompt": "the rain", "max_tokens": 12, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 12, "ignore_eos": True}
    openai = {"temperature": 1.0, "repetition_penalty": 1.0}
    with Engine(str(folder), device="cpu", max_total_tokens=512) as engine:
        params = {"max_new_tokens": 12, "temperature": 0.0, "repetition_penalty": 1.5, "ignore_eos": True}
        expected = engine.generate("the rain", params)["text"]
        plain = engine.generate("the rain", {**params, "repetition_penalty": 1.0})["text"]
        assert expected != plain
        with served(engine) as server:
            for _ in range(2):
                assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected
            told = server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
            asked = server.post("/v1/chat/completions", {**chat, "temperature": 0.0}).json()
            assert told == asked["choices"][0]["message"]["content"]
            greedy = {**body, "repetition_penalty": 1.0}
            assert server.post("/v1/completions", greedy).json()["choices"][0]["text"] == plain
            sampled = {
                server.post("/v1/completions", {**body, **openai}).json()["choices"][0]["text"] for _ in range(4)
            }
            assert len(sampled) > 1
            answer = server.post("/v1/responses", {"input": "the rain", "max_output_tokens": 4}).json()
            assert (answer["temperature"], answer["top_p"]) == (0.0, 1.0)
            defaults = {"temperature": 0.0, "repetition_penalty": 1.5}
            assert server.get("/model_info").json()["preferred_sampling_params"] == defaults
        with served(engine, sampling_defaults="openai") as server:
            sampled = {server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(4)}
            assert len(sampled) > 1
