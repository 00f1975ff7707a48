"""Forked children, and theirs: connections, threads and event loops are each process's own, an engine is its parent's,
and the parent never notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, slow_steps
from tests.patience import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parent.parent
SERVED = {"reconnect_grace": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("model"), context=16384)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(str(model), **{**OPTIONS, "max_total_tokens": 65536, "check_ledger": False}) as engine:
        yield engine


def running(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["num_running_reqs"])


HEAD = """
import asyncio, concurrent.futures, gc, multiprocessing, os, pickle, queue, signal, sys, threading, time
import sgl
from sgl.errors import EngineDead, ProgramError
from tests.patience import PATIENCE

signal.alarm(int(PATIENCE))  # of a process that hangs nothing is left
where = sys.argv[1]
fork = multiprocessing.get_context("fork")
options = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

@sgl.function
def program(s, x="a"):
    s += "hello" + x + sgl.gen("y")

@sgl.function
async def coroutine(s, x="a"):
    s += "hello" + x + sgl.gen("y")
    return await s["y"]

def forked(work):
    "Do it in a child, which must end well."
    def body():
        signal.alarm(int(PATIENCE))
        work()
        sys.stdout.flush()
    process = fork.Process(target=body)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0, process.exitcode

def os_forked(work, code=7):
    "The same, in a child that ends as interpreters do."
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(int(PATIENCE))
        work()
        sys.exit(code)
    assert os.waitpid(pid, 0)[1] == code << 8

def raises(kind, call):
    "At once, and it says what to do."
    try:
        found = call()
    except ProgramError as error:
        assert isinstance(error.__cause__, kind), error
        message = str(error)
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"it gave {found!r}")
    assert "forked" in message, message
    assert kind is not EngineDead or ("spawn" in message and "RuntimeEndpoint" in message), message
