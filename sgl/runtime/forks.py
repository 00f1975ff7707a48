"""Processes forked from one that has imported what they need: the imports take seconds."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sgl.child import command, search_path
from sgl.errors import EngineDead

PARENT_WATCHER = "sgl-parent"
"""The name of a thread that waits for the parent's end and holds no lock meanwhile."""
_STARTING_SECONDS = 300.0  # for the imports
_POLL_SECONDS = 0.25


class Fork:
    """A forked process, with what is needed of subprocess.Popen."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """status: gives its exit code once it has ended."""
        self.pid = pid
        self._status = status
        self._code: int | None = None
        self._lock = threading.Lock()  # only one thread reads it

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not _readable([self._status], timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            with self._lock:
                if self._code is None and (code := _number(self._status)) is not None:
                    self._code = code
                elif self._code is None:  # the forker was killed: nobody can tell, and the process ends by itself
                    self._code = -signal.SIGKILL
                    self._kill()
        return self._code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Forker:
    """The parent of such processes. It ends when this process is gone."""

    def __init__(self, module: str, *, from_here: bool = False) -> None:
        """Start it; it imports the module while this process goes on. from_here: as a fork of this process, which has
        imported it, has no other thread that holds a lock, and no GPU yet."""
        self._control, theirs = socket.socketpair()
        number, parent = theirs.fileno(), os.getpid()
        with theirs:
            if not from_here:
                code = f"from {__name__} import serve; serve({number}, {parent}, {module!r})"
                null = subprocess.DEVNULL
                self._process = subprocess.Popen(command(code), stdin=null, stdout=null, pass_fds=[number])
                self.pid = self._process.pid
            elif not (pid := os.fork()):
                _serve_here(theirs.detach(), parent, module)
            else:
                self.pid = pid

    def runs(self) -> bool:
        """Whether it has not ended."""
        return not _readable([self._control], 0.0)  # it sends nothing

    def fork(self, code: str, arguments: list[str], *passed: socket.socket) -> Fork:
        """A process that runs code with this one's folder, environment, import path and stderr, to which it prints,
        too. passed: one socket at most, whose number there is the last argument. Raises EngineDead."""
        status, theirs = socket.socketpair()
        request = json.dumps([code, arguments, dict(os.environ), search_path()]).encode()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(theirs)
                numbers = [theirs.fileno(), os.open(".", os.O_RDONLY), _stderr()]
                for number in numbers[1:]:
                    stack.callback(os.close, number)
                numbers += [each.fileno() for each in passed]
                socket.send_fds(self._control, [b"f"], numbers)
            if not _readable([status], _STARTING_SECONDS):
                raise EngineDead(f"no process was forked within {_STARTING_SECONDS:g} s")
            if (pid := _number(status)) is None or pid < 0:
                why = "the one that it is forked from is gone" if pid is None else os.strerror(-pid)
                raise EngineDead(f"a process cannot be started: {why}")
            status.sendall(request + b"\n")
        except OSError as error:
            raise EngineDead(f"the process that others are forked from is gone: {error}") from error
        except BaseException:
            status.close()  # a process that is forked none the less ends without a request
            raise
        return Fork(pid, status)


_forkers: dict[str, Forker] = {}  # by what they import
_lock = threading.Lock()


def forker(module: str) -> Forker:
    """This process's for what needs the module."""
    with _lock:
        its = _forkers.get(module)
        if its is None or not its.runs():
            _forkers[module] = its = Forker(module)
        return its


def fork_from_here(module: str) -> None:
    """Fork what needs the module from what this process is now, unless there is a forker for it, or threads run that
    may hold locks; see Forker."""
    if module not in _forkers and _is_alone():
        _forkers[module] = Forker(module, from_here=True)


def _is_alone() -> bool:
    """Whether no thread runs beside the main one but one that only watches the parent."""
    others = {each.name for each in threading.enumerate() if each is not threading.main_thread()}
    return others <= {PARENT_WATCHER}


def _forget() -> None:
    """What this process forks starts its own, since the parent's end with the parent."""
    global _lock
    _forkers.clear()
    _lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_forget)


def set_process_name(name: str) -> None:
    """Name this process in ps and top."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def serve(control: int, parent: int, module: str) -> NoReturn:
    """The forker's main program. control: a socket from `parent`, which started it."""
    set_process_name("sgl forker")
    for sent in (signal.SIGINT, signal.SIGTERM):  # to all processes at once: the parent decides
        signal.signal(sent, signal.SIG_IGN)
    # A thread would be lost in forks; a timer looks for the parent while this imports.
    signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == parent else os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS, _POLL_SECONDS)
    importlib.import_module(module)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.freeze()  # a child's collections touch, and so copy, nothing of this
    asked = socket.socket(fileno=control)
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # else nothing would wake it
    children: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        ready = _readable([asked, woken], _POLL_SECONDS)
        if woken.fileno() in ready:
            woken.recv(4096)
        for pid in list(children):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(children[pid], os.waitstatus_to_exitcode(how))
                children.pop(pid).close()
        if asked.fileno() in ready:
            data, numbers, _, _ = socket.recv_fds(asked, 1, 4)
            if not data:
                break
            told, folder, stderr, *passed = numbers
            status = socket.socket(fileno=told)
            if (pid := _fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (asked, woken, wakes, *children.values()):
                    each.close()
                _run(status, folder, stderr, passed)
            _tell(status, pid)
            if pid > 0:
                children[pid] = status
            else:
                status.close()
            for number in (folder, stderr, *passed):
                os.close(number)
    os._exit(0)


def _serve_here(control: int, parent: int, module: str) -> NoReturn:
    """In a fork: nothing else of the parent's is held open."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.closerange(3, control)
        os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
        serve(control, parent, module)
    finally:
        os._exit(1)


def _fork() -> int:
    """os.fork(), or minus the number of its error."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _run(status: socket.socket, folder: int, stderr: int, passed: list[int]) -> NoReturn:
    """The rest of a forked process."""
    code = 1
    try:
        with status, status.makefile("rb") as source:
            request = source.readline()
        if not request:  # whoever asked was interrupted
            os._exit(0)
        os.dup2(stderr, 2)
        os.dup2(stderr, 1)
        # The process that was forked may have put others in their place.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.fchdir(folder)
        os.close(folder)
        os.close(stderr)
        program, arguments, environment, sys.path[:] = json.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = [*arguments, *map(str, passed)]
        exec(program, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # as an interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def _stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)


def _readable(sources: Sequence[socket.socket], seconds: float | None) -> set[int]:
    """The file descriptors, of any number, where there is something or the end within seconds; None: whenever."""
    poll = select.poll()  # select's are below 1,024
    for source in sources:
        poll.register(source, select.POLLIN)
    return {number for number, _ in poll.poll(None if seconds is None else 1000 * seconds)}


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody asks any more
        status.sendall(number.to_bytes(8, "little", signed=True))


def _number(status: socket.socket) -> int | None:
    try:
        data = status.recv(8, socket.MSG_WAITALL)
    except OSError:
        return None
    return int.from_bytes(data, "little", signed=True) if data else None
