"""Spare servers outlive their replica by a while: the one that takes its place on this host takes them on.

Such a one listens at an abstract Unix socket, which only processes of the same user get through, and whose name nobody
else knows. On systems without these, nobody is found, and a server starts cold. Meanwhile it is connected with the
cluster's process, whose end is its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

WAIT_SECONDS = 30.0
"""For which a spare one waits. Ray takes a few seconds to start a replica again."""
_TURN_SECONDS = 1.0
_GREETING = b"\n"


def name_of(token: str, generation: int) -> str:
    """Of a cluster's spare servers, for devices that are visible here."""
    devices = sorted(item for item in os.environ.items() if item[0].endswith("VISIBLE_DEVICES"))
    return "sgl-spare-" + hashlib.sha256(repr((token, generation, devices)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SpareAddress:
    """Where a spare server waits."""

    name: str  # see `name_of`
    control: tuple[str, int]  # the address of the cluster's process


def wait(address: SpareAddress, seconds: float = WAIT_SECONDS) -> socket.socket | None:
    """The connection of whoever takes this process on; None: nobody did, or the cluster's process has ended."""
    deadline = time.monotonic() + seconds
    try:
        cluster = socket.create_connection(address.control, _TURN_SECONDS)
    except OSError:
        return None
    with cluster, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{address.name}-{os.getpid()}")
        listening.listen(1)
        listening.settimeout(_TURN_SECONDS)
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([listening, cluster], [], [], left)
            if listening not in ready:  # the cluster's process says nothing: this is its end
                break
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                connection.settimeout(_TURN_SECONDS)
                if _peer(connection)[1] == os.getuid():
                    connection.sendall(_GREETING)
                    connection.settimeout(None)
                    return connection
                connection.close()
    return None


class AdoptedProcess:
    """A process that somebody else started, as `subprocess.Popen` has it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self.stdin, self.stdout = connection.makefile("wb"), connection.makefile("rb")

    def poll(self) -> int | None:
        """-1 once it has ended; its exit code is its parent's to know."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def _ended(self, timeout: float | None) -> int | None:
        its = select.poll()
        its.register(self._handle, select.POLLIN)
        return -1 if its.poll(None if timeout is None else 1000 * timeout) else None


def adopted(name: str) -> AdoptedProcess | None:
    """A process that waits to be taken on under this name."""
    try:
        found = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    except OSError:
        return None
    for each in found:
        if each.rpartition("-")[0] == f"@{name}":
            with contextlib.suppress(OSError):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(_TURN_SECONDS)
                connection.connect("\0" + each[1:])
                pid, user = _peer(connection)
                if user == os.getuid() and connection.recv(1) == _GREETING:  # no other one was faster
                    connection.settimeout(None)
                    return AdoptedProcess(connection, pid)
                connection.close()
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
