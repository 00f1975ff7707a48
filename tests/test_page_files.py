"""Cached pages in files: found again by the next engine, never another's, never half written, and no more than may be.

A child process is killed at every one of its writes, before it, half way and behind it."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.errors import ConfigError
from sgl.runtime.cache import files as files_module
from sgl.runtime.cache import parts as parts_module
from sgl.runtime.cache import segments as segments_module
from sgl.runtime.cache.files import Item, Kind, PageFiles, Transfer
from sgl.runtime.cache.keys import key_of
from tests.patience import PATIENCE, wait_until

PAGE = 4
BYTES = 40
MODEL = b"m" * 32


def content(name: bytes) -> np.ndarray:
    """What a page of this name has in these tests."""
    return np.frombuffer((name * 2)[:BYTES], np.uint8)


class Store:
    """Files with 64 pages of host memory."""

    def __init__(
        self, folder: Path, model: bytes = MODEL, max_bytes: int = 1 << 20, segment_bytes: int = 400
    ) -> None:
        self.memory = np.zeros((64, BYTES), np.uint8)
        self.files = PageFiles(folder, model, self.memory, PAGE, max_bytes, segment_bytes=segment_bytes)

    def names(self, prompt: list[int], namespace: str | None = None) -> list[bytes]:
        return self.files.names(key_of(prompt), namespace)

    def stored(self, prompt: list[int], namespace: str | None = None) -> int:
        return len(self.files.leading(self.names(prompt, namespace)))

    def items(self, names: list[bytes]) -> list[Item]:
        return [Item(Kind.PAGE, name, page) for page, name in enumerate(names, 1)]

    def write(self, names: list[bytes]) -> Transfer:
        for page, name in enumerate(names, 1):
            self.memory[page] = content(name)
        return self.done(self.files.write(self.items(names)))

    def read(self, names: list[bytes]) -> Transfer:
        self.memory[:] = 0
        transfer = self.done(self.files.read(self.items(names)))
        for page, name in enumerate(names[: transfer.num_good], 1):
            assert self.memory[page].tobytes() == content(name).tobytes(), "a wrong page was read"
        return transfer

    def done(self, transfer: Transfer) -> Transfer:
        wait_until(lambda: transfer.is_done)
        return transfer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.files.close()


PROMPT = list(range(100, 140))


def test_pages_outlast_the_engine(tmp_path: Path) -> None:
    first = Store(tmp_path)
    names = first.names(PROMPT)
    assert first.write(names).num_good == len(names) == 10
    first.files.close()
    second = Store(tmp_path)
    assert second.stored(PROMPT) == 10
    assert second.stored([*PROMPT[:22], 7, *PROMPT[23:]]) == 5
    assert second.read(names).num_good == 10
    second.files.close()


def test_names_differ_by_model_namespace_and_all_that_comes_before(store: Store, tmp_path: Path) -> None:
    names = store.names(PROMPT)
    other = Store(tmp_path, model=b"n" * 32)
    assert not set(names) & {*other.names(PROMPT), *store.names(PROMPT, "key"), *store.names([1, *PROMPT[1:]])}
    assert store.names(PROMPT)[:3] == store.names(PROMPT[:15])
    store.write(names)
    assert (store.stored(PROMPT), store.stored(PROMPT, "key"), other.stored(PROMPT)) == (10, 0, 0)
    other.files.close()


def test_adapters_and_what_follows_an_image_stay_out_of_files(store: Store) -> None:
    assert store.files.names(key_of(PROMPT), (3, None)) == []
    assert len(store.names([*PROMPT[:14], -2, *PROMPT[15:]])) == 3


def test_each_engine_has_a_part_of_its_own(store: Store, tmp_path: Path) -> None:
    beside = Store(tmp_path)
    store.write(store.names(PROMPT))
    assert beside.stored(PROMPT) == 0
    beside.files.close()
    again = Store(tmp_path)
    assert again.stored(PROMPT) == 0
    again.files.close()


def test_files_are_bounded_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store = Store(tmp_path, max_bytes=4000)
    kept = store.names(PROMPT)[:2]
    store.write(kept)
    for number in range(40):
        store.write(store.names([number] * 40))
        assert store.read(kept).num_good == 2
        used = sum(path.stat().st_size for path in tmp_path.rglob("*.pages"))
        assert used == store.files.num_bytes <= 4000
    assert store.stored([3] * 40) == 0
    assert store.stored([39] * 40) == 10
    store.files.close()
    smaller = Store(tmp_path, max_bytes=1000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pages")) <= 1000
    smaller.files.close()


def test_what_other_models_left_is_bounded_too(store: Store, tmp_path: Path) -> None:
    store.write(store.names(PROMPT))
    for number in range(4):
        other = Store(tmp_path, model=bytes([number]) * 32, max_bytes=1200)
        other.write(other.names(PROMPT))
        other.files.close()
    last = Store(tmp_path, model=b"l" * 32, max_bytes=1200)
    used = {path: path.stat().st_size for path in tmp_path.rglob("*.pages")}
    mine = sum(size for path, size in used.items() if MODEL.hex()[:24] in str(path))
    assert sum(used.values()) - mine <= 1200
    assert store.read(store.names(PROMPT)).num_good == 10, "an engine that runs keeps its own"
    last.files.close()


def test_parts_of_another_user_are_left_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(store.names(PROMPT))
    store.files.close()
    opened = os.open

    def refused(path: object, *arguments: int) -> int:
        if MODEL.hex()[:24] in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refused)
    mine = Store(tmp_path, model=b"l" * 32, max_bytes=100)
    assert mine.write(mine.names(PROMPT)[:1]).num_good == 1
    mine.files.close()
    assert list((tmp_path / MODEL.hex()[:24]).rglob("*.pages"))


def test_a_flush_removes_all(store: Store, tmp_path: Path) -> None:
    store.write(store.names(PROMPT))
    store.files.clear()
    assert store.stored(PROMPT) == 0
    wait_until(lambda: not list(tmp_path.rglob("*.pages")))
    assert store.write(store.names(PROMPT)).num_good == 10


def test_a_flush_empties_what_it_cannot_remove(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took the right to change the folder away did not mean to keep pages that were flushed."""
    store.write(store.names(PROMPT))

    def refused(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        store.files.clear()
        wait_until(lambda: not any(path.stat().st_size for path in tmp_path.rglob("*.pages")))
    assert store.write(store.names(PROMPT)).num_good == 10
    assert store.read(store.names(PROMPT)).num_good == 10
    store.files.close()
    again = Store(tmp_path)
    assert again.stored(PROMPT) == 10
    again.files.close()


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """A flipped bit anywhere, or a file cut anywhere: fewer pages, and never a wrong one."""
    store = Store(tmp_path, segment_bytes=1 << 16)
    names = store.names(PROMPT)
    store.write(names)
    store.files.close()
    (path,) = tmp_path.rglob("*.pages")
    data = path.read_bytes()
    for place in range(0, len(data), 29):
        for damaged in (data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :], data[:place]):
            path.write_bytes(damaged)
            store = Store(tmp_path, segment_bytes=1 << 16)
            found = store.stored(PROMPT)
            assert store.read(names[:found]).num_good < 10
            store.files.close()
            path.parent.mkdir(exist_ok=True)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="hicache_storage_dir"):
        Store(tmp_path / "file")


