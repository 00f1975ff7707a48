"""Hybrids of gated delta nets and attention that are cut among ranks: their tokens and logprobs are those of the whole
model, also after forks, cached prefixes and chunks, whose states each rank copies for its heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.parts import check_parts
from sgl.runtime.model.shard import Shard
from tests.test_gdn_models import MODELS, OPTIONS, tiny_hybrid
from tests.test_hf_models import MAX_NEW, made_prompts
from tests.transformers_reference import Reference

GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_NEW}


def answers(engine: Engine, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    found = engine.generate(input_ids=prompts, sampling_params={**GREEDY, **options}, return_logprob=True)
    return [result for each in found for result in (each if isinstance(each, list) else [each])]


HEADS, STAGES = {"tp_size": 2}, {"pp_size": 2}
ATTENTION_FIRST = ["full_attention"] * 2 + [
    "linear_attention"
] * 2  # one stage has no delta net, the other no pages


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "changes", "ranks"),
    [
        ("next-mixed", {}, HEADS),
        ("3.5-moe", {"num_key_value_heads": 1}, HEADS),
        pytest.param(
            "next", {"linear_num_value_heads": 2, "tie_word_embeddings": True}, HEADS, marks=pytest.mark.slow
        ),
        pytest.param("3.5", {}, HEADS, marks=pytest.mark.slow),
        ("next-mixed", {}, STAGES),
        ("3.5", {"layer_types": ATTENTION_FIRST}, STAGES),
        pytest.param("3.5-moe", {}, {"pp_size": 3}, marks=pytest.mark.slow),
        pytest.param("next", {"num_hidden_layers": 8}, HEADS | STAGES, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_tokens_of_transformers(
    name: str, changes: dict[str, Any], ranks: dict[str, int], tmp_path: Path
) -> None:
    path, architecture = tiny_hybrid(tmp_path, name, **changes)
    reference, prompts = Reference(path, architecture), made_prompts()[:4]
    expected = [reference.greedy(prompt, MAX_NEW) for prompt in prompts]
    options = {**OPTIONS, **ranks, "chunked_prefill_size": 16, "page_size": 4}
    with Engine(str(path), **options) as engine:
        for rows in ([0, 1, 2, 3], [3, 1, 0]):  # cached
            results = engine.generate(
                input_ids=[prompts[row] for row in rows],
                sampling_params=GREEDY,
                return_logprob=True,
                logprob_start_len=0,
            )
            for row, result in zip(rows, results, strict=True):
                assert result["output_ids"] == expected[row]
                given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
                torch.testing.assert_close(given, reference.logprobs(prompts[row]), atol=1e-4, rtol=0)
        forked = engine.generate(input_ids=prompts[0], sampling_params={**GREEDY, "n": 3})
        assert [result["output_ids"] for result in forked] == [expected[0]] * 3
        assert forked[0]["meta_info"]["cached_tokens"] > 0
        assert not engine.check_ledger()


@pytest.mark.slow
def test_stages_have_steps_of_several_requests_under_way_while_some_are_retracted(tmp_path: Path) -> None:
    path, architecture = tiny_hybrid(tmp_path, "3.5")
    reference, prompts = Reference(path, architecture), made_prompts()
    options = {**OPTIONS, **STAGES, "page_size": 4, "max_total_tokens": 84, "chunked_prefill_size": 7}
    with Engine(str(path), **options) as engine:
        for rows in ([0, 1, 2, 3, 5], [5, 3, 2, 1, 0]):
            results = answers(engine, [prompts[row] for row in rows])
            assert [its["output_ids"] for its in results] == [
                reference.greedy(prompts[row], MAX_NEW) for row in rows
            ]


@pytest.mark.slow
def test_random_weights_are_cut_from_those_of_one_rank(tmp_path: Path) -> None:
    path, _ = tiny_hybrid(tmp_path, "3.5-moe")
    outputs = []
    for ranks in ({}, HEADS, STAGES):
        with Engine(str(path), **OPTIONS, **ranks, load_format="dummy") as engine:
            outputs.append(answers(engine, made_prompts()[:2], ignore_eos=True))
    for one, *others in zip(*outputs, strict=True):
        for two in others:
            assert one["output_ids"] == two["output_ids"]
            logprobs = [[each[0] for each in its["meta_info"]["output_token_logprobs"]] for its in (one, two)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "shard", "message"),
    [
        ("next", {}, Shard(size=3), "tp_size=3: .* has 4 attention heads, which 3 ranks"),
        ("next", {"linear_num_key_heads": 1}, Shard(size=2), "has 1 key heads in its delta nets"),
        ("next", {"moe_intermediate_size": 33}, Shard(size=2), "has 33 columns of an expert"),
        ("next", {"shared_expert_intermediate_size": 33}, Shard(size=2), "has 33 columns of its shared expert"),
        ("3.5", {"intermediate_size": 33}, Shard(size=2), "has 33 columns of its MLP"),
        ("3.5", {"vocab_size": 32}, Shard(size=2), "has a vocabulary of 32"),
        ("3.5", {}, Shard(stages=5), "pp_size=5: .* has 4 layers, fewer than stages"),
    ],
)
def test_what_cannot_be_cut_is_named(
    name: str, changes: dict[str, Any], shard: Shard, message: str, tmp_path: Path
) -> None:
    assert name in MODELS
    config = HybridConfig.from_pretrained(tiny_hybrid(tmp_path, name, **changes)[0])
    with pytest.raises(ConfigError, match=message):
        check_parts(config, shard)
