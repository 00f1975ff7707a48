"""The policy "program": small programs first, the critical path before other work, forks as one unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

import sgl
from benchmarks import program_policy
from sgl.lang.backends.engine import EngineBackend
from sgl.runtime.engine import Engine
from sgl.runtime.program.order import ProgramOrder
from sgl.runtime.program.stream import NodeRequests, Stream
from sgl.runtime.scheduler.programs import GENERATED, QUANTUM, Programs, ProgramService, Unit
from sgl.runtime.scheduler.request import Phase, Request
from tests.scheduler_driver import Driver, Setting, make_request
from tests.tiny_models import tiny_checkpoint


def order(driver: Driver) -> list[int]:
    with closing(driver.scheduler.queue.candidates()) as candidates:
        return [request.uid for request in candidates]


def driver_of(rows: int = 1, **fields: object) -> Driver:
    return Driver(Setting(rows=rows, policy="program", overlap=False, budget=64, **fields))  # type: ignore[arg-type]


def test_a_program_that_has_had_much_or_will_need_much_comes_after_one_that_has_not() -> None:
    driver = driver_of()
    large, small, begun = ProgramService(), ProgramService(), ProgramService()
    large.future = 4 * QUANTUM
    begun._settled = 2 * QUANTUM
    requests = [make_request(uid, [uid], 4, program=its) for uid, its in enumerate((large, begun, small))]
    for request in requests:
        driver.scheduler.add(request)
    assert order(driver) == [2, 1, 0]
    assert [request.level for request in requests] == [3, 2, 0]


def test_programs_of_like_size_go_in_order_of_arrival_whatever_comes_later_for_them() -> None:
    driver = driver_of()
    first, second = ProgramService(), ProgramService()
    for uid, its in enumerate((first, second, first)):
        driver.scheduler.add(make_request(uid, [uid], 4, program=its))
    assert order(driver) == [0, 2, 1]


def test_what_a_program_waits_for_goes_before_other_work_of_its_level() -> None:
    driver = driver_of()
    programs = [ProgramService() for _ in range(2)]
    requests = [make_request(uid, [uid], 4, program=its, is_critical=False) for uid, its in enumerate(programs)]
    for request in requests:
        driver.scheduler.add(request)
    assert order(driver) == [0, 1]
    driver.scheduler.becomes_critical(requests[1])
    assert order(driver) == [1, 0]
    driver.scheduler.becomes_critical(requests[1])
    driver.run()


def test_service_counts_what_was_computed_and_generated_once_also_after_a_retraction() -> None:
    driver = driver_of(rows=4, num_pages=12, page_size=4, context=40, conservativeness=0.1)
    services = [ProgramService() for _ in range(3)]
    requests = [make_request(uid, list(range(uid, uid + 9)), 12, program=its) for uid, its in enumerate(services)]
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    assert driver.scheduler.counters.retractions
    for request, its in zip(requests, services, strict=True):
        again = its._settled - 9 - GENERATED * len(request.output_ids)
        assert 0 <= again <= request.num_retractions * 21, "of what was evicted meanwhile"
        assert not its.running
        assert not its._expected
        assert not its._awaited


def fork(driver: Driver, branches: int, prompt: int, output: int) -> list[Request]:
    """Requests that begin a fork's branches and share no prefix."""
    service, unit = ProgramService(), Unit()
    requests = [
        make_request(100 + uid, [uid * 7 + i for i in range(prompt)], output, program=service, unit=unit)
        for uid in range(branches)
    ]
    for request in requests:
        service.arrives(request)
    for request in requests:
        driver.scheduler.add(request)
    return requests


def fork_behind_another(rows: int) -> tuple[Driver, Request, list[Request]]:
    """Four branches, of which two would fit beside the request that runs."""
    driver = driver_of(rows=rows, num_pages=20, page_size=4, context=64)
    blocking = make_request(1, list(range(44)), 12)  # 14 of 20 pages
    driver.scheduler.add(blocking)
    driver.step()
    return driver, blocking, fork(driver, 4, 9, 2)  # 3 pages each


def test_a_fork_enters_as_a_whole_or_not_yet() -> None:
    driver, blocking, branches = fork_behind_another(rows=8)
    one = make_request(2, [90, 91], 2)
    driver.scheduler.add(one)
    driver.step()
    assert {request.phase for request in branches} == {Phase.WAITING}, "two of four would fit"
    assert one.phase is not Phase.WAITING, "a unit that waits holds up nobody"
    while blocking.phase is not Phase.DONE:
        driver.step()
        assert len({request.phase is Phase.WAITING for request in branches}) == 1
    driver.run()
    assert all(request.phase is Phase.DONE for request in branches)
    driver.check()


