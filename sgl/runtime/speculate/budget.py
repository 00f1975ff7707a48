"""How many drafts each row of a step gets: so many that tokens a second are most, by measurement.

Measured are the share of drafts that stand, for each kind of guess, and what steps take, by their rows and tokens. A
step with drafts yields more tokens and takes longer; where that is no gain, there are none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle

_FADE = 0.97  # of what was seen of a kind of guess, with each that comes where rows are few,
_FEW = 8  # as so many; with more, so many steps count as with these
_FIRST_TRIALS, _FIRST_SHARE = 3.0, 0.7  # believed before anything was seen
_LEAST_SURVIVAL = 0.1  # of a draft worth a thought
_NEW = 0.25  # weight of a new measurement
SHORTEST_STEP, LONGEST_STEP = 1e-5, 1e3
"""Seconds of a step that are believed: some clocks tick less often than steps end."""
_MOST_LONGER = 3.0  # a measurement counts as at most so many times the one before: others had the processor
_LEAST_RATIO = 0.5  # of a step with drafts to a plain one: less is a slip of the plain one's measurement
_LEAST_GAIN = 1.03  # in tokens a second, for drafts to be worth it
_PLAIN = 128  # looks, after which steps without drafts are measured anew
_TRIED = 4  # drafts of a step that are tried where each takes time
_EXTRA = {True: 0.003, False: 0.4}
"""A guess for steps never seen, on a GPU or a CPU: of a plain one, for each row's draft."""


@dataclass(slots=True)
class Acceptance:
    """Of one kind of guess."""

    accepted: float = _FIRST_TRIALS * _FIRST_SHARE
    trials: float = _FIRST_TRIALS

    @property
    def share(self) -> float:
        """Of drafts whose predecessors were accepted, those that are, too."""
        return self.accepted / self.trials

    def saw(self, num_accepted: int, num_tried: int, num_rows: int = 1) -> None:
        """Of num_tried drafts, num_accepted leading ones were accepted; at most one was rejected. num_rows: that may
        have had such a guess in the step."""
        fade = _FADE ** min(1.0, _FEW / num_rows)
        self.accepted = self.accepted * fade + num_accepted
        self.trials = self.trials * fade + num_tried


@dataclass(slots=True)
class _Cost:
    """Of steps of about so many rows."""

    plain: float = 0.0  # seconds; 0: never seen
    waiting: float = 0.0  # seconds, without drafts, begun only when the step before was handled; 0: never seen
    extra: dict[int, float] = field(default_factory=dict)
    """By the longest row's tokens, up to a power of two: how many plain steps longer for each draft."""


class StepCosts:
    """Seconds that steps take, by rows and tokens."""

    def __init__(self, *, is_padded: bool, compiles: bool) -> None:
        """See `Budget`."""
        self._is_padded, self._compiles = is_padded, compiles
        self._costs: defaultdict[int, _Cost] = defaultdict(_Cost)  # by `size_of` rows

    def saw(self, num_rows: int, num_drafts: int, longest: int, seconds: float, *, waited: bool = False) -> None:
        """A step of so many rows took that long. longest: tokens of its longest row. waited: whether it was begun only
        when the one before was handled, as steps with drafts are that do not go ahead."""
        cost = self._costs[size_of(num_rows)]
        seconds = min(max(seconds, SHORTEST_STEP), LONGEST_STEP)
        if not num_drafts and waited:
            if cost.plain:
                cost.waiting = _moved(cost.waiting or cost.plain, seconds)
        elif not num_drafts:
            cost.plain = _moved(cost.plain, seconds)
        elif cost.plain:
            key = size_of(longest)
            computed = self._computed(num_rows, num_drafts, key)
            extra = (seconds / cost.plain - 1) / computed
            before = cost.extra.get(key, extra)
            if key not in cost.extra and self._compiles:  # the first one may have taken any time
                before = self._extra(cost, num_rows, computed, key)
                extra = min(extra, before)
            most = (_MOST_LONGER * max(_LEAST_RATIO, 1 + before * computed) - 1) / computed
            cost.extra[key] = before + _NEW * (min(extra, most) - before)

    def plain(self, num_rows: int) -> float:
        """Seconds of a step of so many rows without drafts; 0: never seen."""
        return self._costs[size_of(num_rows)].plain

    def waiting(self, num_rows: int) -> float:
        """How many plain steps longer such a step takes if it is begun only when the one before was handled."""
        cost = self._costs[size_of(num_rows)]
        return max(0.0, cost.waiting / cost.plain - 1) if cost.plain and cost.waiting else 0.0

    def ratio(self, num_rows: int, num_drafts: int, longest: int) -> float:
        """How many plain steps such a step takes."""
        if not num_drafts:
            return 1.0
        cost, key = self._costs[size_of(num_rows)], size_of(longest)
        computed = self._computed(num_rows, num_drafts, key)
        return max(_LEAST_RATIO, 1.0 + self._extra(cost, num_rows, computed, key) * computed)

    def _extra(self, cost: _Cost, num_rows: int, computed: int, key: int) -> float:
        """`_Cost.extra`, or a guess. Of what the next shorter length takes much may be for any drafts at all."""
        if (extra := cost.extra.get(key)) is not None:
            return extra
        least = _EXTRA[self._is_padded or self._compiles] / num_rows
        seen = [length for length in cost.extra if length <= key]
        nearest = max(seen, default=min(cost.extra, default=key))
        extra = cost.extra.get(nearest, least)
        if nearest >= key or not self._is_padded:
            return extra
        known = num_rows * (nearest - 1)
        return (extra * known + least * (computed - known)) / computed

    def _computed(self, num_rows: int, num_drafts: int, longest: int) -> int:
        return num_rows * (longest - 1) if self._is_padded else num_drafts


