"""Decoders with latent attention that are cut among ranks: their logits and tokens are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.loader import load_latent
from sgl.runtime.model.mla.parts import check_parts
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from tests.test_hf_models import MAX_NEW, OPTIONS
from tests.test_mla import MODELS, V2, biased, written
from tests.test_models import Paged, in_chunks
from tests.test_shards import PagedStage, on_ranks
from tests.tiny_transformers import tiny_transformer


@pytest.mark.parametrize(
    ("size", "stages"), [(2, 1), (1, 2), *(pytest.param(*its, marks=pytest.mark.slow) for its in ((4, 1), (2, 3)))]
)
@pytest.mark.parametrize(
    "name", [name if name == "v2-lite" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_ranks_give_the_logits_of_the_whole_model(
    load_format: Any, size: int, stages: int, name: str, tmp_path: Path
) -> None:
    architecture, overrides = MODELS[name]
    path = biased(tiny_transformer(tmp_path / "model", architecture, **overrides))
    config = LatentConfig.from_pretrained(path)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, config.vocab_size, length).tolist() for length in (1, 40, 23)]
    whole: Any = load_latent(config, load_format=load_format)
    expected = Paged(whole, sequences, 16).run(in_chunks(sequences, 7))

    def work(ranks: Ranks) -> list[torch.Tensor]:
        part: Any = load_latent(config, load_format=load_format, ranks=ranks)
        assert part.config.num_heads == config.num_heads // size
        return PagedStage(part, sequences, 16).run(in_chunks(sequences, 7))

    for found in on_ranks(tmp_path / "ranks", size, stages, work)[:size]:  # of the first stage
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
            assert torch.equal(one.argmax(-1), other.argmax(-1))


@pytest.mark.slow
def test_an_engine_of_two_ranks_gives_the_tokens_of_one(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, V2, **MODELS["v2"][1])
    prompts = [list(range(3, 3 + n)) for n in (40, 5, 17)]
    outputs = []
    for tp_size, pp_size in ((1, 1), (2, 1), (1, 2)):
        with Engine(
            str(path), **{**OPTIONS, "model_impl": "sgl", "tp_size": tp_size, "pp_size": pp_size}
        ) as engine:
            greedy = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "n": 2}
            results = engine.generate(input_ids=prompts, sampling_params=greedy)
            outputs.append([result["output_ids"] for result in results])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("fields", "shard", "message"),
    [
        ({}, Shard(size=3), "tp_size=3: .* has 16 attention heads"),
        ({"intermediate_size": 33}, Shard(size=2), "has 33 columns of its MLP"),
        ({"moe_intermediate_size": 33}, Shard(size=2), "has 33 columns of an expert"),
        ({"vocab_size": 32}, Shard(size=2), "has a vocabulary of 32"),
        ({"num_hidden_layers": 2}, Shard(stages=3), "pp_size=3: .* has 2 layers, fewer than stages"),
    ],
)
def test_what_cannot_be_cut_is_named(fields: dict[str, Any], shard: Shard, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(LatentConfig.from_pretrained(written(tmp_path, **fields)), shard)


def test_a_size_that_no_layer_has_need_not_be_cut(tmp_path: Path) -> None:
    fields = {"first_k_dense_replace": 27, "moe_intermediate_size": 33}
    check_parts(LatentConfig.from_pretrained(written(tmp_path, **fields)), Shard(size=2))
