"""New weights for models that several processes hold: each rank's part, refusals that leave all ranks alone, and
logprobs of groups of samples, bit for bit from run to run."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl import Engine
from sgl.errors import EngineDead, InvalidRequest, WeightsError
from sgl.kernels import cpu
from sgl.runtime.model.update import ranks
from tests.live_server import slow_steps
from tests.patience import PATIENCE, wait_until
from tests.ports import free_port
from tests.test_gdn_models import tiny_hybrid
from tests.test_mla import MODELS as MLA
from tests.test_rollouts import PROMPT as SAMPLED
from tests.test_rollouts import computed, group, steps
from tests.test_server_training import started
from tests.test_weights_update import GREEDY, OPTIONS, PROMPT, expected, outcome, shaken, tensors_of
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import tiny_transformer

DETERMINISTIC: dict[str, Any] = {**OPTIONS, "deterministic": True}
LONG = {**GREEDY, "max_new_tokens": 100}
CUTS: list[Any] = [
    {"tp_size": 2},
    {"pp_size": 2},
    pytest.param({"tp_size": 2, "pp_size": 2}, marks=pytest.mark.slow),
]


def cold(engine: Engine) -> Any:
    """The outcome; a cached prefix may round otherwise."""
    assert engine.flush_cache()
    return outcome(engine)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("old") / "m", "llama")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(old, tmp_path_factory.mktemp("new") / "m")


@pytest.mark.parametrize("cut", [CUTS[0], pytest.param(CUTS[1], marks=pytest.mark.slow), CUTS[2]], ids=str)
def test_all_ranks_take_an_update_or_none_does(old: Path, new: Path, cut: dict[str, Any]) -> None:
    wanted = expected(new, **cut)
    with Engine(old, **OPTIONS, **cut) as engine:
        before = outcome(engine)
        whole = tensors_of(new)
        name = "model.layers.1.self_attn.k_proj.weight"  # of the second stage
        noise = whole[name].clone()
        noise[-1, -1] = float("nan")  # of the second rank
        for wrong, words in (
            ({"other.weight": whole[name]}, "no place for: other.weight"),
            ({name: whole[name][:-1]}, r"k_proj.weight of the update is \[31, 64\]; this model's is \[32, 64\]"),
            ({name: noise}, "k_proj.weight of the update has numbers NaN"),
        ):
            with pytest.raises(WeightsError, match=words):
                engine.update_weights({**whole, **wrong}, weight_version="never")
            assert cold(engine) == before
            assert engine.weight_version == "default"
        assert engine.update_weights(whole, weight_version="1").success
        assert outcome(engine) == wanted != before
        engine.update_weights_from_disk(old, weight_version="0")
        assert outcome(engine) == before
        assert engine.check_ledger() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "qwen3-moe", "deepseek", "hybrid"])
def test_stages_of_other_models_take_their_layers(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": True, "num_hidden_layers": 3} if kind == "tied" else {}
    if kind == "deepseek":
        first = tiny_transformer(tmp_path / "old", "DeepseekV3ForCausalLM", **MLA["v3"][1])
    elif kind == "hybrid":
        first, _ = tiny_hybrid(tmp_path / "old", "3.5-moe")
    else:
        first = tiny_checkpoint(tmp_path / "old", "llama" if kind == "tied" else kind, **options)
    other = shaken(first, tmp_path / "new")
    wanted = expected(other, pp_size=2)
    with Engine(first, **OPTIONS, pp_size=2) as engine:
        before = outcome(engine)
        engine.update_weights(tensors_of(other))
        assert outcome(engine) == wanted != before
        engine.update_weights_from_disk(first)
        assert outcome(engine) == before


@pytest.mark.costly
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
    ],
)
def test_every_tensor_is_read_from_the_ranks_that_have_it(family: str, tmp_path: Path, cut: dict[str, Any]) -> None:
    folder = tiny_checkpoint(tmp_path / "m", family)
    with Engine(folder, **OPTIONS) as engine:
        wanted = engine.weights_hash()
    with Engine(folder, **OPTIONS, **cut) as engine:
        assert engine.weights_hash() == wanted
        before = outcome(engine)
        for name, its in tensors_of(folder).items():
            found = torch.tensor(engine.get_weights_by_name(name, 1000))
            torch.testing.assert_close(found, its.float(), rtol=0, atol=1e-6, msg=name)
        assert outcome(engine)[0] == before[0]
        with pytest.raises(WeightsError, match="no place for: other"):
            engine.get_weights_by_name("other")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_hash_is_of_all_ranks_numbers(old: Path, cut: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"  # of the last stage
    changed = tensors_of(old)[name]
    changed[-1, -1] += 1  # of the last rank
    seen = []
    for options in ({}, cut):
        with Engine(old, **OPTIONS, **options) as engine:
            before = engine.weights_hash()
            engine.update_weights({name: changed})
            seen.append((before, engine.weights_hash()))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


@pytest.mark.slow
def test_a_hash_of_what_is_not_read_is_of_all_ranks(tmp_path: Path) -> None:
    folder = tiny_transformer(tmp_path / "m", "DeepseekV3ForCausalLM", **MLA["v3"][1])
    whole = tensors_of(folder)
    name = next(its for its in whole if its.endswith("layers.1.self_attn.o_proj.weight"))
    with Engine(folder, **OPTIONS, tp_size=2) as engine:
        before = engine.weights_hash()
        assert engine.weights_hash() == before
        changed = whole[name].clone()
        changed[0, -1] += 1  # of the last rank
        engine.update_weights({name: changed})
        assert engine.weights_hash() != before
        engine.update_weights({name: whole[name]})
        assert engine.weights_hash() == before


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made within it."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = {its.untyped_storage().data_ptr() for its in args if isinstance(its, torch.Tensor)}
            if made.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma2", "qwen3-moe", "phi3"])
def test_rows_of_a_tensor_take_no_room_for_all_of_it(family: str, tmp_path: Path) -> None:
    """And any rows are those of the checkpoint, also where they are a part of a head."""
    folder = tiny_checkpoint(tmp_path / "m", family)
    whole = tensors_of(folder)
    with Engine(folder, **OPTIONS) as engine:
        writer = engine._weights.writer
        writer.begin(list(whole))
        for name, its in whole.items():
            for first, last in {(0, 1), (len(its) - 1, len(its)), (len(its) // 3, len(its) // 2 + 1)}:
                with Largest() as largest, torch.inference_mode():
                    found = writer.rows(name, first, last)
                torch.testing.assert_close(found, its[first:last].float(), rtol=0, atol=1e-6)
                heads = 32 * math.prod(its.shape[1:])  # whole heads are turned back
                assert largest.most <= max(found.numel(), heads), name
        writer.finish()


@pytest.mark.slow
def test_ranks_exchange_the_rows_that_are_wanted(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole vocabulary in float32 may be more than there is memory for, and would end the engine."""
    sizes: list[int] = []

    total = ranks.total

    def counted(model: Any, part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return total(model, part)

    monkeypatch.setattr(ranks, "total", counted)
    wanted = tensors_of(old)
    with Engine(old, **OPTIONS, tp_size=2) as engine:
        for name, most in (("model.embed_tokens.weight", 3), ("model.norm.weight", 10**30)):
            found = torch.tensor(engine.get_weights_by_name(name, most))
            torch.testing.assert_close(found, wanted[name][: min(most, 1 << 60)].float(), rtol=0, atol=1e-6)
            assert sizes.pop() == len(found)


@pytest.mark.slow
@pytest.mark.skipif(cpu.why_not() is not None, reason=f"cannot be compiled: {cpu.why_not()}")
@pytest.mark.parametrize("cut", [CUTS[0], pytest.param(CUTS[1], marks=pytest.mark.slow), CUTS[2]], ids=str)
def test_a_groups_logprobs_are_those_of_another_engines_prompts_bit_for_bit(
    old: Path, new: Path, cut: dict[str, Any]
) -> None:
    """Before an update and after it, and from run to run."""
    runs = []
    for _ in range(2):
        with Engine(old, **DETERMINISTIC, **cut) as engine:
            before = group(engine)
            engine.update_weights(tensors_of(new))
            runs.append((before, group(engine)))
    assert runs[0] == runs[1]
    for folder, samples in zip((old, new), runs[0], strict=True):
        with Engine(folder, **{**DETERMINISTIC, "chunked_prefill_size": 9}, **cut) as other:
            assert computed(other, samples) == [logprobs for _, logprobs in samples]


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS[:2], ids=str)
def test_a_trainer_broadcasts_to_all_ranks(old: Path, new: Path, cut: dict[str, Any]) -> None:
    """Each is a rank of its group, though rank 0 checks what comes and gives it to all."""
    whole = tensors_of(new)
    names = sorted(whole)
    noise = whole[names[0]].clone()
    noise[0, 0] = float("inf")
    process, port = started([*(whole[name] for name in names), noise], 3)
    look: dict[str, Any] = {"names": names, "dtypes": ["float32"] * len(names)}
    look["shapes"] = [list(whole[name].shape) for name in names]
    wanted = expected(new, **cut)
    with Engine(old, **OPTIONS, **cut) as engine:
        before = cold(engine)
        with pytest.raises(InvalidRequest, match=r"rank_offset=1: 2 ranks .* are more than 2"):
            engine.init_weights_update_group("127.0.0.1", port, 1, 2, "g", "gloo")
        engine.init_weights_update_group("127.0.0.1", port, 1, 3, "g", "gloo")
        with pytest.raises(WeightsError, match="no place for: other"):
            engine.update_weights_from_distributed(["other"], ["float32"], [[1]], "g")
        assert cold(engine) == before
        engine.update_weights_from_distributed(**look, group_name="g")
        assert cold(engine) == wanted != before
        with pytest.raises(WeightsError, match="has numbers from"):
            engine.update_weights_from_distributed(names[:1], ["float32"], [list(noise.shape)], "g")
        process.join(PATIENCE)
        with pytest.raises(InvalidRequest, match="did not arrive"):
            engine.update_weights_from_distributed(**look, group_name="g")
        assert cold(engine) == wanted
        with pytest.raises(InvalidRequest, match="no group 'g'"):
            engine.destroy_weights_update_group("g")
        with pytest.raises(InvalidRequest, match="came about within"):
            engine.init_weights_update_group("127.0.0.1", free_port(), 1, 3, "g", "gloo", timeout=0.2)
        assert cold(engine) == wanted


