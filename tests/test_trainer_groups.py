"""Process groups with trainers: entered, left and used by several ranks, in an order that cannot deadlock."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore

from sgl import Engine
from sgl.errors import InvalidRequest
from sgl.runtime.model.update import group as groups
from sgl.runtime.model.update.group import FollowerGroups, TrainerGroup
from sgl.runtime.parallel import wire
from tests.live_server import slow_steps
from tests.patience import PATIENCE, wait_until
from tests.ports import free_port
from tests.test_rollouts import steps
from tests.test_weights_update import GREEDY, OPTIONS, PROMPT
from tests.tiny_models import tiny_checkpoint

NORM = "model.norm.weight"
LOOK = [NORM], ["float32"], [[64]], "g"


class Trainer:
    """A group's rank 0, in this process: torch's backend, with the keys that torch gives it."""

    def __init__(self, size: int = 2) -> None:
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self.port, self._size = self._store.port, size
        self._entering: Future[Any] = Future()
        threading.Thread(target=self._enter, daemon=True).start()

    def _enter(self) -> None:
        c10d: Any = distributed.distributed_c10d
        store: Any = self._store
        for prefix in ("g", "g/", "cpu/"):
            store = c10d.PrefixStore(prefix, store)
        try:
            self._entering.set_result(c10d.ProcessGroupGloo(store, 0, self._size))
        except RuntimeError as error:
            self._entering.set_exception(error)

    def broadcast(self, *values: float) -> None:
        for value in values:
            self.broadcast_tensor(torch.full((64,), float(value)))

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._entering.result(PATIENCE).broadcast([tensor], options).wait()

    @property
    def place(self) -> tuple[Any, ...]:
        return "127.0.0.1", self.port, 1, self._size, "g", "gloo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("m"), "llama")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, **OPTIONS) as engine:
        yield engine


def later(function: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def update(engine: Engine, value: float, trainer: Trainer) -> None:
    done = later(lambda: engine.update_weights_from_distributed(*LOOK))
    trainer.broadcast(value)
    assert done.result(PATIENCE).success
    assert engine.get_weights_by_name(NORM) == [value] * 64


def test_an_engine_that_ends_leaves_its_groups_and_another_enters_one_of_the_same_name(folder: Path) -> None:
    for value in (1.0, 2.0):
        trainer = Trainer()
        engine = Engine(folder, **OPTIONS)
        success, message = engine.init_weights_update_group(*trainer.place)
        assert success, message
        update(engine, value, trainer)
        group = engine._started.trainers.get("g")
        engine.shutdown()
        assert group.is_left
        with pytest.raises(InvalidRequest, match="the engine is shut down"):
            engine._started.trainers.enter("g", *trainer.place[:4], "gloo", 1.0)


def test_two_engines_of_a_process_enter_groups_of_the_same_name() -> None:
    trainers = Trainer(), Trainer()
    entered = [TrainerGroup("127.0.0.1", each.port, 1, 2, "g", "gloo", PATIENCE) for each in trainers]
    found = torch.zeros(64)
    for value, (group, trainer) in enumerate([*zip(entered, trainers, strict=True)] * 2):
        group.entered()
        sent = later(partial(trainer.broadcast, value))
        group.receive([found.zero_()])
        sent.result(PATIENCE)
        assert found.tolist() == [value] * 64
    for group in entered:
        group.close()


@pytest.mark.parametrize("how", ["destroyed", "shutdown"])
def test_who_enters_a_group_that_is_left_waits_no_longer(engine: Engine, how: str) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # whose trainer never comes
    place = "127.0.0.1", store.port, 1, 2, "g", "gloo"
    for _ in range(2 if how == "destroyed" else 1):  # the name is free again
        entering = later(lambda: engine.init_weights_update_group(*place))
        wait_until(lambda: "g" in engine._started.trainers._groups)
        if how == "destroyed":
            engine.destroy_weights_update_group("g")
        else:
            engine.shutdown()
        with pytest.raises(InvalidRequest, match=r"no group 'g' of 2 .* came about .*: the group was left"):
            entering.result(PATIENCE)


class FakeRanks:
    """Of an engine of one, as another rank would see it."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.number = events, 0

    def send(self, frame: Any) -> None:
        self.events.append(frame)

    def lost(self) -> list[int]:
        return [0, self.number]


