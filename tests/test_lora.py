"""LoRA adapters through the engine: each equals the model with its weights merged, alone and side by side."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sgl import Engine
from sgl.errors import AdapterError, ConfigError, InvalidRequest
from sgl.kernels.layers.linear import Matrix, linear
from sgl.runtime.batch import Batch, Int64Array
from sgl.runtime.model.lora import LoraStep
from sgl.runtime.runner.adapters import Adapters
from tests.tiny_adapters import ALL, ATTENTION, greedy, logprobs, merged, tiny_adapter
from tests.tiny_models import tiny_checkpoint

RNG = random.Random(5)
PROMPT = [RNG.randrange(3, 380) for _ in range(41)]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_total_tokens": 2048,
    "page_size": 4,
    "check_ledger": True,
    "enable_lora": True,
    "max_lora_rank": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "attention": {"targets": ATTENTION, "rank": 8, "lora_alpha": 3, "use_rslora": True},
    "two": {"targets": ("q_proj", "v_proj"), "rank": 2, "lora_alpha": 8},
    "regex": {
        "targets": ("k_proj", "down_proj"),
        "target_modules": r".*\.(self_attn\.k_proj|mlp\.down_proj)",
        "ranks": {"1.self_attn.k_proj": 7},
        "rank_pattern": {r"layers\.1\.self_attn\.k_proj": 7},
        "alpha_pattern": {"down_proj": 9},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    folder = model.parent
    return {
        name: tiny_adapter(folder / name, model, seed=i, **kind) for i, (name, kind) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def oracles(model: Path, adapters: dict[str, Path]) -> dict[str | None, Any]:
    return {None: merged(model, None), **{name: merged(model, path) for name, path in adapters.items()}}


@pytest.fixture(scope="module")
def engine(model: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    with Engine(model_path=model, lora_paths=adapters, **OPTIONS) as engine:
        yield engine


def ask(engine: Engine, ids: list[int], lora_path: Any, count: int = 8, **options: Any) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    result: dict[str, Any] = engine.generate(
        input_ids=ids,
        sampling_params=params,
        lora_path=lora_path,
        return_logprob=True,
        logprob_start_len=0,
        **options,
    )
    return result


def check(result: dict[str, Any], oracle: Any, ids: list[int]) -> None:
    """Greedy tokens equal, all logprobs within 1e-4."""
    output = result["output_ids"]
    assert output == greedy(oracle, ids, len(output))
    meta = result["meta_info"]
    found = [its[0] for its in meta["input_token_logprobs"][1:]] + [its[0] for its in meta["output_token_logprobs"]]
    assert found == pytest.approx(logprobs(oracle, ids + output), abs=1e-4)


@pytest.mark.parametrize("name", [None, *KINDS])
def test_an_adapter_equals_the_merged_model(
    engine: Engine, oracles: dict[str | None, Any], name: str | None
) -> None:
    check(ask(engine, PROMPT, name), oracles[name], PROMPT)
    # what is cached of it serves the next one
    longer = PROMPT + PROMPT[:7]
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    result = engine.generate(input_ids=longer, sampling_params=params, lora_path=name)
    assert result["meta_info"]["cached_tokens"] == len(PROMPT) // 4 * 4
    assert result["output_ids"] == greedy(oracles[name], longer, 6)


@pytest.mark.parametrize("in_parts", [False, True])
def test_adapters_beside_products(
    model: Path,
    adapters: dict[str, Path],
    oracles: dict[str | None, Any],
    monkeypatch: pytest.MonkeyPatch,
    in_parts: bool,
) -> None:
    """As a GPU's decode steps compute them, on a stream of their own; products' sums may come in parts."""
    aside = SimpleNamespace(wait_stream=lambda _: None)
    step = Adapters.step

    def beside(self: Adapters, batch: Batch, wanted: Int64Array | None) -> LoraStep:
        made = step(self, batch, wanted)
        made._aside = cast(torch.cuda.Stream, aside)
        return made

    def parts(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor:
        product = linear(x, matrix, bias).float()
        return torch.stack((product - 1.0, torch.ones_like(product)))

    monkeypatch.setattr(Adapters, "step", beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: aside)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    if in_parts:
        monkeypatch.setattr("sgl.runtime.model.decoder.linear_add", parts)
    with Engine(model_path=model, lora_paths=adapters, **OPTIONS) as engine:
        for name in ("all", "two", None):
            check(ask(engine, PROMPT, name), oracles[name], PROMPT)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_adapters_in_chunks(
    model: Path, adapters: dict[str, Path], oracles: dict[str | None, Any], chunk: int
) -> None:
    with Engine(model_path=model, lora_paths=adapters, **OPTIONS, chunked_prefill_size=chunk) as engine:
        check(ask(engine, PROMPT, "all"), oracles["all"], PROMPT)
        check(ask(engine, PROMPT, "regex"), oracles["regex"], PROMPT)


def test_a_batch_of_adapters_and_the_base(engine: Engine, oracles: dict[str | None, Any]) -> None:
    names = [None, "all", "attention", None, "two", "regex", "all", "two"]
    prompts = [PROMPT[i : i + 9 + i] for i in range(len(names))]
    params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    results = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
    for name, prompt, result in zip(names, prompts, results, strict=True):
        assert result["output_ids"] == greedy(oracles[name], prompt, 12)
    several = engine.generate(input_ids=prompts[:2], sampling_params={**params, "n": 2}, lora_path="two")
    assert [its["output_ids"] for its in several] == [
        greedy(oracles["two"], prompt, 12) for prompt in prompts[:2] for _ in range(2)
    ]


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"max_running_requests": 3}, {"disable_overlap_schedule": False}])
def test_more_adapters_than_slots(
    model: Path, adapters: dict[str, Path], oracles: dict[str | None, Any], options: dict[str, Any]
) -> None:
    rng = random.Random(3)
    # pages for few: requests are retracted, and come back in other slots
    small = {**OPTIONS, "max_total_tokens": 160, "max_loras_per_batch": 2}
    with Engine(model_path=model, lora_paths=adapters, **{**small, **options}) as engine:
        names = [rng.choice([None, *adapters]) for _ in range(24)]
        prompts = [[rng.randrange(3, 380) for _ in range(rng.randrange(2, 12))] for _ in names]
        params = [{"max_new_tokens": rng.randrange(1, 16), "temperature": 0.0, "ignore_eos": True} for _ in names]
        results = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
        for name, prompt, wanted, result in zip(names, prompts, params, results, strict=True):
            assert result["output_ids"] == greedy(oracles[name], prompt, wanted["max_new_tokens"])
        assert not engine.check_ledger()


def test_a_name_with_other_weights_meets_nothing_cached(
    engine: Engine, model: Path, adapters: dict[str, Path], oracles: dict[str | None, Any]
) -> None:
    first = engine.load_lora_adapter(lora_name="again", lora_path=str(adapters["all"]))
    assert first.success
    assert first.loaded_adapters["again"] == str(adapters["all"])
    assert ask(engine, PROMPT, "again")["output_ids"] == greedy(oracles["all"], PROMPT, 8)
    evictable = engine.get_server_info()["internal_states"][0]["kv_evictable_tokens"]
    assert "again" not in engine.unload_lora_adapter(lora_name="again").loaded_adapters
    assert engine.get_server_info()["internal_states"][0]["kv_evictable_tokens"] < evictable
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'again' is loaded"):
        ask(engine, PROMPT, "again")
    engine.load_lora_adapter("again", str(adapters["two"]))
    result = engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 8, "temperature": 0.0}, lora_path="again"
    )
    assert result["meta_info"]["cached_tokens"] == 0
    assert result["output_ids"] == greedy(oracles["two"], PROMPT, 8)[: len(result["output_ids"])]
    engine.unload_lora_adapter("again")
    assert not engine.check_ledger()


@pytest.mark.usefixtures("slowly")
def test_unloading_waits_for_requests_and_refuses_new_ones(
    engine: Engine, adapters: dict[str, Path], oracles: dict[str | None, Any]
) -> None:
    engine.load_lora_adapter("leaving", str(adapters["all"]))
    params = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    events = engine.generate(input_ids=PROMPT, sampling_params=params, lora_path="leaving", stream=True)
    next(events)
    unloading = threading.Thread(target=engine.unload_lora_adapter, args=("leaving",))
    unloading.start()
    while "leaving" in [its.lora_name for its in engine._adapters.listed()]:
        pass
    assert unloading.is_alive()
    with pytest.raises(InvalidRequest, match="leaving"):
        ask(engine, PROMPT, "leaving")
    *_, last = events
    assert last["output_ids"] == greedy(oracles["all"], PROMPT, 60)
    unloading.join()


def test_loading_while_others_run(
    engine: Engine, adapters: dict[str, Path], oracles: dict[str | None, Any]
) -> None:
    params = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    failures: list[BaseException] = []

    def serve(name: str) -> None:
        try:
            for i in range(4):
                prompt = PROMPT[i : i + 5]
                result = engine.generate(input_ids=prompt, sampling_params=params, lora_path=name)
                assert result["output_ids"] == greedy(oracles[name], prompt, 40)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(name,)) for name in ("all", "two")]
    for thread in threads:
        thread.start()
    for _ in range(6):
        engine.load_lora_adapter("passing", str(adapters["attention"]))
        result = engine.generate(
            input_ids=PROMPT, sampling_params={**params, "max_new_tokens": 3}, lora_path="passing"
        )
        assert result["output_ids"] == greedy(oracles["attention"], PROMPT, 3)
        engine.unload_lora_adapter("passing")
    for thread in threads:
        thread.join()
    assert not failures
    assert not engine.check_ledger()


def test_pinned_adapters_leave_a_slot(model: Path, adapters: dict[str, Path]) -> None:
    paths = [{"lora_name": "all", "lora_path": str(adapters["all"]), "pinned": True}, f"two={adapters['two']}"]
    with Engine(model_path=model, lora_paths=paths, **OPTIONS, max_loras_per_batch=2) as engine:
        with pytest.raises(InvalidRequest, match="pinned"):
            engine.load_lora_adapter("attention", str(adapters["attention"]), pinned=True)
        engine.load_lora_adapter("attention", str(adapters["attention"]))
        for name in ("all", "two", "attention", "all"):
            ask(engine, PROMPT, name)
    with pytest.raises(ConfigError, match="max_loras_per_batch"):
        Engine(model_path=model, lora_paths=paths, **OPTIONS, max_loras_per_batch=1)


def test_pinned_adapters_leave_a_slot_while_several_are_loaded(
    model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every slot pinned, requests with another adapter would wait forever."""
    read, both = Adapters.read, threading.Barrier(2)

    def read_at_once(self: Adapters, path: str) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=1.0)
        return read(self, path)

    monkeypatch.setattr(Adapters, "read", read_at_once)
    with Engine(model_path=model, **OPTIONS, max_loras_per_batch=2) as engine:

        def load(name: str) -> bool:
            with suppress(InvalidRequest):
                return bool(engine.load_lora_adapter(name, str(adapters[name]), pinned=True).success)
            return False

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(load, ("all", "two"))) == [False, True]
        engine.load_lora_adapter("attention", str(adapters["attention"]))
        ask(engine, PROMPT, "attention")


