"""Checkpoints that cannot be served are refused by name before memory is taken; whatever way they are cut, the good
ones load to the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from sgl.runtime.engine import Engine
from sgl.runtime.model.checkpoint import checkpoint_folder, find_checkpoint
from sgl.runtime.model.choice import ModelImpl, read_config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.weights import checkpoint_tensors
from tests.test_gdn_models import tiny_hybrid
from tests.tiny_models import byte_tokenizer, edit_json, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good Llama checkpoint in one file."""
    return tiny_checkpoint(tmp_path)


def load(folder: Path) -> Decoder:
    return load_decoder(ModelConfig.from_pretrained(folder))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_weights(left: Decoder, right: Decoder) -> None:
    others = checkpoint_tensors(right.config, right.weights)
    for name, tensor in checkpoint_tensors(left.config, left.weights).items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedModel,
            ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3"],
        ),
        ({"architectures": ...}, UnsupportedModel, ["supported: LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, UnsupportedModel, ["gelu"]),
        ({"is_causal": False}, UnsupportedModel, ["attention to later tokens (is_causal)"]),
        ({"text_config": {"is_causal": False}}, UnsupportedModel, ["attention to later tokens (is_causal)"]),
        ({"quantization_config": {"quant_method": "eetq"}}, UnsupportedModel, ["quantized", "eetq"]),
        ({"num_local_experts": 8}, UnsupportedModel, ["mixture of experts"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ModelError, ["'short_factor' is None"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 1.0]}},
            ModelError,
            ["short_factor and long_factor", "8 numbers each"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            UnsupportedModel,
            ["partial_rotary_factor"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            UnsupportedModel,
            ["rope of its own for each layer type"],
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ModelError, ["factor"]),
        ({"torch_dtype": "int8", "dtype": "int8"}, UnsupportedModel, ["int8"]),
        ({"hidden_size": ...}, ModelError, ["no 'hidden_size'"]),
        ({"hidden_size": "64"}, ModelError, ["hidden_size", "'64'", "number"]),
        ({"num_hidden_layers": 2.5}, ModelError, ["num_hidden_layers", "whole"]),
        ({"num_key_value_heads": 3}, ModelError, ["4 is no multiple", "3"]),
        ({"tie_word_embeddings": "yes"}, ModelError, ["tie_word_embeddings", "neither true nor false"]),
    ],
)
def test_a_config_that_cannot_be_served_says_why(
    folder: Path, changes: dict[str, Any], error: type[ModelError], words: list[str]
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(error) as caught:
        ModelConfig.from_pretrained(folder)
    assert all(word in str(caught.value) for word in [str(folder), *words]), str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_config_that_cannot_be_read_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_pretrained(folder)


def test_a_path_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="nowhere/at/all is neither a checkpoint folder"):
        ModelConfig.from_pretrained("nowhere/at/all")
    with pytest.raises(ModelError, match="neither a checkpoint folder"):
        ModelConfig.from_pretrained(tmp_path / "absent")


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32)


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, ["lacks 1 tensor", "model.layers.1.mlp.up_proj.weight [96, 64]"]),
        (reshape, ["model.norm.weight", "[32]", "[64]"]),
        (add, ["1 tensor", "no place for", "model.layers.0.self_attn.q_proj.bias [64]"]),
        (integers, ["model.norm.weight", "I32", "BF16"]),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], words: list[str]
) -> None:
    edit_weights(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_weight_file_is_named_with_its_size(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()[:kept]
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"model\.safetensors \({len(content)} bytes\) is truncated"):
        load(folder)


def test_a_missing_weight_file_is_named_with_what_lies_there_instead(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing; nor is .*, only tf_model\.h5"):
        load(folder)


def pickled(folder: Path, *, is_old: bool = False, names: tuple[str, ...] = ("pytorch_model.bin",)) -> Path:
    """The checkpoint with its tensors dealt out to pickles."""
    tensors = list(load_file(folder / "model.safetensors").items())
    placed = {}
    for index, name in enumerate(names):
        part = dict(tensors[index :: len(names)])
        torch.save(part, folder / name, _use_new_zipfile_serialization=not is_old)
        placed |= dict.fromkeys(part, name)
    if len(names) > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("is_old", "names"), [(False, ("pytorch_model.bin",)), (True, ("pytorch_model-1.bin", "pytorch_model-2.bin"))]
)
@pytest.mark.parametrize("model_impl", ["sgl", "transformers"])
def test_pickles_give_the_same_answers(
    tmp_path: Path, is_old: bool, names: tuple[str, ...], model_impl: Literal["sgl", "transformers"]
) -> None:
    safe = tiny_checkpoint(tmp_path / "safe")
    old = pickled(tiny_checkpoint(tmp_path / "old"), is_old=is_old, names=names)
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    answers = []
    for folder, found in ((safe, "safetensors"), (old, "pickles")):
        with Engine(str(folder), model_impl=model_impl, **options) as engine:
            assert engine.get_server_info()["checkpoint_format"] == found
            params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            result = engine.generate(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
            answers.append(result["meta_info"]["output_token_logprobs"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8
    with pytest.raises(ConfigError, match="holds PyTorch's pickles alone"):
        Engine(str(old), model_impl=model_impl, load_format="safetensors", **options)


class Planted:
    """What a pickle would run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, mark: {**tensors, "evil": Planted(mark)}, "is truncated or no pickle of tensors alone"),
        (lambda tensors, mark: [*tensors.values()], "it holds a list, not tensors by their names"),
        (lambda tensors, mark: {"state_dict": tensors}, "'state_dict' in it is dict, no dense tensor"),
        (lambda tensors, mark: {**tensors, "sparse": torch.eye(2).to_sparse()}, "no dense tensor"),
        (lambda tensors, mark: {name: tensors[name] for name in list(tensors)[1:]}, "lacks 1 tensor"),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_pickles_that_hold_anything_else_are_refused_and_run_nothing(
    folder: Path, change: Callable[[dict[str, torch.Tensor], Path], Any], words: str, is_old: bool
) -> None:
    file, mark = pickled(folder) / "pytorch_model.bin", folder / "was-run"
    tensors = torch.load(file, weights_only=True)
    torch.save(change(tensors, mark), file, _use_new_zipfile_serialization=not is_old)
    with pytest.raises(WeightsError, match=words):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_pickle_is_named_with_its_size(folder: Path, kept: int) -> None:
    path = pickled(folder) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=rf"pytorch_model\.bin \({path.stat().st_size} bytes\) is truncated"):
        load(folder)


@pytest.mark.parametrize("content", [b"\x80\x02.", b"\x80\x02h\x05.", b"\x80\x02}\x85t."])
def test_a_damaged_pickle_is_an_error_of_weights(folder: Path, content: bytes) -> None:
    """Whatever torch's reader stumbles over."""
    path = pickled(folder) / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin \(\d+ bytes\) is truncated or no pickle"):
        load(folder)


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    torch.save({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert_same_weights(load(folder), load(tiny_checkpoint(tmp_path / "alone")))


def test_shards_without_their_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    one = load(tiny_checkpoint(tmp_path / "one"))
    folder = tiny_checkpoint(tmp_path / "many", max_shard_size="100KB")
    (folder / INDEX).unlink()
    assert_same_weights(one, load(folder))
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(WeightsError, match=r"nor is there model\.safetensors\.index\.json.*only model-00001-of"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "a LoRA adapter: serve its base model, with --lora-paths"),
        ("model_index.json", "a pipeline that makes images"),
        ("params.json", "its maker's own format"),
        ("snapshots/5ca1ab1e/config.json", r"folders within it have one: name .*snapshots/5ca1ab1e"),
        ("inner/config.json", r"folders within it have one: name .*inner"),
    ],
)
def test_a_folder_of_another_kind_says_what_to_name(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_old_models_of_a_hub_are_downloaded_with_their_pickles(
    folder: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").rename(folder / weights)
    asked: list[list[str]] = []

    def download(hub_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert hub_id == "an/id"
        assert "original/*" in ignore_patterns
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert checkpoint_folder("an/id") == folder
    assert "*.safetensors" in asked[0]
    assert asked[1:] == ([["pytorch_model*"]] if weights == "pytorch_model.bin" else [])


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_a_config_that_is_no_json_is_named(text: str | bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(str(folder), "auto")


def test_shards_load_to_the_same_weights_as_one_file(tmp_path: Path) -> None:
    one = load(tiny_checkpoint(tmp_path / "one"))
    folder = tiny_checkpoint(tmp_path / "many", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_weights(one, load(folder))


def test_a_shard_that_is_missing_or_lacks_what_the_index_says_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, max_shard_size="100KB")
    index = json.loads((folder / INDEX).read_text())
    name, shard = next(iter(index["weight_map"].items()))
    elsewhere = next(other for other in index["weight_map"].values() if other != shard)
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": {**index["weight_map"], name: elsewhere}}))
    with pytest.raises(WeightsError, match=rf"{elsewhere} lacks the tensor {name}"):
        load(folder)
    for text in ("{", "[" * 100_000):
        (folder / INDEX).write_text(text)
        with pytest.raises(WeightsError, match=f"cannot read .*{INDEX}"):
            load(folder)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / shard).unlink()
    with pytest.raises(WeightsError, match=rf"{shard} is missing, 1 of the \d+ that .*{INDEX} names"):
        load(folder)


def test_a_tied_head_is_the_embedding_also_where_the_checkpoint_repeats_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    tied = load(folder)
    assert tied.weights.lm_head is tied.weights.embedding
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0})
    )
    assert load(folder).weights.lm_head is not tied.weights.lm_head
    repeated = load(folder)
    assert repeated.weights.lm_head is repeated.weights.embedding
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    different = load(folder)
    assert different.weights.lm_head is not different.weights.embedding, (
        "as in transformers, a head of its own counts"
    )


@pytest.mark.parametrize("given", ["auto", ...])
@pytest.mark.parametrize(
    ("stored", "found"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float64", "float32")]
)
@pytest.mark.parametrize("model_impl", ["sgl", "transformers"])
def test_a_dtype_that_the_config_does_not_say_is_that_of_the_weights(
    given: Any, stored: str, found: str, model_impl: ModelImpl, folder: Path
) -> None:
    edit_json(folder / "config.json", torch_dtype=given, dtype=...)
    edit_weights(
        folder, lambda its: its.update({name: each.to(getattr(torch, stored)) for name, each in its.items()})
    )
    assert read_config(str(folder), model_impl).dtype == found
    (folder / "model.safetensors").unlink()
    assert read_config(str(folder), model_impl).dtype == "float32"


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_models_that_embed_texts_may_be_stored_without_a_head(
    architecture: str, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3-Embedding is, the largest of which says in vain that its head is not tied."""
    path = tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    whole = load(path)

    def behead(tensors: dict[str, torch.Tensor]) -> None:
        bodies = {name.removeprefix("model."): its for name, its in tensors.items() if "lm_head" not in name}
        tensors.clear()
        tensors.update(bodies)

    edit_weights(path, behead)
    edit_json(path / "config.json", architectures=[architecture])
    body = load(path)
    assert body.weights.lm_head is body.weights.embedding
    if is_tied:
        assert_same_weights(whole, body)
    left, right = (checkpoint_tensors(its.config, its.weights) for its in (whole, body))
    assert all(torch.equal(left[name], right[name]) for name in left if name != "lm_head.weight")
    assert ("has no head" in caplog.text) == (not is_tied)


@pytest.mark.parametrize("kind", ["latent", "hybrid"])
def test_other_layers_of_our_own_are_read_without_the_first_word_too(kind: str, tmp_path: Path) -> None:
    path, architecture = tmp_path / "model", "DeepseekV3ForCausalLM"
    if kind == "latent":
        tiny_transformer(path, architecture, **{**ARCHITECTURES[architecture], "tie_word_embeddings": True})
    else:
        tiny_hybrid(path, "3.5")
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 128}
    answers = []
    for _ in range(2):
        with Engine(str(path), model_impl="sgl", **options) as engine:
            answer = engine.generate(input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 4})
            answers.append(answer["output_ids"])
        tensors = {name.removeprefix("model."): its for name, its in load_file(path / "model.safetensors").items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert answers[0] == answers[1]


def test_random_weights_need_only_a_config_and_are_the_same_each_time(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    config = ModelConfig.from_pretrained(folder)
    first, second = (load_decoder(config, load_format="dummy") for _ in range(2))
    assert_same_weights(first, second)
    assert float(first.weights.embedding.std()) == pytest.approx(config.initializer_range, rel=0.1)


ODD: list[Any] = [None, 0, -1, 1.5, "x", "", [], {}, True, [1, 2], [None], {"a": 1}, {"factor": [1]}, 1e308, 10**30]
ODD += [float("nan"), float("inf"), "1e-5", [[]], [{}], {"rope_type": []}, {"rope_type": "yarn", "factor": "4"}]
KEYS = ["rope_scaling", "quantization_config", "layer_types", "torch_dtype", "text_config", "num_experts"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-moe", "gpt-oss", "phi3", "hybrid"])
def test_any_value_of_a_config_is_read_or_named(family: str, tmp_path: Path) -> None:
    folder = tiny_hybrid(tmp_path, "next")[0] if family == "hybrid" else tiny_checkpoint(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    for key in [*config, *KEYS]:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
            with suppress(ModelError):
                read_config(str(folder), "sgl")


@pytest.mark.parametrize("value", ["x", [None], 1.5, True])
def test_ends_that_are_no_tokens_are_named(value: Any, folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match="'eos_token_id' is"):
        ModelConfig.from_pretrained(folder)


def test_ends_of_generation_come_from_both_configs(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[2, 7])
    assert ModelConfig.from_pretrained(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert ModelConfig.from_pretrained(folder).eos_token_ids == (2,)


def test_the_end_of_a_turn_that_only_the_tokenizer_names_ends_a_generation(folder: Path) -> None:
    tokenizer = byte_tokenizer(384)
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(folder)
    edit_json(folder / "config.json", eos_token_id=2)
    with Engine(str(folder), device="cpu", max_total_tokens=64) as engine:
        assert engine.get_server_info()["eos_token_ids"] == sorted({2, tokenizer.convert_tokens_to_ids("!")})


@pytest.mark.parametrize("path", ["a" * 300, "/" + "a" * 300, "~nobody-of-that-name/x"])
def test_what_no_path_can_be_is_an_error_of_models(path: str) -> None:
    with pytest.raises(ModelError, match="is no path of a checkpoint: "):
        checkpoint_folder(path)
    with pytest.raises(ModelError, match="is no path of a checkpoint: "):
        find_checkpoint(path)


def test_a_path_to_config_or_weights_is_the_folder(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        assert ModelConfig.from_pretrained(folder / name) == ModelConfig.from_pretrained(folder)
