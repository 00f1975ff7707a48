"""Clients that end, are interrupted, killed, or let go of a state: what their programs were generating ends on the
server, and what runs for others goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import sgl
from sgl.errors import BackendError, ProgramError, RequestAborted
from sgl.runtime.engine import Engine
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served, slow_steps
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("own_garbage")
ROOT = Path(__file__).resolve().parent.parent
LONG = 16000  # tokens: at the pace of these tests they take longer than PATIENCE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = chat_checkpoint(tmp_path_factory.mktemp("model"), context=16384)
    options = {**OPTIONS, "max_total_tokens": 65536, "check_ledger": False}
    with Engine(str(folder), **options) as engine, slow_steps(engine, 0.05):
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    """Whose programs would go on for an hour where their client's end is not noticed or not told."""
    with served(engine, reconnect_grace=3600.0) as server:
        yield server


@pytest.fixture(scope="module")
def short(engine: Engine) -> Iterator[LiveServer]:
    """With next to no grace."""
    with served(engine, reconnect_grace=0.1) as server:
        yield server


def running(engine: Engine) -> int:
    state = engine.get_server_info()["internal_states"][0]
    return int(state["num_running_reqs"] + state["num_queue_reqs"])


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    """Everything ends, long before it would by itself, and every page has its owner."""
    yield
    wait_until(lambda: running(engine) == 0)
    assert engine.check_ledger() == []


HEAD = (
    f"LONG = {LONG}"
    + """
import asyncio, gc, os, signal, sys, threading, time
import sgl
backend = sgl.RuntimeEndpoint(sys.argv[1])
options = {"backend": backend, "max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}

@sgl.function
def program(s, x=""):
    s += "hello" + x + sgl.gen("y")

@sgl.function
def observing(s, x=""):
    s += "hello" + x + sgl.gen("y")
    s += s["y"]

@sgl.function
async def coroutine(s, x=""):
    s += "hello" + x + sgl.gen("y")
    await s["y"]

@sgl.function
def forking(s):
    s += "hello"
    branches = s.fork(3)
    branches += sgl.gen("y")
    branches.join()

def begun(number=1):
    "Wait until the server runs so many requests."
    while True:
        state = backend.get_server_info()["internal_states"][0]
        if state["num_running_reqs"] >= number:
            print("begun", flush=True)
            return
        time.sleep(0.01)

def later(number=1):
    threading.Thread(target=begun, args=(number,), daemon=True).start()
"""
)

UNDER_WAY = {
    "a run": "state = program.run(**options); begun()",
    "a run with branches": "state = forking.run(**options); begun(3)",
    "several runs": "states = [program.run(str(i), **options) for i in range(3)]; begun(3)",
    "a stream that is not read": "state = program.run(stream=True, **options); begun()",
    "a stream that is read in part": (
        "state = program.run(stream=True, **options); it = state.text_iter(); next(it); next(it); begun()"
    ),
    "a body that reads": "state = observing.run(stream=True, **options); begun()",
    "a coroutine's stream": "state = coroutine.run(stream=True, **options); begun()",
    "calls of a server that gets no programs": (
        "backend.model_info.pop('programs'); state = program.run(**options); begun()"
    ),
}
WAITING = {
    "a read": "later(); program.run(**options)['y']",
    "a text": "later(); program.run(**options).text()",
    "a stream": "later(); list(program.run(stream=True, **options).text_iter())",
    "a body that reads": "later(); observing.run(**options)",
    "a batch": "later(4); program.run_batch([(str(i),) for i in range(4)], **options)",
    "a batch of bodies that read": "later(4); observing.run_batch([(str(i),) for i in range(4)], **options)",
    "a batch on one thread": "later(); observing.run_batch([(str(i),) for i in range(4)], num_threads=1, **options)",
    "a generator": "later(4); list(program.run_batch([(str(i),) for i in range(4)], generator_style=True, **options))",
    "a coroutine": "later(); asyncio.run(coroutine.arun(**options))",
    "a coroutine that is run": "later(); coroutine.run(**options)",
    "an asynchronous batch": (
        "later(4)\n"
        "async def main(): await program.arun_batch([(str(i),) for i in range(4)], **options)\n"
        "asyncio.run(main())"
    ),
    "a coroutine in a running loop": (
        "later()\nasync def cell(): coroutine.run(**options)\nasyncio.new_event_loop().run_until_complete(cell())"
    ),
}


