"""What is read of an adapter's folder, and what is refused of it, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sgl.errors import AdapterError
from sgl.runtime.bounded_regex import RegexRefused
from sgl.runtime.model.adapter import LoraConfig, read_adapter
from sgl.runtime.model.adapter_names import Patterns, Values, ends_of
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.lora import Fused, LoraSlots, Modules
from sgl.runtime.model.lora_products import decoder_modules, decoder_products, lora_modules
from sgl.runtime.model.shard import WHOLE, Shard
from tests.tiny_adapters import ALL, tiny_adapter
from tests.tiny_models import tiny_checkpoint
from tests.tiny_vision import tiny_vision

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("files") / "model", num_hidden_layers=2)


def slots_for(model: Path, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32) -> LoraSlots:
    config = ModelConfig.from_pretrained(model)
    known, layers = decoder_modules(config), decoder_products(config, shard)
    return LoraSlots(known, layers, num_slots=1, rank=8, targets=ALL, dtype=dtype, device=CPU)


class Counted:
    """Counts the ends that are looked up."""

    ends = 0

    def __call__(self, module: str) -> Iterable[str]:
        for end in ends_of(module):
            self.ends += 1
            yield end


def refused(model: Path, folder: Path, words: str) -> AdapterError:
    with pytest.raises(AdapterError, match=words) as error:
        read_adapter(str(folder), slots_for(model))
    assert error.value.path is not None
    return error.value


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 300])
def test_a_path_that_none_can_be_is_refused(model: Path, path: str) -> None:
    with pytest.raises(AdapterError, match="is no adapter's folder"):
        read_adapter(path, slots_for(model))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora is true"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ".*"}, "target_modules has model.embed_tokens"),
        ({"target_modules": ["c_attn"]}, "in none of the model"),
        ({"target_modules": "(q_proj"}, r"target_modules has '\(q_proj', which is malformed: .* at position 0$"),
        ({"exclude_modules": "(q_proj"}, r"exclude_modules has '\(q_proj', which is malformed: .* at position 0$"),
        ({"rank_pattern": {"(q_proj": 2}}, r"rank_pattern has '\(q_proj', which is malformed: .* at position 0$"),
        ({"alpha_pattern": {"q(?i)": 2}}, r"alpha_pattern has 'q\(\?i\)', which is malformed: .* at position 1$"),
        (
            {"rank_pattern": {"(?i)q": 2}},
            r"has '\(\?i\)q', which .* position 8, behind the \(\.\*\\\.\)\?\( that peft",
        ),
        ({"target_modules": 7}, "must be a list of names"),
        ({"r": 0}, "r=0"),
        ({"r": "4"}, "an integer from 1 to"),
        ({"r": 16}, "max_lora_rank is 8"),
        ({"lora_alpha": None, "rank_pattern": []}, "lora_alpha=null"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"r": 10**400}, "r=1000"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern"),
        ({"target_modules": "(a{99}){999}"}, "'.*', which is too large"),
        ({"target_modules": "a|" * 50_000 + "a"}, "is too large: it has 100001 characters, and 65536 are allowed"),
        ({"target_modules": "()" * 5_000}, "is too large: it has 5000 groups, and 2000 are allowed"),
        ({"target_modules": "(" * 9999}, r"'\({80}…', which is malformed"),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_name(
    model: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    refused(model, tiny_adapter(tmp_path, model, **fields), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": r"(.|\w)*[!?]"}, "target_modules has '.*', which takes too long to match"),
        ({"exclude_modules": r"(.|\w)*[!?]"}, "exclude_modules has '.*', which takes too long"),
        ({"rank_pattern": {r"(.|\w)*[!?]": 2}}, r"rank_pattern has '\(\.\|.*', which takes too long"),
        (
            {"rank_pattern": {f"{its:016b}".replace("1", "."): 2 for its in range(30_000)}},
            "patterns take more than 0.1 s",
        ),
        ({"rank_pattern": {f"x.[y]_{number}": 2 for number in range(10_000)}}, "patterns take more than 0.1 s"),
    ],
)
def test_patterns_of_a_config_hold_no_thread(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("sgl.runtime.model.adapter_names.MAX_SECONDS", 0.1)
    refused(model, tiny_adapter(tmp_path, model, **fields), words)


def test_no_pattern_is_blamed_for_the_time_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.runtime.model.adapter_names.MAX_SECONDS", 0.1)
    patterns = Patterns()
    patterns.spend(0.09)
    with pytest.raises(RegexRefused, match="patterns take more than 0"):
        patterns.matches("rank_pattern", r"(.|\w)*[!?]", "model.layers.0.self_attn.q_proj")


def test_many_names_are_found_by_their_ends(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.runtime.model.adapter_names.ends_of", counted := Counted())
    names = [*ALL, *(f"nobody.{number}" for number in range(50_000))]
    folder = tiny_adapter(tmp_path, model, target_modules=names)
    assert len(LoraConfig.read(str(folder)).modules(slots_for(model).known)) == 14
    assert counted.ends < 1000


def test_many_parameters_are_found_by_their_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = {f"model.layers.{number}.mlp.experts.down_proj": Fused([("x",)]) for number in range(94)}
    folder = tiny_adapter(tmp_path, model, targets=(), target_parameters=["93.mlp.experts.down_proj"] * 2_000)
    counted = Counted()
    for where in ("adapter", "adapter_names"):
        monkeypatch.setattr(f"sgl.runtime.model.{where}.ends_of", counted)
    found = LoraConfig.read(str(folder)).fused(Modules({}, {}, {}, fused))
    assert list(found) == ["model.layers.93.mlp.experts.down_proj"]
    assert counted.ends < 2_000


@pytest.mark.parametrize(
    ("pattern", "module", "is_meant"),
    [
        ("q_proj", "layers.0.q_proj", True),
        ("q_proj", "layers.0.xq_proj", False),
        ("0.q_proj", "layers.10.q_proj", False),
        ("0.q_proj", "layers.0.q_proj", True),
        ("q.proj", "layers.0.q_proj", True),
        ("layers.0.q_proj", "layers.0.q_proj", True),
        ("a.layers.0.q_proj", "layers.0.q_proj", False),
        ("", "layers.0.q_proj", False),
        (r"layers\..*(q|k)_proj", "layers.0.k_proj", True),
        ("k_proj|0", "layers.0", True),
        (r"(?!.*visual).*q_proj", "visual.q_proj", True),
        (r".*\b(q_proj)\b", "visual.0.q_proj", True),
        ("q_proj{1}", "q_proj", True),
        ("q_proj{x}", "q_proj{x}", True),
        ("q_proj{,}", "q_projjj", True),
        ("q_proj{,}", "q_proj{,}", False),
        ("q_proj{,2}", "q_projj", True),
        ("q_proj{\u0661}", "q_proj{\u0661}", True),
        ("q_proj{\u0661}", "q_proj", False),
    ],
)
def test_patterns_mean_what_they_mean_to_peft(pattern: str, module: str, is_meant: bool) -> None:
    """Whose expression is the one here."""
    assert bool(re.match(rf"(.*\.)?({pattern})$", module)) == is_meant
    assert (Values("rank_pattern", {pattern: 1}, Patterns()).value(module, 0) == 1) == is_meant
    assert Patterns().means("target_modules", pattern, module) == bool(re.fullmatch(pattern, module) and pattern)


PATTERNS = st.text("ab._", max_size=5) | st.sampled_from(["a|b", "[ab].*", r"a\.b"])


@given(st.lists(PATTERNS, unique=True), st.text("ab._", max_size=8))
def test_the_first_pattern_counts(patterns: list[str], module: str) -> None:
    """Also where those of names and dots are looked up, whose dots mean any character."""
    first = next((its for its in patterns if re.fullmatch(rf"(.*\.)?({its})", module)), None)
    assert Values("rank_pattern", {its: its for its in patterns}, Patterns()).value(module, None) == first


def test_a_pattern_for_each_module_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As peft writes the ranks that EVA chose."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{its}.{name}"
        for layer in range(27)
        for its in range(64)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    patterns = Patterns()
    monkeypatch.setattr(patterns, "spend", lambda seconds: spent.append(seconds))
    spent: list[float] = []
    values = Values("rank_pattern", {module: rank for rank, module in enumerate(modules)}, patterns)
    assert [values.value(module, None) for module in modules] == [*range(len(modules))]
    assert sum(spent) < 0.5


def test_a_regular_expression_may_list_every_module() -> None:
    modules = [
        *(f"model.layers.{layer}.{part}.{name}" for layer in range(94) for part in ("x", "y") for name in ALL),
        *(f"model.layers.{layer}.mlp.experts.{its}.up_proj" for layer in range(6) for its in range(64)),
    ]
    pattern = "|".join(map(re.escape, modules))
    patterns = Patterns()
    assert all(patterns.means("target_modules", pattern, module) for module in modules)
    assert not patterns.means("target_modules", pattern, "model.layers.94.x.q_proj")


@pytest.mark.parametrize("word", ["all-linear", "ALL-LINEAR", "All-Linear"])
def test_all_products_are_meant_in_any_case(model: Path, tmp_path: Path, word: str) -> None:
    folder = tiny_adapter(tmp_path, model, target_modules=word)
    assert len(LoraConfig.read(str(folder)).modules(slots_for(model).known)) == 14


@pytest.mark.parametrize("body", ["model", "language_model.model"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": r"^(?!.*visual)(language_model\.)?model\.layers\.\d\.(self_attn|mlp)\.\w+_proj"},
        {"exclude_modules": r"model\.language_model\..*"},
        {"rank_pattern": {r"^model\.layers\.0\..*": 4, r"language_model\.model\..*": 4, "q_proj": 4}, "r": 4},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
    ],
)
def test_names_of_an_older_transformers_are_known(body: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """The same modules had other names before multimodal models were put together anew, and an adapter keeps them."""
    model = tiny_vision(tmp_path / "model", "Qwen2_5_VLForConditionalGeneration")
    config = ModelConfig.from_pretrained(model)
    known, layers = lora_modules(config), decoder_products(config, WHOLE)
    slots = LoraSlots(known, layers, num_slots=1, rank=8, targets=ALL, dtype=torch.float32, device=CPU)
    expected = read_adapter(str(tiny_adapter(tmp_path / "new", model)), slots).flat
    file = tiny_adapter(tmp_path / "old", model, **fields) / "adapter_model.safetensors"
    assert expected.count_nonzero()
    new = "base_model.model.model.language_model.layers."
    assert all(name.startswith(new) for name in load_file(file))
    old = f"base_model.model.{body}.layers."
    save_file({name.replace(new, old): tensor for name, tensor in load_file(file).items()}, file)
    torch.testing.assert_close(read_adapter(str(file.parent), slots).flat, expected, rtol=0, atol=0)
    tensors = load_file(file)
    del tensors[f"{old}0.mlp.up_proj.lora_A.weight"]
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=re.escape(f"lacks {old}0.mlp.up_proj.lora_A")):
        read_adapter(str(file.parent), slots)


@pytest.mark.parametrize("fields", [{"use_dora": False, "modules_to_save": None, "bias": "none", "unknown": 1}, {}])
def test_fields_that_change_nothing_are_read_over(model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    read_adapter(str(tiny_adapter(tmp_path, model, **fields)), slots_for(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "no pickle of tensors alone",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "no safetensors"),
    ],
)
def test_damaged_folders(model: Path, tmp_path: Path, change: Callable[[Path], Any], words: str) -> None:
    change(tiny_adapter(tmp_path, model))
    refused(model, tmp_path, words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "model.layers.1.mlp.up_proj.lora_A",
            torch.zeros(3, 64),
            r"\[3, 64\]; the model and rank 4 make it \[4, 64\]",
        ),
        ("model.layers.1.mlp.up_proj.lora_B", torch.zeros(96, 5), r"make it \[96, 4\]"),
        ("model.layers.0.self_attn.q_proj.lora_A", torch.zeros(4, 64, dtype=torch.int32), "floats are expected"),
        ("model.layers.0.self_attn.q_proj.lora_A", torch.full((4, 64), torch.nan), "not finite"),
        ("model.layers.0.self_attn.q_proj.lora_A", None, "lacks"),
        ("model.layers.9.self_attn.q_proj.lora_A", torch.zeros(4, 64), "no matrix of a module"),
        ("model.embed_tokens.lora_embedding_A", torch.zeros(4, 64), "adapters of embedding and head"),
    ],
)
def test_wrong_tensors(model: Path, tmp_path: Path, name: str, value: torch.Tensor | None, words: str) -> None:
    file = tiny_adapter(tmp_path, model) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.{name}.weight"
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, file)
    assert refused(model, tmp_path, words).tensor == name


@pytest.mark.parametrize(("alpha", "dtype"), [(1e30, torch.float32), (1e6, torch.float16)])
def test_what_the_models_dtype_cannot_hold_is_refused(
    model: Path, tmp_path: Path, alpha: float, dtype: torch.dtype
) -> None:
    adapter = tiny_adapter(tmp_path, model, lora_alpha=alpha)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name] = tensors[name] * 1e10 if dtype == torch.float32 else tensors[name]
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=r"lora_B.* too large for the model's torch\.float"):
        read_adapter(str(adapter), slots_for(model, dtype=dtype))
    if dtype == torch.float16:
        assert read_adapter(str(adapter), slots_for(model, dtype=torch.bfloat16)).flat.isfinite().all()


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", hidden_size=32, num_hidden_layers=2)
    refused(model, tiny_adapter(tmp_path / "adapter", other), "make it")


def test_experts_are_changed_by_their_matrices_not_their_names(tmp_path: Path) -> None:
    mixture = tiny_checkpoint(tmp_path / "mixture", "qwen3-moe", num_hidden_layers=2)
    file = tiny_adapter(tmp_path / "experts", mixture, targets=("q_proj", "up_proj")) / "adapter_model.safetensors"
    slots = slots_for(mixture)
    read_adapter(str(file.parent), slots)  # the names of experts alone change nothing
    assert slots.product(0, "down") is None
    matrix = {"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file({**load_file(file), **matrix}, file)
    refused(mixture, file.parent, "has experts, and lora_target_modules are .*start with all of them")


def test_ranks_and_scales_by_module(model: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(
        tmp_path,
        model,
        targets=("q_proj", "up_proj"),
        rank=4,
        lora_alpha=8,
        rank_pattern={r"layers\.1\..*q_proj": 2, "q_proj": 3},
        alpha_pattern={"up_proj": 1},
        layers_to_transform=1,
    )
    lora = LoraConfig.read(str(folder))
    known = decoder_modules(ModelConfig.from_pretrained(model))
    assert lora.modules(known) == {"model.layers.1.self_attn.q_proj": 2, "model.layers.1.mlp.up_proj": 4}
    assert lora.scale("model.layers.1.self_attn.q_proj", 2) == 4.0
    assert lora.scale("model.layers.1.mlp.up_proj", 4) == 0.25
    given = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**given, "use_rslora": True, "exclude_modules": ["up_proj"]})
    )
    lora = LoraConfig.read(str(folder))
    assert list(lora.modules(known)) == ["model.layers.1.self_attn.q_proj"]
    assert lora.scale("model.layers.1.self_attn.q_proj", 4) == 4.0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_an_adapter_are_cut_like_the_model(model: Path, tmp_path: Path, size: int) -> None:
    folder = tiny_adapter(tmp_path, model)
    whole = slots_for(model)
    whole.place(0, read_adapter(str(folder), whole))
    parts = [slots_for(model, Shard(rank, size)) for rank in range(size)]
    for part in parts:
        part.place(0, read_adapter(str(folder), part))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def product(slots: LoraSlots, name: str, x: torch.Tensor) -> torch.Tensor:
        stacked = slots.product(1, name)
        assert stacked is not None
        shrunk = (x @ stacked.a[0].T).chunk(len(stacked.parts), dim=1)
        pairs = zip(shrunk, torch.split(stacked.b[0], list(stacked.parts)), strict=True)
        return torch.cat([narrow @ wide.T for narrow, wide in pairs], dim=1)

    gate_up = [product(part, "gate_up", x).chunk(2, dim=1) for part in parts]
    together = torch.cat([torch.cat([each[which] for each in gate_up], dim=1) for which in (0, 1)], dim=1)
    torch.testing.assert_close(together, product(whole, "gate_up", x))
    inner = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    summed = sum(product(part, "down", its) for part, its in zip(parts, inner.chunk(size, dim=1), strict=True))
    torch.testing.assert_close(summed, product(whole, "down", inner))
