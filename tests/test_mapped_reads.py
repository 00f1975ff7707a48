"""Reads of memory that other engines opened, between a reader and servers of a few lines: what one engine that stands
still, a stranger, or a copy that does not end may hold up."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sgl.kernels.shared_memory import SharedMemory
from sgl.runtime.transfer import mapped
from sgl.runtime.transfer import server as server_module
from sgl.runtime.transfer.mapped import MappedReader, MappedRemote
from sgl.runtime.transfer.offers import Offer, Offers
from sgl.runtime.transfer.server import TransferServer
from sgl.runtime.transfer.wire import ANSWER, ASK, GONE, HELD, LENGTH, MAGIC, MAPPED, NOT_SERVED, OK, DeadlineSocket
from tests.patience import PATIENCE, wait_until

LEASE, PROMPT, SECRET = b"l" * 16, b"p" * 32, b"s" * 32


@dataclass
class StubRows:
    """Memory whose copies end when they are told to."""

    has_ended: Callable[[], bool] = lambda: True
    seconds: float = 0.0
    num_runs: int = 1
    forgets: Callable[[], None] = lambda: None
    forgotten: list[Any] = field(default_factory=list)
    page_bytes: int = 16
    mark: bytes = b"m" * 16
    handle: list[Any] = field(default_factory=lambda: [1])

    def number(self, pages: list[int]) -> tuple[list[int], int]:
        return pages, 1

    def open(self, handle: list[Any], mark: bytes) -> Any:
        return mark

    def read(self, theirs: Any, rows: list[int], stamp: int, own: list[int]) -> StubRows:
        return self

    def forget(self, theirs: Any) -> None:
        self.forgets()
        self.forgotten.append(theirs)

    def close(self) -> None:
        pass


@dataclass
class Params:
    """What a reader uses of TransferParams."""

    port: int
    host: str = "127.0.0.1"
    lease: str = LEASE.hex()
    lease_seconds: float = 120.0
    engine: str = "another"


@pytest.fixture
def readers() -> Iterator[Callable[[StubRows], MappedReader]]:
    made: list[MappedReader] = []

    def make(rows: StubRows) -> MappedReader:
        made.append(MappedReader(rows, SECRET))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@pytest.fixture
def servers() -> Iterator[Callable[[], TransferServer]]:
    made: list[TransferServer] = []

    def make() -> TransferServer:
        offers = Offers()
        offer = Offer(LEASE, PROMPT, [1], time.monotonic() + PATIENCE)
        offer.is_copied.set()
        offers.add(offer)
        rows = StubRows(mark=os.urandom(16))
        made.append(TransferServer(np.empty((0, 16), np.uint8), offers, "127.0.0.1", 0, MappedRemote(rows, SECRET)))
        return made[-1]

    yield make
    for server in made:
        server.close()


def asked(port: int, kind: bytes, lease: bytes, secret: bytes = SECRET) -> tuple[socket.socket, int]:
    """A connection, and the status that a server answers to an engine, or to whoever has another secret."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    peer = DeadlineSocket(sock, time.monotonic() + PATIENCE, PATIENCE)
    named = PROMPT if kind == MAPPED else mapped._proof(secret, lease)
    peer.send(ASK.pack(MAGIC, kind, lease, named, 0, int(kind == MAPPED)))
    return sock, ANSWER.unpack(peer.receive(ANSWER.size))[0]


def test_memory_is_told_to_engines_and_not_to_clients_who_know_a_lease(
    servers: Callable[[], TransferServer],
) -> None:
    port = servers().port
    assert asked(port, HELD, LEASE, b"another")[1] == NOT_SERVED
    assert asked(port, MAPPED, bytes(16))[1] == GONE
    assert asked(port, HELD, LEASE)[1] == OK


