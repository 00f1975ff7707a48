"""New weights in a running engine: the bits of an engine that was started with them, and nothing cached of before."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sgl import Engine
from sgl.errors import InvalidRequest, ModelError, WeightsError
from sgl.lang.ir import nodes as ir
from tests.program_client import Client, gen
from tests.test_gdn_models import MODELS as HYBRIDS
from tests.test_gdn_models import tiny_hybrid
from tests.test_mla import MODELS as MLA
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import tiny_transformer

RNG = random.Random(11)
PROMPT = [RNG.randrange(3, 250) for _ in range(41)]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_total_tokens": 2048,
    "page_size": 4,
    "check_ledger": True,
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: its for file in sorted(folder.glob("*.safetensors")) for name, its in load_file(file).items()}


def shaken(folder: Path, to: Path) -> Path:
    """The checkpoint with other weights."""
    shutil.copytree(folder, to)
    for file in sorted(to.glob("*.safetensors")):
        generator = torch.Generator().manual_seed(3)
        changed = {
            name: its + 0.1 * its.std(correction=0) * torch.randn(its.shape, generator=generator)
            for name, its in load_file(file).items()
        }
        save_file(changed, file, {"format": "pt"})
    return to


def outcome(engine: Engine, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    result = engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True)
    return result["output_ids"], [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


def expected(folder: Path, **options: Any) -> tuple[list[int], list[float]]:
    with Engine(folder, **{**OPTIONS, **options}) as engine:
        return outcome(engine)


def slow(*families: str) -> list[Any]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "gpt-oss",
        *slow("llama", "qwen2", "qwen3", "phi3", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmo2"),
    ],
)
def test_an_update_leaves_the_bits_of_an_engine_that_began_with_these_weights(family: str, tmp_path: Path) -> None:
    old, new = (tiny_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    with Engine(old, **OPTIONS) as engine:
        before = outcome(engine)
        assert engine.update_weights(tensors_of(new), weight_version="1").success
        assert outcome(engine) == expected(new) != before
        assert engine.get_server_info()["weight_version"] == "1"
        engine.update_weights_from_disk(old)
        assert outcome(engine) == before
        name, whole = next(
            (name, its) for name, its in tensors_of(old).items() if "q_proj" in name or "qkv" in name
        )
        torch.testing.assert_close(torch.tensor(engine.get_weights_by_name(name, 3)), whole[:3], rtol=0, atol=1e-6)
        assert engine.check_ledger() == []


@pytest.mark.parametrize(
    "architecture",
    [
        "GPT2LMHeadModel",
        *slow("Qwen3ForCausalLM", "Starcoder2ForCausalLM", "GPTNeoXForCausalLM", "OlmoeForCausalLM"),
    ],
)
def test_modules_of_transformers_take_tensors_by_their_own_names(architecture: str, tmp_path: Path) -> None:
    impl: Any = {"model_impl": "transformers"}
    old = tiny_transformer(tmp_path / "old", architecture)
    new = shaken(old, tmp_path / "new")
    wanted = expected(new, **impl)
    with Engine(old, **OPTIONS, **impl) as engine:
        before = outcome(engine)
        engine.update_weights_from_disk(new)
        assert outcome(engine) == wanted != before
        engine.update_weights_from_disk(old)
        assert outcome(engine) == before
        module = getattr(transformers, architecture).from_pretrained(new, dtype=torch.float32)
        engine.update_weights(module.named_parameters())
        assert outcome(engine) == wanted


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("DeepseekV3ForCausalLM", MLA["v3"][1]),
        pytest.param("DeepseekV3ForCausalLM", MLA["v3-dense"][1], marks=pytest.mark.slow),
        pytest.param("DeepseekV2ForCausalLM", MLA["v2-lite"][1], marks=pytest.mark.slow),
    ],
)
def test_latent_attention_takes_new_weights(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    old = tiny_transformer(tmp_path / "old", architecture, **options)
    check_both_ways(old, shaken(old, tmp_path / "new"))


@pytest.mark.parametrize("name", ["3.5", *slow("next", "next-mixed", "3.5-moe")])
def test_hybrids_take_new_weights(name: str, tmp_path: Path) -> None:
    old, _ = tiny_hybrid(tmp_path / "old", name)
    check_both_ways(old, shaken(old, tmp_path / "new"))


def check_both_ways(old: Path, new: Path) -> None:
    wanted = expected(new)
    with Engine(old, **OPTIONS) as engine:
        before = outcome(engine)
        engine.update_weights(tensors_of(new))
        assert outcome(engine) == wanted != before
        engine.update_weights_from_disk(old)
        assert outcome(engine) == before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "next-mixed", "3.5-moe"])
def test_each_rank_takes_its_part(family: str, tmp_path: Path) -> None:
    if family in HYBRIDS:
        old = tiny_hybrid(tmp_path / "old", family)[0]
        new = shaken(old, tmp_path / "new")
    else:
        old, new = (tiny_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    wanted = expected(new, tp_size=2)
    with Engine(old, **OPTIONS, tp_size=2) as engine:
        before = outcome(engine)
        engine.update_weights(tensors_of(new))
        assert outcome(engine) == wanted != before
        engine.update_weights_from_disk(old)
        assert outcome(engine) == before
        with pytest.raises(WeightsError, match="no place"):
            engine.update_weights({"other": torch.ones(2)})
        engine.flush_cache()
        assert outcome(engine) == before


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    return tiny_checkpoint(folder, vocab_size=259, tie_word_embeddings=True, with_tokenizer=True)


@pytest.fixture
def engine(tied: Path) -> Iterator[Engine]:
    with Engine(tied, **{**OPTIONS, "skip_tokenizer_init": False}) as engine:
        yield engine


def test_what_is_wrong_is_refused_and_the_old_weights_stand(engine: Engine, tied: Path, tmp_path: Path) -> None:
    whole, prompt = tensors_of(tied), PROMPT[:20]
    outcome(engine, prompt)  # a cold cache may round otherwise
    before, name = outcome(engine, prompt), "model.layers.1.self_attn.k_proj.weight"
    good = {"model.norm.weight": torch.zeros(64)}
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"model.layers.9.mlp.up_proj.weight": whole[name]}, "no place for: model.layers.9"),
        ({name: whole[name][:-1]}, r"k_proj.weight of the update is \[31, 64\]; this model's is \[32, 64\]"),
        (
            {name: whole[name].to(torch.int32)},
            "k_proj.weight of the update is torch.int32; it must be one of float64",
        ),
        (
            {"lm_head.weight": torch.zeros(259, 64), "model.embed_tokens.weight": torch.ones(259, 64)},
            "differs from model.embed_tokens.weight, and here they are one",
        ),
    ]
    for number in ("nan", "inf", "-inf"):
        noise = whole[name].clone()
        noise[3, 5] = float(number)
        wrong.append(({name: noise}, "k_proj.weight of the update has numbers .*: they must be finite"))
    wrong.append(({name: whole[name].double() * 1e200}, "at most 3.40282e.38 in float32"))
    for useless in (
        whole[name].to_sparse(),
        whole[name].to("meta"),
        torch.nn.Parameter(whole[name]).as_subclass(type("DTensor", (torch.Tensor,), {})),
        torch.nested.nested_tensor([whole[name]]),
        torch.nested.nested_tensor([whole[name]], layout=torch.jagged),
    ):
        wrong.append(({name: useless}, "give a plain, dense tensor with data"))
    for tensors, message in wrong:
        with pytest.raises(WeightsError, match=message):
            engine.update_weights({**good, **tensors})
    for given in (None, {}, [("a", 1)], ["a"], [(name, whole[name])] * 2, 3, "a", whole[name]):
        with pytest.raises(InvalidRequest, match=r"named_tensors|twice|1 to"):
            engine.update_weights(given)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="weight_version"):
        engine.update_weights(good, weight_version="")
    broken = shutil.copytree(tied, tmp_path / "broken")
    save_file({n: its for n, its in whole.items() if n != name}, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks 1 tensor of this model: model.layers.1.self_attn.k_proj.weight"):
        engine.update_weights_from_disk(broken)
    (broken / "model.safetensors").write_bytes((tied / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(WeightsError, match="truncated"):
        engine.update_weights_from_disk(broken)
    save_file({**whole, name: noise}, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"k_proj.weight of .*broken has numbers from -inf to"):
        engine.update_weights_from_disk(broken)
    for path in (3, b"folder", "", None):
        with pytest.raises(InvalidRequest, match="model_path must be a path, not") as caught:
            engine.update_weights_from_disk(path)  # type: ignore[arg-type]
        assert caught.value.param == "model_path"
    other = tiny_checkpoint(tmp_path / "other", vocab_size=259, rms_norm_eps=1e-3, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="it is another model"):
        engine.update_weights_from_disk(other)
    with pytest.raises(ModelError):
        engine.update_weights_from_disk(tmp_path / "nothing")
    assert outcome(engine, prompt) == before


def test_a_tied_head_is_the_embedding_under_either_name(engine: Engine, tied: Path) -> None:
    whole, prompt = tensors_of(tied), PROMPT[:20]
    before = outcome(engine, prompt)
    changed = whole["model.embed_tokens.weight"].flip(0)
    engine.update_weights({"lm_head.weight": changed})
    head = outcome(engine, prompt)
    engine.update_weights({"model.embed_tokens.weight": whole["model.embed_tokens.weight"].bfloat16()})
    engine.update_weights({"model.embed_tokens.weight": changed})
    assert outcome(engine, prompt) == head != before


def test_what_takes_no_weights_says_why(tied: Path) -> None:
    with (
        Engine(tied, **OPTIONS, quantization="int4") as engine,
        pytest.raises(WeightsError, match="quantised weights"),
    ):
        engine.update_weights({"model.norm.weight": torch.zeros(64)})


def test_nothing_cached_of_the_old_weights_is_found_again(tied: Path, tmp_path: Path) -> None:
    new = shaken(tied, tmp_path / "new")
    tiered: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
    }
    tiered["hicache_storage_dir"] = str(tmp_path / "kv")
    prompts = [[RNG.randrange(3, 250) for _ in range(90)] for _ in range(6)]
    options = {**OPTIONS, "max_total_tokens": 384, "page_size": 8}
    with Engine(new, **options) as other:
        wanted = [outcome(other, prompt) for prompt in prompts]
    with Engine(tied, **{**options, **tiered}) as engine:
        tiers = engine._scheduler.memory.tiers
        assert tiers is not None
        tiers.rates.compute.seconds, tiers.rates.load.seconds, tiers.rates.step = 1.0, 1e-7, 0.0
        tiers.rates.is_fixed = True
        before = [outcome(engine, prompt) for prompt in prompts * 2][:6]
        assert engine.get_server_info()["internal_states"][0]["host_loaded_tokens"]
        engine.update_weights_from_disk(new)
        assert [outcome(engine, prompt) for prompt in prompts] == wanted != before
        assert engine.check_ledger() == []


def test_requests_under_way_go_on_and_leave_nothing_to_others(engine: Engine, tied: Path, tmp_path: Path) -> None:
    new = shaken(tied, tmp_path / "new")
    prompt = [RNG.randrange(3, 250) for _ in range(50)]
    wanted = expected_of(new, prompt)
    stream = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 160}, stream=True)
    next(stream)
    engine.update_weights_from_disk(new)
    assert outcome(engine, prompt)[0] == wanted[0]  # beside it
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 160}
    whole = prompt + last["output_ids"]
    for asked in (prompt, whole):
        tokens, logprobs = outcome(engine, asked)
        their_tokens, their_logprobs = expected_of(new, asked)
        assert tokens == their_tokens
        assert logprobs == pytest.approx(their_logprobs, abs=1e-4)
    assert engine.check_ledger() == []


def expected_of(folder: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    with Engine(folder, **OPTIONS) as engine:
        return outcome(engine, prompt)


def test_a_program_goes_on_under_the_new_weights(engine: Engine, tied: Path, tmp_path: Path) -> None:
    client = Client(engine)
    client.send(ir.Text("x" * 40), gen(max_tokens=4))
    client.wait(ir.NodeDone)
    engine.update_weights_from_disk(shaken(tied, tmp_path / "new"))
    client.send(ir.Text("y" * 9), gen(max_tokens=4), final=True)
    client.wait(ir.Done)
    usage = client.of(ir.NodeDone)[-1].meta["usage"]
    assert usage["cached_tokens"] == 0, "its prefix was of the old weights"
    assert engine.check_ledger() == []


def test_logprobs_of_samples_are_those_of_a_training_forward_pass(engine: Engine, tied: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    model.model.norm.weight.data.mul_(0.5)
    engine.update_weights(model.named_parameters())
    params = {"n": 4, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 12, "ignore_eos": True, "seed": 1}
    group = engine.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True)
    ids = torch.tensor([PROMPT + each["output_ids"] for each in group])
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
    for each, its in zip(group, wanted, strict=True):
        found = [entry[0] for entry in each["meta_info"]["output_token_logprobs"]]
        picked = its.gather(1, torch.tensor(each["output_ids"])[:, None])[:, 0]
        assert found == pytest.approx(picked.tolist(), abs=1e-5)
