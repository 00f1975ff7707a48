"""Computes token masks on the device, from the requests' places in finished automata. Nothing is read back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sgl.grammar.automaton.finished import MAX_BYTES, MAX_DEPTH, MAX_OPENED, Configuration, FinishedAutomaton
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.kernels.mask.layout import MAX_OPEN, AutomatonTensors, GrammarTensors, Places
from sgl.kernels.mask.ops import compute_masks_
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into
from sgl.runtime.batch import Int32Array
from sgl.runtime.runner.device_grammars import addresses_of, places_arrays, vocabulary_tensors

_COPY_BYTES = 4 << 20

assert MAX_OPENED == MAX_OPEN, "what cursors leave to others is walked here"


class _DeviceCopy(NamedTuple):
    """An automaton's copy on the device."""

    automaton: FinishedAutomaton  # keeps its id in use
    tensors: AutomatonTensors
    addresses: list[int]  # its row of `GrammarTensors.addresses`


class DeviceMasks:
    """Masks over one vocabulary for at most `max_rows` requests a step.

    Automata stay in an arena, which is cleared when full. In stream order: earlier launches still read their own
    data.
    """

    def __init__(self, vocabulary: Vocabulary, max_rows: int, device: torch.device) -> None:
        self._vocabulary = vocabulary_tensors(vocabulary, device)
        self._arena = torch.empty(max_rows * MAX_BYTES, dtype=torch.uint8, device=device)
        self._used = 0
        self._copies: dict[int, _DeviceCopy] = {}  # by the automaton's id
        self._uploader = Uploader(device)
        self._large_uploader = Uploader(device, _COPY_BYTES + MAX_BYTES, num_buffers=4)

    def walk(self, configurations: Collection[Configuration], masks: torch.Tensor, rows: Int32Array) -> None:
        """Write each place's mask to its row (int32 [N], distinct) of masks, int32 [rows, words]. Does not wait for
        the device."""
        self._settle({id(finished): finished for finished, _ in configurations})
        numbers: dict[int, int] = {}
        places = [(numbers.setdefault(id(finished), len(numbers)), place) for finished, place in configurations]
        copies = [self._copies[key] for key in numbers]
        arrays = places_arrays(places, MAX_DEPTH)
        addresses = np.array([copy.addresses for copy in copies], np.int64)
        *on_device, index, addresses_there = self._uploader.upload(*arrays, rows, addresses)
        # one kernel for all: with stacks and counters
        automata = [copy.tensors for copy in copies]
        grammars = GrammarTensors(automata, addresses_there, has_stacks=True, has_counters=True)
        compute_masks_(masks, index, Places(*on_device), grammars, self._vocabulary)

    def _settle(self, wanted: dict[int, FinishedAutomaton]) -> None:
        """Upload missing automata, adjacent to each other."""
        missing = [finished for key, finished in wanted.items() if key not in self._copies]
        arrays = [finished.arrays for finished in missing]
        sizes = [sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in its) for its in arrays]
        if self._used + sum(sizes) > len(self._arena):
            self._copies.clear()
            self._used = 0
            if len(missing) < len(wanted):
                self._settle(wanted)
                return
        for finished, its, size in zip(missing, arrays, sizes, strict=True):
            assert size <= MAX_BYTES, "larger ones are not finished"
            block = self._arena[self._used : self._used + size]
            tensors = AutomatonTensors(*views_into(block, tuple(its)))
            self._copies[id(finished)] = _DeviceCopy(finished, tensors, addresses_of([tensors])[0].tolist())
            self._used += size
        # Few copies: each may wait for a staging buffer.
        at, together, length = self._used - sum(sizes), list[npt.NDArray[Any]](), 0
        for its, size in zip(arrays, sizes, strict=True):
            together += its
            length += size
            if length >= _COPY_BYTES:
                self._large_uploader.upload_into(self._arena[at : at + length], *together)
                at, together, length = at + length, [], 0
        if together:
            self._large_uploader.upload_into(self._arena[at : at + length], *together)