def test_what_is_held_is_written_later_or_never(old: Path, new: Path) -> None:
    with Engine(old, **OPTIONS) as engine:
        before = cold(engine)
        with pytest.raises(InvalidRequest, match="no update is held"):
            engine.commit_update()
        assert "held" in engine.update_weights_from_disk(new, weight_version="1", hold=True).message
        assert (cold(engine), engine.weight_version) == (before, "default")
        engine.drop_update()
        with pytest.raises(InvalidRequest, match="no update is held"):
            engine.commit_update()
        engine.update_weights_from_disk(new, weight_version="1", hold=True)
        with pytest.raises(WeightsError, match="no place"):
            engine.update_weights({"other": torch.ones(2)}, hold=True)
        assert engine.config.model_path == str(old)
        assert engine.commit_update().success
        assert (cold(engine), engine.weight_version) == (expected(new), "1")
        assert engine.config.model_path == str(new)
        engine.update_weights(tensors_of(old), hold=True)
        engine.commit_update()
        assert cold(engine) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["update", *(pytest.param(its, marks=pytest.mark.slow) for its in ("read", "release"))]
)
def test_a_rank_that_is_gone_ends_the_engine_and_nobody_waits(old: Path, what: str) -> None:
    calls: dict[str, Any] = {
        "update": lambda: engine.update_weights_from_disk(old),
        "read": lambda: engine.get_weights_by_name("model.norm.weight"),
        "release": lambda: engine.release_memory_occupation(),
    }
    with Engine(old, **OPTIONS, tp_size=2) as engine:
        group = engine._started.group
        assert group is not None
        os.kill(group._processes[1].pid, signal.SIGSTOP)  # it takes nothing any more

        def kill() -> None:
            time.sleep(0.3)
            group._processes[1].kill()

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(EngineDead):
            calls[what]()
        wait_until(lambda: engine.heartbeat_age() == float("inf"))