class Budget:
    """Divides a step among rows. Nothing here changes a token, so measured times do no harm."""

    def __init__(self, *, is_padded: bool = False, compiles: bool = False) -> None:
        """is_padded: whether steps compute all rows as long as the longest, up to a power of two, as captured ones on a
        GPU do. compiles: whether the first step of a kind may take time that no other takes."""
        self.costs = StepCosts(is_padded=is_padded, compiles=compiles)
        self._is_padded = is_padded
        self._since_plain = 0  # looks
        self._lengths = cycle((1, 3, 7))
        self._acceptance: defaultdict[tuple[str, int], Acceptance] = defaultdict(Acceptance)

    def acceptance(self, drafter: str, grade: int) -> Acceptance:
        """Of a drafter's guesses of one grade."""
        return self._acceptance[drafter, grade]

    def is_plain_due(self, num_rows: int) -> bool:
        """Before each look for drafts: whether the next steps are to have none, to be measured."""
        self._since_plain += 1
        if self._since_plain < _PLAIN and self.costs.plain(num_rows):
            return False
        self._since_plain = 0
        return True

    def may_pass_look(self, num_rows: int) -> bool:
        """Whether a step may have drafts without a look, as far as `is_plain_due` goes."""
        return self._since_plain + 1 < _PLAIN and self.costs.plain(num_rows) > 0

    def passed_look(self) -> None:
        """A step has: it counts as a look."""
        self._since_plain += 1

    def trial(self, num_rows: int, drafts: Sequence[tuple[float, int]]) -> list[int]:
        """As `divide`, to see what drafts take, though it may not pay. Where steps compute all rows as long as the
        longest, 1, 3 and 7 of each in turn, since what one length takes tells little of another; else few."""
        most = next(self._lengths) if self._is_padded else _TRIED // max(1, num_rows) or 1
        return [min(number, max(1, len(_survival(share, most)))) for share, number in drafts]

    def divide(self, num_rows: int, drafts: Sequence[tuple[float, int]], *, waited: bool = False) -> list[int]:
        """How many of its drafts each row gets, for a step of num_rows rows in all. drafts: of rows that have any, the
        share that stands, and their number. waited: whether the step has waited for them anyhow."""
        if not drafts:
            return []
        kinds = Counter(drafts)  # many rows have the same
        most = max(number for _, number in kinds)
        survival: dict[float, list[float]] = {}
        gained, computed = [0.0] * most, [0] * most  # by place
        worth: dict[tuple[float, int], int] = {}
        for kind, count in kinds.items():
            share, number = kind
            if share not in survival:
                survival[share] = _survival(share, most)
            its = survival[share][:number]
            worth[kind] = len(its)
            for place, survives in enumerate(its):
                gained[place] += count * survives
                computed[place] += count
        best, best_rate = 0, _LEAST_GAIN / (1 + self.costs.waiting(num_rows) if waited else 1)
        for length, (tokens, number) in enumerate(zip(accumulate(gained), accumulate(computed), strict=True), 1):
            if not computed[length - 1]:
                break
            rate = (1 + tokens / num_rows) / self.costs.ratio(num_rows, number, length + 1)
            if rate > best_rate:
                best, best_rate = length, rate
        return [min(best, worth[kind]) for kind in drafts]


def _survival(share: float, number: int) -> list[float]:
    """Of each of so many drafts how likely it stands, those left out that hardly do."""
    its = []
    for place in range(1, number + 1):
        survives = share**place
        if survives < _LEAST_SURVIVAL:
            break
        its.append(survives)
    return its


def _moved(before: float, seconds: float) -> float:
    """A mean that is new if it was 0."""
    return before + _NEW * (min(seconds, _MOST_LONGER * before) - before) if before else seconds


def size_of(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()