class Client:
    """A process that runs a script against a server."""

    def __init__(self, server: LiveServer, script: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            # SIGINT is ignored in jobs of the background, and so in their children
            [
                sys.executable,
                "-c",
                "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + HEAD + script,
                server.url,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def wait_for(self, line: str) -> None:
        """Until it prints that line."""
        assert self.process.stdout is not None
        for printed in self.process.stdout:
            if printed.strip() == line:
                return
        raise AssertionError(f"the client ended: {self.errors()}")

    def errors(self) -> str:
        """What it wrote to stderr, once it has ended."""
        return self.process.communicate(timeout=PATIENCE)[1]


ENDS = [
    *[(way, "") for way in UNDER_WAY],
    ("several runs", "\nraise LookupError('mine')"),
    ("a run", "\nsys.exit(3)"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("way", "end"), ENDS)
def test_programs_of_a_process_that_ends_are_cancelled(
    server: LiveServer, engine: Engine, way: str, end: str
) -> None:
    client = Client(server, UNDER_WAY[way] + end)
    client.wait_for("begun")
    errors = client.errors()
    wait_until(lambda: running(engine) == 0)
    assert ("LookupError: mine" in errors) == ("LookupError" in end)
    assert errors.count("Traceback") == ("LookupError" in end), errors


@pytest.mark.costly
@pytest.mark.parametrize("way", WAITING)
def test_programs_of_an_interrupted_process_are_cancelled(server: LiveServer, engine: Engine, way: str) -> None:
    client = Client(server, WAITING[way])
    client.wait_for("begun")
    client.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in client.errors()
    assert client.process.returncode == -signal.SIGINT
    wait_until(lambda: running(engine) == 0)


@pytest.mark.costly
@pytest.mark.parametrize(
    "way",
    [
        "a read",
        "a stream",
        "a batch",
        "a batch of bodies that read",
        "a coroutine",
        "an asynchronous batch",
        "a coroutine in a running loop",
    ],
)
def test_an_interrupt_that_is_caught_cancels_what_it_interrupted(
    server: LiveServer, engine: Engine, way: str
) -> None:
    """And nothing else: the process goes on."""
    script = (
        f"try:\n{textwrap.indent(WAITING[way], '    ')}\nexcept KeyboardInterrupt: print('caught', flush=True)\n"
    )
    client = Client(server, script + "while True: time.sleep(1)")
    try:
        client.wait_for("begun")
        client.process.send_signal(signal.SIGINT)
        client.wait_for("caught")
        wait_until(lambda: running(engine) == 0)
    finally:
        client.process.kill()
        client.errors()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("way", "number"), [*[(way, signal.SIGKILL) for way in UNDER_WAY], ("a run", signal.SIGTERM)]
)
def test_programs_of_a_killed_process_end_within_the_grace(
    short: LiveServer, engine: Engine, way: str, number: signal.Signals
) -> None:
    client = Client(short, UNDER_WAY[way] + "\nwhile True: time.sleep(1)")
    client.wait_for("begun")
    client.process.send_signal(number)
    client.errors()
    wait_until(lambda: running(engine) == 0)


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


@sgl.function
def program(s: Any, x: str = "") -> None:
    s += "hello" + x + sgl.gen("y")


@sgl.function
def observing(s: Any) -> None:
    s += "hello" + sgl.gen("y")
    s += s["y"]


@sgl.function
async def coroutine(s: Any) -> None:
    s += "hello" + sgl.gen("y")
    await s["y"]


@sgl.function
def forking(s: Any) -> Any:
    s += "hello"
    branches = s.fork(2)
    branches += sgl.gen("y")
    return branches


@sgl.function
def said(s: Any, x: str) -> None:
    s += "hello" + x + sgl.gen("y")


Run = Callable[..., Any]


@pytest.fixture(params=["server", "calls", "engine"])
def run_on(request: pytest.FixtureRequest, server: LiveServer, engine: Engine) -> Iterator[dict[str, Any]]:
    """Options of a run that would take minutes."""
    options: dict[str, Any] = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}
    if request.param == "engine":
        yield {**options, "backend": engine}
        return
    backend = sgl.RuntimeEndpoint(server.url)
    if request.param == "calls":
        del backend.model_info["programs"]
    yield {**options, "backend": backend}
    backend.shutdown()


DROPPED: dict[str, Run] = {
    "run": lambda **options: program.run(**options),
    "stream": lambda **options: program.run(stream=True, **options),
    "a body that reads": lambda **options: observing.run(stream=True, **options),
    "a coroutine": lambda **options: coroutine.run(stream=True, **options),
    "a branch": lambda **options: forking.run(**options).ret_value[1],
    "an iterator": lambda **options: _begun(program.run(stream=True, **options).text_iter()),
    "a compiled program": lambda **options: said.compile(backend=options.pop("backend")).run(x="", **options),
}


def _begun(pieces: Iterator[str]) -> Iterator[str]:
    next(pieces)
    return pieces


@pytest.mark.parametrize("way", DROPPED)
def test_a_state_that_is_garbage_cancels_its_program(engine: Engine, run_on: dict[str, Any], way: str) -> None:
    state = DROPPED[way](**run_on)
    wait_until(lambda: running(engine) >= 1)
    gc.collect()
    number = running(engine)
    assert number >= 1, "somebody holds it"
    del state
    gc.collect()
    wait_until(lambda: running(engine) == 0)


def test_a_branch_that_somebody_holds_keeps_the_program(engine: Engine, run_on: dict[str, Any]) -> None:
    branch = forking.run(**{**run_on, "max_new_tokens": 20}).ret_value[0]
    gc.collect()
    assert isinstance(branch["y"], str)


def test_a_callback_keeps_the_program(run_on: dict[str, Any]) -> None:
    done = threading.Event()
    program.run(**{**run_on, "max_new_tokens": 20}).when_done(done.set)
    gc.collect()
    assert done.wait(PATIENCE)


def test_a_cancelled_task_cancels_its_program(engine: Engine, run_on: dict[str, Any]) -> None:
    async def read(state: Any) -> None:
        async for _ in state.text_async_iter():
            pass

    async def main() -> None:
        for work in (
            lambda: program.arun(**run_on),
            lambda: coroutine.arun(**run_on),
            lambda: _awaited(program.arun_batch([("a",), ("b",)], **run_on)),
            lambda: read(program.run(stream=True, **run_on)),
        ):
            task = asyncio.create_task(work())
            while not await asyncio.to_thread(running, engine):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            while await asyncio.to_thread(running, engine):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def _awaited(batch: Any) -> Any:
    return await batch


def test_a_body_that_fails_gives_up_the_programs_that_it_called(engine: Engine, run_on: dict[str, Any]) -> None:
    kept: list[Any] = []

    @sgl.function
    def outer(s: Any) -> None:
        kept.append(program())
        wait_until(lambda: running(engine) == 1)
        raise LookupError("mine")

    with pytest.raises(LookupError):
        outer.run(**run_on)
    wait_until(lambda: running(engine) == 0)
    assert isinstance(kept[0].error().__cause__, RequestAborted)


def test_a_client_that_is_back_in_time_loses_nothing(server: LiveServer, engine: Engine) -> None:
    """Every connection breaks after some bytes."""
    from tests.test_server_programs import Cutter

    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0, "seed": 1}
    whole = program.run(backend=engine, **options).text()
    cutter = Cutter(server.url, 2500)
    try:
        backend = sgl.RuntimeEndpoint(cutter.url, max_retries=50)
        state = program.run(backend=backend, stream=True, **options)
        assert "".join(state.text_iter()) == state.text() == whole
        assert cutter.num_cut > 1
    finally:
        backend.shutdown()
        cutter.close()


