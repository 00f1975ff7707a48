"""The memory of engines of several ranks, given back and taken again by all, also where one fails."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sgl import Engine
from sgl.errors import EngineDead, InvalidRequest
from sgl.kernels.collectives import Folder
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.group import RankGroup
from sgl.runtime.parallel.occupation import RankedOccupation, follow
from sgl.runtime.runner import occupation
from sgl.runtime.runner.occupation import PARTS, Part
from tests.patience import PATIENCE
from tests.test_occupation import state
from tests.test_pause import LONG, OPTIONS, PROMPT, begun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes no memory back in place")
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.slow)], ids=str)
def test_all_ranks_give_back_and_go_on(folder: Path, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(folder, **OPTIONS, **cut) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
        of_one = engine.get_server_info()["kv_bytes"]  # or of the stage with two of the three layers
        of_all = of_one * 2 if "tp_size" in cut else of_one * 3 // 2
        running = begun(engine)
        assert engine.release_memory_occupation() == {"kv_cache": of_all} == state(engine)["released_memory"]
        assert engine.release_memory_occupation() == {}
        assert not engine.continue_generation()
        engine.update_weights_from_disk(folder)
        engine.resume_memory_occupation()
        assert running.wait()["output_ids"] == wanted
        with monkeypatch.context() as patch:
            patch.setattr(occupation.Occupied, "release", Mock(side_effect=OSError("no pages")))
            with pytest.raises(OSError, match="no pages"):
                engine.release_memory_occupation()
        assert state(engine)["released_memory"] == {"kv_cache": of_one}  # the other rank's
        assert state(engine)["is_paused"]
        engine.resume_memory_occupation()
        assert state(engine)["released_memory"] == {}
        assert engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"] == wanted
        assert engine.check_ledger() == []


class Memory:
    """Of a rank."""

    device = CPU
    why_not = None

    def __init__(self, fails: Collection[str]) -> None:
        self.fails, self.calls, self.released = {*fails}, list[str](), dict[Part, int]()

    def parts(self) -> tuple[Part, ...]:
        return PARTS

    def release(self, parts: Collection[Part]) -> None:
        self._do("release")
        self.released |= dict.fromkeys([*parts, "cuda_graph"], 5)

    def take(self, parts: Collection[Part]) -> None:
        self._do("take")
        for part in {*parts} - {"cuda_graph"}:
            self.released.pop(part, None)

    def capture(self) -> None:
        self._do("capture")
        self.released.pop("cuda_graph", None)

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what in self.fails:
            raise torch.OutOfMemoryError(what)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_lacks_is_missing_and_can_be_tried_again(
    tmp_path: Path, tp_size: int, pp_size: int, failing: int
) -> None:
    size = tp_size * pp_size
    memories = [Memory(["take"] if rank == failing else []) for rank in range(size)]
    frames = [queue.Queue[wire.Frame | None]() for _ in range(size)]

    kept: list[Ranks] = []  # some are done before others

    def joined(rank: int) -> Ranks:
        kept.append(ranks := Ranks.join(Folder(str(tmp_path)), Shard.of(rank, tp_size, pp_size), CPU))
        return ranks

    def other(rank: int) -> None:
        ranks = joined(rank)
        while (frame := frames[rank].get(timeout=PATIENCE)) is not None:
            assert isinstance(frame, wire.Release | wire.Restore | wire.Capture)
            follow(frame, memories[rank], ranks)  # type: ignore[arg-type]

    with ThreadPoolExecutor(size) as threads:
        others: list[Future[None]] = [threads.submit(other, rank) for rank in range(1, size)]
        group = Mock(size=size, ranks=joined(0), failing=nullcontext)
        group.send = lambda frame: [its.put(wire.unpacked(wire.packed(frame))) for its in frames]
        leader = RankedOccupation(memories[0], group)  # type: ignore[arg-type]
        try:
            assert leader.release(PARTS) == dict.fromkeys(PARTS, 5 * size)
            with pytest.raises((torch.OutOfMemoryError, InvalidRequest)) as raised:
                leader.restore(PARTS)
            assert (raised.type is InvalidRequest) == (failing > 0)
            assert leader.released == {"kv_cache": 5, "weights": 5, "cuda_graph": 5 * size}
            memories[failing].fails.clear()
            leader.restore(PARTS)
            assert leader.released == {}
        finally:
            for its in frames:
                its.put(None)
        for each in others:
            each.result(PATIENCE)
    assert [its.calls for its in memories] == [["release", "take", "take", "capture"]] * size


def test_a_rank_that_captures_no_graphs_ends_the_engine() -> None:
    """The others wait for it amid theirs, where nothing but its end reaches them."""
    ranks = Mock()
    with pytest.raises(torch.OutOfMemoryError, match="capture"):
        follow(wire.Capture(), Memory(["capture"]), ranks)  # type: ignore[arg-type]
    group = Mock(size=2, failing=nullcontext, ranks=Mock(**{"sum.return_value": [0, 0, 0, 1, 0, 0, 5]}))
    group.end = lambda message: EngineDead(message)
    leader = RankedOccupation(Memory(["capture"]), group)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="rank 0 captured no CUDA graphs"):
        leader.restore(PARTS)
    ranks.sum.assert_not_called()
    assert group.ranks.sum.call_count == 1, "after what was taken, not after graphs"


def test_a_group_that_is_ended_says_why() -> None:
    group = object.__new__(RankGroup)
    told: list[EngineDead] = []
    group._closed, group._lock, group._processes = threading.Event(), threading.Lock(), {}
    group._is_remote, group._ranks, group._failure, group._on_failure = False, None, None, told.append
    failure = group.end("no graphs")
    assert told == [failure]
    with pytest.raises(EngineDead, match="no graphs"):
        group.check()
