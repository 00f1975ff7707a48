"""Real schemas: their labelled instances are judged right, and what their grammars generate is valid."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.json_generation import BYTES, judge
from sgl.errors import GrammarError
from sgl.grammar import compile
from tests.json_random import accepts


@pytest.fixture(scope="module")
def sample(unpacked: Callable[[str], Path]) -> list[tuple[str, Any]]:
    paths = random.Random(5).sample(sorted(unpacked("maskbench").rglob("*.json")), 50)
    return [(path.name, json.loads(path.read_text())) for path in paths]


def test_instances_are_judged_as_they_are_labelled(sample: list[tuple[str, Any]]) -> None:
    wrong: list[str] = []
    for name, document in sample:
        try:
            grammar = compile(
                json_schema=document["schema"],
                vocabulary=BYTES,
                whitespace="flexible",
                key_order="any",
                lenient=True,
            )
        except GrammarError as error:
            wrong += [f"{name}: {error}" for test in document["tests"] if test["valid"]]
            continue
        for i, test in enumerate(document["tests"]):
            text = json.dumps(test["data"], ensure_ascii=False).encode()
            is_excused = bool(grammar.dropped) and not test["valid"]
            if accepts(grammar, text) != test["valid"] and not is_excused:
                wrong.append(f"{name}: instance {i}")
    assert wrong == []


def test_generated_documents_are_valid(sample: list[tuple[str, Any]]) -> None:
    rng = random.Random(2)
    counts: Counter[str] = Counter()
    for name, document in sample[:25]:
        found, invalid = judge(document["schema"], rng, texts=2, budget=800)
        assert not invalid, (name, invalid)
        counts += found
    assert counts["valid"] >= 30, counts
