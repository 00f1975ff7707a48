"""What ranks share in memory is given back however their processes end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sgl.runtime.cluster import running
from sgl.runtime.parallel import folders
from sgl.runtime.parallel.channels import receiver_of
from sgl.runtime.parallel.folders import LedFolder
from sgl.runtime.parallel.ring import Ring

_LEADING = """
import os, signal, sys
from pathlib import Path
from sgl.runtime.parallel import folders
folders._memory = lambda: Path(sys.argv[1])
print(folders.LedFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "_memory", lambda: tmp_path)
    return tmp_path


def left(memory: Path) -> Path:
    """A folder whose leader was killed, with all others."""
    leader = subprocess.run(
        [sys.executable, "-c", _LEADING, memory], stdout=subprocess.PIPE, text=True, check=False
    )
    assert leader.returncode == -signal.SIGKILL
    (folder := Path(leader.stdout.strip())).joinpath("rows").write_bytes(bytes(100))
    return folder


def test_the_next_engine_removes_what_killed_ones_left_and_nothing_else(memory: Path) -> None:
    led, before = LedFolder(), left(memory)
    strange, outside = memory / "sgl-ranks-strange", memory / "outside"
    strange.mkdir()
    outside.mkdir()
    (outside / "lock").touch()
    (memory / "sgl-ranks-link").symlink_to(outside)
    (other := memory / "sgl-ranks-pointing").mkdir()
    (other / "lock").symlink_to(outside / "lock")
    mine = LedFolder()
    assert not before.exists()
    also_before = left(memory)
    running.sweep(str(memory / "ray"))
    assert not also_before.exists()
    assert all(each.exists() for each in (led.path, mine.path, strange, outside / "lock", other))
    for each in (led, mine):
        each.close()
        each.close()
        assert not each.path.exists()


def test_a_rank_that_fails_since_its_leader_was_killed_leaves_nothing(memory: Path) -> None:
    led, before = LedFolder(), left(memory)
    for folder in (led.path, before):
        Ring(folder / "ring", 1)
        receiver_of([str(folder)], 1, 2).fail("Connection reset by peer")
    assert not before.exists()
    assert (led.path / "error1").read_text() == "Connection reset by peer"
    led.close()
