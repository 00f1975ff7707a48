"""Rows that fail: the first one's error is raised when all rows are done, whatever failed and whichever way rows are
run; the bar counts them, and states show what failed and what is pending."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import sgl
from sgl.compat.utils import dump_state_text
from sgl.errors import BackendError, EngineDead, ProgramError, RequestAborted
from sgl.lang.backends.base import Backend
from sgl.lang.ir import nodes as ir
from sgl.lang.record import batch
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.patience import PATIENCE, wait_until


@sgl.function
def row(s: Any, name: str) -> None:
    s += "a" + sgl.gen(name)


@sgl.function
async def async_row(s: Any, name: str) -> None:
    s += "a" + sgl.gen(name)


@sgl.function
def observing(s: Any, name: str) -> str:
    s += "a" + sgl.gen(name)
    return str(s[name])


@sgl.function
def choosing(s: Any, name: str) -> None:
    s += "a" + (sgl.gen(name) if name == "bad" else sgl.select(name, ["x", "y"]))


@sgl.function
def joined(s: Any, name: str) -> None:
    s += "a"
    branches = s.fork(2)
    branches[0] += sgl.gen("fine")
    branches[1] += sgl.gen(name)
    branches.join()


@sgl.function
def forked(s: Any, name: str) -> None:
    s += "a"
    branches = s.fork(2)
    branches[0] += sgl.gen("fine")
    branches[1] += sgl.gen(name)


@sgl.function
def nested(s: Any, name: str) -> None:
    s += row(name)[name]


PROGRAMS = [row, async_row, observing, choosing, joined, forked, nested]


async def _each(program: Any, rows: Any, **options: Any) -> list[Any]:
    return [state async for state in program.arun_batch(rows, **options)]


async def _all(program: Any, rows: Any, **options: Any) -> Any:
    return await program.arun_batch(rows, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "run_batch": lambda program, rows, **options: program.run_batch(rows, **options),
    "one thread": lambda program, rows, **options: program.run_batch(rows, num_threads=1, **options),
    "generator": lambda program, rows, **options: list(program.run_batch(rows, generator_style=True, **options)),
    "streams": lambda program, rows, **options: program.run_batch(rows, stream=True, **options),
    "arun_batch": lambda *args, **options: asyncio.run(_all(*args, **options)),
    "async for": lambda *args, **options: asyncio.run(_each(*args, **options)),
    "one by one": lambda *args, **options: asyncio.run(_all(*args, max_concurrency=1, **options)),
}
ROWS = [("good",), ("bad",), ("fine",), ("bad",), ("well",)]


@pytest.fixture(params=[lambda mock: mock, ProgramBackend], ids=["calls", "programs"])
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param(MockBackend(lambda *_: "ok", fail_on=["bad"]))
    return backend


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_failure_of_any_row_is_raised(backend: Backend, way: str, program: Any) -> None:
    with pytest.raises(ProgramError, match=r"gen 'bad' .*told to fail") as raised:
        WAYS[way](program, ROWS, backend=backend)
    assert any("in row 1 of" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_return_exceptions_keeps_the_others(backend: Backend, way: str, program: Any) -> None:
    outcomes = WAYS[way](program, ROWS, backend=backend, return_exceptions=True)
    assert [isinstance(outcome, ProgramError) for outcome in outcomes] == [False, True, False, True, False]
    assert all(outcomes[i].error() is None for i in (0, 2, 4))


@pytest.mark.parametrize("way", ["run_batch", "one thread", "streams", "arun_batch", "generator"])
def test_all_rows_are_done_before_the_first_failure_is_raised(way: str) -> None:
    mock = MockBackend(lambda *_: "ok", fail_on=["bad"], together=1 if way == "one thread" else 9)
    rows = [("bad",), *[(f"x{i}",) for i in range(8)]]
    with pytest.raises(ProgramError, match="gen 'bad'"):
        WAYS[way](row, rows, backend=mock)
    assert (len(mock.calls), mock.running, mock.cancelled) == (9, 0, 0)


def test_a_generator_yields_the_rows_before_the_failure() -> None:
    mock = MockBackend(lambda *_: "ok", fail_on=["bad"])
    states = row.run_batch([("x",), ("y",), ("bad",), ("z",)], generator_style=True, backend=mock)
    assert [next(states).text() for _ in range(2)] == ["aok", "aok"]
    with pytest.raises(ProgramError) as raised:
        next(states)
    assert any("in row 2 of" in note for note in raised.value.__notes__)


def test_rows_of_a_later_chunk_have_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CHUNK", 2)
    mock = MockBackend(lambda *_: "ok", fail_on=["bad"])
    states = row.run_batch([("x",), ("y",), ("z",), ("bad",)], generator_style=True, backend=mock)
    assert [next(states).text() for _ in range(3)] == ["aok"] * 3
    with pytest.raises(ProgramError) as raised:
        next(states)
    assert any("in row 3 of" in note for note in raised.value.__notes__)


def test_a_branch_whose_failure_the_body_has_seen_is_its_own_business(backend: Backend) -> None:
    @sgl.function
    def tries(s: Any, name: str) -> str:
        first, second = s.fork(2)
        first += sgl.gen(name)
        second += sgl.gen("other")
        try:
            return str(first[name])
        except ProgramError:
            return str(second["other"])

    states = tries.run_batch([("good",), ("bad",)], backend=backend)
    assert [state.ret_value for state in states] == ["ok", "ok"]
    assert states[1].error() is None
    states[1].sync()


def test_a_single_run_tells_of_a_branch_that_nobody_joined(backend: Backend) -> None:
    state = forked.run("bad", backend=backend)
    with pytest.raises(ProgramError, match="gen 'bad'"):
        state.sync()
    for _ in range(2):
        assert isinstance(state.error(), ProgramError)
        assert isinstance(state.failed(), ProgramError)
    with pytest.raises(ProgramError, match="gen 'bad'"):
        forked.run("bad", backend=backend, use_thread=False)
    with pytest.raises(ProgramError, match="gen 'bad'"):
        asyncio.run(forked.arun("bad", backend=backend))


class Dying(Backend):
    """Takes some programs, then dies: those under way fail, and so do all that follow."""

    def __init__(self, num_taken: int) -> None:
        self.num_left = num_taken
        self.sinks: list[ir.Sink] = []

    def open(self, program: ir.Program, sink: ir.Sink) -> Any:
        if self.num_left <= 0:
            raise EngineDead("the engine is gone")
        self.num_left -= 1
        self.sinks.append(sink)
        return self

    def send(self, segment: ir.Segment) -> None:
        """Die with the last."""
        if self.num_left <= 0:
            for sink in self.sinks:
                sink(ir.NodeFailed(None, None, BackendError("the server died")))

    def cancel(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_whose_server_died_fails(way: str) -> None:
    if way == "one by one":
        pytest.skip("its first program never ends on this backend")
    with pytest.raises(ProgramError, match=r"the server died|the engine is gone"):
        WAYS[way](row, [(f"x{i}",) for i in range(6)], backend=Dying(3))
    outcomes = WAYS[way](row, [(f"x{i}",) for i in range(6)], backend=Dying(3), return_exceptions=True)
    assert all(isinstance(outcome, ProgramError) for outcome in outcomes)


def test_a_compiled_program_raises_the_first_failure_too(backend: Backend) -> None:
    @sgl.function
    def shout(s: Any, word: str) -> None:
        s += word + sgl.gen("bad") if word == "b" else word + sgl.gen("x")  # recorded with a symbol: always x

    compiled = shout.compile(backend=backend)
    assert [state["x"] for state in compiled.run_batch([{"word": "a"}, {"word": "b"}])] == ["ok", "ok"]

    @sgl.function
    def bad(s: Any, word: str) -> None:
        s += word + sgl.gen("bad")

    compiled = bad.compile(backend=backend)
    with pytest.raises(ProgramError, match="gen 'bad'"):
        compiled.run_batch([{"word": "a"}, {"word": "b"}])
    outcomes = compiled.run_batch([{"word": "a"}, {"word": "b"}], return_exceptions=True)
    assert all(isinstance(outcome, ProgramError) for outcome in outcomes)


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("style", [False, True])
def test_the_bar_counts_rows_that_fail(monkeypatch: pytest.MonkeyPatch, style: bool) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr(batch, "CHUNK", 2)

    @sgl.function
    def some_raise(s: Any, name: str) -> None:
        if name == "worse":
            raise LookupError("mine")
        s += sgl.gen(name)

    rows = [("good",), ("bad",), ("worse",), ("fine",)]
    mock = MockBackend(lambda *_: "ok", fail_on=["bad"])
    options: dict[str, Any] = {"backend": mock, "progress_bar": True, "generator_style": style}
    outcomes = list(some_raise.run_batch(rows, return_exceptions=True, **options))
    assert [type(outcome) for outcome in outcomes[1:3]] == [ProgramError, LookupError]
    last = out.getvalue().rstrip().splitlines()[-1].split("\r")[-1]
    assert "4/4" in last, "one bar for all"
    assert "failed=2" in last
    out.truncate(0)
    list(row.run_batch([("x",), ("y",)], **options))
    assert "failed" not in out.getvalue()


def test_the_repr_of_a_failed_state_says_so_and_why(backend: Backend) -> None:
    state = row.run("bad", backend=backend)
    state.error()
    assert repr(state).startswith("ProgramState(a[bad: failed]; failed: gen 'bad' (")
    assert "the mock was told to fail" in repr(state)
    state = forked.run("bad", backend=backend)
    state.error()
    assert "failed: gen 'bad'" in repr(state)

    @sgl.function
    def raising(s: Any) -> None:
        s += "a"
        raise LookupError("mine")

    state = raising.run(backend=backend, stream=True)
    state.error()
    assert repr(state) == "ProgramState(a; failed: LookupError: mine)"
    state = row.run("x", backend=MockBackend(together=ENDLESS))
    state.cancel()
    assert isinstance(state.error().__cause__, RequestAborted)
    assert "failed: program 'row' failed: the program was cancelled" in repr(state)


def test_the_repr_of_an_unfinished_state_marks_what_is_pending() -> None:
    held = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + "b" + sgl.select("y", ["p", "q"]) + "c"
        held.wait(PATIENCE)

    state = program.run(backend=MockBackend(together=ENDLESS), stream=True)
    wait_until(lambda: "c" in repr(state))
    assert repr(state) == "ProgramState(a[x: pending]b[y: pending]c; running)"
    held.set()
    wait_until(lambda: "running" not in repr(state))
    assert repr(state) == "ProgramState(a[x: pending]b[y: pending]c)"
    state.cancel()
    done = row.run("x", backend=MockBackend(lambda *_: "ok"))
    done.sync()
    assert repr(done) == "ProgramState(aok)"


def test_a_file_of_texts_has_the_errors_of_failed_rows(tmp_path: Any, backend: Backend) -> None:
    outcomes = row.run_batch(ROWS, backend=backend, return_exceptions=True)
    dump_state_text(tmp_path / "texts", outcomes)
    written = (tmp_path / "texts").read_text()
    assert written.count("aok") == 3
    assert written.count("told to fail") == 2


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    yield
    wait = partial(wait_until, lambda: not any(t.name == "sgl-body" for t in threading.enumerate()))
    wait()