def test_a_program_that_the_server_gave_up_is_told_of(short: LiveServer, engine: Engine) -> None:
    backend = sgl.RuntimeEndpoint(short.url)
    state = program.run(backend=backend, max_new_tokens=LONG, ignore_eos=True, stream=True)
    wait_until(lambda: running(engine) == 1)
    [opened] = [each for each in backend.request("/v1/programs") if each["is_running"]]
    assert requests.delete(f"{short.url}/v1/programs/{opened['id']}", timeout=PATIENCE).ok
    with pytest.raises(ProgramError, match="has given the program up") as raised:
        state.text()
    assert isinstance(raised.value.__cause__, BackendError)


@pytest.mark.parametrize("backend", [MockBackend(together=ENDLESS), ProgramBackend(MockBackend(together=ENDLESS))])
def test_a_dropped_run_is_cancelled_on_every_backend(backend: Any) -> None:
    mock = getattr(backend, "mock", backend)
    state = program.run(backend=backend)
    wait_until(lambda: mock.running == 1)
    del state
    gc.collect()
    wait_until(lambda: mock.running == 0)
    assert mock.cancelled == 1


UNREAD = """
import sgl

CONSTRAINTS = [{}, {"regex": "[a-z]{3,90}"}, {"json_schema": '{"type": "array", "items": {"type": "integer"}}'}]

@sgl.function
def program(s):
    s += "A letter: " + sgl.select("letter", ["a", "b"])
    branches = s.fork(3)
    branches += lambda i: sgl.gen("value", max_tokens=200, **CONSTRAINTS[i])

state = program.run(backend=sgl.Engine(device="cpu"))
print(state["letter"])
"""


@pytest.mark.slow
def test_a_script_that_ends_before_its_branches_do_says_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UNREAD],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE,
    )
    notice, *more = ended.stderr.splitlines()
    assert (ended.returncode, more) == (0, []), ended.stderr
    assert notice.startswith("sgl runs its embedded model")
    assert ended.stdout in ("a\n", "b\n")
