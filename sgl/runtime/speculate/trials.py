"""Whether models are asked for drafts: while they pay with so many rows, and now and then to try whether they do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.budget import Budget, size_of
from sgl.runtime.speculate.drafter import DeviceDrafter

LONGEST_PAUSE = 128  # steps, between looks at drafters

_TRIAL = 8  # looks with drafts of a model, in a trial of it,
_EMPTY_LOOK = 1 / 8  # of such a look is one without
_TRYING = 0.01  # of the time, for trials
_LONGEST_REST = 1 << 14  # steps without one


class Trials:
    """Of the models of one engine. They are followed from the first step on."""

    def __init__(self, models: Sequence[DeviceDrafter], budget: Budget, most: int) -> None:
        """most: drafts of a row."""
        self._models = models
        self._budget = budget
        self._most = most
        self.follows = True
        """Whether models are asked."""
        self._looks_left = 0.0  # of a trial
        self._size, self._seconds = 0, 0.0  # of which rows it is, and what it took
        self._rests: dict[int, int] = {}  # where models do not pay, by `size_of` rows: steps until the next trial
        self._latest_size = 0  # of a step

    @property
    def is_on(self) -> bool:
        """Whether models are asked though they did not pay."""
        return self._looks_left > 0

    def choose(self, num_rows: int, requests: Collection[Request] = ()) -> bool:
        """See whether models are to be asked for these requests, among so many; True: a trial begins."""
        if not self._models:
            return False
        size, begins = size_of(num_rows), False
        if pays := any(self._pays(model, num_rows, requests) for model in self._models):
            self._looks_left = 0.0
            if requests:  # not of other grades, maybe
                self._rests.pop(size, None)
        elif not self._looks_left and self._rests.setdefault(size, LONGEST_PAUSE) <= 0:
            self._looks_left, self._size, self._seconds, begins = _TRIAL, size, 0.0, True
        self.follows = pays or self.is_on
        for model in self._models:
            model.follow(is_on=self.follows)
        return begins

    def _pays(self, model: DeviceDrafter, num_rows: int, requests: Iterable[Request]) -> bool:
        grades = {grade for request in requests if (grade := model.grade(request)) is not None}
        shares = [self._budget.acceptance(model.name, grade).share for grade in grades or {0}]
        return any(any(self._budget.divide(num_rows, [(share, self._most)] * num_rows)) for share in shares)

    def may_change(self, num_rows: int) -> bool:
        """One more step was handled: whether models that rest may be asked from now on."""
        size = size_of(num_rows)
        before, self._latest_size = self._latest_size, size
        if size in self._rests:
            self._rests[size] -= 1
        return not self.follows and (size != before or self._rests.get(size, 0) <= 0)

    def took(self, num_rows: int, seconds: float) -> None:
        """A step did."""
        self._seconds += seconds - self._budget.costs.plain(num_rows)

    def looked(self, *, is_drafted: bool) -> None:
        """A look was one of the trial. Behind the last one models rest, for so long that trials take little time."""
        self._looks_left -= 1.0 if is_drafted else _EMPTY_LOOK
        if self._looks_left <= 0:
            self._looks_left, plain = 0.0, self._budget.costs.plain(self._size)
            rest = math.ceil(self._seconds / (_TRYING * plain)) if plain else 0
            self._rests[self._size] = min(max(rest, LONGEST_PAUSE), _LONGEST_REST)
