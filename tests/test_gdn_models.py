"""Hybrids of gated delta nets and attention against transformers: the same tokens and logprobs, however the requests
are cut, cached, forked, mixed or retracted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import sgl
from sgl.errors import ConfigError, UnsupportedModel, WeightsError
from sgl.runtime import memory_plan
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.model.choice import read_config
from tests.test_hf_models import MAX_NEW, made_prompts
from tests.tiny_models import byte_tokenizer, edit_json
from tests.transformers_reference import Reference

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
    expected = [reference.greedy(prompt, MAX_NEW) for prompt in prompts]
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


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = tiny_hybrid(tmp_path_factory.mktemp("hybrid"), "3.5")
    byte_tokenizer(384).save_pretrained(path)
    return path


@sgl.function
def tree(s: Any, topic: str) -> None:
    s += f"Some words about {topic}, which are long enough for several pages, and then: "
    s += sgl.gen("first", max_tokens=20, temperature=0)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f" Now number {number} says "
        branch += sgl.gen("more", max_tokens=9, temperature=0)
    s += " ".join(branch["more"] for branch in branches)
    s += sgl.select("best", choices=["apples are best", "apples are worst", "pears"])
    s += sgl.gen("end", regex="the end of all [0-9]{2} apples and pears[.!]", temperature=0)


@pytest.mark.costly
@pytest.mark.parametrize("run_ahead", [False, True])
def test_programs_that_fork_select_and_jump_give_what_they_do_without_shared_prefixes(
    run_ahead: bool, with_tokenizer: Path
) -> None:
    def run(**options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        options = {"device": "cpu", "check_ledger": True, "page_size": 4, "max_total_tokens": 4096, **options}
        with Engine(str(with_tokenizer), disable_overlap_schedule=not run_ahead, **options) as engine:
            states = tree.run_batch([{"topic": its} for its in ("cats", "cars", "dogs")], backend=engine)
            values = [{name: state[name] for name in ("first", "best", "end")} for state in states]
            return values, engine.get_server_info()["internal_states"][0]

    expected, _ = run(disable_radix_cache=True)
    for options in ({}, {"chunked_prefill_size": 16}, {"state_checkpoints": 2}, {"max_total_tokens": 700}):
        values, counters = run(**options)
        assert values == expected
        assert counters["forced_tokens"] > 0
        assert "state_checkpoints" in options or counters["cached_tokens"] > 0


def test_candidates_are_scored_as_texts_of_their_own(with_tokenizer: Path) -> None:
    prefix, candidates = [7] * 21 + [9, 30], [[5, 6, 7], [5, 6, 8, 9], [70]]
    reference = Reference(with_tokenizer, "Qwen3_5ForCausalLM")
    with Engine(str(with_tokenizer), **OPTIONS, page_size=4) as engine:
        for _ in range(2):
            for candidate, score in zip(candidates, engine.score(prefix, candidates), strict=True):
                expected = reference.logprobs([*prefix, *candidate])[-len(candidate) :]
                torch.testing.assert_close(torch.tensor(score.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("option", "value"),
    [("tp_size", 3), ("pp_size", 5), ("quantization", "fp8"), ("load_format", "gguf")],
)
def test_what_hybrids_cannot_have_is_refused(option: str, value: Any, with_tokenizer: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(str(with_tokenizer), device="cpu", **{option: value})
    assert caught.value.option == option


def test_checkpoints_of_states_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="no recurrent layers"):
        Engine(device="cpu", state_checkpoints=4)


def test_transformers_modules_do_not_serve_hybrids(with_tokenizer: Path) -> None:
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        read_config(str(with_tokenizer), "transformers")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"layer_types": ["linear_attention"] * 4}, "only linear_attention layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention'"),
    ],
)
def test_configs_that_are_not_served_say_why(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path, architecture = tiny_hybrid(tmp_path, "next")
    edit_json(path / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=named) as caught:
        read_config(str(path), "auto")
    assert caught.value.architecture == architecture


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path, _ = tiny_hybrid(tmp_path, "next")
    file = path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.linear_attn.A_log"

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(WeightsError) as caught:
            Engine(str(path), **OPTIONS)
        return str(caught.value)

    assert f"lacks 1 tensor that its config.json calls for: {name} [4]" in refused(
        {key: its for key, its in whole.items() if key != name}
    )
    assert "no place for: model.more.weight [3]" in refused({**whole, "model.more.weight": torch.zeros(3)})
    assert f"{name} in {file} is [3]" in refused({**whole, name: torch.zeros(3)})


def test_the_text_part_of_a_model_that_sees_is_served_and_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    path, architecture = tiny_hybrid(tmp_path / "text", "3.5-moe", tie_word_embeddings=True)
    prompt = made_prompts()[0]
    expected = Reference(path, architecture).greedy(prompt, MAX_NEW)
    tensors = load_file(path / "model.safetensors")
    experts = {key: its for key, its in tensors.items() if ".experts." in key}
    seen = {
        key.replace("model.", "model.language_model.", 1): its for key, its in tensors.items() if key not in experts
    }
    for layer in range(4):
        parts = {
            kind: torch.stack(
                [experts[f"model.layers.{layer}.mlp.experts.{i}.{kind}_proj.weight"] for i in range(4)]
            )
            for kind in ("gate", "up", "down")
        }
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        seen[f"{stem}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        seen[f"{stem}.down_proj"] = parts["down"]
    seen |= {"mtp.norm.weight": torch.zeros(64), "model.visual.blocks.0.norm.weight": torch.zeros(8)}
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(seen, whole / "model.safetensors", {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(path).to_dict()
    rope = {**config["rope_parameters"], "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": True,
        "text_config": {**config, "rope_parameters": rope, "tie_word_embeddings": None},
    }
    (whole / "config.json").write_text(json.dumps(outer))
    with Engine(str(whole), **OPTIONS) as engine:
        result = engine.generate(input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": MAX_NEW})
    assert result["output_ids"] == expected


def test_memory_is_shared_out_between_requests_checkpoints_and_pages() -> None:
    def plan(available: float, rows: int = 128, **options: Any) -> tuple[int, int]:
        return memory_plan._plan_states(EngineConfig(**options), rows, available)

    assert plan(10_000) == (128, 256)
    assert plan(302) == (50, 100)
    assert plan(302, disable_radix_cache=True) == (128, 0)
    assert plan(302, state_checkpoints=30) == (120, 30)
    assert plan(302, 40, max_running_requests=40) == (40, 80)
    assert plan(102, 40, max_running_requests=40) == (40, 10)
    assert plan(3) == (1, 0)


def test_random_weights_serve(with_tokenizer: Path) -> None:
    with Engine(str(with_tokenizer), **OPTIONS, load_format="dummy") as engine:
        result = engine.generate(input_ids=[5] * 20, sampling_params={"max_new_tokens": 4})
        assert len(result["output_ids"]) <= 4
        assert engine.get_server_info()["num_weights"] > 0
