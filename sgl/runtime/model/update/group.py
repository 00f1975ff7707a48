"""Process groups with trainers, which broadcast new weights. A trainer that is gone holds nobody for longer than its
group's timeout, and who gives up waits for nobody: what may hang does so on a thread of the group's own."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import distributed

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import shown

logger = logging.getLogger(__name__)

BACKENDS = {"nccl": "cuda", "gloo": "cpu"}
"""And the device by which torch names the keys of their groups."""
_POLL_SECONDS = 1e-3
_LOOK_SECONDS = 0.02  # between looks whether another rank has failed
_TRY_SECONDS = 5.0  # of connecting: for so long a group goes on that was left
_GRACE_SECONDS = 5.0  # for torch to notice its timeout itself
_numbers = itertools.count(1)

WhyLost = Callable[[], str | None]
"""Why a group is of no use any more, if that is known."""


class TrainerGroup:
    """This engine's end; rank 0 is the trainer."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        name: str,
        backend: str,
        seconds: float,
        number: int = 0,
    ) -> None:
        """Begin to enter. number: what the group is called among this engine's ranks, if it has one already."""
        self.backend, self.number = backend, number or next(_numbers)
        self._what = f"group {name!r} of {size} at {address}:{port}"
        self._seconds = seconds
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._group: Any = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sgl-trainer", daemon=True).start()
        host = f"[{address.strip('[]')}]" if ":" in address else address
        self._entering = self._later(lambda: self._enter(f"tcp://{host}:{port}", rank, size, name))

    def entered(self, why_lost: WhyLost = lambda: None) -> None:
        """Wait for the others. Raises InvalidRequest if they do not come within the time."""
        try:
            self._settle(self._entering, why_lost)
        except (RuntimeError, ValueError, TimeoutError) as error:  # DistStoreError and its like are RuntimeErrors
            within = f"within {self._seconds:g} s"
            message = f"no {self._what} came about {within}: {error}"
            raise InvalidRequest(message, param="master_address") from error

    def receive(self, tensors: Sequence[torch.Tensor], why_lost: WhyLost = lambda: None) -> None:
        """Fill tensors with what rank 0 broadcasts, one after the other. Raises InvalidRequest if that does not
        come; the group is of no use then."""
        try:
            self._settle(self.hear(tensors), why_lost)
        except (RuntimeError, TimeoutError) as error:
            message = (
                f"the trainer's broadcast did not arrive ({error}): the old weights stand, and the group is closed"
            )
            raise InvalidRequest(message, param="group_name") from error

    def hear(self, tensors: Sequence[torch.Tensor]) -> Future[None]:
        """Begin to `receive`, after what was begun before."""
        return self._later(lambda: self._receive(tensors))

    @property
    def is_left(self) -> bool:
        """Whether it was closed."""
        return self._left.is_set()

    def close(self) -> None:
        """Let go of it, also while it is entered or receives. Waits for nobody. Idempotent."""
        with self._lock:
            self._left.set()
            ended = [] if self._group is None else [self._group]
            self._group = None
        self._work.put(None)
        _end(ended)

    def _settle(self, future: Future[None], why_lost: WhyLost) -> None:
        """Wait for it; close the group if it fails. Raises what it raises, and TimeoutError."""
        end = time.monotonic() + self._seconds + _GRACE_SECONDS
        try:
            while not wait([future], _LOOK_SECONDS).done:
                if self.is_left:
                    raise TimeoutError("the group was left")
                if (why := why_lost()) is not None:
                    raise TimeoutError(why)
                if time.monotonic() > end:
                    raise TimeoutError(f"nothing for {self._seconds:g} s")
            future.result()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        for work in iter(self._work.get, None):
            work()

    def _later(self, function: Callable[[], None]) -> Future[None]:
        """Run it on the group's thread."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                function()
            except Exception as error:  # the future raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._work.put(run)
        return done

    def _enter(self, url: str, rank: int, size: int, name: str) -> None:
        ended = [joined(url, rank, size, name, self.backend, self._seconds, self._left)]
        with self._lock:
            if not self.is_left:
                self._group = ended.pop()
                return
        _end(ended)
        raise TimeoutError("the group was left")

    def _receive(self, tensors: Sequence[torch.Tensor]) -> None:
        group = self._group
        if group is None:
            raise TimeoutError("the group was left")
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        end = time.monotonic() + self._seconds
        try:
            for work in [group.broadcast([tensor], options) for tensor in tensors]:
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing for {self._seconds:g} s")
                    if self.is_left:
                        raise TimeoutError("the group was left")
                    time.sleep(_POLL_SECONDS)
                work.wait()
        finally:
            # or the error's traceback has it, until a garbage collection ends it on any thread: see `_end`
            del group


class TrainerGroups:
    """An engine's, by name. Safe from any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, TrainerGroup] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def enter(self, name: str, *place: Any) -> TrainerGroup:
        """Begin to enter one; place: see `TrainerGroup`. Raises InvalidRequest if there is one of this name."""
        with self._lock:
            if self._is_closed:
                raise InvalidRequest("the engine is shut down", param="group_name")
            if name in self._groups:
                raise InvalidRequest(f"there is a group {name!r} already: destroy it first", param="group_name")
            address, port, rank, size, backend, seconds = place
            self._groups[name] = group = TrainerGroup(address, port, rank, size, name, backend, seconds)
            return group

    def get(self, name: Any) -> TrainerGroup:
        """One of them, entered or just being. Raises InvalidRequest for an unknown name."""
        with self._lock:
            group = self._groups.get(name) if isinstance(name, str) else None
            known = ", ".join(self._groups) or "none"
        if group is None:
            raise InvalidRequest(f"there is no group {shown(name)}; there are: {known}", param="group_name")
        return group

    def leave(self, name: str, group: TrainerGroup) -> bool:
        """Let go of one; returns whether it was still of this name."""
        group.close()
        with self._lock:
            is_known = self._groups.get(name) is group
            if is_known:
                del self._groups[name]
        return is_known

    def close(self) -> None:
        """Let go of all, and enter no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            groups = list(self._groups.values())
            self._groups.clear()
        for group in groups:
            group.close()


class FollowerGroups:
    """On a rank other than 0: enters trainers' groups, which count every rank, and hears broadcasts, which rank 0 then
    gives to all, while steps go on. What fails is told in the log, and to rank 0."""

    def __init__(self, rank: int, device: torch.device, tell: Callable[[int], None]) -> None:
        """tell: rank 0, which of the groups is of no use."""
        self._rank, self._device, self._tell = rank, device, tell
        self._groups: dict[str, TrainerGroup] = {}
        self._alone: list[tuple[TrainerGroup, Future[None]]] = []

    def enter(
        self, address: str, port: int, first: int, size: int, name: str, backend: str, seconds: float, number: int
    ) -> None:
        """See `TrainerGroup`."""
        if (before := self._groups.get(name)) is not None:
            self.leave(name, before.number)
        place = address, port, first + self._rank, size, name, backend, seconds
        self._groups[name] = group = TrainerGroup(*place, number)
        group._entering.add_done_callback(lambda done: self._look(group, done))

    def hear(self, name: str, tensors: Sequence[tuple[str, int]], is_alone: bool) -> None:
        """Take part in these broadcasts: dtypes, and numbers of elements. is_alone: see `settle`."""
        if (group := self._groups.get(name)) is None:
            return
        sizes = [(getattr(torch, dtype), number) for dtype, number in tensors]
        most = max(dtype.itemsize * number for dtype, number in sizes)
        scratch = torch.empty(most, dtype=torch.uint8, device=self._device)
        if is_alone and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        done = group.hear([scratch[: dtype.itemsize * number].view(dtype) for dtype, number in sizes])
        done.add_done_callback(lambda done: self._look(group, done))
        if is_alone:
            self._alone.append((group, done))

    def settle(self) -> None:
        """Wait until what is heard alone is heard, or its group left: what follows may use the device's other
        communicators."""
        for group, done in self._alone:
            with contextlib.suppress(Exception):  # its callback has told
                group._settle(done, lambda: None)
        self._alone.clear()

    def leave(self, name: str, number: int) -> None:
        """Let go of a group, unless another has its name."""
        group = self._groups.get(name)
        if group is not None and group.number == number:
            del self._groups[name]
            group.close()

    def _look(self, group: TrainerGroup, done: Future[None]) -> None:
        if (error := done.exception()) is not None and not group.is_left:
            logger.error("rank %d is not of a trainer's group: %s", self._rank, error)
            self._tell(group.number)
            group.close()


def joined(url: str, rank: int, size: int, name: str, backend: str, seconds: float, left: threading.Event) -> Any:
    """A backend of torch's with which a trainer's group of this name is met, unknown to torch's own tables: another
    engine in this process may have one of the same name. Raises RuntimeError, and TimeoutError once left."""
    c10d: Any = distributed.distributed_c10d  # its types lack what follows
    end = time.monotonic() + seconds
    while True:
        rest = datetime.timedelta(seconds=max(1e-3, min(end - time.monotonic(), _TRY_SECONDS)))
        try:
            store, rank, size = next(c10d.rendezvous(url, rank, size, timeout=rest))
            break
        except RuntimeError:
            if time.monotonic() > end or left.is_set():
                raise
    timeout = datetime.timedelta(seconds=seconds)
    store.set_timeout(timeout)
    for prefix in (name, f"{name}/", f"{BACKENDS[backend]}/"):  # as torch calls it on the trainer's side
        store = c10d.PrefixStore(prefix, store)
    if left.is_set():
        raise TimeoutError("the group was left")
    if backend == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _end(groups: list[Any]) -> None:
    """Empty the list, on a thread of its own: gloo's destructor waits for what was begun, to the group's time limit."""
    if groups:
        threading.Thread(target=_abort, args=(groups,), name="sgl-trainer-end", daemon=True).start()


def _abort(groups: list[Any]) -> None:
    group = groups.pop()
    abort = getattr(group, "abort", None)
    with contextlib.suppress(RuntimeError):  # a backend without it
        if abort is not None:
            abort()
