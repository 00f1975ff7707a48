"""`deterministic=True`: the same bits for a request, whatever else the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sgl
from sgl import Engine
from sgl.errors import ConfigError
from sgl.kernels import cpu
from sgl.kernels.layers import activation
from sgl.kernels.layers.invariant import InvariantMatrix
from sgl.runtime.config import EngineConfig
from sgl.runtime.tier_choice import identity, weights_hash
from tests.bits import CELLS, Bits, Requests, differing
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=f"cannot be compiled: {cpu.why_not()}")

FAMILIES = "llama", "qwen3", "qwen3-moe"
OTHERS = "gemma2", "gpt-oss", "qwen2-moe", "olmo2", "phi3", "glm4"
SMALL = Requests(6, 500, 80, 6)
MANY = Requests(12, 500, 150, 8)


def started(folder: Path, **options: Any) -> Engine:
    return Engine(folder, **{"skip_tokenizer_init": True, "deterministic": True, "check_ledger": True, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    return {name: tiny_checkpoint(path / name, name, vocab_size=500) for name in (*FAMILIES, *OTHERS)}


def reference(folder: Path, requests: Requests, **options: Any) -> list[Bits]:
    """Each request alone, whole, without a cache."""
    with started(folder, disable_radix_cache=True, chunked_prefill_size=-1, **options) as engine:
        return requests.alone(engine)


def check(folder: Path, requests: Requests, expected: list[Bits], **options: Any) -> None:
    with started(folder, **options) as engine:
        for way, found in requests.among_others(engine):
            assert differing(expected, found) == 0, (options, way)
        outputs = [(ids, [], logprobs, best) for ids, _, logprobs, best in expected]
        for way, found in requests.among_others(engine, start=-1):
            found = [(ids, [], logprobs, best) for ids, _, logprobs, best in found]
            assert differing(outputs, found) == 0, (options, way, "outputs alone")


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_others(folders: dict[str, Path], family: str) -> None:
    expected = reference(folders[family], SMALL)
    check(folders[family], SMALL, expected, chunked_prefill_size=7, page_size=4, speculative_algorithm="NGRAM")
    check(folders[family], SMALL, expected, max_total_tokens=160, page_size=4)  # some are retracted


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_anything(folders: dict[str, Path], family: str, backend: str) -> None:
    requests = MANY if backend == "cpu" else Requests(4, 500, 60, 4)
    expected = reference(folders[family], requests, attention_backend=backend)
    for options in CELLS.values():
        check(folders[family], requests, expected, attention_backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(folders: dict[str, Path], family: str) -> None:
    expected = reference(folders[family], MANY)
    check(folders[family], MANY, expected, chunked_prefill_size=7, page_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_windows_that_give_pages_up(folders: dict[str, Path], family: str) -> None:
    """Beyond a window, a row's pages begin elsewhere in each step."""
    for backend in ("cpu", "torch"):
        requests = Requests(6, 500, 230, 20, seed=1)
        expected = reference(folders[family], requests, attention_backend=backend)
        check(folders[family], requests, expected, attention_backend=backend, chunked_prefill_size=50, page_size=4)


@pytest.mark.slow
def test_copies_in_host_memory_and_files(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = reference(folders["llama"], MANY)
    options: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "page_size": 4}
    options |= {"hicache_storage_dir": str(tmp_path), "max_total_tokens": 400, "hicache_ratio": 16.0}
    with started(folders["llama"], **{**options, "deterministic": False}) as engine:
        MANY.alone(engine)  # whose files are of no use
    for _ in range(2):  # the second finds files
        check(folders["llama"], MANY, expected, **options)


def test_pages_of_other_bits_are_another_models(folders: dict[str, Path]) -> None:
    """So neither files nor another engine's pages bring them."""
    found = []
    for options in ({"deterministic": False}, {}, {}, {"attention_backend": "torch"}):
        with started(folders["llama"], **{"attention_backend": "cpu", **options}) as engine:
            model = engine._started.model
            assert model is not None
            found.append(identity(engine.config, model, model.config, weights_hash(model.weights.tensors())))
    assert found[1] == found[2]
    assert len(set(found)) == 3