def test_a_group_that_another_rank_cannot_enter_is_undone_at_once(engine: Engine) -> None:
    ranks: Any = FakeRanks([])
    engine._weights._ranks = ranks
    store = TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    entering = later(lambda: engine.init_weights_update_group("127.0.0.1", store.port, 1, 3, "g", "gloo"))
    wait_until(lambda: ranks.events)
    assert ranks.events[0].name == "g"
    ranks.number = ranks.events[0].number
    with pytest.raises(InvalidRequest, match="rank 1 is not of it, for a reason that is in the log"):
        entering.result(PATIENCE)
    assert isinstance(ranks.events[-1], wire.LeaveGroup)
    with pytest.raises(InvalidRequest, match="there is no group 'g'"):
        engine.destroy_weights_update_group("g")


def test_a_rank_tells_which_group_it_could_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_TRY_SECONDS", 0.1)
    told: list[int] = []
    entered = FollowerGroups(1, torch.device("cpu"), told.append)
    entered.enter("127.0.0.1", free_port(), 1, 3, "left", "gloo", PATIENCE, 6)
    entered.leave("left", 6)  # which is no failure
    entered.enter("127.0.0.1", free_port(), 1, 3, "g", "gloo", 0.3, 7)
    wait_until(lambda: told)
    time.sleep(0.3)
    assert told == [7]


def test_updates_of_a_group_come_one_after_the_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their broadcasts, in an order of the threads' own, would be taken for one another."""
    heard: list[int] = []
    hear = TrainerGroup.hear
    monkeypatch.setattr(TrainerGroup, "hear", lambda self, its: (heard.append(len(its)), hear(self, its))[1])
    trainer = Trainer()
    engine.init_weights_update_group(*trainer.place)
    first = later(lambda: engine.update_weights_from_distributed(*LOOK))
    wait_until(lambda: heard)
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
    second = later(lambda: engine.update_weights_from_distributed(names, ["float32"] * 2, [[64]] * 2, "g"))
    time.sleep(0.2)
    assert heard == [1]
    trainer.broadcast(1.0, 2.0, 3.0)
    assert first.result(PATIENCE).success
    assert second.result(PATIENCE).success
    assert [engine.get_weights_by_name(name, 1) for name in (NORM, *names)] == [[1.0], [2.0], [3.0]]


def generation(engine: Engine, params: dict[str, Any]) -> Future[Any]:
    """One under way."""
    before = steps(engine)
    running = later(lambda: engine.generate(input_ids=PROMPT, sampling_params=params))
    wait_until(lambda: steps(engine) > before + 3)
    return running


def check_stands_still(engine: Engine, trainer: Trainer, num_heard: Callable[[], int], length: int) -> None:
    """Over NCCL, no step is under way while a broadcast is; other exchanges of ranks wait for it, too. num_heard:
    broadcasts that were begun; length: of generations, in tokens."""
    params = {**GREEDY, "max_new_tokens": length}
    wanted = engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]
    norm = torch.tensor(engine.get_weights_by_name(NORM))
    engine.init_weights_update_group(*trainer.place)
    engine._started.trainers.get("g").backend = "nccl"  # which differs in what it may wait for
    with slow_steps(engine):
        running = generation(engine, params)
        updating = later(lambda: engine.update_weights_from_distributed(*LOOK))
        wait_until(lambda: num_heard() == 1)
    before = steps(engine)
    reading, pausing = later(lambda: engine.get_weights_by_name(NORM)), later(lambda: engine.pause_generation())
    time.sleep(0.3)
    assert steps(engine) == before
    assert not any(each.done() for each in (running, updating, reading, pausing))
    wait_until(lambda: engine.heartbeat_age() < 0.3)
    trainer.broadcast_tensor(norm)
    assert updating.result(PATIENCE).success
    assert torch.equal(torch.tensor(reading.result(PATIENCE)), norm)
    pausing.result(PATIENCE)
    ended = running.result(PATIENCE)
    assert ended["output_ids"] == wanted[: len(ended["output_ids"])]
    assert len(ended["output_ids"]) < length
    engine.continue_generation()
    with slow_steps(engine):
        running = generation(engine, params)
        updating = later(lambda: engine.update_weights_from_distributed(*LOOK))
        wait_until(lambda: num_heard() == 2)
    engine.destroy_weights_update_group("g")  # a trainer that does not come costs no more than this
    with pytest.raises(InvalidRequest, match="the group was left"):
        updating.result(PATIENCE)
    assert running.result(PATIENCE)["output_ids"] == wanted


