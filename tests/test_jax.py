"""Engines of device="jax" answer as transformers and our torch engines do, on one device and on a mesh. What they
cannot do is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import sgl
from sgl.errors import ConfigError, MissingExtra, UnsupportedModel, WeightsError
from sgl.kernels.mask.ops import apply_token_mask_
from sgl.kernels.sampling import ops
from sgl.runtime.engine import Engine
from sgl.runtime.platform import registry
from tests.patience import PATIENCE
from tests.tiny_gguf import WIDE, tiny_gguf
from tests.tiny_models import CLASSES, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

jax = pytest.importorskip("jax", reason="needs sgl[jax]")

ROOT = Path(__file__).resolve().parent.parent
OPTIONS: dict[str, Any] = {"max_total_tokens": 1024, "max_running_requests": 6, "dtype": "float32"}
PROMPTS = [[3 + (7 * row + 5 * at) % 370 for at in range(length)] for row, length in enumerate((1, 7, 64, 150))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {"regex": "[a-z]{3,9} [0-9]{2}", "temperature": 0.0},
    {"json_schema": '{"enum": ["red", "green", 17]}', "temperature": 0.8, "seed": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 3, "max_new_tokens": 12},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "logit_bias": {"17": 5.0}, "min_new_tokens": 4},
]


@sgl.function
def forks(s: Any) -> None:
    s += "Three words:"
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += f" {number}." + sgl.gen("word", max_tokens=4)
    s += "".join(branch["word"] for branch in branches)
    s += sgl.select("mood", choices=["good", "bad"]) + sgl.gen("code", regex="[0-9]{4}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), with_tokenizer=True, num_hidden_layers=2)


def expected_of(path: Path) -> list[tuple[list[int], torch.Tensor]]:
    """transformers' greedy tokens of each prompt, and the prompt's logprobs."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # it is a token like others
    found = []
    for ids in PROMPTS:
        given, length = torch.tensor([ids]), GREEDY["max_new_tokens"]
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=length, do_sample=False, pad_token_id=0
            )
            logprobs = model(given).logits[0, :-1].float().log_softmax(-1)
        found.append((out[0, len(ids) :].tolist(), logprobs.gather(1, given[0, 1:, None]).squeeze(1)))
    return found


def check(engine: Engine, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
    for (ids, logprobs), result in zip(expected, found, strict=True):
        assert result["output_ids"] == ids
        given = [each[0] for each in result["meta_info"]["input_token_logprobs"][1:]]
        assert torch.allclose(torch.tensor(given), logprobs, atol=1e-4)


@pytest.mark.slow  # it compiles for a quarter of a minute
def test_one_engine_answers_as_transformers_and_as_ours_in_torch(llama: Path) -> None:
    answers = []
    with Engine(llama, device="jax", check_ledger=True, **OPTIONS) as engine:
        check(engine, expected_of(llama))
        again = engine.generate(input_ids=[PROMPTS[3]], sampling_params=GREEDY)[0]
        assert again["meta_info"]["cached_tokens"] > 0
        info = engine.get_server_info()
        name = registry.platform_of("jax").names()[0]
        assert (info["device"], info["device_name"], info["dtype"]) == ("jax", name, "float32")
        answers.append(answered(engine))
        with pytest.raises(WeightsError, match="device='jax' take no new weights"):
            engine.update_weights({"model.norm.weight": torch.ones(64)})
    with Engine(llama, device="cpu", **OPTIONS) as engine:
        answers.append(answered(engine))
    assert answers[0] == answers[1]


def answered(engine: Engine) -> list[Any]:
    ids = [engine.generate("name: ", {"max_new_tokens": 10, **way})["output_ids"] for way in WAYS]
    return [*ids, forks.run(backend=engine, temperature=0.0).text()]


def test_draws_are_those_of_torch() -> None:
    from sgl.runtime.jax.sampling import Drawn, choose, logprobs

    generator = np.random.default_rng(0)
    number, vocab_size = 48, 70
    logits = generator.normal(0, 3, (number, vocab_size)).astype(np.float32)
    seeds = generator.integers(0, 1 << 62, number)
    positions = generator.integers(0, 1 << 20, number)
    floats = np.stack(
        [
            generator.choice([0.0, 0.3, 1.0, 2.0], number),
            generator.choice([1.0, 0.5, 0.9], number),
            generator.choice([0.0, 0.05, 0.4], number),
            generator.choice([0.0, 0.6], number),
            generator.choice([0.0, 0.4], number),
            generator.choice([1.0, 1.4, 0.7], number),
        ],
        1,
    ).astype(np.float32)
    top_k = generator.choice([1, 3, 20, vocab_size], number)
    occurrences = generator.choice([0, 0, 1, 2, 5], (number, vocab_size)).astype(np.int32)
    masks = generator.integers(-(1 << 31), 1 << 31, (4, 3)).astype(np.int32)
    mask_rows = generator.integers(-1, 4, number).astype(np.int32)
    edits = np.array([3, 5]), np.array([60, 2]), np.array([50.0, -np.inf], np.float32)
    its = torch.from_numpy(logits.copy())
    columns = torch.from_numpy(floats).unbind(1)
    ops.penalize_(its, torch.from_numpy(occurrences), *columns[3:])
    ops.add_edits_(its, *map(torch.from_numpy, edits))
    apply_token_mask_(its, torch.from_numpy(masks), torch.from_numpy(mask_rows))
    expected = ops.sample(
        its, columns[0], torch.from_numpy(seeds), torch.from_numpy(positions),
        top_k=torch.from_numpy(top_k), top_p=columns[1], min_p=columns[2],
    )  # fmt: skip
    halves = np.stack((seeds & 0xFFFFFFFF, seeds >> 32), 1).astype(np.uint32)
    nothing = np.full(number, -1, np.int32)
    rows = np.arange(number)
    drawn = Drawn(
        rows, positions.astype(np.int32), floats, halves, top_k.astype(np.int32), nothing, mask_rows, edits
    )
    compiled = jax.jit(choose, static_argnames=("draws", "cuts"))
    found = compiled(logits, drawn, masks, occurrences, draws=True, cuts=True)
    assert np.asarray(found).tolist() == expected.tolist()
    given = generator.integers(0, vocab_size, (number, 2))
    wanted = ops.logprobs(torch.from_numpy(logits), expected, 5, torch.from_numpy(given))
    columns = logprobs(jax.numpy.asarray(logits), jax.numpy.asarray(expected.numpy()), given, top_k=5)
    for ours, theirs in zip(columns, wanted, strict=True):
        assert np.allclose(np.asarray(ours), theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "int4"}, "quantization"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"lora_paths": "a=/nowhere"}, "lora_paths"),
        ({"deterministic": True}, "deterministic"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode"),
        ({"enable_lora": True}, "enable_lora"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache"),
        ({"attention_backend": "torch"}, "attention_backend"),
        ({"pp_size": 2}, "pp_size"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_size": 2, "device": "jax:0"}, "tp_size"),
        ({"device": "jax:7"}, "device"),
        ({"dp_size": 2, "dp_rank": 0}, "dp_size"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_name(options: dict[str, Any], named: str, llama: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Engine(llama, **{"device": "jax", **options})
    assert refused.value.option == named
    assert named in str(refused.value)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "GPT2LMHeadModel"])
def test_models_that_it_does_not_compute_are_refused_with_those_it_does(architecture: str, tmp_path: Path) -> None:
    tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    with pytest.raises(UnsupportedModel, match=f"{architecture} is not computed by device='jax': it serves Llama"):
        Engine(tmp_path, device="jax", skip_tokenizer_init=True)


def test_without_jax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"device='jax' needs jax, .*sgl\[jax\]"):
        registry.platform_of("jax")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CLASSES))