def test_damage_is_told_once(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write(store.names(PROMPT))
    (path, *_) = sorted(tmp_path.rglob("*.pages"))
    os.truncate(path, 100)
    for name in store.names(PROMPT):
        store.read([name])
    assert store.files.num_bad > 1
    assert [its.getMessage() for its in caplog.records if "is damaged" in its.getMessage()] == [
        f"a page in {path.parent} is damaged: it is computed again, as others will be"
    ]


def test_a_folder_that_was_refused_is_locked_no_more(tmp_path: Path) -> None:
    """Once it is mended, the next try finds its pages."""
    first = Store(tmp_path)
    first.write(first.names(PROMPT))
    first.files.close()
    (part,) = tmp_path.glob("*/part-0")
    (part / "99999999.pages").mkdir()
    with pytest.raises(ConfigError, match="hicache_storage_dir"):
        Store(tmp_path)
    (part / "99999999.pages").rmdir()
    again = Store(tmp_path)
    assert again.stored(PROMPT) == 10
    again.files.close()


def test_a_segment_that_the_disk_cannot_read_costs_its_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the start: it is a cache."""
    first = Store(tmp_path, max_bytes=1 << 16)
    first.write(first.names(PROMPT))
    first.files.close()
    bad, *others = sorted(tmp_path.rglob("*.pages"))
    inode, read = bad.stat().st_ino, os.pread

    def failing(file: int, size: int, place: int) -> bytes:
        if os.fstat(file).st_ino == inode and place > 200:  # behind its first records
            raise OSError(5, "Input/output error")
        return read(file, size, place)

    monkeypatch.setattr(os, "pread", failing)
    again = Store(tmp_path, max_bytes=1 << 16)
    names = again.names(PROMPT)
    kept = [name for name in names if again.read([name]).num_good]
    assert 0 < len(kept) < len(names)
    assert again.write(names).num_good == again.read(names).num_good == len(names)
    again.files.close()
    assert not bad.exists()
    assert all(path.exists() for path in others)
    assert f"{bad} cannot be read, and is removed: [Errno 5] Input/output error" in caplog.text


def test_new_folders_are_open_to_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "a" / "b").files.close()
    finally:
        os.umask(before)
    made = list((tmp_path / "a").rglob("*"))
    assert len(made) == 5
    assert all(not path.stat().st_mode & 0o077 for path in (tmp_path / "a", *made))


def test_open_files_are_bounded_however_often_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "_MOST_SEGMENTS", 4)
    for number in range(9):
        store = Store(tmp_path, segment_bytes=1000)
        store.write(store.names([number] * 40))
        store.files.close()
    store = Store(tmp_path, segment_bytes=1000)
    assert len(list(tmp_path.rglob("*.pages"))) == len(store.files._segments._segments) == 4
    assert [store.stored([number] * 40) for number in range(9)] == [0] * 5 + [10] * 4
    for number in range(9, 60):
        store.write(store.names([number] * 40))
        assert store.read(store.names([number] * 40)).num_good == 10
    assert len(list(tmp_path.rglob("*.pages"))) <= 4
    store.files.close()


def test_an_engine_that_ends_does_not_wait_for_a_slow_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor would kill it, with most of what there is to write unwritten just so."""
    write_all, is_asked = segments_module.write_all, threading.Event()

    def slow(file: int, data: bytes) -> None:
        assert is_asked.wait(PATIENCE)
        write_all(file, data)

    monkeypatch.setattr(segments_module, "write_all", slow)
    names = store.names(PROMPT)
    transfer = store.files.write(store.items(names))
    ending = threading.Thread(target=store.files.close, args=(0.0,))
    ending.start()
    wait_until(lambda: store.files._is_closing)
    is_asked.set()
    ending.join(PATIENCE)
    assert transfer.is_done
    assert transfer.num_good <= 1
    again = Store(tmp_path)
    assert again.stored(PROMPT) == transfer.num_good, "the part is another's now"
    again.files.close()


def full(file: int, data: bytes) -> None:
    """In place of `write_all`, on a disk that fills up meanwhile."""
    os.write(file, data[:10])
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_writes_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(store.names(PROMPT)[:5])
    monkeypatch.setattr(segments_module, "write_all", full)
    assert store.write(store.names(PROMPT)).num_good == 5
    assert store.files.error is not None
    assert store.files.num_failed == 1
    assert store.write(store.names(PROMPT)).num_good == 0, "and it is left alone for a while"
    assert store.files.num_failed == 1
    assert store.read(store.names(PROMPT)[:5]).num_good == 5


@pytest.mark.parametrize("before", [1, 2, 5])  # pages, with room for 4 in a segment: amid one, and at its beginning
@pytest.mark.parametrize("can_cut", [True, False])
def test_a_disk_that_has_room_again_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, can_cut: bool
) -> None:
    monkeypatch.setattr(files_module, "_FIRST_PAUSE", 0.02)
    store = Store(tmp_path)
    names = store.names(PROMPT)
    assert store.write(names[:before]).num_good == before
    with monkeypatch.context() as patch:
        patch.setattr(segments_module, "write_all", full)
        if not can_cut:
            patch.setattr(os, "ftruncate", lambda file, size: (_ for _ in ()).throw(OSError(5, "I/O error")))
        wait_until(lambda: store.write(names) and store.files.num_failed > 2)
        assert store.stored(PROMPT) == before
    wait_until(lambda: store.write(names).num_good == 10)
    assert store.files.error is None
    assert store.read(names).num_good == 10
    assert store.files.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.pages"))
    store.files.close()
    again = Store(tmp_path)
    assert again.stored(PROMPT) == 10
    assert again.read(names).num_good == 10
    again.files.close()