@pytest.mark.slow
def test_threads_do_not_matter(folders: dict[str, Path]) -> None:
    expected = reference(folders["llama"], MANY)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(folders["llama"], MANY, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_add_in_order(folders: dict[str, Path], ranks: dict[str, int]) -> None:
    for family in ("llama", "qwen3-moe") if "tp_size" in ranks else ("llama",):
        expected = reference(folders[family], SMALL, **ranks)
        check(folders[family], SMALL, expected, chunked_prefill_size=7, **ranks)


@sgl.function
def branches(s: Any, topic: str) -> None:
    s += f"About {topic}: "
    s += sgl.gen("first", max_tokens=6, temperature=1.0)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f" {i}. " + sgl.gen("point", regex="[a-z ]{4,12}", max_tokens=8, temperature=1.0)
    forks.join()
    s += forks[0]["point"] + sgl.gen("last", max_tokens=4)


@pytest.mark.slow
def test_programs_with_forks_and_constraints(tmp_path: Path) -> None:
    """Alone and among others: forks share pages, constraints force text."""
    folder = tiny_checkpoint(tmp_path / "llama", "llama", with_tokenizer=True)
    topics = [{"topic": f"{'cats and ' * (i % 5)}dogs {i}"} for i in range(12)]

    def texts(states: Any) -> list[str]:
        return [state.text() for state in states]

    with Engine(folder, deterministic=True, disable_radix_cache=True, speculative_algorithm="off") as engine:
        alone = texts(branches.run(backend=engine, seed=7, **topic) for topic in topics)
    for options in ({}, {"chunked_prefill_size": 5}, {"speculative_algorithm": "auto"}, {"max_total_tokens": 512}):
        with Engine(folder, deterministic=True, **options) as engine:
            for _ in range(2):
                assert texts(branches.run_batch(topics, backend=engine, seed=7)) == alone, options


@pytest.mark.slow
def test_forced_text_is_cut_into_the_same_tokens(tmp_path: Path) -> None:
    """Whether it is appended, or each of its tokens is sampled for its logprob or under a penalty."""
    folder = tiny_checkpoint(tmp_path / "llama", "llama", with_tokenizer=True, vocab_size=384)
    constrained = {"regex": r"(yes|no|perhaps), as was said before: [a-z ]{1,20}", "max_new_tokens": 60}
    params = [{**constrained, "temperature": 1.0, "seed": seed} for seed in range(6)]
    found: list[list[list[int]]] = []
    base = {"device": "cpu", "deterministic": True, "check_ledger": True, "speculative_algorithm": "off"}
    for options in ({}, {"disable_jump_forward": True}, {"speculative_algorithm": "GRAMMAR"}, {"page_size": 4}):
        with Engine(folder, **{**base, **options}) as engine:
            for more in ({}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 2}):
                results = engine.generate(input_ids=[[5, 6, 7]] * 6, sampling_params=params, **more)
                found.append([result["output_ids"] for result in results])
                alone = engine.generate(input_ids=[5, 6, 7], sampling_params=params[2], **more)
                assert alone["output_ids"] == found[-1][2]
            state = engine.get_server_info()["internal_states"][0]
            assert (state["forced_tokens"] > 0) == (options != {"disable_jump_forward": True})
    assert all(its == found[0] for its in found)


@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 40), st.booleans(), st.data())
def test_a_product_is_the_same_for_any_rows(n: int, k: int, rows: int, has_bias: bool, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    x, plain = torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator)
    matrix, bias = InvariantMatrix.of(plain), torch.randn(n, generator=generator) if has_bias else None
    whole = matrix.times(x, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, plain, bias), rtol=1e-4, atol=1e-4)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert torch.equal(matrix.times(x[start:stop], bias), whole[start:stop])
    assert matrix.times(x[:0], bias).shape == (0, n)


@pytest.mark.parametrize(
    "gate",
    [activation.silu_and_mul, activation.gelu_and_mul, lambda x: activation.clamped_and_mul(x, 1.7, 3.0)],
    ids=["silu", "gelu", "clamped"],
)
def test_gates_are_the_same_for_any_rows(gate: Any) -> None:
    x = torch.randn(37, 2 * 45, generator=torch.Generator().manual_seed(0)) * 4
    whole = gate(x)
    torch.testing.assert_close(whole, gate(x.double()).float(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(gate(x[i : i + 1]), whole[i : i + 1]) for i in range(len(x)))
    capped = activation.cap_(x.clone(), 5.0)
    torch.testing.assert_close(capped, 5.0 * torch.tanh(x / 5.0), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(activation.cap_(x[i].clone(), 5.0), capped[i]) for i in range(len(x)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "bfloat16"}, "float32"),
        ({"model_impl": "transformers"}, "row by row"),
        ({"enable_lora": True}, "merge the adapter"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(folders: dict[str, Path], options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic=True: .*{why}") as caught:
        started(folders["llama"], **options)
    assert caught.value.option == "deterministic"


def test_the_originals_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig.from_options({"enable_deterministic_inference": True}).deterministic
    assert not EngineConfig.from_options({}).deterministic
    monkeypatch.setenv("SGL_DETERMINISTIC", "1")
    assert EngineConfig.from_options({}).deterministic


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_new_weights_are_invariant_too(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    other = tiny_checkpoint(tmp_path / "other", family, vocab_size=500, seed=1)
    few = Requests(3, 500, 40, 4)
    expected = reference(other, few)
    with started(folders[family]) as engine:
        assert differing(expected, few.bits(engine, range(3))) > 0
        engine.update_weights_from_disk(str(other))
        assert differing(expected, few.bits(engine, range(3))) == 0
