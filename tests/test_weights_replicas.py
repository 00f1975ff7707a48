"""New weights for several engines that serve as one: all take an update, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from sgl.errors import EngineDead, InvalidRequest, SglError, WeightsError
from sgl.runtime.config import EngineConfig
from sgl.runtime.server.replicas import Replicas
from tests.patience import PATIENCE
from tests.test_replicas import FakeEngine
from tests.test_server_training import shared, started
from tests.test_weights_update import GREEDY, OPTIONS, PROMPT, expected, shaken, tensors_of
from tests.tiny_models import tiny_checkpoint

LONG = {**GREEDY, "max_new_tokens": 100}


async def outcomes(made: Replicas) -> list[Any]:
    """What each of the two engines answers."""
    found = []
    for engine in made._engines:
        assert await engine.call("flush_cache")  # a cold cache may round otherwise
        result = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
        found.append((result["output_ids"], [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]))
    return found


async def refused(call: Coroutine[Any, Any, Any], words: str) -> None:
    with pytest.raises(SglError, match=words):
        await call


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("old") / "m", "llama")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(old, tmp_path_factory.mktemp("new") / "m")


@pytest.mark.slow
def test_all_engines_take_an_update_or_none_does(old: Path, new: Path) -> None:
    whole, name = tensors_of(new), "model.layers.1.self_attn.k_proj.weight"
    noise = whole[name].clone()
    noise[-1, -1] = float("nan")
    names = sorted(whole)
    look = {
        "names": names,
        "dtypes": ["float32"] * len(names),
        "shapes": [list(whole[name].shape) for name in names],
        "group_name": "g",
    }
    firsts, lasts = [expected(old)] * 2, [expected(new)] * 2
    process, port = started([whole[name] for name in names], 3)

    async def check() -> None:
        made = Replicas(
            EngineConfig.from_options({**OPTIONS, "model_path": str(old), "dp_size": 2}), configure=print
        )
        await made.start()
        try:
            assert await outcomes(made) == firsts != lasts
            for wrong, words in (
                ([("other", whole[name])], "no place for: other"),
                ([(name, whole[name][:-1])], "k_proj.weight of the update is"),
                ([(name, noise)], "has numbers NaN"),
            ):
                options = {"serialized_named_tensors": [shared(wrong)], "weight_version": "never"}
                await refused(made.call("update_weights_from_tensor", **options), words)
            await refused(
                made.call("update_weights_from_disk", model_path=str(old / "none")), "neither a checkpoint"
            )
            assert await outcomes(made) == firsts
            tensors = [shared([*whole.items()])]
            await made.call("update_weights_from_tensor", serialized_named_tensors=tensors, weight_version="1")
            assert await outcomes(made) == lasts
            await made.call("update_weights_from_disk", model_path=str(old), weight_version="2")
            assert await outcomes(made) == firsts
            states = [(await its.call("get_server_info"))["weight_version"] for its in made._engines]
            assert states == ["2", "2"]
            place = entry(1, 3, master_address="127.0.0.1", master_port=port)
            await refused(made.call("init_weights_update_group", **place | {"rank_offset": 2}), "more than 3")
            await made.call("init_weights_update_group", **place)
            await made.call("update_weights_from_distributed", **look)
            assert await outcomes(made) == lasts
            process.join(PATIENCE)
            await refused(made.call("update_weights_from_distributed", **look), "did not arrive")
            assert await outcomes(made) == lasts
            await refused(made.call("commit_update"), "no update is held")
            for mode in ("in_place", "retract", "abort"):
                await paused(made, mode)
            released = await made.call("release_memory_occupation", None)
            assert released == {"kv_cache": 2 * (await made.call("get_server_info"))["kv_bytes"]}
            await made.call("update_weights_from_disk", model_path=str(old))
            await made.call("resume_memory_occupation", None)
            assert await made.call("flush_cache")
            assert await outcomes(made) == firsts
            assert await made.call("check_ledger") == []
        finally:
            await made.close()

    asyncio.run(check())


async def paused(made: Replicas, mode: str) -> None:
    """Both engines have something under way."""
    wanted = [(await its.generate(input_ids=PROMPT, sampling_params=LONG))["output_ids"] for its in made._engines]
    running = [asyncio.ensure_future(its.generate(input_ids=PROMPT, sampling_params=LONG)) for its in made._engines]
    while not all(state["num_running_reqs"] for state in (await made.call("get_server_info"))["internal_states"]):
        await asyncio.sleep(0.001)
    await made.call("pause_generation", mode)
    states = (await made.call("get_server_info"))["internal_states"]
    assert [state["is_paused"] for state in states] == [True, True]
    if mode != "abort":
        assert not any(its.done() for its in running)
    await made.call("continue_generation")
    for ids, its in zip(wanted, running, strict=True):
        result = await asyncio.wait_for(its, PATIENCE)
        assert (result["output_ids"] == ids) == (mode != "abort")
        assert (result["meta_info"]["finish_reason"]["type"] == "abort") == (mode == "abort")


def entry(first: int, size: int, **place: Any) -> dict[str, Any]:
    """How a group is entered."""
    there = {"master_address": "h", "master_port": 1, "rank_offset": first, "world_size": size}
    return {**there, "group_name": "g", "backend": "gloo", **place}


class Changing(FakeEngine):
    """An engine that takes updates, or fails at a method."""

    def __init__(self, method: str = "", error: Exception | None = None) -> None:
        super().__init__(fails=False)
        self._method, self._error = method, error
        self.ranks: list[int] = []

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(method)
        if method == "init_weights_update_group":
            self.ranks.append(options["rank_offset"])
        await asyncio.sleep(0)
        if method == self._method and self._error is not None:
            raise self._error
        return True, f"{method} done"


@pytest.mark.parametrize(
    ("method", "error", "first", "ends"),
    [
        ("", None, ["update_weights_from_disk", "commit_update"], None),
        (
            "update_weights_from_disk",
            WeightsError("a bad disk"),
            ["update_weights_from_disk", "drop_update"],
            "disk",
        ),
        ("update_weights_from_disk", EngineDead("gone"), ["update_weights_from_disk", "commit_update"], None),
        ("commit_update", EngineDead("gone"), ["update_weights_from_disk", "commit_update"], None),
        ("commit_update", InvalidRequest("no update is held"), ["update_weights_from_disk", "commit_update"], None),
    ],
    ids=str,
)
def test_none_writes_before_all_have_checked(
    method: str, error: Exception | None, first: list[str], ends: str | None
) -> None:
    async def check() -> None:
        made = Replicas(EngineConfig(dp_size=2), configure=print)
        one, other = Changing(), Changing(method, error)
        made._engines = [one, other]  # type: ignore[list-item]
        asked = made.call("update_weights_from_disk", model_path="folder", weight_version=None)
        if ends is None:
            assert await asked == (True, "commit_update done")
        else:
            await refused(asked, ends)
        assert one.asked == first

    asyncio.run(check())


class Entering(Changing):
    """An engine that waits for the others of a group, until it is told to leave it."""

    _is_left: asyncio.Event | None = None

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(method)
        if method == "destroy_weights_update_group":
            if self._is_left is None:
                raise InvalidRequest("there is no group 'g'")
            self._is_left.set()
            return None
        await asyncio.sleep(0.05)  # it is told to leave before it has begun
        self._is_left = asyncio.Event()
        await self._is_left.wait()
        raise InvalidRequest("the group was left")


def test_a_group_that_one_engine_refuses_is_undone_at_once() -> None:
    async def check() -> None:
        made = Replicas(EngineConfig(dp_size=3), configure=print)
        error = InvalidRequest("there is a group 'g' already")
        engines = Changing("init_weights_update_group", error), Changing(), Entering()
        made._engines = list(engines)  # type: ignore[arg-type]
        asked = made.call("init_weights_update_group", **entry(1, 4))
        await asyncio.wait_for(refused(asked, "there is a group 'g' already"), PATIENCE)
        assert [its.asked[-1].split("_")[0] for its in engines] == ["init", "destroy", "destroy"]

    asyncio.run(check())


def test_every_rank_of_every_engine_enters_a_group_or_none() -> None:
    async def check() -> None:
        made = Replicas(EngineConfig(dp_size=3, tp_size=2), configure=print)
        for fails in (False, True):
            engines = [Changing(), Changing(), Changing("init_weights_update_group", InvalidRequest("late"))]
            if not fails:
                engines[2] = Changing()
            for its in engines:
                its.config = EngineConfig(dp_size=3, tp_size=2)
            made._engines = engines  # type: ignore[assignment]
            asked = made.call("init_weights_update_group", **entry(1, 7))
            if fails:
                await refused(asked, "late")
                assert engines[0].asked[1:] == ["destroy_weights_update_group"]
            else:
                await asked
            assert [its.ranks for its in engines] == [[1], [3], [5]]
        engines[1].is_up = False
        await refused(made.call("init_weights_update_group", **entry(1, 7)), "2 of 3 engines are running")

    asyncio.run(check())