def test_room_follows_the_adapters(model: Path, adapters: dict[str, Path]) -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("enable_lora", "max_lora_rank")}
    with Engine(model_path=model, lora_paths={"two": adapters["two"]}, **options) as engine:
        assert engine.config.enable_lora
        assert (engine.config.max_lora_rank, engine.config.lora_target_modules) == (2, ("q_proj", "v_proj"))
        with pytest.raises(AdapterError, match="max_lora_rank is 2"):
            engine.load_lora_adapter("all", str(adapters["all"]))
    with Engine(model_path=model, enable_lora=True, lora_target_modules=["q_proj"], **options) as engine:
        assert engine.config.max_lora_rank == 16
        with pytest.raises(AdapterError, match="lora_target_modules"):
            engine.load_lora_adapter("two", str(adapters["two"]))
    with Engine(model_path=model, **options) as engine:
        with pytest.raises(InvalidRequest, match="enable_lora"):
            engine.load_lora_adapter("two", str(adapters["two"]))
        with pytest.raises(InvalidRequest, match="enable_lora"):
            ask(engine, PROMPT, "two")


def test_wrong_names_and_loads(engine: Engine, adapters: dict[str, Path], tmp_path: Path) -> None:
    for name in ("al", 7, ["all"]):
        with pytest.raises(InvalidRequest, match="adapter"):
            ask(engine, PROMPT, name)
    with pytest.raises(InvalidRequest, match="2 values for 1 prompts"):
        engine.generate(input_ids=[PROMPT], lora_path=["all", None])
    with pytest.raises(InvalidRequest, match="already"):
        engine.load_lora_adapter("all", str(adapters["two"]))
    for name, path in (("", "x"), ("x", ""), (None, "x"), ("x", 3)):
        with pytest.raises(InvalidRequest, match="must be a text"):
            engine.load_lora_adapter(name, path)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="neither"):
        engine.load_lora_adapter("new", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidRequest, match="did you mean 'all'"):
        engine.unload_lora_adapter("al")
    assert set(ALL) == set(engine.config.lora_target_modules or ())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}])
