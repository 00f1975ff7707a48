"""Programs of event loops: `async def` bodies, batches over asynchronous iterators, cancellation; and the blocking
API inside a running loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.patience import PATIENCE


def echo(prompt: Any, params: Any) -> str:
    """A reply that is the gen's name in brackets."""
    return f"<{params.node.name}>"


async def until(is_so: Callable[[], bool]) -> None:
    """Leave the loop to others until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


@sgl.function
async def agent(s, question):
    """Observes, forks, sets, copies."""
    s += question + sgl.gen("plan")
    plan = await s["plan"]
    async with s.fork(2) as branches:
        branches += lambda i: f"{plan}{i}" + sgl.gen("step")
    with s.copy() as copy:
        copy += sgl.gen("copied")
    s["set"] = "value"
    with s.user():
        s += "done"
    meta = await s.get_meta_info("plan")
    return [await s["step"], await s["copied"], await s["set"], meta["completion_tokens"], await s.text()]


EXPECTED = [["<step>", "<step>"], "<copied>", "value", 6, "q<plan><|im_start|>user\ndone<|im_end|>\n"]


@pytest.mark.usefixtures("unhurried")
def test_async_programs_await_values_and_forks() -> None:
    async def main() -> None:
        backend = ProgramBackend(MockBackend(echo))
        state = await agent.arun("q", backend=backend)
        assert state.ret_value == EXPECTED
        assert state["plan"] == "<plan>"  # complete: reading does not wait
        assert backend.requests <= 1 + 6
        assert (await agent("q", backend=backend)).ret_value == EXPECTED

    asyncio.run(main())


def test_async_programs_run_from_blocking_code_and_inside_a_running_loop() -> None:
    backend = MockBackend(echo)
    assert agent.run("q", backend=backend).ret_value == EXPECTED

    async def notebook_cell() -> None:
        assert agent.run("q", backend=backend).ret_value == EXPECTED
        assert [state.ret_value for state in agent.run_batch([("q",)] * 3, backend=backend)] == [EXPECTED] * 3
        assert "".join(agent.run("q", backend=backend, stream=True).text_iter()).startswith("q<plan>")

    asyncio.run(notebook_cell())


def test_arun_of_a_blocking_program_does_not_block_the_loop() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        return s["x"]

    async def main() -> None:
        backend = MockBackend(echo, together=ENDLESS)
        runs = asyncio.gather(*[program.arun(backend=backend) for _ in range(50)])
        await until(lambda: backend.running == 50)
        backend.release()
        assert [state.ret_value for state in await runs] == ["<x>"] * 50

    asyncio.run(main())


async def rows(count: int, log: list[int] | None = None) -> AsyncIterator[dict[str, Any]]:
    """An asynchronous source of rows."""
    for i in range(count):
        await asyncio.sleep(0)
        if log is not None:
            log.append(i)
        yield {"i": i}


@sgl.function
async def numbered(s, i):
    """One gen a row."""
    s += f"{i}:" + sgl.gen("x")
    if i == 3:
        raise ValueError("row 3")
    return await s["x"]


def test_arun_batch_keeps_order_and_bounds_concurrency() -> None:
    @sgl.function
    async def program(s, i):
        s += f"{i}:" + sgl.gen("x")
        return i, await s["x"]

    async def main() -> None:
        for limit in (1, 4, None):
            backend = MockBackend(echo, together=limit or 12)
            states = await program.arun_batch(rows(12), backend=backend, max_concurrency=limit)
            assert [state.ret_value for state in states] == [(i, "<x>") for i in range(12)]
            assert backend.max_running == (limit or 12)
        by_tuple = await program.arun_batch([(0,), (1,)], backend=MockBackend(echo))
        assert [state.ret_value[0] for state in by_tuple] == [0, 1]
        with pytest.raises(InvalidRequest, match="max_concurrency"):
            program.arun_batch([], max_concurrency=0)

    asyncio.run(main())


def test_arun_batch_yields_rows_as_they_are_done_and_takes_no_more_than_it_must() -> None:
    async def main() -> None:
        log: list[int] = []
        seen = []
        async for outcome in numbered.arun_batch(
            rows(100, log), backend=MockBackend(echo), max_concurrency=2, return_exceptions=True
        ):
            seen.append(outcome)
            if len(seen) == 5:
                break
        assert [type(outcome).__name__ for outcome in seen] == ["ProgramState"] * 3 + ["ValueError", "ProgramState"]

    asyncio.run(main())


def test_arun_batch_raises_the_first_error_and_cancels_the_rest() -> None:
    async def main() -> None:
        backend = MockBackend(echo, together=7)
        with pytest.raises(ValueError, match="row 3"):
            await numbered.arun_batch(rows(8), backend=backend)
        await until(lambda: not backend.running)

        async def broken() -> AsyncIterator[dict[str, int]]:
            yield {"i": 0}
            raise LookupError("the source")

        with pytest.raises(LookupError, match="the source"):
            await numbered.arun_batch(broken(), backend=backend)

    asyncio.run(main())


def test_cancelling_a_batch_cancels_its_programs() -> None:
    async def main() -> None:
        backend = MockBackend(echo, together=ENDLESS)

        async def batch() -> None:
            await agent.arun_batch([("q",)] * 8, backend=backend)

        task = asyncio.create_task(batch())
        await until(lambda: backend.running == 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not backend.running)
        assert backend.cancelled == 8

    asyncio.run(main())


def test_streams_of_async_programs_and_their_errors() -> None:
    @sgl.function
    async def program(s, fail):
        s += "a" + sgl.gen("x")
        if fail:
            raise KeyError("body")
        pieces = [piece async for piece in s.text_iter("x")]
        s += "|" + "+".join(pieces)

    async def main() -> None:
        state = program.run(False, backend=MockBackend(echo), stream=True)
        assert "".join([piece async for piece in state.text_async_iter()]) == "a<x>|<+x+>"
        state = program.run(True, backend=MockBackend(echo), stream=True)
        with pytest.raises(KeyError, match="body"):
            [piece async for piece in state.text_async_iter()]

    asyncio.run(main())


def test_nested_async_programs_inherit_their_callers_run() -> None:
    @sgl.function
    async def inner(s, i):
        s += f"{i}" + sgl.gen("x")

    @sgl.function
    async def outer(s):
        states = await asyncio.gather(*[inner(i) for i in range(3)])
        return [state["x"] for state in states]

    async def main(backend: MockBackend) -> Any:
        return (await outer.arun(backend=backend, seed=4, temperature=0.3)).ret_value

    backend = MockBackend()
    first = asyncio.run(main(backend))
    assert {params.sampling["temperature"] for _, params in backend.calls} == {0.3}
    assert first == asyncio.run(main(MockBackend()))
    assert len(set(first)) == 3


def test_errors_of_one_branch_and_group_misuse() -> None:
    @sgl.function
    async def program(s):
        async with s.fork(2) as branches:
            branches[0] += sgl.gen("good")
            branches[1] += sgl.gen("bad")
        with pytest.raises(ProgramError, match="gen 'bad'"):
            await s["bad"]
        assert isinstance(await s.error(), ProgramError)
        assert await branches[0]["good"] == "<good>"

    with pytest.raises(ProgramError, match="gen 'bad'"):
        program.run(backend=MockBackend(echo, fail_on=["bad"]))


def test_many_threads_with_loops_share_a_backend() -> None:
    backend = MockBackend(echo, together=6)
    results: list[Any] = []

    def work(i: int) -> None:
        results.append(asyncio.run(agent.arun("q", backend=backend)).ret_value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [EXPECTED] * 6


def test_why_a_streamed_text_ended_is_told_though_no_text_comes_with_it() -> None:
    class Apart(TextBackend):
        async def generate(self, prompt: Prompt, params: GenParams) -> Completion:
            return Completion("ab")

        async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
            yield Completion("a", {"finish_reason": None})
            yield Completion("b", {"finish_reason": None})
            yield Completion("", {"finish_reason": {"type": "stop"}})

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")

    async def read() -> list[Any]:
        state = program.run(backend=Apart(), stream=True)
        pairs = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
        return [(text, meta["finish_reason"]) for text, meta in pairs]

    assert asyncio.run(read()) == [("a", None), ("b", {"type": "stop"})]
