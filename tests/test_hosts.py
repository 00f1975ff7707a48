"""Ranks on several hosts, which here are processes: only who knows the secret takes part, and they come and go."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.errors import ConfigError, EngineDead, SglError
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.parallel import tcp, wire
from sgl.runtime.parallel.tcp import Connection, TcpReceiver, TcpSender, secret_of
from tests.patience import PATIENCE, wait_until
from tests.ports import free_port
from tests.test_server_process import ranks_of
from tests.test_shards import random_batch, same

SECRET = b"a secret of some bytes"


@pytest.fixture
def sender() -> Iterator[TcpSender]:
    sender = TcpSender("127.0.0.1", 0, SECRET, num_ranks=3, num_nodes=2)
    yield sender
    sender.close()


def receiver(sender: TcpSender, rank: int, secret: bytes = SECRET) -> TcpReceiver:
    return TcpReceiver("127.0.0.1", sender.port, secret, rank, 0.0)


def test_frames_arrive_on_all_ranks_bit_for_bit(sender: TcpSender) -> None:
    ends = [receiver(sender, rank) for rank in (1, 2)]
    rng = np.random.default_rng(3)
    batches = [random_batch(rng) for _ in range(100)]
    got: list[list[Any]] = [[], []]

    def read(which: int) -> None:
        for _ in batches:
            frame = wire.unpacked(ends[which].get())
            assert isinstance(frame, wire.Forward)
            got[which].append(frame.batch)
            ends[which].beat()

    threads = [threading.Thread(target=read, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(sender._connections) == 2, "both are there")
    for batch in batches:
        sender.put(wire.packed(wire.Forward(batch)), lambda: None)
    for which, thread in enumerate(threads):
        thread.join(PATIENCE)
        for one, other in zip(batches, got[which], strict=True):
            assert all(same(getattr(one, name), getattr(other, name)) for name in type(one).__slots__)
    wait_until(lambda: [sender.beats(reader) for reader in range(2)] == [100, 100], "every beat is heard")
    ends[0].fail("ValueError: no")
    ends[0].close()
    wait_until(lambda: sender.gone(0) == "ValueError: no", "its reason is known")
    with pytest.raises(EngineDead, match="rank 1 is gone"):
        sender.put(b"", lambda: None)
    assert sender.gone(1) is None
    sender.close()
    with pytest.raises((OSError, EOFError)):
        ends[1].get()


@pytest.mark.parametrize("secret", [b"another secret of bytes", b""])
def test_who_does_not_know_the_secret_is_let_in_by_neither_side(
    sender: TcpSender, secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((OSError, EOFError)):
        receiver(sender, 1, secret)
    wait_until(lambda: "it does not know the secret" in caplog.text, "the log says why")
    assert not sender._connections
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            sock, _ = impostor.accept()
            sock.sendall(tcp._GREETING + bytes(32))
            tcp._exactly(sock, 4 + 32 + 32)
            sock.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(EOFError, match="it does not know the secret"):
            TcpReceiver("127.0.0.1", impostor.getsockname()[1], SECRET, 1, 0.0)


def test_strangers_hold_nothing_and_disturb_nobody(sender: TcpSender, monkeypatch: pytest.MonkeyPatch) -> None:
    end = receiver(sender, 1)
    monkeypatch.setattr(tcp, "_HANDSHAKE_SECONDS", 0.5)
    strangers = [
        socket.create_connection(("127.0.0.1", sender.port)) for _ in range(40)
    ]  # more than shake hands at once
    for stranger in strangers[::2]:
        with contextlib.suppress(OSError):
            stranger.sendall(secrets.token_bytes(200))
    wait_until(lambda: sender._handshakes._value == tcp._MOST_HANDSHAKES, "none is left")
    monkeypatch.undo()
    for stranger in strangers:
        stranger.close()
    for rank in (0, 1, 5, 2**32 - 1):  # rank 0, one that is there, and none
        sock = socket.create_connection(("127.0.0.1", sender.port))
        tcp._proven_hub(sock, SECRET, rank)
        assert sock.recv(1) == b""
    sender._connections[2] = sender._connections[1]
    sender.put(b"x", lambda: None)
    assert end.get() == b"x"


def test_a_stranger_that_trickles_is_cut_off(sender: TcpSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_HANDSHAKE_SECONDS", 0.5)
    stranger = socket.create_connection(("127.0.0.1", sender.port))
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 60:  # of 68 bytes
            sent += stranger.send(b"x")
            time.sleep(0.1)
    stranger.close()
    assert sent < 60
    wait_until(lambda: sender._handshakes._value == tcp._MOST_HANDSHAKES, "its place is free")


@pytest.mark.parametrize("change", ["forged", "repeated", "left out", "endless"])
def test_messages_are_proven_one_by_one(change: str) -> None:
    left, right = socket.socketpair()
    sender, receiver = Connection(left, b"key", is_sender=True), Connection(right, b"key", is_sender=False)
    sender.send(b"one")
    assert receiver.receive() == b"one"
    raw_left, raw_right = socket.socketpair()
    sender._socket = raw_left
    sender.send(b"two")
    data = raw_right.recv(1000)
    if change == "forged":
        data = data[:-1] + b"x"
    elif change == "left out":
        sender.send(b"three")
        data = raw_right.recv(1000)
    elif change == "endless":
        data = struct.pack("<Q32s", 2**60, bytes(32))
    left.sendall(data)
    if change == "repeated":
        assert receiver.receive() == b"two"
        left.sendall(data)
    with pytest.raises(EOFError, match="forged" if change != "endless" else "too long"):
        receiver.receive()


@pytest.mark.parametrize(
    ("options", "words", "option"),
    [
        ({"dist_init_addr": None}, "2 hosts need HOST:PORT of host 0", "dist_init_addr"),
        ({"dist_init_addr": "here:port"}, "need HOST:PORT", "dist_init_addr"),
        ({"dist_init_addr": "here:70000"}, "need HOST:PORT", "dist_init_addr"),
        ({"dist_init_addr": "here:" + "1" * 5000}, "need HOST:PORT", "dist_init_addr"),
        ({"dist_init_addr": "here:٣٠"}, "need HOST:PORT", "dist_init_addr"),
        ({"dist_key_file": None}, "2 hosts need a dist_key_file", "dist_key_file"),
        ({"dist_key_file": "/nowhere/secret"}, "the secret cannot be read", "dist_key_file"),
        ({"tp_size": 3}, "tp_size=3 times pp_size=1 is no multiple of nnodes=2", "nnodes"),
        ({"node_rank": 1}, "node_rank=1 follows host 0", "node_rank"),
        ({"dp_size": 2, "dp_rank": 0}, "several engines run on one host only", "dp_size"),
        ({"dist_init_addr": "203.0.113.7:1"}, "cannot listen on 203.0.113.7:1", "dist_init_addr"),
    ],
)
def test_options_that_do_not_fit_are_explained(
    options: dict[str, Any], words: str, option: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    base = {"device": "cpu", "tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=words) as refused:
        Engine(**{**base, "dist_key_file": str(tmp_path / "secret"), **options})  # type: ignore[arg-type]
    assert refused.value.option == option


def test_a_secret_is_long_and_in_no_message(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="5 bytes: a secret needs 16 at least") as refused:
        secret_of(str(path))
    assert "short" not in str(refused.value)
    path.write_text("x" * 16 + "\n")
    assert secret_of(str(path)) == b"x" * 16
    with pytest.raises(ConfigError, match="host"):
        _ = EngineConfig(nnodes=2, tp_size=2, node_rank=2, dist_init_addr="a:1", dist_key_file="f").address


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / "log", "wb") as log:
            command = [sys.executable, "-m", "sgl", "serve", "embedded", "--device", "cpu", *flags]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_hosts_compute_together_and_again_after_one_failed(follow: Callable[..., Any], tmp_path: Path) -> None:
    """Two stages of two ranks, the second on another host, which is killed, then stands still."""
    secret, address = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    secret.write_text(secrets.token_hex(32))
    flags = ["--nnodes", "2", "--dist-init-addr", address, "--dist-key-file", str(secret)]
    other = follow("--tp", "2", "--pp", "2", "--node-rank", "1", *flags)
    options: dict[str, Any] = {
        "device": "cpu",
        "tp_size": 2,
        "pp_size": 2,
        "nnodes": 2,
        "rank_timeout": 3.0,
        "dist_init_addr": address,
        "dist_key_file": str(secret),
    }
    params = {"max_new_tokens": 10, "temperature": 0}
    with Engine(device="cpu") as engine:
        expected = [each["text"] for each in engine.generate(["a b", "c d"], params)]
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with Engine(**options) as engine:
            assert [each["text"] for each in engine.generate(["a b", "c d"], params)] == expected
            wait_until(lambda: len(ranks_of(other.pid)) == 2, "both ranks run there")
            answers: list[BaseException] = []

            def ask(engine: Engine = engine, answers: list[BaseException] = answers) -> None:
                try:
                    engine.generate(["x"] * 4, {"max_new_tokens": 900, "ignore_eos": True})
                except SglError as error:
                    answers.append(error)

            asker = threading.Thread(target=ask)
            asker.start()
            wait_until(lambda engine=engine: engine.get_server_info()["internal_states"][0]["num_running_reqs"])  # type: ignore[misc]
            os.kill(ranks_of(other.pid)[0], number)
            asker.join(PATIENCE)
            assert "of 4" in str(answers[0])
            assert isinstance(answers[0], EngineDead)
    with Engine(**options) as engine:
        assert [each["text"] for each in engine.generate(["a b", "c d"], params)] == expected
        assert "secret" not in str({k: v for k, v in engine.get_server_info().items() if k != "dist_key_file"})
    wait_until(lambda: not ranks_of(other.pid), "its ranks end with the engine")
    other.terminate()
    assert other.wait(PATIENCE) == 0
    assert f"follows {address} as host 1 of 2" in (tmp_path / "log").read_text()
