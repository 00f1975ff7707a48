"""Reads large bodies in disposable processes, forked from a warm one: their time and memory are isolated."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sgl.child import command
from sgl.errors import InvalidRequest
from sgl.machine_limits import limit_address_space
from sgl.runtime.requests.threads import in_thread

logger = logging.getLogger(__name__)

_MORE_BYTES = 3 << 29  # of address space, beside what imports map
_CPU_SECONDS = 10  # the largest body takes one
_NICER = 5  # yields to the engine
_IMPORTED = tuple(f"sgl.runtime.server.{module}" for module in ("native", "protocol", "programs"))
_ANSWER_BYTES = 1 << 18

T = TypeVar("T")


class BodyProcesses:
    """The processes of one server, for its event loop. The warm one starts with the first body."""

    def __init__(self, imported: Sequence[str] = _IMPORTED) -> None:
        """imported: modules that the warm process imports."""
        self._imported = tuple(imported)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(
        self, turns: asyncio.Semaphore, function: Callable[..., T], data: bytes | bytearray, *arguments: Any
    ) -> T:
        """A module's function called with a body and more, in turn: a process holds one until it ends, even if the
        caller leaves. Raises what the function raises of InvalidRequest, which also tells that the limits of time or
        memory were reached."""
        await turns.acquire()
        running = asyncio.ensure_future(self._run(function, data, arguments))

        def ended(its: asyncio.Future[T]) -> None:
            turns.release()
            if not its.cancelled():
                its.exception()  # the caller may have left

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    async def _run(self, function: Callable[..., T], data: bytes | bytearray, arguments: tuple[Any, ...]) -> T:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self._hand_over(theirs)
            call = pickle.dumps((function, arguments))
            answer = bytearray()
            with contextlib.suppress(ConnectionError):  # it has ended
                await loop.sock_sendall(ours, call)
                await loop.sock_sendall(ours, data)
                ours.shutdown(socket.SHUT_WR)
                while piece := await loop.sock_recv(ours, _ANSWER_BYTES):
                    answer += piece
        if not answer:
            raise InvalidRequest("the body takes too much time or memory to read")
        result = await in_thread(
            lambda: pickle.loads(answer), len(answer)
        )  # thousands of models, one after another
        if isinstance(result, Exception):
            raise result
        answered: T = result
        return answered

    def start(self) -> None:
        """Start the warm process."""
        if self._control is None:
            ours, theirs = socket.socketpair()
            with theirs:
                code = f"from {__name__} import serve; serve({theirs.fileno()}, {self._imported})"
                self._process = subprocess.Popen(
                    command(code), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            self._control = ours

    def close(self) -> None:
        """End the warm process; its forks end by themselves."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _hand_over(self, end: socket.socket) -> None:
        for attempt in range(2):
            self.start()
            assert self._control is not None, "it was started"
            try:
                socket.send_fds(self._control, [b"."], [end.fileno()])
                return
            except OSError:
                self.close()
                if attempt:
                    raise
                logger.warning("the process that reads large bodies had ended: starting another")


def serve(descriptor: int, imported: Sequence[str]) -> None:
    """The warm process: imports these modules, then forks. Ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server gets the interrupt
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for module in imported:
        importlib.import_module(module)
    os.nice(_NICER)
    gc.disable()  # it would scan a million new objects repeatedly
    with socket.socket(fileno=descriptor) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with socket.socket(fileno=descriptors[0]) as end:
                if os.fork() == 0:
                    control.close()
                    with contextlib.suppress(OSError):
                        end.sendall(pickle.dumps(_answer(end), protocol=5))
                    os._exit(0)


def _answer(end: socket.socket) -> Any:
    """What the function gives, or its error."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    limit_address_space(_MORE_BYTES)
    try:
        with end.makefile("rb") as file:
            function, arguments = pickle.load(file)
            return function(file.read(), *arguments)
    except InvalidRequest as error:
        return error
    except MemoryError:
        return InvalidRequest("the body takes too much memory to read")
    except Exception as error:  # not every error can be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
