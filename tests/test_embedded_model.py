"""The embedded model: small enough to ship, the same to transformers and to the engine, and right on plain cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sgl
from sgl.runtime.engine import Engine

FOLDER = Path(sgl.__file__).parent / "models" / "embedded"

RECORDS: list[tuple[dict[str, str], str, dict[str, Any]]] = [
    (
        {"name": "string", "age": "integer", "email": "string", "city": "string"},
        "Hi, I'm Priya Raman, 34, reach me at priya.r@example.org, living in Oslo.",
        {"name": "Priya Raman", "age": 34, "email": "priya.r@example.org", "city": "Oslo"},
    ),
    (
        {"restaurant": "string", "party_size": "integer", "day": "string", "time": "string"},
        "Book a table for 4 at Luigi's on Friday at 7pm",
        {"restaurant": "Luigi's", "party_size": 4, "day": "Friday", "time": "7pm"},
    ),
    (
        {"price": "number", "product": "string", "shipping_days": "integer"},
        "The MacroPad X2 costs $49.99 and ships in 3 days",
        {"price": 49.99, "product": "MacroPad X2", "shipping_days": 3},
    ),
    (
        {"origin": "string", "destination": "string"},
        "I need a train from Brindlehoek to Sankt Aldorf tomorrow.",
        {"origin": "Brindlehoek", "destination": "Sankt Aldorf"},
    ),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=str(FOLDER), device="cpu", dtype="float32") as engine:
        yield engine


def chat(engine: Engine, *messages: tuple[str, str]) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    text: str = engine.get_tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return text


def ask(engine: Engine, fields: dict[str, str], text: str) -> str:
    listed = ", ".join(f"{name} ({kind})" for name, kind in fields.items())
    return chat(engine, ("user", f"Extract the record as JSON with the fields {listed}.\nText: {text}"))


def test_weights_fit_into_the_package() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 13_000_000


def test_engine_and_transformers_agree(engine: Engine) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = [ask(engine, fields, text) for fields, text, _ in RECORDS[:2]] + ["Once upon a time, there was a fox"]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        result = engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 40})
        assert result["output_ids"] == expected


@pytest.mark.parametrize("constrained", [False, True])
def test_records_are_extracted(engine: Engine, constrained: bool) -> None:
    prompts = [ask(engine, fields, text) for fields, text, _ in RECORDS]
    params: list[dict[str, Any]] = []
    for fields, _, _ in RECORDS:
        properties = {name: {"type": kind} for name, kind in fields.items()}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(fields),
            "additionalProperties": False,
        }
        constraint = {"json_schema": json.dumps(schema)} if constrained else {}
        params.append({"temperature": 0.0, "max_new_tokens": 128, **constraint})
    results = engine.generate(prompt=prompts, sampling_params=params)
    assert [json.loads(result["text"]) for result in results] == [record for _, _, record in RECORDS]


def test_sentiment_is_told_by_scores(engine: Engine) -> None:
    choices = ["positive", "negative"]
    for text, answer in [("The pasta was delicious.", "positive"), ("The room was dirty and noisy.", "negative")]:
        prompt = chat(engine, ("user", f"Classify the sentiment of the text as positive, negative.\nText: {text}"))
        scores = [sum(p for p in s.logprobs if p is not None) for s in engine.score(prompt, choices)]
        assert choices[scores.index(max(scores))] == answer


def test_a_tool_is_called_and_its_result_read(engine: Engine) -> None:
    def calculator(expression: str) -> float:
        """Evaluate an arithmetic expression."""
        raise NotImplementedError

    def get_weather(city: str) -> str:
        """Get the weather for a city."""
        raise NotImplementedError

    system = sgl.describe_tools([calculator, get_weather])
    turns = [("system", system), ("user", "What is 17 times 23?")]
    call = engine.generate(chat(engine, *turns), {"temperature": 0.0, "max_new_tokens": 64})["text"]
    assert call == '<tool_call>{"name":"calculator","arguments":{"expression":"17 * 23"}}</tool_call>'
    prompt = chat(engine, *turns, ("assistant", call), ("tool", "391"))
    assert "391" in engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 64})["text"]
