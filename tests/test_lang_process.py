"""The language and its process: exits that do not hang, children by fork, many threads, signals."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.patience import PATIENCE

HEAD = """
import multiprocessing, os, signal, sys, threading, time
import sgl
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.patience import wait_until

@sgl.function
def program(s, x):
    s += x + sgl.gen("y")

def interrupt_soon(is_so):
    "A Ctrl-C once something is so, and the main thread has had time to wait for it."
    def interrupt():
        wait_until(is_so)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
"""

SCRIPTS = {
    "exit with a program under way": """
        program.run("a", backend=MockBackend(together=ENDLESS))
        program.run("a", backend=MockBackend(together=ENDLESS), stream=True)
        program.run("a", backend=ProgramBackend(MockBackend(together=ENDLESS)))
        print("done")
    """,
    "exit while a thread reads": """
        state = program.run("a", backend=MockBackend(together=ENDLESS))
        threading.Thread(target=state.text, daemon=True).start()
        time.sleep(0.1)
        print("done")
    """,
    "a child by fork": """
        @sgl.function
        def slow(s):
            time.sleep(10**6)

        for _ in range(2):
            slow.run(backend=MockBackend(), stream=True)
        backend = MockBackend(lambda *_: "hi")
        assert program.run("a", backend=backend)["y"] == "hi"

        def child():
            assert program.run("b", backend=MockBackend(lambda *_: "hi")).text() == "bhi"
            assert len(program.run_batch([("c",)] * 5, backend=MockBackend())) == 5
            assert program.run("d", backend=MockBackend(lambda *_: "hi"), stream=True).text() == "dhi"
            os._exit(7)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(600)
        assert process.exitcode == 7, process.exitcode
        assert program.run("a", backend=backend)["y"] == "hi"
        print("done")
    """,
    "an interrupted read": """
        backend = MockBackend(together=ENDLESS)
        state = program.run("a", backend=backend)
        try:
            interrupt_soon(lambda: backend.running)
            state["y"]
        except KeyboardInterrupt:
            state.cancel()
            print("done")
    """,
    "an interrupt that wakes nobody who reads": """
        backend = MockBackend(together=ENDLESS)
        state = program.run("a", backend=backend)
        try:
            interrupt_soon(lambda: backend.running)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # another thread takes it
            state["y"]
        except KeyboardInterrupt:
            state.cancel()
            print("done")
    """,
    "an interrupt that wakes no batch": """
        backend = MockBackend(together=ENDLESS)
        try:
            interrupt_soon(lambda: backend.running == 10)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            program.run_batch([("a",)] * 10, backend=backend)
        except KeyboardInterrupt:
            print("done")
    """,
    "an interrupted batch": """
        backend = MockBackend(together=ENDLESS)
        try:
            interrupt_soon(lambda: backend.running == 10)
            program.run_batch([("a",)] * 10, backend=backend)
        except KeyboardInterrupt:
            print("done")
    """,
}


@pytest.mark.costly
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_process_ends_as_it_should(name: str) -> None:
    script = HEAD + textwrap.dedent(SCRIPTS[name])
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=PATIENCE, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "done"), run.stderr
    assert "Traceback" not in run.stderr