def test_a_fork_larger_than_the_cache_enters_one_by_one() -> None:
    driver = driver_of(rows=8, num_pages=12, page_size=4, context=32)
    branches = fork(driver, 8, 9, 6)
    driver.run()
    assert all(request.phase is Phase.DONE for request in branches)
    driver.check()


def test_a_fork_of_more_branches_than_rows_enters_one_by_one() -> None:
    """It would wait for room that it cannot use; and looking for room for very many takes long."""
    driver, _, branches = fork_behind_another(rows=3)
    driver.step()
    assert [request.phase is Phase.WAITING for request in branches] == [False, False, True, True]
    driver.run()
    driver.check()


class Counted(int):
    """Counts additions."""

    number = 0

    def __mul__(self, other: int) -> Counted:
        return Counted(int(self) * int(other))

    def __add__(self, other: int) -> Counted:
        Counted.number += 1
        return Counted(int(self) + int(other))

    __radd__ = __add__


def test_a_program_of_very_many_requests_is_not_added_up_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.runtime.scheduler.programs.GENERATED", Counted(GENERATED))
    service, programs = ProgramService(), Programs()
    requests = [make_request(uid, [1], 2, program=service) for uid in range(1000)]
    for request in requests:
        programs.enter(request)
    assert 0 < Counted.number < 10_000
    assert requests[-1].level == (1000 * 2 * GENERATED // QUANTUM).bit_length()


def test_a_forks_branches_have_the_level_of_all_of_them() -> None:
    driver = driver_of()
    branches = fork(driver, 3, 2, 200)
    assert {request.level for request in branches} == {(3 * 200 * GENERATED // QUANTUM).bit_length()}


class _Requests(NodeRequests):
    def __init__(self, stream: Stream, uid: int) -> None:
        super().__init__(stream, [])
        self.requests = [make_request(uid, [1], 2)]


def test_a_forks_last_branch_and_what_somebody_waits_for_are_critical() -> None:
    order, root = ProgramOrder(), Stream(0, "")
    calls = [_Requests(Stream(1 + i, f"3.{i}/", root), i) for i in range(3)]
    for call in calls:
        order.begin(call)
    assert order.became_critical() == []
    assert len({id(call.requests[0].unit) for call in calls}) == 1
    order.end(calls[0])
    assert order.became_critical() == []
    order.want(calls[1].stream.id, 0)
    assert order.became_critical() == calls[1].requests
    order.end(calls[1])
    assert order.became_critical() == calls[2].requests
    again = _Requests(calls[2].stream, 9)
    order.end(calls[2])
    order.begin(again)
    assert again.requests[0].unit is None, "only the first node of a branch begins it"
    assert order.became_critical() == again.requests


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), vocab_size=259, max_position_embeddings=512, with_tokenizer=True
    )
    options = {"page_size": 4, "max_total_tokens": 1024, "max_running_requests": 3, "check_ledger": True}
    with Engine(str(folder), device="cpu", schedule_policy="program", **options) as engine:  # type: ignore[arg-type]
        yield engine


@sgl.function
def tree(s: sgl.ProgramState, topic: str) -> None:
    s += "About " + topic + ":"
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f" {i}" + sgl.gen("thought", max_tokens=6, temperature=0)
        twigs = branch.fork(2)
        twigs += sgl.gen("twig", max_tokens=3, temperature=0)
        twigs.join("concate_and_append")
    branches.join("concate_and_append")
    s += sgl.select("which", ["yes", "no"]) + sgl.gen("end", max_tokens=4, temperature=0)


def test_programs_have_the_same_values_together_as_alone(engine: Engine) -> None:
    backend = EngineBackend(engine)
    topics = [{"topic": f"number {i}"} for i in range(6)]
    together = tree.run_batch(topics, backend=backend)
    assert [s.text() for s in together] == [tree.run(**topic, backend=backend).text() for topic in topics]


@pytest.mark.slow
def test_mixed_programs_at_high_load_end_much_earlier_than_by_longest_prefix() -> None:
    makers, arrivals = program_policy.at_load(100, 1.5, seed=0, rows=8, pages=8192)
    lpm, ours = (program_policy.measure(its, makers, arrivals, rows=8, pages=8192) for its in ("lpm", "program"))
    assert lpm["mean s"] > 1.3 * ours["mean s"], "1.5 with 200 programs, which takes twice as long to test"
    assert ours["programs/s"] > 0.98 * lpm["programs/s"]