def test_a_connection_that_gets_no_thread_is_closed_and_others_are_served(
    servers: Callable[[], TransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 1)
    server, start = servers(), threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "sgl-transfer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
                assert sock.recv(1) == b""
    assert asked(server.port, MAPPED, bytes(16))[1] == GONE


def test_connections_that_are_held_leave_room_for_others(
    servers: Callable[[], TransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 3)
    server = servers()
    port = server.port

    def is_idle() -> bool:
        return server._room._value == 3  # its threads end behind their answers

    held = [asked(port, HELD, LEASE) for _ in range(3)]
    assert [status for _, status in held] == [OK] * 3
    assert asked(port, HELD, LEASE)[1] == NOT_SERVED
    for _ in range(5):
        wait_until(is_idle)
        sock, status = asked(port, MAPPED, LEASE)
        assert status == OK
        sock.close()
    held.pop()[0].close()
    wait_until(lambda: is_idle() and asked(port, HELD, LEASE)[1] == OK)


def standing_still() -> socket.socket:
    """A server that describes pages, and never how to open its memory."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        peer = DeadlineSocket(sock, time.monotonic() + PATIENCE, PATIENCE)
        if ASK.unpack(peer.receive(ASK.size))[1] == MAPPED:
            described = msgspec.msgpack.encode({"mark": b"a" * 16, "rows": [1], "stamp": 1})
            peer.send(ANSWER.pack(OK, 16) + LENGTH.pack(len(described)) + described)
        held.append(sock)

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            pass  # closed

    held: list[socket.socket] = []
    threading.Thread(target=accept, daemon=True).start()
    return listener


def test_an_engine_that_stands_still_holds_up_its_own_reads_alone(
    servers: Callable[[], TransferServer],
    readers: Callable[[StubRows], MappedReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped, "_SILENT_SECONDS", 100.0)
    reader = readers(StubRows())
    with standing_still() as listener:
        still: Any = Params(listener.getsockname()[1])
        stuck = [reader.read(still, PROMPT, 0, [number]) for number in range(4)]
        good = reader.read(Params(servers().port), PROMPT, 0, [9])  # type: ignore[arg-type]
        wait_until(lambda: good.is_done)
        assert (good.error, good.num_good) == (None, 1)
        assert not any(each.is_done for each in stuck)
        for each in stuck:
            each.cut()
        wait_until(lambda: all(each.is_quiet for each in stuck))


def test_nobody_waits_for_memory_to_be_closed(
    servers: Callable[[], TransferServer], readers: Callable[[StubRows], MappedReader]
) -> None:
    """Which may take as long as another engine's copies."""
    goes_on = threading.Event()
    rows = StubRows(forgets=lambda: goes_on.wait(PATIENCE) and None)
    reader, ending, other = readers(rows), servers(), servers()
    first = reader.read(Params(ending.port), PROMPT, 0, [1])  # type: ignore[arg-type]
    wait_until(lambda: first.is_quiet)
    ending.close()
    wait_until(lambda: not reader._peers)
    second = reader.read(Params(other.port), PROMPT, 0, [2])  # type: ignore[arg-type]
    wait_until(lambda: second.is_quiet)
    assert (second.num_good, rows.forgotten) == (1, [])
    goes_on.set()
    wait_until(lambda: len(rows.forgotten) == 1)


def test_memory_that_a_copy_reads_is_not_closed(
    servers: Callable[[], TransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.runtime.transfer.reader._ENDING_SECONDS", 0.05)
    rows = StubRows(has_ended=lambda: False)
    reader = MappedReader(rows, SECRET)
    read = reader.read(Params(servers().port), PROMPT, 0, [1])  # type: ignore[arg-type]
    wait_until(lambda: bool(reader._peers))
    reader.close()
    assert read.is_quiet
    assert (read.num_good, rows.forgotten) == (0, [])


def test_numbers_that_are_no_rows_are_refused(readers: Callable[[StubRows], MappedReader]) -> None:
    for rows, stamp in (([1 << 40], 1), ([0], 1), ([-1], 1), ([1], -1), ([1], 1 << 62)):
        listener = socket.create_server(("127.0.0.1", 0))
        read = readers(StubRows()).read(Params(listener.getsockname()[1]), PROMPT, 0, [1])  # type: ignore[arg-type]
        with listener, listener.accept()[0] as sock:
            peer = DeadlineSocket(sock, time.monotonic() + PATIENCE, PATIENCE)
            peer.receive(ASK.size)
            described = msgspec.msgpack.encode({"mark": b"a" * 16, "rows": rows, "stamp": stamp})
            peer.send(ANSWER.pack(OK, 16) + LENGTH.pack(len(described)) + described)
            wait_until(lambda: read.is_quiet)  # noqa: B023 - within its turn
        assert "where the pages lie cannot be read" in str(read.error)


def test_shared_memory_that_nobody_closes_is_given_back() -> None:
    def files() -> int:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # of the listing
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        return sum("memfd:sgl" in link for link in links)

    gc.collect()  # others'
    before = files()
    memory = SharedMemory(1 << 16, torch.device("cpu"))
    assert files() > before
    del memory
    gc.collect()
    assert files() == before
