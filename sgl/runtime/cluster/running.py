"""The clusters that run on this machine, as files that only their user can read: how `sgl cluster` finds them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import msgspec

from sgl.errors import ConfigError
from sgl.runtime.cluster.link import Link


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

    def link(self) -> Link:
        """The way to it."""
        return Link(self.control, self.token)

    def is_alive(self) -> bool:
        """Whether its process is there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process has its number
            return False
        return self.began is None or began(self.pid) in (self.began, None)  # else it has another's number

    def write(self) -> None:
        """Have it found. Raises ConfigError."""
        folder = _folder()
        path, new = folder / f"{self.port}.json", folder / f"{self.port}.new"
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
        (_folder() / f"{self.port}.json").unlink(missing_ok=True)


def began(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where Linux does not say."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def found(port: int | None) -> Running:
    """The one that listens on a port; None: the only one. Raises ConfigError."""
    there = running()
    if port is not None:
        there = [each for each in there if each.port == port]
    if len(there) == 1:
        return there[0]
    ports = ", ".join(str(each.port) for each in there)
    if there:
        raise ConfigError(f"several clusters run here: give --port, one of {ports}", option="port")
    where = "" if port is None else f" on port {port}"
    raise ConfigError(f"no cluster runs on this machine{where}: `sgl cluster up FILE` starts one", option="port")


def sweep(folder: str) -> None:
    """End other processes that have files of a Ray's folder open, and remove it. Ray's agents outlive a Ray that was
    killed."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if int(process.name) != os.getpid() and any(
                os.readlink(file).startswith(f"{folder}/") for file in (process / "fd").iterdir()
            ):
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back a Ctrl-C to the end of imports and of Ray's start, whose callbacks and C++ code drop an exception in
    their middle or do not bear it. A second one is not held back."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    if before is not signal.SIG_IGN:  # by nohup, say
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


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
