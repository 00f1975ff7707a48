"""The clusters that run on this machine, as files that only their user can read: how `sgl cluster` finds them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import msgspec

from sgl.errors import ConfigError, EngineDead
from sgl.runtime.cluster.link import Link
from sgl.runtime.parallel import folders

_SWEEPS, _SWEEP_SECONDS = 500, 0.02
MARK = "_SGL_RAY_FOLDER"
"""In the environment of all that a Ray of one's own starts: its folder."""


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster."""

    pid: int
    port: int
    url: str
    control: str
    token: str
    ray_address: str | None  # of a Ray cluster that is not its own
    app: str  # of Ray Serve
    folder: str | None  # of its own Ray
    began: int | None = None  # of the process, as `began` says
    ray_auth: str | None = None  # RAY_AUTH_MODE: for "auto", but for no address, Ray finds out itself

    def link(self) -> Link:
        """The way to it."""
        return Link(self.control, self.token)

    def is_alive(self) -> bool:
        """Whether its process is there."""
        return _exists(self.pid) and (
            self.began is None or began(self.pid) in (self.began, None)
        )  # or it has another's number

    @property
    def path(self) -> Path:
        """Of its file."""
        return _folder() / f"{self.port}.json"

    def write(self) -> None:
        """Have it found. Raises ConfigError."""
        path, new = self.path, self.path.with_suffix(".new")
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(asdict(self)))
            new.replace(path)
        except OSError as error:  # the disk is full, say
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise ConfigError(
                f"{path}, by which `sgl cluster` finds this cluster, cannot be written: {error}", option="port"
            ) from error

    def forget(self) -> None:
        """Have it found no more. Idempotent."""
        for kind in ("json", "starting"):
            (_folder() / f"{self.port}.{kind}").unlink(missing_ok=True)


@contextlib.contextmanager
def starting(port: int) -> Iterator[None]:
    """Have it said within the context that a cluster on that port starts here. Where that cannot be written, nothing
    is said: what comes behind says it."""
    path = _folder() / f"{port}.starting"
    with contextlib.suppress(OSError):
        path.write_text(f"{os.getpid()} {began(os.getpid()) or 0}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def starting_processes() -> dict[int, int]:
    """Those that start a cluster, or have started one, by their ports."""
    there = {}
    for path in _folder().glob("*.starting"):
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = map(int, path.read_text().split())
            if began(pid) in (ticks, None) and _exists(pid):
                there[int(path.stem)] = pid
    return there


def is_starting(pid: int) -> bool:
    """Whether the process is one of those."""
    return pid in starting_processes().values()


def began(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where Linux does not say."""
    facts = _facts(pid)
    return int(facts[19]) if facts else None


def _facts(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; nothing where it does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def found(port: int | None) -> Running:
    """The one that listens on a port; None: the only one. Raises ConfigError, and EngineDead where it is only
    starting."""
    there = running()
    if port is not None:
        there = [each for each in there if each.port == port]
    if len(there) == 1:
        return there[0]
    ports = ", ".join(str(each.port) for each in there)
    if there:
        raise ConfigError(f"several clusters run here: give --port, one of {ports}", option="port")
    starting = starting_processes()
    if port is None and len(starting) > 1:
        ports = ", ".join(map(str, sorted(starting)))
        raise ConfigError(f"several clusters start here: give --port, one of {ports}", option="port")
    for its, pid in starting.items():
        if port in (None, its):
            message = f"the cluster on port {its} is starting, in process {pid}: ask again in some seconds"
            raise EngineDead(message)
    where = "" if port is None else f" on port {port}"
    raise ConfigError(f"no cluster runs on this machine{where}: `sgl cluster up FILE` starts one", option="port")


def new_folder() -> str:
    """For the Ray of this process."""
    return tempfile.mkdtemp(prefix=f"sgl-ray-{os.getpid()}-", dir="/tmp")  # sockets' paths must be short


def sweep_start(port: int, pid: int) -> None:
    """End and remove what a process that was killed while it started a cluster left behind."""
    for folder in Path("/tmp").glob(f"sgl-ray-{pid}-*"):
        sweep(str(folder))
    (_folder() / f"{port}.starting").unlink(missing_ok=True)


def sweep(folder: str) -> None:
    """End other processes of a Ray that have files of its folder open, and remove it. Ray's agents outlive a Ray that
    was killed; whoever reads a log there goes on."""
    for _ in range(_SWEEPS):  # one may have started another meanwhile
        if not (pids := list(_that_use(folder))):
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    folders.sweep()  # of ranks among them


def _that_use(folder: str) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            files = (os.readlink(file) for file in (process / "fd").iterdir())
            has_one = int(process.name) != os.getpid() and any(file.startswith(f"{folder}/") for file in files)
            if has_one and _is_of_ray(process, folder):
                yield int(process.name)


def _is_of_ray(process: Path, folder: str) -> bool:
    """Whether the Ray of that folder started it, or what that started did. Ray's workers and agents overwrite their
    environment with their title."""
    marked = f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")
    return marked or (process / "cmdline").read_bytes().startswith(b"ray::")


class Signals:
    """SIGINT and SIGTERM, however many come and whenever: they are noted, and raise nothing themselves. An exception in
    the middle of an import, of Ray's start or of its end would leave half of it behind."""

    def __init__(self) -> None:
        """They wait until `take`, also in all threads that start before it: Ray's start sets handlers of its own, which
        end the process."""
        both = (signal.SIGINT, signal.SIGTERM)
        self._numbers = {each for each in both if signal.getsignal(each) is not signal.SIG_IGN}  # by a &
        self._came = False
        self._stop: Callable[[], object] = bool
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        os.register_at_fork(after_in_child=self._let_through)  # to Ray's processes, which have a preexec_fn

    def take(self) -> None:
        """Note them from now on."""
        for each in self._numbers:
            signal.signal(each, self._note)
        self._let_through()

    def _let_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        self._stop()

    def check(self) -> None:
        """Raises KeyboardInterrupt if one came."""
        if self._came or signal.sigpending() & self._numbers:
            raise KeyboardInterrupt

    def tell(self, stop: Callable[[], object]) -> None:
        """Have it called at each from now on, and at once if one came."""
        self._stop = stop
        if self._came:
            stop()


def _exists(pid: int) -> bool:
    """Whether a process of this user's has the number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # it has ended, or another user's has its number
        return False
    return _facts(pid)[:1] != ["Z"]  # it has ended, and its parent does not ask how


def running() -> list[Running]:
    """All of them, also those that were killed."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Running))
    return found


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"sgl-clusters-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"{folder} is not this user's alone: remove it", option="port")
    return folder
