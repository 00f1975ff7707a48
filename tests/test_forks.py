"""Engines and ranks are forked from a process that has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sgl.errors import EngineDead
from sgl.runtime import forks
from sgl.runtime.forks import Fork
from sgl.runtime.parallel.group import FOLLOWER
from tests.house import REPOSITORY
from tests.open_files import many_open_files
from tests.patience import PATIENCE, wait_until
from tests.test_server_process import children

WAITING = "import time; time.sleep(600)"


def test_a_fork_has_the_folder_environment_path_and_stderr_of_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_this_path.py").write_text("NAME = 'found'")
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SGL_TEST_FORK", "ü = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        "import os, sys, threading, of_this_path\n"
        "print(os.getcwd(), os.environ['SGL_TEST_FORK'], of_this_path.NAME, sys.argv[1:],"
        " len(os.listdir('/proc/self/fd')), 'sgl.runtime.follower' in sys.modules, threading.active_count(),"
        " file=sys.stderr)\n"
        "sys.exit(7)"
    )
    process = forks.forker(FOLLOWER).fork(code, ["1", "two words"])
    assert process.wait(PATIENCE) == 7 == process.poll()
    said = capfd.readouterr().err
    assert said.startswith(f"{folder} ü = 1 found ['1', 'two words']")
    assert said.split()[-3:] == ["4", "True", "1"], "stdin, stdout, stderr, and the list of them: nothing of others"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("", 0), ("raise SystemExit('why')", 1), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 10)", -10)],
)
def test_how_it_ends_is_told(code: str, exit_code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert forks.forker(FOLLOWER).fork(code, []).wait(PATIENCE) == exit_code
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (code == "1 / 0")


def test_one_that_runs_may_be_waited_for_and_killed() -> None:
    process = forks.forker(FOLLOWER).fork(WAITING, [])
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    process.kill()  # again does nothing
    assert not Path(f"/proc/{process.pid}").exists(), "it is reaped"


def test_the_next_asks_a_new_one_when_it_was_killed() -> None:
    first = forks.forker(FOLLOWER)
    process = first.fork(WAITING, [])
    os.kill(first.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists())
    wait_until(lambda: not first.runs())
    with pytest.raises(EngineDead, match="is gone"):
        first.fork("", [])
    assert forks.forker(FOLLOWER) is not first
    assert forks.forker(FOLLOWER).fork("", []).wait(PATIENCE) == 0


def test_nothing_is_forked_for_who_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt comes while the forker imports, as a rule."""
    its = forks.forker(FOLLOWER)
    its.fork("", []).wait(PATIENCE)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    os.kill(its.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(forks, "_readable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            its.fork(WAITING, [])
    os.kill(its.pid, signal.SIGCONT)
    assert its.fork("", []).wait(PATIENCE) == 0  # it goes on, and has seen the first
    wait_until(lambda: not children(its.pid))


def test_a_process_with_thousands_of_open_files_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_forkers", {})
    with many_open_files():
        process = forks.forker(FOLLOWER).fork(WAITING, [])
    assert process.poll() is None
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    assert forks.forker(FOLLOWER).runs()


def test_a_process_whose_threads_may_hold_locks_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_forkers", {})
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    forks.fork_from_here(FOLLOWER)
    assert not forks._forkers
    ended.set()
    thread.join()


LEADER = """
import os, sys, time
from sgl.runtime import forks
from sgl.runtime.follower import main
if sys.argv[1] == "here":
    inherited, wanted = os.pipe()
    forks.fork_from_here("sgl.runtime.follower")
forker = forks.forker("sgl.runtime.follower")
process = forker.fork("import os; print(len(os.listdir('/proc/self/fd')), file=__import__('sys').stderr); "
                      "import time\\nwhile os.getppid() == %d: time.sleep(0.01)" % forker.pid, [])
if not (other := os.fork()):  # it holds the leader's end open
    assert not forks._forkers
    time.sleep(600)
print(forker.pid, process.pid, other, flush=True)
time.sleep(600)
"""


@pytest.mark.costly
@pytest.mark.parametrize("where", ["here", "anew"])
def test_all_end_with_the_leader_though_its_other_children_do_not(where: str) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    assert leader.stderr is not None
    forker_pid, pid, other = map(int, leader.stdout.readline().split())
    try:
        assert leader.stderr.readline() == "4\n", "nothing of the leader's is held open"
        leader.kill()
        leader.wait()
        for each in (forker_pid, pid):
            wait_until(lambda each=each: not Path(f"/proc/{each}").exists())
    finally:
        os.kill(other, signal.SIGKILL)


IMPORTS = """
import time
from sgl.runtime import forks
forks.Forker("imports_for_long")
time.sleep(600)
"""


def test_one_ends_with_its_leader_though_it_still_imports(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    module = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    (tmp_path / "imports_for_long.py").write_text(module)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    with subprocess.Popen([sys.executable, "-c", IMPORTS], env=environment) as leader:
        wait_until(lambda: pid.exists() and pid.read_text())
        leader.kill()
        wait_until(lambda: not Path(f"/proc/{pid.read_text()}").exists())


def test_many_at_once() -> None:
    processes: list[Fork] = [forks.forker(FOLLOWER).fork(WAITING, []) for _ in range(20)]
    assert len({each.pid for each in processes}) == 20
    for each in processes:
        each.kill()
    assert all(each.wait(PATIENCE) == -signal.SIGKILL for each in processes)
