"""Memory and processors are what the container and the process's own limits leave, not what the machine has."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.lang.record import batch
from sgl.lang.record.pool import BodyPool
from sgl.machine_limits import Memory, address_space_left, memory_limit, num_processors
from sgl.runtime import rank_start
from sgl.runtime.engine import Engine
from sgl.runtime.platform import cpu as cpu_platform
from tests.lang_mocks import MockBackend
from tests.patience import PATIENCE
from tests.tiny_models import tiny_checkpoint

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def no_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {"memory.max": "123456\n"}, 123456),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "5000\n"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "4000\n", "a/memory.max": "5000\n"}, 4000),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.high": "3000\n"}, 3000),
        ("0::/host/path\n", {"memory.max": "7000\n"}, 7000),  # the path is the host's, the folder the container's
        ("4:memory:/d/x\n0::/\n", {"memory/d/x/memory.limit_in_bytes": "6000\n"}, 6000),
        ("4:memory:/d\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, MACHINE),
        ("4:cpu:/d\n", {"cpu/d/memory.limit_in_bytes": "6000\n"}, MACHINE),
        ("0::/\n", {"memory.max": "nonsense\n"}, MACHINE),
    ],
)
def test_memory_is_the_least_of_all_limits(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert memory_limit(system(tmp_path, cgroup, files)).num_bytes == expected


def test_the_address_space_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 2000))
    found = memory_limit(system(tmp_path, "0::/\n", {"memory.max": "5000\n"}))
    assert found.num_bytes == 1000
    assert "ulimit -v" in found.what
    assert address_space_left(tmp_path) == 1000


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("3:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "200000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/\n", {}, 8),
    ],
)
def test_processors_are_the_containers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_processors(system(tmp_path, cgroup, files)) == expected


@pytest.mark.parametrize(("processors", "threads"), [(2, 96), (10, 160)])
def test_the_threads_of_a_batch_are_of_the_processors_that_are_ours(
    monkeypatch: pytest.MonkeyPatch, processors: int, threads: int
) -> None:
    made = []

    class Pool(BodyPool):
        def __init__(self, max_threads: int) -> None:
            made.append(max_threads)
            super().__init__(max_threads)

    @sgl.function
    def body(s: Any) -> None:
        s += "a"

    monkeypatch.setattr(batch, "BodyPool", Pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 256)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    body.run_batch([{}, {}], backend=MockBackend())
    assert made == [threads]


def test_an_engine_is_sized_from_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path)
    monkeypatch.setattr(
        cpu_platform, "memory_limit", lambda: Memory(8 << 20, "the container's memory (memory.max)")
    )
    with Engine(str(path), device="cpu", skip_tokenizer_init=True) as engine:
        assert engine.get_server_info()["kv_bytes"] <= 0.3 * (8 << 20)
    monkeypatch.setattr(cpu_platform, "memory_limit", lambda: Memory(4096, "the container's memory (memory.max)"))
    with pytest.raises(rank_start.ConfigError, match=r"weights take .* container's memory"):
        Engine(str(path), device="cpu", skip_tokenizer_init=True)


def test_pages_that_cannot_be_had_are_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(
        rank_start,
        "KVCache",
        type("KVCache", (), {"__new__": fail, "bytes_per_token": staticmethod(lambda *_: 64)}),
    )
    with pytest.raises(rank_start.ConfigError, match=r"KV pages for 4\d* tokens take .* and there are .* in all"):
        Engine(str(tiny_checkpoint(tmp_path)), device="cpu", skip_tokenizer_init=True, max_total_tokens=4096)


@pytest.mark.slow
def test_with_little_address_space_an_engine_starts_or_says_why(tmp_path: Path) -> None:
    """As under `ulimit -v`: never a raw error of NumPy or torch."""
    code = f"""
import resource, torch, sgl
resource.setrlimit(resource.RLIMIT_AS, (int(2.2e9) + {1 << 30}, -1))
try:
    with sgl.Engine({str(tiny_checkpoint(tmp_path))!r}, device="cpu", skip_tokenizer_init=True) as engine:
        print("served", engine.generate(input_ids=[1, 2], sampling_params={{"max_new_tokens": 2}})["output_ids"])
    sgl.Engine({str(tmp_path)!r}, device="cpu", skip_tokenizer_init=True, max_total_tokens=10**11)
except sgl.errors.ConfigError as error:
    print("typed", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert "typed" in done.stdout, done.stderr


@pytest.mark.parametrize("hard", [None, 10 << 30])
def test_a_limit_of_what_is_to_come_begins_at_what_is_mapped(hard: int | None) -> None:
    """Also under `ulimit -v`, and where the threads of many processors map more than all that is to come."""
    code = f"""
import mmap, resource
from sgl.machine_limits import limit_address_space
mapped = mmap.mmap(-1, 9 << 30, flags=mmap.MAP_PRIVATE)
if {hard}: resource.setrlimit(resource.RLIMIT_AS, ({hard}, {hard}))
limit = limit_address_space(2 << 30)
assert resource.getrlimit(resource.RLIMIT_AS) == (limit, limit) and 9 << 30 < limit <= {hard or 12 << 30}
small = mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE)
try: mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE)
except (OSError, MemoryError): print("bounded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "bounded\n", done.stderr
