"""LoRA adapters on a GPU: replayed and launched steps, of attention and of experts, against merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl import Engine
from tests.test_lora import PROMPT
from tests.tiny_adapters import ALL, ATTENTION, greedy, logprobs, merged, tiny_adapter
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 128, "num_experts_per_tok": 6}
"""A token takes all experts: rounding would choose others."""
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
Checked = tuple[Path, dict[str, Path], dict[str | None, Any]]


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe"])
def its(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder, others = tmp_path_factory.mktemp("lora"), ALL if request.param == "qwen2-moe" else ATTENTION
    sizes = {name: size for name, size in SIZES.items() if request.param == "qwen3-moe" or name != "head_dim"}
    model = tiny_checkpoint(folder / "model", request.param, num_hidden_layers=2, **sizes)
    adapters = {
        "single": tiny_adapter(folder / "single", model, seed=1, targets=others, experts="single"),
        "fused": tiny_adapter(folder / "fused", model, seed=2, rank=20, targets=(), experts="fused"),
        "attention": tiny_adapter(folder / "attention", model, seed=3, targets=ATTENTION),
    }
    return (
        model,
        adapters,
        {None: merged(model, None), **{name: merged(model, adapters[name]) for name in adapters}},
    )


def results(its: Checked, device: str, **options: Any) -> list[tuple[str | None, list[int], dict[str, Any]]]:
    """Of rows with different adapters, one of which has a long prompt."""
    model, adapters, _ = its
    names = [None, *adapters, *adapters, None, "single"]
    prompts = [PROMPT[i : i + 9 + 2 * i] for i in range(len(names) - 1)] + [PROMPT * 5]
    common: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 4096, "lora_paths": adapters}
    with Engine(model_path=model, device=device, **common, **options) as engine:
        found = engine.generate(
            input_ids=prompts,
            sampling_params=PARAMS,
            lora_path=names,
            return_logprob=True,
            logprob_start_len=0,
        )
    return list(zip(names, prompts, found, strict=True))


@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}], ids=str)
def test_tokens_are_those_of_merged_models_in_float32(its: Checked, options: dict[str, Any]) -> None:
    for name, prompt, result in results(its, "cuda", dtype="float32", attention_backend="triton", **options):
        assert result["output_ids"] == greedy(its[2][name], prompt, 8)


@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}], ids=str)
def test_logprobs_are_near_those_of_merged_models_in_bfloat16(its: Checked, options: dict[str, Any]) -> None:
    for name, prompt, result in results(its, "cuda", dtype="bfloat16", **options):
        meta = result["meta_info"]
        found = [each[0] for each in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
        assert found == pytest.approx(
            logprobs(its[2][name], prompt + result["output_ids"]), abs=0.6
        )  # others differ by 3
