"""What fails is raised within a second, at the place where Python looks, with the node and the cause."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import sgl
from sgl.errors import (
    BackendError,
    EngineDead,
    InvalidRequest,
    ProgramError,
    RequestAborted,
    RequestTimeout,
    SglError,
)
from sgl.lang.backends.base import Backend
from sgl.lang.ir import nodes as ir
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.patience import PATIENCE, wait_until
from tests.test_lang_defects import SOON, within

BACKENDS = [lambda **options: MockBackend(**options), lambda **options: ProgramBackend(MockBackend(**options))]


@pytest.fixture(params=BACKENDS, ids=["calls", "programs"])
def backend_of(request: pytest.FixtureRequest) -> Any:
    """Makes a backend of single calls, or one of programs."""
    return request.param


@sgl.function
def one_gen(s):
    """A single gen."""
    s += "prompt" + sgl.gen("x")


READS = {
    "item": lambda state: state["x"],
    "value": lambda state: state.value("x"),
    "text": lambda state: state.text(),
    "messages": lambda state: state.messages(),
    "sync": lambda state: state.sync(),
    "meta": lambda state: state.get_meta_info("x"),
    "stream": lambda state: list(state.text_iter()),
    "stream of it": lambda state: list(state.text_iter("x")),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_gen_is_raised_by_every_read(backend_of: Any, read: str, stream: bool) -> None:
    state = one_gen.run(backend=backend_of(fail_on=["x"]), stream=stream)
    with pytest.raises(
        ProgramError, match=r"gen 'x' \(node 1, after 6 characters\) failed: .*told to fail"
    ) as caught:
        within(SOON, lambda: READS[read](state))
    assert caught.value.node == "1"
    assert isinstance(caught.value.__cause__, BackendError)
    assert state.error().__cause__ is caught.value.__cause__


def test_what_was_done_before_the_failure_stays_readable(backend_of: Any) -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("before") + "text" + sgl.gen("broken") + sgl.gen("after")

    state = program.run(backend=backend_of(reply=lambda *_: "ok", fail_on=["broken"]))
    assert within(SOON, lambda: state["before"]) == "ok"
    for name in ("broken", "after"):
        with pytest.raises(ProgramError, match="gen 'broken'"):
            within(SOON, lambda name=name: state[name])


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_failing_branch_fails_the_join_and_leaves_its_siblings(backend_of: Any, mode: str) -> None:
    @sgl.function
    def program(s):
        s += "start"
        forks = s.fork(3)
        forks += lambda i: sgl.gen(f"x{i}")
        forks.join(mode)
        s += sgl.gen("later")
        return forks

    state = program.run(backend=backend_of(reply=lambda *_: "ok", fail_on=["x1"]))
    for read in (state.text, state.sync, lambda: state["later"]):
        with pytest.raises(ProgramError, match="gen 'x1'"):
            within(SOON, read)
    assert state.error().node == "1.1/0"
    assert state.ret_value[0]["x0"] == state.ret_value[2]["x2"] == "ok"


def test_a_failure_reaches_forks_of_it_and_refs_to_it(backend_of: Any) -> None:
    @sgl.function
    def program(s):
        left, right = s.fork(2)
        left += sgl.gen("broken")
        inner = left.fork(2)
        inner += sgl.gen("inner")
        right += "ref:" + left.ref("broken") + sgl.gen("right")
        return left, right, inner

    left, right, inner = program.run(backend=backend_of(fail_on=["broken"])).ret_value
    for read in (lambda: inner[1]["inner"], lambda: left.text(), lambda: right["right"], lambda: right.text()):
        with pytest.raises(ProgramError):
            within(SOON, read)


@pytest.mark.parametrize("stream", [False, True])
def test_a_raising_body_raises_its_own_error(backend_of: Any, stream: bool) -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        raise LookupError("mine")

    backend = backend_of(together=ENDLESS)
    if not stream:
        with pytest.raises(LookupError, match="mine"):
            within(SOON, lambda: program.run(backend=backend))
        return
    state = program.run(backend=backend, stream=True)
    for read in READS.values():
        with pytest.raises(LookupError, match="mine"):
            within(SOON, lambda read=read: read(state))


def test_cancelling_ends_reads_and_the_work_on_the_backend(backend_of: Any) -> None:
    backend = backend_of(together=ENDLESS)
    mock = getattr(backend, "mock", backend)
    state = one_gen.run(backend=backend, stream=True)
    reader: list[BaseException] = []

    def read() -> None:
        try:
            list(state.text_iter())
        except BaseException as error:
            reader.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: mock.running == 1)
    state.cancel()
    thread.join(SOON)
    assert isinstance(reader[0], ProgramError)
    assert isinstance(reader[0].__cause__, RequestAborted)
    wait_until(lambda: mock.running == 0)
    assert mock.cancelled == 1
    state.cancel()  # twice is as good as once


def test_cancelling_closes_the_whole_tree(backend_of: Any) -> None:
    @sgl.function
    def program(s):
        forks = s.fork(4)
        for fork in forks:
            fork.fork(2).__iadd__(sgl.gen("x"))
        s += sgl.gen("root")

    backend = backend_of(together=ENDLESS)
    mock = getattr(backend, "mock", backend)
    state = program.run(backend=backend)
    wait_until(lambda: mock.running == 9)
    state.cancel()
    wait_until(lambda: mock.running == 0)
    assert mock.cancelled == 9


def test_a_program_that_takes_too_long_times_out(backend_of: Any) -> None:
    state = one_gen.run(backend=backend_of(together=ENDLESS), timeout=0.05)
    with pytest.raises(ProgramError, match=r"not finished within 0\.05 s") as caught:
        within(SOON, lambda: state["x"])
    assert isinstance(caught.value.__cause__, RequestTimeout)


def test_a_gen_that_takes_too_long_times_out_alone(backend_of: Any) -> None:
    @sgl.function
    def program(s):
        left, right = s.fork(2)
        left += sgl.gen("late", timeout=0.02)
        right += sgl.gen("fine")
        return left, right

    left, right = program.run(backend=backend_of(reply=lambda *_: "ok", held=["late"])).ret_value
    assert within(SOON, lambda: right["fine"]) == "ok"
    with pytest.raises(ProgramError, match="not finished"):
        within(SOON, lambda: left["late"])


class Broken(Backend):
    """Fails in a way of its own."""

    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, program: ir.Program, sink: ir.Sink) -> Any:
        if self.where == "open":
            raise EngineDead("the engine is closed")
        self.sink = sink
        return self

    def send(self, segment: ir.Segment) -> None:
        """Raise, or report that the whole program failed."""
        if self.where == "send":
            raise RuntimeError("a bug")
        self.sink(ir.NodeFailed(None, None, EngineDead("the engine died")))

    def cancel(self) -> None:
        """Nothing is held."""


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("where", "cause"), [("open", EngineDead), ("send", BackendError), ("event", EngineDead)])
def test_a_dead_backend_is_raised_by_every_read(where: str, cause: type[Exception]) -> None:
    for read in READS.values():
        state = one_gen.run(backend=Broken(where))
        with pytest.raises(ProgramError) as caught:
            within(SOON, lambda read=read, state=state: read(state))
        assert isinstance(caught.value.__cause__, cause)


def test_an_unenforceable_constraint_is_an_error_not_ignored() -> None:
    class Unconstrained(MockBackend):
        constraints = frozenset()

    for gen in (sgl.gen("x", regex="a+"), sgl.gen("x", json_schema="{}"), sgl.gen_int("x"), sgl.gen("x", ebnf="a")):
        state = sgl.function(lambda s, gen=gen: s.__iadd__(gen) and None).run(backend=Unconstrained())
        with pytest.raises(ProgramError, match="cannot enforce") as caught:
            within(SOON, lambda state=state: state["x"])
        assert isinstance(caught.value.__cause__, InvalidRequest)


def test_waiting_for_a_name_that_never_comes_ends_with_the_body(backend_of: Any) -> None:
    go_on = threading.Event()

    @sgl.function
    def program(s):
        go_on.wait(PATIENCE)
        s += sgl.gen("x")

    state = program.run(backend=backend_of(), stream=True)
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(ProgramError, match="never set a variable 'y'"):
        within(SOON, lambda: state["y"])


def test_inside_of_a_body_nothing_waits_for_the_body_itself(backend_of: Any) -> None:
    """Neither its own thread nor others that it waits for, nor a fork, nor an event loop."""

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        branch = s.fork(1)[0]
        with ThreadPoolExecutor(3) as threads:
            for state in (s, branch):
                with pytest.raises(ProgramError, match="never set a variable 'y'"):
                    threads.submit(lambda state=state: state["y"]).result(SOON)
                assert threads.submit(lambda state=state: "".join(state.text_iter())).result(SOON) == "aok"
                assert threads.submit(lambda state=state: state.get_meta_info("y")).result(SOON) is None

    @sgl.function
    async def async_program(s):
        s += "a" + sgl.gen("x")
        assert "".join([piece async for piece in s.text_iter()]) == "aok"
        with pytest.raises(ProgramError, match="never set a variable 'y'"):
            await s["y"]

    for stream in (False, True):
        for one in (program, async_program):
            within(5 * SOON, one.run(backend=backend_of(reply=lambda *_: "ok"), stream=stream).sync)


def test_use_thread_false_raises_directly(backend_of: Any) -> None:
    with pytest.raises(ProgramError, match="told to fail"):
        one_gen.run(backend=backend_of(fail_on=["x"]), use_thread=False)


def test_a_batch_keeps_gen_errors_in_their_places(backend_of: Any) -> None:
    @sgl.function
    def program(s, name):
        s += sgl.gen(name)

    rows = [("good",), ("bad",), ("fine",)]
    outcomes = program.run_batch(
        rows, backend=backend_of(reply=lambda *_: "ok", fail_on=["bad"]), return_exceptions=True
    )
    assert outcomes[0]["good"] == outcomes[2]["fine"] == "ok"
    assert isinstance(outcomes[1], ProgramError)


def takes_values(*values: Any) -> None:
    """A function that no model could call."""


def takes_unknown(x: Unknown) -> None:  # noqa: F821
    """A function without a schema."""


@sgl.function
def forks(s, size):
    """Branches."""
    s += "a"
    s.fork(size)


def weather(city: str, days: float = 5.0) -> None:
    """A tool."""


BAD_ARGUMENTS: list[Any] = [
    (lambda: sgl.gen("x", temperature=-1), "temperature must be"),
    (lambda: sgl.gen("x", max_tokens=1.5), "max_tokens must be a whole number"),
    (lambda: sgl.gen("x", min_tokens=5, max_tokens=2), "greater than"),
    (lambda: sgl.gen("x", stop=[""]), "stop must be"),
    (lambda: sgl.gen("x", regex="("), "regex"),
    (lambda: sgl.gen("x", stop_regex="["), "regex"),
    (lambda: sgl.gen("x", dtype=list), "dtype must be"),
    (lambda: sgl.gen("x", regex="a", json_schema="{}"), "exclude each other"),
    (lambda: sgl.gen("x", json_schema="not json"), "not JSON"),
    (lambda: sgl.gen("x", schema=object()), "neither a JSON Schema nor a type"),
    (lambda: sgl.gen("x", choices=["a"], temperature=0.7), "temperature must be 0"),
    (lambda: sgl.gen("x", choices=["a"], regex="b"), "exclude each other"),
    (lambda: sgl.gen("x", top_p=True), "top_p must be a number"),
    (lambda: sgl.gen("x", n=0), "n must be"),
    (lambda: sgl.select("x", "yes"), "list of strings"),
    (lambda: sgl.select("x", [""]), "no empty one"),
    (lambda: sgl.select("x"), "list of strings"),
    (lambda: sgl.select("x", ["a"], choices_method="best"), "no choices_method"),
    (lambda: sgl.separate_reasoning(sgl.gen("x"), "unknown"), "no reasoning format"),
    (lambda: sgl.separate_reasoning("text", "qwen3"), "named gen"),
    (lambda: sgl.image(3), "no image"),
    (lambda: sgl.gen("x", tool_choice="maybe", tools=[weather]), "tool_choice"),
    (lambda: sgl.gen("x", tool_choice="required"), "there are no tools"),
    (lambda: sgl.gen("x", tool_choice="maybe"), "not .maybe."),
    (
        lambda: sgl.gen("x", seed=2**63),
        "seed must be a whole number from -9223372036854775808 to 9223372036854775807",
    ),
    (lambda: sgl.gen("x", max_tokens=2**31), "max_tokens must be a whole number from 0 to 2147483647"),
    (lambda: sgl.gen("x", stop=3), "stop must be a non-empty string or a list of them, not"),
    (lambda: sgl.gen("x", stop_token_ids="ab"), "stop_token_ids must be a list of token ids"),
    (lambda: sgl.gen("x", stop_token_ids=[1.5]), "stop_token_ids must be a list of token ids"),
    (lambda: sgl.gen("x", extra=5), "extra must be a dict, not 5"),
    (lambda: sgl.gen("x", regex=re.compile("a")), "regex must be a text"),
    (lambda: sgl.gen("x", ebnf=5), "ebnf must be a text, not 5"),
    (lambda: sgl.gen("x", json_schema=12), "12 is neither a JSON Schema nor a type"),
    (lambda: sgl.gen("x", schema=forks), "nor a type that has one: Unable [^.]*$"),
    (lambda: sgl.select("x", 5), "choices must be a list of strings, not 5"),
    (lambda: sgl.select("x", [1, 2]), "choices must hold strings"),
    (lambda: sgl.select("x", ["a"], temperature="0"), "temperature must be a number"),
    (lambda: sgl.select("x", ["a"], choices_method=3), "no choices_method 3"),
    (lambda: sgl.separate_reasoning(sgl.gen("x")), "no reasoning format None; there are"),
    (lambda: sgl.gen("x", tools=5), "tools must be a list of functions, not 5"),
    (lambda: sgl.gen("x", tools=[{"name": "f"}]), "a tool must be a function with a name"),
    (lambda: sgl.describe_tools([partial(weather)]), "a tool must be a function with a name"),
    (lambda: sgl.describe_tools([takes_values]), r"takes .values: .Any., which has no name"),
    (lambda: sgl.describe_tools([takes_unknown]), "no JSON Schema: name 'Unknown'"),
    (lambda: sgl.gen("x", tools=[weather, weather]), "two tools are named 'weather'"),
    (lambda: sgl.function(5), "a program is a function, not 5"),
    (lambda: sgl.function(num_api_spec_tokens="a")(weather), "must be a number of tokens"),
    (lambda: one_gen.run(sampling=3), "sampling must be a dict of parameters, not 3"),
    (lambda: one_gen.run_batch([{}], num_threads=0), "'auto' or a number of at least 1, not 0"),
    (lambda: one_gen.run_batch([{}], num_threads="all"), "not 'all'"),
    (lambda: forks.run("two", backend=MockBackend()), "at least one, not 'two'"),
    (lambda: one_gen.run(backend="http://x"), r"pass an sgl.Engine, sgl.RuntimeEndpoint"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_where_they_are_given(make: Any, message: str) -> None:
    with pytest.raises(SglError, match=message):
        make()


def test_errors_in_async_programs_and_cancelled_tasks(backend_of: Any) -> None:
    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        await s["x"]

    async def main() -> None:
        with pytest.raises(ProgramError, match="told to fail"):
            await program.arun(backend=backend_of(fail_on=["x"]))
        backend = backend_of(together=ENDLESS)
        mock = getattr(backend, "mock", backend)
        task = asyncio.create_task(program.arun(backend=backend))
        while not mock.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while mock.running:
            await asyncio.sleep(0.01)
        assert mock.cancelled == 1

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("template", [5, lambda messages, add_generation_prompt: 1])
def test_what_renders_no_turns_is_no_chat_template(template: Any) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("a") + sgl.gen("x")

    with pytest.raises(ProgramError, match=r"chat_template must be a name|it made int, not text") as caught:
        program.run(backend=MockBackend(), chat_template=template).sync()
    assert isinstance(caught.value.__cause__, InvalidRequest)
