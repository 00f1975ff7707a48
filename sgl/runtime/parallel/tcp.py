"""Frames between hosts, over TCP, to peers that prove a shared secret.

Whoever connects and the sender prove to each other that they know the secret, by HMACs of fresh random numbers; each
message then carries an HMAC of a key of that connection and of the message's number, so none can be forged, repeated or
left out. Nothing is encrypted: the network sees prompts and tokens.

A message is its length, its HMAC, and content. To the sender it is MessagePack: ("beat", numbers), ("set", key, value),
("get", key) or ("error", text); from it the bytes of a frame, or the value of a get, behind a letter that tells which.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import distributed

from sgl.errors import ConfigError, EngineDead
from sgl.runtime.parallel.times import NUMBERS

logger = logging.getLogger(__name__)

_GREETING = b"sgl ranks 2\n"
_NONCE, _PROOF = 32, 32  # bytes
_RANK = struct.Struct("<I")
_HEAD = struct.Struct("<Q32s")  # length, HMAC
_MOST = 1 << 30  # bytes of a message
_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 16  # at once
_POLL_SECONDS = 0.1
_VANISHED_MS = 10_000
_LEAST_SECRET = 16  # bytes
_FRAME, _VALUE = b"F", b"V"
_c10d: Any = distributed  # its types lack what is used here
_packed, _unpacked = msgspec.msgpack.encode, msgspec.msgpack.decode


class Connection:
    """One end of a proven connection. `send` is safe from several threads, `receive` is one thread's."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_sender: bool) -> None:
        self._socket = sock
        self._out, self._in = (key + side for side in ((b"hub", b"rank") if is_sender else (b"rank", b"hub")))
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send a message. Raises OSError."""
        with self._lock:
            self._sent += 1
            self._socket.sendall(_HEAD.pack(len(data), _hmac(self._out, self._sent, data)) + data)

    def receive(self) -> bytes:
        """Wait for the next message. Raises OSError and EOFError."""
        length, proof = _HEAD.unpack(_exactly(self._socket, _HEAD.size))
        if length > _MOST:
            raise EOFError("a message is too long")
        data = _exactly(self._socket, length)
        self._received += 1
        if not hmac.compare_digest(proof, _hmac(self._in, self._received, data)):
            raise EOFError("a message is forged")
        return data

    def close(self) -> None:
        """Close it; whoever waits for a message gets an error. Idempotent."""
        _shut(self._socket)
        self._socket.close()

    @property
    def host(self) -> str:
        """The own address that the peer reaches."""
        return str(self._socket.getsockname()[0])


class TcpSender:
    """Rank 0's end: one connection for each other rank. With the writer's methods of Ring."""

    is_one_host = False

    def __init__(self, host: str, port: int, secret: bytes, num_ranks: int, num_nodes: int) -> None:
        """Listen. Each other host's supervisor connects, too, as a rank behind the last. Raises OSError."""
        self._secret = secret
        self._num_ranks = num_ranks
        self._num_peers = num_ranks + num_nodes
        self._connections: dict[int, Connection] = {}
        self._beats = [0] * self._num_peers
        self._numbers = [[0] * NUMBERS] * self._num_peers
        self._errors: dict[int, str] = {}
        self._gone: set[int] = set()
        self._store: dict[str, bytes] = {}
        self._stores: list[Any] = []
        self._changed = threading.Condition()
        self._handshakes = threading.Semaphore(_MOST_HANDSHAKES)
        self._listener = socket.create_server((host, port), backlog=_MOST_HANDSHAKES)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="sgl-hub", daemon=True).start()

    def put(self, frame: bytes, check: Callable[[], None]) -> None:
        """Send a frame to all. Raises what `check` raises, or EngineDead, when one is gone."""
        for rank in range(1, self._num_ranks):
            connection = self._connections[rank]
            try:
                connection.send(_FRAME + frame)
            except OSError as error:
                check()
                raise EngineDead(f"rank {rank} is gone: {error}") from error

    def beats(self, reader: int) -> int:
        """How often a rank (reader + 1) has told that it lives."""
        return self._beats[reader + 1]

    def numbers(self, reader: int) -> list[int]:
        """What it told of itself with its latest beat; see `times`."""
        return self._numbers[reader + 1]

    def gone(self, reader: int) -> str | None:
        """Why a rank that was there is not any more."""
        rank = reader + 1
        with self._changed:
            return self._errors.get(rank, "its connection ended") if rank in self._gone else None

    def close(self) -> None:
        """End all connections. Idempotent."""
        _shut(self._listener)  # ends `accept`, which would keep the port
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

    def store(self, name: str, size: int) -> Any:
        """Where ranks find each other; see `collectives.Rendezvous`."""
        self._stores.append(_Store(self._set, self._get))  # kept, as torch does not
        return _c10d.PrefixStore(name, self._stores[-1])

    def _set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._store[key] = value
            self._changed.notify_all()

    def _get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._store or bool(self._gone))
            if key not in self._store:
                raise RuntimeError("a rank is gone")
            return self._store[key]

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, address), daemon=True).start()

    def _meet(self, sock: socket.socket, address: Any) -> None:
        late = threading.Timer(_HANDSHAKE_SECONDS, _shut, [sock])  # in all: a byte now and then holds no place
        late.start()
        try:
            rank, key = _proven_rank(sock, self._secret)
        except (OSError, EOFError, struct.error) as error:
            logger.warning("a connection from %s was refused: %s", address[0], error)
            sock.close()
            return
        finally:
            late.cancel()
            self._handshakes.release()
        with self._changed:
            is_wanted = 0 < rank < self._num_peers and rank not in self._connections
            if is_wanted:
                connection = self._connections[rank] = Connection(_ready(sock), key, is_sender=True)
        if not is_wanted:
            logger.warning("a connection from %s was refused: rank %d is not expected", address[0], rank)
            sock.close()
            return
        self._read(rank, connection)

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                kind, *rest = _unpacked(connection.receive())
                if kind == "beat":
                    self._beats[rank], self._numbers[rank] = self._beats[rank] + 1, rest[0]
                elif kind == "set":
                    self._set(*rest)
                elif kind == "get":
                    threading.Thread(target=self._answer, args=(connection, *rest), daemon=True).start()
                elif kind == "error":
                    self._errors[rank] = rest[0]
        except (OSError, EOFError, RuntimeError, msgspec.MsgspecError):
            with self._changed:
                self._gone.add(rank)
                self._changed.notify_all()
            connection.close()

    def _answer(self, connection: Connection, key: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            connection.send(_VALUE + self._get(key))


class TcpReceiver:
    """Another rank's end. With the reader's methods of Ring."""

    is_one_host = False

    def __init__(self, host: str, port: int, secret: bytes, rank: int, patience: float) -> None:
        """Connect, for up to `patience` seconds while nobody listens. Raises OSError and EOFError."""
        end = time.monotonic() + patience
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL_SECONDS)
        key = _proven_hub(sock, secret, rank)
        self._connection = Connection(_ready(sock), key, is_sender=False)
        self.host = self._connection.host
        self.numbers = [0] * NUMBERS
        """What each beat tells; see `times`."""
        self._frames: deque[bytes] = deque()  # that came before a value
        self._stores: list[Any] = []

    def get(self) -> bytes:
        """Wait for the next frame. Raises OSError and EOFError when rank 0 is gone."""
        return self._frames.popleft() if self._frames else self._received(_FRAME)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._connection.close()

    def beat(self) -> None:
        """Tell that this rank lives. Raises OSError."""
        self._connection.send(_packed(("beat", self.numbers)))

    def fail(self, text: str) -> None:
        """Tell why this rank ends."""
        with contextlib.suppress(OSError):
            self._connection.send(_packed(("error", text)))

    def store(self, name: str, size: int) -> Any:
        """Where ranks find each other; see `collectives.Rendezvous`."""
        self._stores.append(_Store(self._set, self._get))  # kept, as torch does not
        return _c10d.PrefixStore(name, self._stores[-1])

    def _set(self, key: str, value: bytes) -> None:
        self._connection.send(_packed(("set", key, value)))

    def _get(self, key: str) -> bytes:
        self._connection.send(_packed(("get", key)))
        return self._received(_VALUE)

    def _received(self, kind: bytes) -> bytes:
        while True:
            data = self._connection.receive()
            if data[:1] == kind:
                return data[1:]
            self._frames.append(data[1:])  # values come only when asked for