def test_a_broadcast_over_nccl_has_its_place_between_two_steps(engine: Engine) -> None:
    events: list[Any] = []
    forward, receive = engine._loop._runner.forward, TrainerGroup.receive

    def launch(batch: Any) -> Any:
        events.append("step")
        return forward(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._loop._runner, "forward", launch)
        patch.setattr(
            TrainerGroup, "receive", lambda *its: (events.append("begin"), receive(*its), events.append("end"))
        )
        engine._weights._ranks = FakeRanks(events)  # type: ignore[assignment]
        hears = [True, True]
        check_stands_still(engine, Trainer(), lambda: events.count("begin"), 400)
    assert [its.is_alone for its in events if isinstance(its, wire.Broadcast)] == hears
    for place, its in enumerate(events):
        if its == "begin":
            assert isinstance(events[place - 1], wire.Broadcast)
        if its == "begin" and "end" in events[place:]:
            assert events[place + 1] == "end", "nothing is launched meanwhile"


@pytest.mark.slow
def test_ranks_hear_a_broadcast_over_nccl_between_the_same_steps(folder: Path) -> None:
    """gloo in its place, with two ranks that wait as for NCCL."""
    with Engine(folder, **OPTIONS, tp_size=2) as engine:
        alone: list[Any] = []
        group = engine._started.group
        assert group is not None
        send = group.send

        def note(frame: Any) -> None:
            send(frame)
            if isinstance(frame, wire.Broadcast):
                alone.append(frame)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "send", note)
            check_stands_still(
                engine, Trainer(3), lambda: len(alone), 120
            )  # a token takes ranks without cores 0.3 s
        assert [its.is_alone for its in alone] == [True, True]


class FakeGroup:
    """Whose broadcasts come when the test says so."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *place: Any) -> None:
        self.number, self.is_left = place[-1], False
        self._entering: Future[None] = Future()
        self.heard: list[Future[None]] = []
        self.made.append(self)

    def hear(self, tensors: Any) -> Future[None]:
        self.heard.append(Future())
        return self.heard[-1]

    def _settle(self, done: Future[None], why_lost: Any) -> None:
        while not self.is_left and not wait([done], 0.01).done:
            pass

    def close(self) -> None:
        self.is_left = True


def test_a_rank_does_nothing_else_before_it_has_heard_what_it_hears_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TrainerGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "made", [])
    entered = FollowerGroups(1, torch.device("cpu"), print)
    entered.enter("h", 1, 1, 3, "g", "nccl", 9.0, 1)
    [group] = FakeGroup.made
    entered.hear("g", [("float32", 4)], False)
    entered.settle()  # steps go on beside gloo's
    entered.hear("g", [("bfloat16", 4)], True)
    settling = later(entered.settle)
    time.sleep(0.1)
    assert not settling.done()
    group.heard[1].set_result(None)
    settling.result(PATIENCE)
    entered.hear("g", [("float32", 4)], True)
    entered.leave("g", 7)  # a late word of an earlier one
    assert not group.is_left
    entered.leave("g", 1)
    entered.settle()  # of a group that is left, nothing is awaited
    assert not group.heard[2].done()


@pytest.mark.parametrize(
    ("address", "url"),
    [("10.0.0.1", "tcp://10.0.0.1:9"), ("::1", "tcp://[::1]:9"), ("[::1]", "tcp://[::1]:9"), ("h", "tcp://h:9")],
)
def test_addresses_are_urls_with_and_without_brackets(
    monkeypatch: pytest.MonkeyPatch, address: str, url: str
) -> None:
    entered: list[str] = []
    monkeypatch.setattr(TrainerGroup, "_enter", lambda self, place, *others: entered.append(place))
    group = TrainerGroup(address, 9, 1, 2, "g", "gloo", 5.0)
    group.entered()
    group.close()
    assert entered == [url]


@pytest.mark.parametrize("trainer_is_there", [True, False])
def test_nobody_waits_for_what_a_left_group_had_begun(trainer_is_there: bool) -> None:
    """Gloo's destructor does, to the group's time limit: an engine stood still for minutes when a garbage collection on
    its thread came to a group whose broadcast had not come."""
    trainer = Trainer()
    group = TrainerGroup("127.0.0.1", trainer.port, 1, 2, "g", "gloo", 100 * PATIENCE)
    group.entered()
    receiving = later(partial(group.receive, [torch.zeros(64)]))
    wait_until(group._work.empty)
    time.sleep(0.05)  # it waits for the broadcast
    if not trainer_is_there:
        trainer._entering.result(PATIENCE).abort()
    group.close()
    with pytest.raises(InvalidRequest, match="the trainer's broadcast did not arrive"):
        receiving.result(PATIENCE)
    del group, receiving
    later(gc.collect).result(PATIENCE)
