"""New weights for a running engine: checked as a whole, then written in place between two steps.

What is cached of the old ones is found by no later request. Running requests go on with the KV that they have; their
next tokens are of the new weights (`Engine.pause_generation("retract")` before has theirs computed anew).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sgl.errors import EngineDead, InvalidRequest, WeightsError
from sgl.lang.ir.sampling import shown
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.pause import settle
from sgl.runtime.model.base import Model
from sgl.runtime.model.update.choice import writer_of
from sgl.runtime.model.update.files import Files
from sgl.runtime.model.update.group import BACKENDS, TrainerGroup, TrainerGroups
from sgl.runtime.model.update.ranks import Told, first_rows, hashed, write
from sgl.runtime.model.update.writer import FLOATS, Given, Writer, check, check_aliases, check_numbers
from sgl.runtime.occupation import MemoryOccupation
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.group import RankGroup
from sgl.runtime.requests.changes import WeightsUpdate
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.tier_choice import weights_hash

MAX_TENSORS = 1 << 20
"""Of one update."""
_MOST_CHARACTERS = 1024  # of a version or name
_MOST_RANKS = 1 << 16


T = TypeVar("T")
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Update:
    """`path`: of a checkpoint, which is whole."""

    looks: Mapping[str, Given]
    get: Callable[[str], torch.Tensor]
    version: str | None
    source: str
    path: str | None = None


class WeightUpdates:
    """Of one engine. Safe from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model | None,
        scheduler: Scheduler,
        loop: EngineLoop,
        ranks: RankGroup | None,
        groups: TrainerGroups,
        memory: MemoryOccupation,
    ) -> None:
        """model: None, if torch does not compute it. ranks: None, if there is one."""
        self._memory, self._ranks, self._groups = memory, ranks, groups
        self._config, self._of_torch, self._scheduler, self._loop = config, model, scheduler, loop
        self._writer: Writer | None = None
        self._held: _Update | None = None  # checked
        self._receiving, self._exchanging = threading.Lock(), threading.Lock()

    def from_tensors(self, given: NamedTensors, *, version: str | None, source: str, hold: bool) -> WeightsUpdate:
        """Write some of the model's tensors; or, with hold, keep them for `commit`. Raises WeightsError and
        InvalidRequest before the first is written, and EngineDead."""
        check_version(version)
        tensors = _named(given)
        looks = {name: Given(tuple(its.shape), its.dtype) for name, its in tensors.items()}
        update = _Update(looks, tensors.__getitem__, version, source)
        return self._call(lambda: self._take(update, hold=hold))

    def from_files(self, path: str, *, version: str | None, hold: bool) -> WeightsUpdate:
        """Write all of the model's tensors from a checkpoint of the same model. Raises ModelError, and EngineDead."""
        check_version(version)
        files = Files(path, self._model, self._config.model_impl)

        def write_all() -> WeightsUpdate:
            return self._take(_Update(files.given(self.writer), files.get, version, path, path), hold=hold)

        return self._call(write_all)

    def commit(self) -> tuple[WeightsUpdate, str | None]:
        """Write what is held, and say what checkpoint it was, if it was one. Raises InvalidRequest where nothing is
        held, or memory was released meanwhile, and EngineDead."""

        def commit() -> tuple[WeightsUpdate, str | None]:
            if (held := self._held) is None:
                raise InvalidRequest("no update is held: give one with hold=True")
            self._held = None
            return self._write(held), held.path

        return self._call(commit)

    def _call(self, function: Callable[[], T]) -> T:
        """Between two steps, what may take all ranks."""
        with self._exchanging:
            return self._loop.call(function)

    def drop(self) -> None:
        """Hold no update any more. Idempotent."""
        self._loop.call(lambda: setattr(self, "_held", None))

    def join(self, address: Any, port: Any, rank: Any, size: Any, name: Any, backend: Any, seconds: float) -> None:
        """Enter a group with a trainer, which is its rank 0; waits for it. Raises InvalidRequest."""
        _check_group(address, port, rank, size, name, backend)
        if rank + (num_ranks := self._config.num_ranks) > size:
            message = f"rank_offset={rank}: {num_ranks} ranks (tp_size, pp_size) from there on are more than {size}"
            raise InvalidRequest(message, param="world_size")
        if backend == "nccl" and self._model.device.type != "cuda":  # known before anybody waits for the trainer
            message = f"backend 'nccl' sends between GPUs, and the weights are on {self._model.device}: take 'gloo'"
            raise InvalidRequest(message, param="backend")
        group = self._groups.enter(name, address, port, rank, size, backend, seconds)
        try:
            self._tell_all(wire.JoinGroup(address, port, rank, size, name, backend, seconds, group.number))
            group.entered(lambda: self._why_lost(group))
        except BaseException:
            self._leave(name, group)
            raise

    def leave(self, name: Any) -> None:
        """Let go of a group, also while it is entered. Raises InvalidRequest for an unknown one."""
        self._leave(name, self._groups.get(name))

    def _leave(self, name: str, group: TrainerGroup) -> None:
        if self._groups.leave(name, group):
            self._tell_all(wire.LeaveGroup(name, group.number))

    def _why_lost(self, group: TrainerGroup) -> str | None:
        lost = () if self._ranks is None else self._ranks.lost()
        ranks = [str(rank) for rank, number in enumerate(lost) if number == group.number]
        return f"rank {ranks[0]} is not of it, for a reason that is in the log" if ranks else None

    def _tell_all(self, frame: wire.Frame) -> None:
        """The other ranks, between two steps."""
        if (ranks := self._ranks) is not None:
            self._loop.call(lambda: ranks.send(frame))

    @contextlib.contextmanager
    def _alone(self, group: TrainerGroup) -> Iterator[bool]:
        """Around a group's broadcasts. With NCCL, no step and no other exchange of the ranks is under way meanwhile,
        which it says: two communicators of a device, used in another order on another rank, may wait for each other
        for ever."""
        if self._ranks is None or group.backend != "nccl":
            yield False
            return
        with self._exchanging, self._memory.halted():
            yield True

    def _tell(self, told: Told) -> None:
        assert self._ranks is not None, "there are other ranks"
        self._ranks.send(wire.Write(told))

    def from_group(
        self, names: Any, dtypes: Any, shapes: Any, name: Any, *, version: str | None, is_flat: bool, hold: bool
    ) -> WeightsUpdate:
        """Write what a group's trainer broadcasts: tensors of these names in order, or, flat, all of their bytes in
        one. Nothing is awaited that does not fit, nor two updates at once. Raises WeightsError, InvalidRequest and
        EngineDead."""
        check_version(version)
        looks = _looks(names, dtypes, shapes)
        with self._receiving:
            tensors = self._received(looks, self._groups.get(name), name, is_flat=is_flat)
            return self.from_tensors(tensors, version=version, source="the trainer", hold=hold)

    def _received(
        self, looks: Mapping[str, Given], group: TrainerGroup, name: str, *, is_flat: bool
    ) -> dict[str, torch.Tensor]:
        self._loop.call(lambda: self._check(looks, is_whole=False, source="the trainer"))
        device = self._model.device
        with torch.inference_mode():
            if is_flat:
                sizes = [math.prod(its.shape) * its.dtype.itemsize for its in looks.values()]
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                received = [flat]
            else:
                received = [torch.empty(its.shape, dtype=its.dtype, device=device) for its in looks.values()]
            about = [(str(its.dtype).removeprefix("torch."), its.numel()) for its in received]
            with self._alone(group) as is_alone:
                try:
                    self._tell_all(wire.Broadcast(name, about, is_alone))
                    group.receive(received, lambda: self._why_lost(group))
                except BaseException:
                    # before a step that other ranks would not begin while they hear, whoever else has left it, too
                    self._groups.leave(name, group)
                    self._tell_all(wire.LeaveGroup(name, group.number))
                    raise
            if is_flat:
                parts = zip(torch.split(flat, sizes), looks.values(), strict=True)
                received = [part.clone().view(its.dtype).view(its.shape) for part, its in parts]
        return dict(zip(looks, received, strict=True))

    def read(self, name: Any, most: int) -> list[Any]:
        """The first `most` rows of a tensor, in float32. Raises InvalidRequest, and WeightsError for an unknown one."""
        if not isinstance(name, str) or isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidRequest("name must be a text, and truncate_size a positive number", param="name")

        def look() -> list[Any]:
            writer = self.writer
            own = writer.name(name)
            if own not in writer.shapes:
                check(writer, {own: Given((), torch.float32)}, is_whole=False, source="the request")
            if writer.why_not_read is not None:
                raise WeightsError(f"{name}: {writer.why_not_read}", tensor=name)
            num_rows = min([most, *writer.shapes[own][:1]])
            with self._with_all(wire.Read(own, num_rows)):
                rows: list[Any] = first_rows(self._model, writer, own, num_rows).cpu().tolist()
            return rows

        return self._call(look)

    def hash(self) -> bytes:
        """Of all weights, on any number of ranks alike; of those that cannot be read, of how each rank holds them.
        Raises WeightsError and EngineDead."""

        def look() -> bytes:
            model, writer = self._model, None
            with contextlib.suppress(WeightsError):
                writer = self.writer if self.writer.why_not_read is None else None
            with self._with_all(wire.Hash(writer is not None)):
                return hashed(model, writer, weights_hash)

        return self._call(look)

    @contextlib.contextmanager
    def _with_all(self, frame: wire.Frame) -> Iterator[None]:
        """Around what the others do as well, if there are any; then the engine ends if it fails. On the loop's
        thread. Raises EngineDead."""
        if self._ranks is None:
            yield
            return
        with self._failing("reading weights"):
            settle(self._loop)
            self._ranks.send(frame)
            yield

    @property
    def _model(self) -> Model:
        if self._of_torch is None:
            raise WeightsError(f"engines on device={self._config.device!r} take no new weights: start another")
        self._memory.check("weights")
        return self._of_torch

    @property
    def writer(self) -> Writer:
        """The model's. Raises WeightsError."""
        model = self._model
        if self._writer is None:
            self._writer = writer_of(model, self._config.quantization)
        return self._writer

    def _check(
        self, given: Mapping[str, Given], *, is_whole: bool, source: str
    ) -> tuple[dict[str, Given], dict[str, str]]:
        """What is used of it by the writer's names, and these with the given ones. Raises WeightsError."""
        writer = self.writer
        theirs = {writer.name(name): name for name in given if not writer.ignores(writer.name(name))}
        used = {name: given[its] for name, its in theirs.items()}
        check(writer, used, is_whole=is_whole, source=source)
        return used, theirs

    def check_able(self) -> None:
        """Raise what any update would: WeightsError, InvalidRequest and EngineDead."""
        self._loop.call(self._able)

    def _able(self) -> Writer:
        if self._scheduler.memory.transfers is not None:
            raise InvalidRequest(
                f"an engine with disaggregation_mode={self._config.disaggregation_mode!r} keeps the weights that it "
                "started with: others pull what it computed, or it pulls theirs"
            )
        return self.writer

    def _take(self, update: _Update, *, hold: bool) -> WeightsUpdate:
        """Check it, and write or hold it. On the loop's thread, between two steps."""
        self._able()
        used, theirs = self._check(update.looks, is_whole=update.path is not None, source=update.source)
        check_aliases(self.writer, used.keys(), lambda name: update.get(theirs[name]), update.source)
        check_numbers(used, lambda name: update.get(theirs[name]), self._model.dtype, update.source)
        if not hold:
            self._loop.copies.settle()
            return self._write(update)
        self._held = update
        return WeightsUpdate(True, f"{len(used)} tensors are held for commit_update")

    def _write(self, update: _Update) -> WeightsUpdate:
        """On the loop's thread; checked."""
        used, theirs = self._check(update.looks, is_whole=update.path is not None, source=update.source)
        with self._failing("an update"):
            settle(self._loop)  # tokens of steps under way are the old weights'
            self._loop.copies.settle()
            tell = None if self._ranks is None else self._tell
            write(self._model, self.writer, used, lambda name: update.get(theirs[name]), tell)
        self._scheduler.memory.outdate()
        self._loop.weight_version = update.version if update.version is not None else self.version
        return WeightsUpdate(True, f"{len(used)} tensors are new; weight_version is {self.version!r}")

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Around what must not fail: the engine ends. Raises EngineDead."""
        try:
            yield
        except BaseException as error:
            dead = EngineDead(f"{what} failed half-way: {type(error).__name__}: {error}")
            self._loop.fail(dead)
            raise dead from error

    @property
    def version(self) -> str:
        """What the last update called its weights, or "default"."""
        return self._loop.weight_version

    def rename(self, version: Any) -> None:
        """Call the present weights so. Raises InvalidRequest."""
        if version is None:
            raise InvalidRequest("new_version is needed", param="new_version")
        check_version(version)

        def rename() -> None:
            self._loop.weight_version = version

        self._loop.call(rename)


def _check_group(address: Any, port: Any, rank: Any, size: Any, name: Any, backend: Any) -> None:
    """Raise InvalidRequest for what names no group."""
    if not isinstance(address, str) or not 0 < len(address) <= _MOST_CHARACTERS:
        raise InvalidRequest(f"master_address must be a host, not {shown(address)}", param="master_address")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS:
        raise InvalidRequest(f"group_name must be a text, not {shown(name)}", param="group_name")
    for param, value, least, most in (
        ("master_port", port, 1, 65535),
        ("world_size", size, 2, _MOST_RANKS),
        ("rank_offset", rank, 1, _MOST_RANKS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidRequest(f"{param} must be {least} to {most}, not {shown(value)}", param=param)
    if rank >= size:
        raise InvalidRequest(f"rank_offset={rank} is none of {size} ranks", param="rank_offset")
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, not {shown(backend)}", param="backend")


def _looks(names: Any, dtypes: Any, shapes: Any) -> dict[str, Given]:
    """What tensors of these lists look like. Raises InvalidRequest."""
    lists = {"names": names, "dtypes": dtypes, "shapes": shapes}
    for param, value in lists.items():
        if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_TENSORS:
            raise InvalidRequest(f"{param} must be a list with an item for each tensor", param=param)
    if len({len(value) for value in lists.values()}) > 1 or len(set(names)) < len(names):
        raise InvalidRequest("names, dtypes and shapes must be as many, and each name is given once", param="names")
    known = {str(its).removeprefix("torch."): its for its in FLOATS}
    looks = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        found = known.get(str(dtype).removeprefix("torch."))
        if not isinstance(name, str) or found is None:
            raise InvalidRequest(f"dtypes must be of {', '.join(known)}, not {shown(dtype)}", param="dtypes")
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise InvalidRequest(f"shapes must be lists of numbers, not {shown(shape)}", param="shapes")
        looks[name] = Given(tuple(shape), found)
    return looks


def check_version(version: Any) -> None:
    """Raise InvalidRequest unless it can name weights."""
    if version is not None and (not isinstance(version, str) or not 0 < len(version) <= _MOST_CHARACTERS):
        raise InvalidRequest(
            f"weight_version must be a text of at most {_MOST_CHARACTERS} characters", param="weight_version"
        )


def _named(given: Any) -> dict[str, torch.Tensor]:
    """Checked pairs. Raises InvalidRequest."""
    if (given is not None and not isinstance(given, Iterable)) or isinstance(given, torch.Tensor | str | bytes):
        message = f"named_tensors must be pairs of a name and a tensor, not a {type(given).__name__}"
        raise InvalidRequest(message, param="named_tensors")
    pairs = list(given.items() if isinstance(given, Mapping) else given or ())
    if not pairs or len(pairs) > MAX_TENSORS:
        raise InvalidRequest(f"an update needs 1 to {MAX_TENSORS} tensors, not {len(pairs)}", param="named_tensors")
    found: dict[str, torch.Tensor] = {}
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidRequest("named_tensors must be pairs of a name and a tensor", param="named_tensors")
        if name in found:
            raise InvalidRequest(f"{name} is given twice", param="named_tensors")
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.is_meta
        ):
            layout = "nested" if tensor.is_nested else tensor.layout
            what = f"a {type(tensor).__name__} on {tensor.device} of layout {layout}"
            raise WeightsError(
                f"{name:.200} is {what}: give a plain, dense tensor with data (of a sharded one, its full_tensor())"
            )
        found[name] = tensor
    return found
