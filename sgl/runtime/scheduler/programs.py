"""What the requests of one program share, for the policy "program".

Least service first: a request's level grows with the logarithm of what its program has attained and is known to need,
since a recorded program says which nodes are still to come. So a small program, or one that has hardly begun, passes
one that takes much, and programs of like size go in order of arrival instead of taking turns. Within a level, requests
on the critical path go first. The requests that begin a fork's branches are a unit: they have one level, and the first
enters only if there is room for all that wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sgl.runtime.batch import Int32Array
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.request import Request

GENERATED = 4
"""Prompt tokens whose computing takes as long as generating one."""
MOST_GENERATED = 256
"""Tokens that an output is expected to have at most: limits are often far above what comes."""
QUANTUM = 1024
"""Service within the first level, in prompt tokens; each further level is as long as all before it."""

_NUMBER_BITS = 48


class ProgramService:
    """What one program was given. `number`: order of arrival of its first request; 0: none came yet."""

    __slots__ = ("_awaited", "_expected", "_settled", "future", "number", "running")

    def __init__(self) -> None:
        self.number = 0
        self.future = 0  # of requests that are known to come
        self.running: set[Request] = set()
        self._settled = 0  # of requests that do not run
        self._expected: dict[Request, int] = {}  # of those that wait, which may be very many,
        self._awaited = 0  # and of all of them

    @property
    def level(self) -> int:
        """How often the service doubled that it has attained, or will have with all that is known to come."""
        running = GENERATED * sum(len(request.output_ids) for request in self.running)
        total = self._settled + running + self._awaited + self.future
        return (total // QUANTUM).bit_length()

    def arrives(self, request: Request) -> None:
        """A request of the program's future is about to be submitted, perhaps with others."""
        self.expect(request)
        self.future = max(0, self.future - self._expected[request])

    def expect(self, request: Request) -> None:
        """A request waits. Idempotent."""
        self.gave_up(request)
        left = request.max_new_tokens - len(request.output_ids)
        self._expected[request] = GENERATED * min(left, MOST_GENERATED)
        self._awaited += self._expected[request]

    def admitted(self, request: Request, new_tokens: int) -> None:
        """A request got a row, and computes so many of its known tokens."""
        self.gave_up(request)
        self._settled += new_tokens - GENERATED * len(request.output_ids)  # counted again from now on
        self.running.add(request)

    def left(self, request: Request) -> None:
        """It lost its row."""
        self.running.discard(request)
        self._settled += GENERATED * len(request.output_ids)

    def gave_up(self, request: Request) -> None:
        """It waits no longer: it ended without a row."""
        self._awaited -= self._expected.pop(request, 0)


class Unit:
    """The requests that begin a fork's branches, as far as they have come. Single-threaded."""

    __slots__ = ("_joined", "failed_in", "level", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Request] = {}  # by uid
        self.level: int | None = None  # None: nobody came yet
        self.failed_in = 0  # the scheduling round in which there was no room for it
        self._joined = True  # whether its requests still enter together

    def partners(self, first: Request) -> list[tuple[Request, int]]:
        """The others that enter with `first`, each with the tokens that it will find computed: they share its
        beginning. None once one has entered."""
        if not self._joined:
            return []
        others = [each for each in self.waiting.values() if each is not first]
        ids = first.known_ids() if others else first.prompt_ids
        return [(each, _shared(ids, each.known_ids())) for each in others]

    def part(self) -> None:
        """From now on its requests enter one by one."""
        self._joined = False


class Programs:
    """The programs and units of one scheduler."""

    def __init__(self) -> None:
        self._num_entered = 0
        self._begun: dict[Unit, None] = {}  # with requests that wait: room for them is reserved

    def enter(self, request: Request) -> None:
        """A request arrives: it gets its level."""
        if request.program is None:
            request.program = ProgramService()
        self._num_entered += 1
        program: ProgramService = request.program
        program.number = program.number or self._num_entered
        program.expect(request)
        request.level = program.level
        unit: Unit | None = request.unit
        if unit is not None:
            unit.level = request.level = request.level if unit.level is None else unit.level
            unit.waiting[request.uid] = request

    def partners(self, request: Request, memory: RowMemory) -> list[tuple[Request, int]]:
        """See `Unit`. A unit that needs more than half of the pages, or more rows than there are, does not wait until
        it has them."""
        unit: Unit | None = request.unit
        if unit is None:
            return []
        if len(unit.waiting) > len(memory.rows.kv_len):
            unit.part()
        partners = unit.partners(request)
        needed = sum(its.num_known - shared + its.max_new_tokens for its, shared in partners)
        if 2 * needed <= memory.page_size * memory.pool.num_pages:
            return partners
        unit.part()
        return []

    def tried(self, unit: Unit, tick: int, *, fits: bool, others_run: bool) -> None:
        """A unit has room for all that wait, or tries again in a later round, or never will if nothing else runs."""
        if fits or not others_run:
            unit.part()
        else:
            unit.failed_in = tick
        if fits:
            self._begun[unit] = None

    def admitted(self, request: Request, new_tokens: int) -> None:
        """See `ProgramService`."""
        request.program.admitted(request, new_tokens)
        self._waits_no_longer(request)

    def left(self, request: Request) -> None:
        """See `ProgramService`."""
        request.program.left(request)

    def gave_up(self, request: Request) -> None:
        """See `ProgramService`."""
        request.program.gave_up(request)
        self._waits_no_longer(request)

    def _waits_no_longer(self, request: Request) -> None:
        unit: Unit | None = request.unit
        if unit is not None and unit.waiting.pop(request.uid, None) is not None and not unit.waiting:
            self._begun.pop(unit, None)

    def is_reserved(self, request: Request) -> bool:
        """Whether there is room for it because of its unit."""
        return request.unit is not None and request.unit in self._begun

    def reserved(self) -> Iterator[Request]:
        """The requests that wait for which there is room."""
        return (request for unit in self._begun for request in unit.waiting.values())


def last_of(candidates: Collection[Request]) -> Request:
    """The one to retract: of the program that has had most, off its critical path if there is one."""
    return max(candidates, key=lambda its: (its.program.level, not its.is_critical, its.program.number, its.order))


def rank_of(request: Request) -> int:
    """The policy's criterion: level, critical path, order of the program's arrival."""
    program: ProgramService = request.program
    return (request.level << 1 | (not request.is_critical)) << _NUMBER_BITS | program.number


def _shared(one: Int32Array, other: Int32Array) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