def test_pauses_of_a_failing_disk_grow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(segments_module, "write_all", full)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    failed = []
    for _ in range(190):
        store.write(store.names(PROMPT))
        failed.append(store.files.num_failed)
        now += 5.0
    times = [5 * at for at, (one, other) in enumerate(itertools.pairwise(failed), 1) if other > one]
    assert times == [5, 15, 35, 75, 155, 315, 615, 915]


def test_an_engine_that_ends_leaves_a_stuck_disk_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_stuck = threading.Event(), threading.Event()

    def stuck(*_: object) -> int:
        is_stuck.set()
        assert goes_on.wait(PATIENCE)
        raise OSError(5, "I/O error")

    store.write(store.names(PROMPT))
    monkeypatch.setattr(files_module, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr(os, "preadv", stuck)
    transfer = store.files.read(store.items(store.names(PROMPT)))
    assert is_stuck.wait(PATIENCE)
    store.files.close(0.0)
    assert not transfer.is_done
    other = Store(tmp_path)
    assert other.stored(PROMPT) == 0, "it took another part"
    other.files.close()
    goes_on.set()
    store.done(transfer)


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_whole_pages_only(tmp_path: Path) -> None:
    assert killed(lambda: write_prompt(tmp_path / "all"), None, "behind") == 0
    for number in range(40):
        for moment in MOMENTS:
            folder = tmp_path / f"{number}{moment}"
            if not killed(lambda folder=folder: write_prompt(folder), number, moment):  # type: ignore[misc]
                assert number > 10, "there are pages and headers of segments to write"
                return
            store = Store(folder)
            names = store.names(PROMPT)
            found = store.stored(PROMPT)
            assert store.read(names[:found]).num_good == found
            assert found >= 10 * (number - 4) // 14
            assert store.write(names).num_good == 10  # and goes on
            assert store.read(names).num_good == 10
            store.files.close()


def write_prompt(folder: Path) -> None:
    store = Store(folder)
    store.write(store.names(PROMPT))
    store.files.close()


def test_engines_that_start_together_take_no_part_for_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who starts looks through the parts of others for what nobody uses, and has them locked meanwhile."""
    lstat = Path.lstat

    def slow(path: Path) -> os.stat_result:
        time.sleep(2e-3)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", slow)
    models = [bytes([number]) * 32 for number in range(6)]
    for model in models:
        store = Store(tmp_path, model)
        store.write(store.names(PROMPT))
        store.files.close()
    started: list[Store] = []
    for _ in range(2):
        threads = [
            threading.Thread(target=lambda *its: started.append(Store(*its)), args=(tmp_path, its))
            for its in models
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [store.stored(PROMPT) for store in started] == [10] * len(models)
        for store in started:
            store.files.close()
        started.clear()


def test_an_engine_that_cannot_start_for_others_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).files.close()
    monkeypatch.setattr(parts_module, "_PATIENCE", 0.05)
    (path,) = tmp_path.glob("lock-*")
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another engine that starts has locked it for 0\.05 s"):
            Store(tmp_path)


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    """A file that is put in place of a segment is neither read nor written nor removed."""
    store.write(store.names(PROMPT))
    store.files.close()
    (path, *_) = sorted(tmp_path.rglob("*.pages"))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"hicache_storage_dir.*{path.name}"):
        Store(tmp_path)
    assert (tmp_path / "elsewhere").stat().st_size > 300


def test_files_of_other_names_change_nothing(store: Store, tmp_path: Path) -> None:
    """Nor do copies of segments, whose numbers would be others' or too long."""
    store.write(store.names(PROMPT))
    store.files.close()
    (path, *_) = sorted(tmp_path.rglob("*.pages"))
    data = path.read_bytes()
    others = [path.with_name(f"{number}.pages") for number in ("1", "٣", "000000001", "9" * 249)]
    for other in others:
        other.write_bytes(data)
    again = Store(tmp_path, max_bytes=4000)
    for number in range(60):
        again.write(again.names([number] * 40))
    assert again.stored([59] * 40) == 10
    assert again.files.num_failed == 0
    again.files.close()
    assert all(other.read_bytes() == data for other in others)
    assert sum(each.stat().st_size for each in set(path.parent.glob("*.pages")) - set(others)) <= 4000


@pytest.mark.parametrize("most_joined", [0, 1 << 20])
def test_contents_of_several_sizes_share_the_bound(
    most_joined: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "_MOST_JOINED", most_joined)
    memory, states = np.zeros((64, BYTES), np.uint8), [np.zeros((8, 500), np.uint8), np.zeros((8, 100), np.uint8)]
    options: dict[str, Any] = {"beside": {Kind.STATE: states}, "segment_bytes": 1300}
    files = PageFiles(tmp_path, MODEL, memory, PAGE, 12_000, **options)
    for number in range(60):
        names = files.names(key_of([number] * 40), None)
        items = [Item(Kind.PAGE, name, page) for page, name in enumerate(names, 1)]
        states[0][number % 8], states[1][number % 8] = number, number + 1
        items.append(Item(Kind.STATE, names[-1], number % 8))
        transfer = files.write(items)
        wait_until(lambda its=transfer: its.is_done)  # type: ignore[misc]
        assert transfer.num_good == 11
        assert files.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.pages")) <= 12_000
    files.close()
    files = PageFiles(tmp_path, MODEL, memory, PAGE, 12_000, **options)
    assert files.has(Kind.STATE, names[-1])
    assert not files.has(Kind.STATE, names[-2])
    for part in states:
        part[:] = 0
    transfer = files.read([Item(Kind.STATE, names[-1], 5)])
    wait_until(lambda: transfer.is_done)
    assert [set(part[5].tolist()) for part in states] == [{59}, {60}]
    assert not states[0][:5].any()
    files.close()


MOMENTS = ("before", "half", "behind")


def killed(work: Callable[[], None], number: int | None, moment: str) -> int:
    """Have a child work that ends at its write `number`; returns the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            _work_and_die(work, number, moment)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _work_and_die(work: Callable[[], None], number: int | None, moment: str) -> None:
    count = 0
    write_all = segments_module.write_all

    def counted(file: int, data: bytes) -> None:
        nonlocal count
        if count == number:
            write_all(file, {"before": b"", "half": data[: len(data) // 2], "behind": data}[moment])
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        write_all(file, data)

    segments_module.write_all = counted
    work()
