"""Hybrids of gated delta nets and attention against transformers: the same tokens and logprobs, however the requests
are cut, cached, forked, mixed or retracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sgl.runtime.engine import Engine
from tests.test_hf_models import MAX_NEW, Reference, made_prompts

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS),
    "next-mixed": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True},
    ),
    "3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {"tie_word_embeddings": True}),
    "3.5-moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_running_requests": 8,
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.01,
    "check_ledger": True,
}


def tiny_hybrid(folder: Path, name: str, **changes: Any) -> tuple[Path, str]:
    """A random checkpoint whose states matter, and its architecture."""
    architecture, config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**{**SIZES, **options, **changes}))
    for key, tensor in model.named_parameters():
        if tensor.dim() > 1:
            tensor.data.normal_(0.0, 0.5 if "conv1d" in key else 0.15)
        elif "A_log" in key:
            tensor.data.uniform_(-4.0, 0.0)  # some remember long
        elif "norm" in key:
            tensor.data += torch.randn_like(tensor) * 0.1
    model.save_pretrained(folder)
    return folder, architecture


@pytest.mark.parametrize("name", ["next", *(pytest.param(its, marks=pytest.mark.slow) for its in list(MODELS)[1:])])
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, architecture = tiny_hybrid(tmp_path, name)
    reference, prompts = Reference(path, architecture), made_prompts()
    expected = [reference.greedy(prompt) for prompt in prompts]
    logprobs = [reference.logprobs(prompt) for prompt in prompts]
    greedy = {"temperature": 0.0, "max_new_tokens": MAX_NEW}

    def check(engine: Engine, rows: list[int], start: int = 0) -> None:
        results = engine.generate(
            input_ids=[prompts[row] for row in rows],
            sampling_params=greedy,
            return_logprob=True,
            logprob_start_len=start,
        )
        for row, result in zip(rows, results, strict=True):
            assert result["output_ids"] == expected[row]
            if not start:
                given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
                torch.testing.assert_close(given, logprobs[row], atol=1e-4, rtol=0)

    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"chunked_prefill_size": -1}, [0, 1, 2, 3, 4, 5]),
        ({"chunked_prefill_size": 1, "page_size": 4}, [0, 3]),
        ({"chunked_prefill_size": 7, "page_size": 1, "state_checkpoints": 3}, [0, 1, 2, 3]),
        ({"chunked_prefill_size": 64, "page_size": 4, "max_total_tokens": 84}, [0, 1, 2, 3, 5]),
    ]
    for options, rows in ways:
        with Engine(str(path), **{**OPTIONS, **options}) as engine:
            assert engine.config.model_impl == "sgl"
            check(engine, rows)
            if "max_total_tokens" in options:
                if all(len(expected[row]) == MAX_NEW for row in rows):
                    assert engine.get_server_info()["internal_states"][0]["retractions"] > 0
                check(engine, [4])
                continue
            check(engine, rows[::-1])
            check(engine, rows, start=-1)  # cached: nothing of the prompt is scored
            forked = engine.generate(input_ids=prompts[0], sampling_params={**greedy, "n": 3})
            assert [result["output_ids"] for result in forked] == [expected[0]] * 3
            if "state_checkpoints" not in options:
                assert forked[0]["meta_info"]["cached_tokens"] > 0