def test_families_equal_transformers(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, seed=1)  # seed 0 has two experts that are all but equally good
    options = {"chunked_prefill_size": 7, "page_size": 4, "skip_tokenizer_init": True}
    with Engine(tmp_path, device="jax", check_ledger=True, **OPTIONS, **options) as engine:
        check(engine, expected_of(tmp_path))


@pytest.mark.slow
def test_a_gguf_file_is_read_as_elsewhere(tmp_path: Path) -> None:
    file, folder = tiny_gguf(tmp_path, "qwen3", "Q4_K", **WIDE, head_dim=64)
    with Engine(file, device="jax", skip_tokenizer_init=True, **OPTIONS) as engine:
        check(engine, expected_of(folder))


MESH = """
import sys
from sgl.runtime.engine import Engine
from tests.test_jax import GREEDY, OPTIONS, PROMPTS, WAYS

for path in sys.argv[1:]:
    answers = []
    for size in (1, 2):
        with Engine(path, device="jax", tp_size=size, check_ledger=True, **OPTIONS) as engine:
            found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
            answers.append([each["output_ids"] for each in found])
            answers[-1] += [engine.generate("name: ", {"max_new_tokens": 10, **way})["output_ids"] for way in WAYS]
            arrays = engine._started.runner._arrays["layers"][0]
            assert len(arrays["qkv"].sharding.device_set) == size
            assert arrays["qkv"].addressable_data(0).size * size == arrays["qkv"].size
    assert answers[0] == answers[1], path
"""


@pytest.mark.slow
def test_a_mesh_of_two_devices_answers_as_one(llama: Path, tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 1, "vocab_size": 385, "num_hidden_layers": 2}  # not to be cut, or copied
    experts = tiny_checkpoint(tmp_path, "qwen2-moe", with_tokenizer=True, **sizes)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", MESH, str(llama), str(experts)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE * 2, check=False
    )
    assert done.returncode == 0, done.stderr


def test_keys_are_padded_by_a_quarter_at_most_above_512() -> None:
    from sgl.runtime.jax.attention import _rounded_keys

    sizes = [_rounded_keys(number) for number in range(1, 20_000)]
    assert sizes == sorted(sizes)
    assert all(number <= size <= max(64, 2 * number - 1) for number, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * number for number, size in enumerate(sizes, 1) if number > 512)
    assert len(set(sizes)) <= 4 + 4 * 6
