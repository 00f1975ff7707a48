"""examples/rl.py learns: rewards rise over a few steps on a CPU, by weights that are pushed back in place."""

from __future__ import annotations

import runpy
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl import Engine
from sgl.kernels import cpu
from tests.house import REPOSITORY

STEPS = 8


@pytest.mark.slow
def test_the_reward_rises_within_a_few_steps() -> None:
    example = runpy.run_path(str(REPOSITORY / "examples" / "rl.py"))
    with Engine(device="cpu", deterministic=cpu.why_not() is None, max_total_tokens=16384) as engine:
        path = engine.config.model_path
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        curve, largest = example["train"](engine, model, steps=STEPS)
        assert len(curve) == STEPS
        assert mean(curve[-3:]) > mean(curve[:3]) + 0.15, curve
        assert largest < 1e-4
        assert engine.weight_version == str(STEPS)
        norm = torch.tensor(engine.get_weights_by_name("model.norm.weight", 1 << 16))
        torch.testing.assert_close(norm, model.model.norm.weight.detach(), rtol=0, atol=0)
        rows = engine.generate(
            "Text: This is Ada, a table for 4 people, please.\nJSON: ",
            {"n": 8, "temperature": 1.0, "max_new_tokens": 24, "stop": "}", "no_stop_trim": True, "seed": 5},
        )
    rewards = [example["reward"](row["text"], {"name": "Ada", "people": 4}) for row in rows]
    assert mean(rewards) > mean(curve[:3]), rewards