"""

SERVER_SCRIPTS = {
    "every way of running": """
        backend = sgl.RuntimeEndpoint(where)
        expected = program.run(backend=backend, **options)["y"]

        def work():
            assert program.run(backend=backend, **options)["y"] == expected
            assert list(program.run(backend=backend, stream=True, **options).text_iter("y"))
            states = program.run_batch([("a",)] * 4, backend=backend, **options)
            assert [state["y"] for state in states] == [expected] * 4
            assert asyncio.run(coroutine.arun(backend=backend, **options)).ret_value == expected
            assert backend.get_server_info()["internal_states"]

        forked(work)
        os_forked(work)
        assert program.run(backend=backend, **options)["y"] == expected
    """,
    "children of children": """
        backend = sgl.RuntimeEndpoint(where)
        sgl.set_default_backend(backend)
        expected = program.run(**options)["y"]

        def work(depth):
            assert program.run(**options)["y"] == expected
            if depth:
                forked(lambda: work(depth - 1))
                os_forked(lambda: work(depth - 1))
            assert program.run(**options)["y"] == expected

        work(2)
    """,
    "a program of the parent": """
        backend = sgl.RuntimeEndpoint(where)
        done = program.run(backend=backend, **options)
        done.sync()
        longer = {**options, "max_new_tokens": 300}
        state = program.run(backend=backend, stream=True, **longer)
        pieces = state.text_iter()
        begin = next(pieces) + next(pieces)

        def work():
            assert isinstance(done["y"], str)
            for read in (state.text, state.sync, lambda: state["y"], lambda: list(state.text_iter())):
                raises(Exception, read)
            assert isinstance(state.error(), ProgramError)
            state.cancel()

        def drop():
            global state, pieces
            del state, pieces
            gc.collect()

        for each in (work, drop):
            forked(each)
            os_forked(each)
        assert begin + "".join(pieces) == state.text()
        assert state["y"] == program.run(backend=backend, **longer)["y"]
    """,
    "while threads are at it": """
        backend = sgl.RuntimeEndpoint(where)
        expected = program.run(backend=backend, **options)["y"]
        over = threading.Event()
        texts = set()

        def load():
            while not over.is_set():
                texts.update(state["y"] for state in program.run_batch([("a",)] * 8, backend=backend, **options))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()

        def work():
            assert program.run(backend=backend, **options)["y"] == expected

        for _ in range(6):
            forked(work)
        over.set()
        for thread in threads:
            thread.join()
        assert texts == {expected}
    """,
    "states that only callbacks hold": """
        backend = sgl.RuntimeEndpoint(where)
        longer = {**options, "max_new_tokens": 100}
        expected = program.run(backend=backend, **longer)["y"]
        outcomes = queue.SimpleQueue()

        def begin():
            state = program.run(backend=backend, stream=True, **longer)
            next(state.text_iter())
            state.when_done(lambda: outcomes.put(state.failed() or state["y"]))

        for _ in range(8):
            begin()
            forked(lambda: time.sleep(0.1))
        for _ in range(8):
            assert outcomes.get(timeout=PATIENCE) == expected
    """,
    "pools of processes": """
        backend = sgl.RuntimeEndpoint(where)
        expected = program.run(backend=backend, **options)["y"]

        def one(x):
            return program.run(x, backend=backend, **options)["y"]

        with fork.Pool(2) as pool:
            assert pool.map(one, ["a"] * 6) == [expected] * 6
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
            assert list(pool.map(one, ["a"] * 6)) == [expected] * 6
    """,
    "backends that are sent": """
        backend = sgl.RuntimeEndpoint(where)
        calls = sgl.OpenAI("default", base_url=where + "/v1", is_chat_model=False)
        expected = program.run(backend=backend, **options)["y"]
        written = program.run(backend=calls, **options)["y"]
        assert program.run(backend=pickle.loads(pickle.dumps(backend)), **options)["y"] == expected
        sent = pickle.loads(pickle.dumps(calls))

        def work():
            for each in (calls, sent):
                assert program.run(backend=each, **options)["y"] == written

        work()
        forked(work)
    """,
    "a backend of blocking methods": """
        from sgl.lang.backend.base_backend import BaseBackend

        class Blocking(BaseBackend):
            def generate(self, s, sampling_params):
                return "ok", {}

        backend = Blocking()

        def work():
            assert program.run(backend=backend)["y"] == "ok"

        work()
        forked(work)
        os_forked(work)
    """,
    "a server of the parent": """
        class Held(sgl.Runtime):
            command = (sys.executable, "-c", "import time; time.sleep(1000)")

        sgl.lang.backends.launch.wait_for_server = lambda *arguments: None
        sgl.lang.backends.launch.RuntimeEndpoint = lambda *arguments, **options: sgl.RuntimeEndpoint(where)
        runtime = Held()

        def work():
            assert program.run(backend=runtime, **options)["y"]
            runtime.shutdown()

        forked(work)
        os_forked(work)
        assert runtime._process.poll() is None
        runtime.shutdown()
        assert runtime._process.poll() is not None
    """,
}

ENGINE_SCRIPTS = {
    "every method": """
        engine = sgl.Engine(where, device="cpu", max_total_tokens=4096, check_ledger=True)
        one = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        expected = engine.generate("a", {**one, "regex": "[a-z]+"})["text"]
        stream = engine.generate("a", {**one, "max_new_tokens": 200}, stream=True)
        next(stream)

        async def events():
            return [event async for event in await engine.async_generate("a", one, stream=True)]

        def work():
            for call in (
                lambda: engine.generate("a", one),
                lambda: engine.generate("a", {**one, "regex": "[b-x]+"}),
                lambda: engine.generate(["a", "b"], one),
                lambda: list(engine.generate("a", one, stream=True)),
                lambda: next(stream),
                lambda: asyncio.run(engine.async_generate("a", one)),
                lambda: asyncio.run(events()),
                lambda: engine.score("a", ["b", "c"]),
                lambda: engine.abort(None),
                lambda: engine.abort("x"),
                lambda: engine.open_program(None, print),
                lambda: engine.prepare(prompt="a"),
                lambda: program.run(backend=engine)["y"],
                lambda: program.run(backend=engine, stream=True).text(),
                lambda: program.run(backend=engine, use_thread=False),
                lambda: coroutine.run(backend=engine),
                lambda: asyncio.run(coroutine.arun(backend=engine)),
                lambda: program.run_batch([("a",), ("b",)], backend=engine),
                lambda: asyncio.run(coroutine.arun(backend=engine)),
                engine.flush_cache,
                engine.get_server_info,
                engine.check_ledger,
                engine.start_profile,
                engine.stop_profile,
                lambda: sgl.flush_cache(engine),
                lambda: sgl.get_server_info(engine),
                lambda: sgl.Engine(where, device="cpu"),
            ):
                raises(EngineDead, call)
            assert engine.heartbeat_age() == float("inf")
            stream.close()
            with engine:
                pass
            engine.shutdown()
            raises(EngineDead, lambda: engine.generate("a", one))

        forked(work)
        os_forked(work)
        forked(lambda: forked(work))
        assert engine.generate("a", {**one, "regex": "[a-z]+"})["text"] == expected
        assert len(list(stream)) > 1
        assert engine.check_ledger() == []
        try:
            pickle.dumps(engine)
        except TypeError as error:
            assert "another process" in str(error)
        else:
            raise AssertionError("it was sent")
    """,
    "a child that lets go of it": """
        engine = sgl.Engine(where, device="cpu", max_total_tokens=4096)
        state = program.run(backend=engine, stream=True, max_new_tokens=300, ignore_eos=True)
        next(state.text_iter())

        def work():
            global engine, state
            raises(Exception, state.text)
            del engine, state
            gc.collect()

        forked(work)
        os_forked(work)
        state.sync()
        assert engine.generate("a", {"max_new_tokens": 3})["text"]
    """,
    "the default backend": """
        sgl.set_default_backend(None)
        os.environ["SGL_MODEL_PATH"] = where
        assert program.run(**options)["y"]
        forked(lambda: raises(EngineDead, lambda: program.run(**options)["y"]))
        assert program.run(**options)["y"]
    """,
    "an engine that is made in the child": """
        def work():
            with sgl.Engine(where, device="cpu", max_total_tokens=4096) as engine:
                assert program.run(backend=engine, **options)["y"]

        forked(work)
        import sgl.runtime.engine  # no engine is made, and no child needs as long for it
        forked(work)
        work()
        forked(lambda: raises(EngineDead, work))
    """,
}


def run(script: str, where: str) -> None:
    lines = [line.removeprefix(" " * 8) for line in script.splitlines()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", HEAD + "\n".join([*lines, "print('done')"]), where],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=PATIENCE,
        check=False,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stdout + ran.stderr
    for noise in ("Traceback", "Unclosed", "was destroyed"):
        assert noise not in ran.stderr, ran.stderr


@pytest.mark.costly
@pytest.mark.parametrize("name", SERVER_SCRIPTS)
def test_what_talks_to_a_server_works_in_a_forked_child(name: str, server: LiveServer, engine: Engine) -> None:
    run(SERVER_SCRIPTS[name], server.url)
    wait_until(lambda: running(engine) == 0)
    assert engine.check_ledger() == []


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        name if name == "the default backend" else pytest.param(name, marks=pytest.mark.slow)
        for name in ENGINE_SCRIPTS
    ],
)
def test_an_engine_is_of_its_own_process(name: str, model: Path) -> None:
    run(ENGINE_SCRIPTS[name], str(model))


def test_a_child_that_goes_on_does_not_keep_the_connections_of_a_killed_parent(
    server: LiveServer, engine: Engine
) -> None:
    script = """
state = program.run(backend=sgl.RuntimeEndpoint(where), stream=True, max_new_tokens=16000, ignore_eos=True)
next(state.text_iter())
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(10**6)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with slow_steps(engine, 0.05):
        parent = subprocess.Popen(
            [sys.executable, "-c", HEAD + script, server.url], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_until(lambda: running(engine) == 1)
            parent.kill()
            wait_until(lambda: running(engine) == 0)
            os.kill(child, 0)  # it is there
        finally:
            parent.kill()
            os.kill(child, signal.SIGKILL)
            parent.wait()
