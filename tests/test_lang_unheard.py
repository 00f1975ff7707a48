"""Nothing that a user's code raises, and no output that nobody reads, leaves a program waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError as Cancelled
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import sgl
from sgl.errors import ProgramError
from sgl.lang.aio import io
from sgl.lang.backends.legacy import BaseBackend
from sgl.lang.backends.steps import TextBackend
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.test_lang_defects import SOON, within
from tests.test_lang_errors import one_gen

# No Exception, or one that a future does not take or takes for another.
STRANGE = [StopIteration, SystemExit, asyncio.CancelledError, Cancelled]


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_its_result(kind: type[BaseException], is_async: bool) -> None:
    def find(work: int) -> int:
        raise kind("nothing")

    async def find_async(work: int) -> int:
        raise kind("nothing")

    find_async.__name__ = "find"
    tool = find_async if is_async else find

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", tools=[tool]) + sgl.gen("y")

    def reply(prompt: Any, params: Any) -> str:
        return (
            '<tool_call>{"name": "find", "arguments": {"work": 1}}</tool_call>' if params.node.name == "x" else "y"
        )

    state = program.run(backend=MockBackend(reply))
    assert within(SOON, lambda: state["y"]) == "y"
    assert "nothing" in f"{state.value('x')[0].error}" or "StopIteration" in state.text()


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("base", [TextBackend, BaseBackend])
def test_whatever_a_backend_raises_fails_the_program_alone(kind: type[BaseException], base: Any) -> None:
    class Strange(base):
        async def generate(self, prompt, params):
            raise kind("odd")

    class StrangeLegacy(base):
        def generate(self, s, sampling_params):
            raise kind("odd")

    state = one_gen.run(backend=(StrangeLegacy if base is BaseBackend else Strange)())
    with pytest.raises(ProgramError, match=r"odd|StopIteration"):
        within(SOON, state.sync)
    assert one_gen.run(backend=MockBackend(lambda *_: "ok"))["x"] == "ok"


def test_the_loop_of_all_programs_survives_what_runs_on_it() -> None:
    done = threading.Event()

    def leave() -> None:
        raise SystemExit

    for work in (leave, lambda: 1 / 0, leave, done.set):
        io.post(work)
    assert done.wait(SOON)


@pytest.mark.parametrize(("kind", "told"), [(StopIteration, "StopIteration"), (Cancelled, "is cancelled: odd")])
def test_what_no_task_can_raise_fails_that_of_a_body(kind: type[Exception], told: str) -> None:
    @sgl.function
    def program(s):
        raise kind("odd")

    with pytest.raises(RuntimeError, match=told):
        asyncio.run(asyncio.wait_for(program.arun(backend=MockBackend()), SOON))


class Closed:
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        """Fail."""
        raise BrokenPipeError("nobody reads")

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.mark.parametrize("wrapped", [lambda mock: mock, ProgramBackend], ids=["calls", "programs"])
def test_output_that_nobody_reads_keeps_nobody_waiting(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Closed())
    monkeypatch.setattr("sys.stderr", Closed())
    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    monkeypatch.setattr(
        "sgl.lang.record.batch._progress", lambda total: SimpleNamespace(update=Closed().write, close=int)
    )
    state = one_gen.run(backend=wrapped(MockBackend(lambda *_: "ok")))
    assert within(SOON, lambda: state["x"]) == "ok"
    within(SOON, state.sync)
    run = partial(one_gen.run_batch, [{}, {}], backend=wrapped(MockBackend(lambda *_: "ok")), progress_bar=True)
    assert [state["x"] for state in within(SOON, run)] == ["ok", "ok"]