def test_adapters_among_ranks(
    model: Path, adapters: dict[str, Path], oracles: dict[str | None, Any], options: dict[str, Any]
) -> None:
    with Engine(
        model_path=model, lora_paths=adapters, **{**OPTIONS, **options, "max_loras_per_batch": 2}
    ) as engine:
        names = [None, "all", "attention", "two", "regex", "all"]
        prompts = [PROMPT[i : i + 9 + i] for i in range(len(names))]
        params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        results = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
        for name, prompt, result in zip(names, prompts, results, strict=True):
            assert result["output_ids"] == greedy(oracles[name], prompt, 6)
        check(ask(engine, PROMPT, "regex"), oracles["regex"], PROMPT)
        engine.unload_lora_adapter("all")
        engine.load_lora_adapter("all", str(adapters["two"]))
        assert ask(engine, PROMPT, "all")["output_ids"] == greedy(oracles["two"], PROMPT, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}, {"max_loras_per_batch": 2}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapters_on_a_gpu(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Exactly in float32; bfloat16 with FlashInfer and graphs stays near it."""
    sizes = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = tiny_checkpoint(tmp_path / "model", family, **sizes)
    adapters = {
        name: tiny_adapter(tmp_path / name, model, seed=i, **its) for i, (name, its) in enumerate(KINDS.items())
    }
    oracles = {None: merged(model, None), **{name: merged(model, path) for name, path in adapters.items()}}
    names = [None, "all", "attention", None, "two", "regex", "all", "two"] * 3
    prompts = [[RNG.randrange(3, 380) for _ in range(5 + i)] for i in range(len(names))]
    params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    common = {"skip_tokenizer_init": True, "device": "cuda", "max_total_tokens": 16_384, "check_ledger": True}
    common |= {"lora_paths": adapters, **options}
    with Engine(model_path=model, dtype="float32", attention_backend="triton", **common) as engine:
        results = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
        for name, prompt, result in zip(names, prompts, results, strict=True):
            assert result["output_ids"] == greedy(oracles[name], prompt, 12)
            alone = engine.generate(input_ids=prompt, sampling_params=params, lora_path=name)
            assert alone["output_ids"] == result["output_ids"]
        long = [RNG.randrange(3, 380) for _ in range(240)]  # with others, tiles of many tokens
        for result in engine.generate(
            input_ids=[long[i:] for i in range(6)],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            lora_path="all",
            return_logprob=True,
        ):
            start = 240 - result["meta_info"]["prompt_tokens"]
            expected = logprobs(oracles["all"], long[start:] + result["output_ids"])[-1]
            assert result["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(expected, abs=1e-3)
    with Engine(model_path=model, dtype="bfloat16", **common) as engine:
        for name in oracles:
            replayed = engine.generate(
                input_ids=[PROMPT, PROMPT[:7], PROMPT[:3]],
                sampling_params={"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
                lora_path=[name, None, "two"],
                return_logprob=True,
            )[0]
            told = [its[0] for its in replayed["meta_info"]["output_token_logprobs"]]
            exact = logprobs(oracles[name], PROMPT + replayed["output_ids"])[-4:]
            assert told == pytest.approx(exact, abs=0.35)
            assert max(told) < 0.0