class _Store(_c10d.Store):  # type: ignore[misc]  # untyped
    """The part of a store that joining a group takes."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put = put
        self._get = get

    def set(self, key: str, value: bytes) -> None:
        """Set a key, once."""
        self._put(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key's value."""
        return self._get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait for keys."""
        for key in keys:
            self._get(key)


def secret_of(path: str, option: str = "dist_key_file") -> bytes:
    """The contents of a secret's file. Raises ConfigError."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the secret cannot be read: {error}", option=option) from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"{path} has {len(secret)} bytes: a secret needs {_LEAST_SECRET} at least, and random ones, for example "
            f"`openssl rand -hex 32 > {path}`",
            option=option,
        )
    return secret


def _proven_rank(sock: socket.socket, secret: bytes) -> tuple[int, bytes]:
    """The rank that has connected, and the connection's key. Raises OSError and EOFError."""
    ours = os.urandom(_NONCE)
    sock.sendall(_GREETING + ours)
    packed = _exactly(sock, _RANK.size)
    theirs, proof = _exactly(sock, _NONCE), _exactly(sock, _PROOF)
    if not hmac.compare_digest(proof, _keyed(secret, b"rank", packed, ours, theirs)):
        raise EOFError("it does not know the secret")
    sock.sendall(_keyed(secret, b"hub", packed, theirs, ours))
    return _RANK.unpack(packed)[0], _keyed(secret, b"key", packed, ours, theirs)


def _proven_hub(sock: socket.socket, secret: bytes, rank: int) -> bytes:
    """The key of a connection to the sender. Raises OSError and EOFError."""
    if _exactly(sock, len(_GREETING)) != _GREETING:
        raise EOFError("no sgl of this version answers there")
    theirs, ours, packed = _exactly(sock, _NONCE), os.urandom(_NONCE), _RANK.pack(rank)
    sock.sendall(packed + ours + _keyed(secret, b"rank", packed, theirs, ours))
    proof = _exactly(sock, _PROOF)
    if not hmac.compare_digest(proof, _keyed(secret, b"hub", packed, ours, theirs)):
        raise EOFError("it does not know the secret")
    return _keyed(secret, b"key", packed, theirs, ours)


def _keyed(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def _hmac(key: bytes, number: int, data: bytes) -> bytes:
    made = hmac.new(key, number.to_bytes(8, "little"), hashlib.sha256)
    made.update(data)
    return made.digest()


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts += part
    return bytes(parts)


def _shut(sock: socket.socket) -> None:
    """End what waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished is noticed
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)
    return sock