class Stopped:
    """Two requests that are paused under way."""

    def __init__(self, engine: Engine, mode: Any) -> None:
        self._engine, self.results = engine, list[Any]()
        before = steps(engine)
        self._thread = threading.Thread(target=self._run, daemon=True)
        with slow_steps(engine):
            self._thread.start()
            wait_until(lambda: steps(engine) > before + 8)
            engine.pause_generation(mode)
        self.so_far = engine._loop.call(self._ids)

    def _run(self) -> None:
        self.results = self._engine.generate(
            input_ids=[PROMPT, PROMPT[:9]], sampling_params=LONG, return_logprob=True
        )

    def _ids(self) -> list[list[int]]:
        live = self._engine._loop._live
        return [list(live[uid].request.output_ids) for uid in sorted(live)]

    def wait(self) -> list[Any]:
        self._engine.continue_generation()
        self._thread.join(PATIENCE)
        return self.results


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.slow)], ids=str)
def test_generations_of_ranks_are_paused_in_three_ways(old: Path, new: Path, cut: dict[str, Any]) -> None:
    with Engine(old, **OPTIONS, **cut) as engine, Engine(new, **OPTIONS) as other:
        plain = engine.generate(input_ids=[PROMPT, PROMPT[:9]], sampling_params=LONG)
        for mode in ("in_place", "retract"):
            assert [its["output_ids"] for its in Stopped(engine, mode).wait()] == [
                its["output_ids"] for its in plain
            ]
        ended = Stopped(engine, "abort").wait()
        assert all(its["meta_info"]["finish_reason"]["type"] == "abort" for its in ended)
        assert all(0 < len(its["output_ids"]) < 100 for its in ended)
        stopped = Stopped(engine, "retract")
        engine.update_weights_from_disk(new, weight_version="1")
        found = stopped.wait()
        for prompt, so_far, result in zip([PROMPT, PROMPT[:9]], stopped.so_far, found, strict=True):
            ids = result["output_ids"]
            assert ids[: len(so_far)] == so_far
            assert 0 < len(so_far) < 100
            rest = {**LONG, "max_new_tokens": 100 - len(so_far)}
            assert (
                ids[len(so_far) :] == other.generate(input_ids=prompt + so_far, sampling_params=rest)["output_ids"]
            )
            assert result["meta_info"]["weight_version"] == "1"
        assert engine.check_ledger() == []


@pytest.mark.slow
@pytest.mark.parametrize("cut", [pytest.param({"tp_size": 2}, marks=pytest.mark.slow), {"pp_size": 2}], ids=str)
def test_each_token_has_the_logprob_of_the_weights_that_sampled_it(
    old: Path, new: Path, cut: dict[str, Any]
) -> None:
    """Updates while steps are under way, without a pause: no token is of both."""
    with Engine(old, **OPTIONS, **cut) as engine:
        stream = engine.generate(input_ids=SAMPLED, sampling_params=LONG, return_logprob=True, stream=True)
        events = [next(stream) for _ in range(4)]
        engine.update_weights_from_disk(new, weight_version="1")
        events += list(stream)
    ids = events[-1]["output_ids"]
    found = [entry[0] for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    num_old = len(
        next(its for its in reversed(events) if its["meta_info"]["weight_version"] == "default")["output_ids"]
    )
    assert 4 <= num_old < 100
    with Engine(old, **OPTIONS) as first:
        wanted = computed(first, [(ids[:num_old], [])])[0]
    assert found[:num_old] == pytest.approx(wanted, abs=1e-4)
