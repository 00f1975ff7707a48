"""A runner without a model: its next token hashes the KV content that it reads, so a wrong page is a wrong token.

`expected_output` is the same function without pages, batches or caches: the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl.runtime.batch import EMPTY_STATE, FROM_DEVICE, Batch, Int32Array, Logprobs, StepResult, TokenMasks

VOCAB = 97
_MASK = (1 << 61) - 1
_WINDOWED = 11


def _mix(state: int, token: int) -> int:
    """The KV content of a token after `state`, the content of the one before it."""
    return ((state ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK


def next_state(state: int, token: int) -> int:
    """A recurrent state after another token."""
    return (state * 3202034522624059733 + (token + 7) * 4354685564936845355) & _MASK


def _choose(total: int, seed: int) -> int:
    return (((total & _MASK) * 2862933555777941757 + seed) & _MASK) >> 20


class Mixed(int):
    """A window that some layers have, while others see everything."""


def expected_output(
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int,
    stop_ids: frozenset[int],
    *,
    recurrent: bool = False,
    window: int | None = None,
) -> list[int]:
    """The tokens that the mock model generates, the stop token included. recurrent: of one with states. window: of one
    that sees so many tokens."""
    state = 0
    contents = [0]
    output: list[int] = []
    for token in prompt:
        contents.append(_mix(contents[-1], token))
        state = next_state(state, token)
    while len(output) < max_new_tokens:
        token = _choose(_total(contents, window) + state * recurrent, seed) % VOCAB
        output.append(token)
        if token in stop_ids:
            break
        contents.append(_mix(contents[-1], token))
        state = next_state(state, token)
    return output


def _total(contents: list[int], window: int | None) -> int:
    if window is None:
        return sum(contents)
    seen = sum(contents[-window:])
    return sum(contents) + _WINDOWED * seen if isinstance(window, Mixed) else seen


class MockPending:
    """A step that was computed in its forward phase."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class MockRunner:
    """Executes batches over a real page table and a KV memory of one integer a slot. num_checkpoints: of states of one
    integer, too; None: it has none. window: tokens that a token sees, 2 at least; if Mixed, of a memory of its own with
    num_window_pages."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_pages: int,
        num_checkpoints: int | None = None,
        window: int | None = None,
        num_window_pages: int = 0,
    ) -> None:
        self.window = window
        self.window_kv = [0] * (num_window_pages * page_size)
        self.window_table = np.zeros((num_rows, max_pages), np.int32)
        self.states: list[int] | None = None if num_checkpoints is None else [0] * num_rows
        self.checkpoints = [0] * (num_checkpoints or 0)
        self.page_size = page_size
        self.kv = [0] * (num_pages * page_size)
        self.page_table = np.zeros((num_rows, max_pages), np.int32)
        self.next_token = [0] * num_rows
        self.seeds = [0] * num_rows
        self.batches: list[Batch] = []
        self.keep_batches = False

    def forward(self, batch: Batch) -> tuple[Batch, StepResult]:
        assert (batch.window_writes is None) != isinstance(self.window, Mixed)
        writes = batch.page_writes
        for its, table in ((writes, self.page_table), (batch.window_writes, self.window_table)):
            if its is not None:
                places = {(int(row), int(index)) for row, index, _ in its}
                assert len(places) == len(its), "a page-table entry is written twice in one step"
                table[its[:, 0], its[:, 1]] = its[:, 2]
        assert len(set(batch.rows.tolist())) == len(batch.rows), "a row appears twice in one step"
        for setup in batch.setups:
            self.seeds[setup.row] = setup.seed
        if self.keep_batches:
            self.batches.append(batch)
        written: set[int] = set()
        windowed_written: set[int] = set()
        tokens, at, inputs, checks = [], 0, {}, {}
        if self.states is not None:
            assert batch.state_loads is not None
            for checkpoint, row in batch.state_loads.tolist():
                self.states[row] = 0 if checkpoint == EMPTY_STATE else self.checkpoints[checkpoint]
        for b, (row, q_len, kv_len) in enumerate(
            zip(batch.rows.tolist(), batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)
        ):
            slots, windowed = self._slots(self.page_table[row], kv_len), []
            if isinstance(self.window, Mixed):
                windowed = self._slots(self.window_table[row], kv_len)
            for i in range(kv_len - q_len, kv_len):
                token = int(batch.token_ids[at])
                at += 1
                if token == FROM_DEVICE:
                    token = self.next_token[row]
                assert slots[i] >= self.page_size, "the dummy page is nobody's"
                assert slots[i] not in written, "two rows write to one slot"
                written.add(slots[i])
                self.kv[slots[i]] = _mix(self.kv[slots[i - 1]] if i else 0, token)
                if windowed:
                    assert windowed[i] >= self.page_size, "the dummy page is nobody's"
                    assert windowed[i] not in windowed_written, "two rows write to one slot"
                    windowed_written.add(windowed[i])
                    self.window_kv[windowed[i]] = self.kv[slots[i]]
                if self.states is not None:
                    self.states[row] = next_state(self.states[row], token)
            if batch.score_from[b] >= 0:
                start = kv_len - q_len + int(batch.score_from[b])
                targets = batch.score_targets[b]
                ends = range(start + 1, start + 1 + len(targets))
                totals = [self._sum(slots[:end], windowed[:end]) for end in ends]
                scored = [expected_score(total, int(t)) for total, t in zip(totals, targets, strict=True)]
                inputs[b] = Logprobs(np.array(scored, np.float32))
            state = 0 if self.states is None else self.states[row]
            tokens.append(_choose(self._sum(slots, windowed) + state, self.seeds[row]) % VOCAB)
            if b in batch.drafts:
                drafts = batch.drafts[b]
                assert q_len > len(drafts) > 0
                assert batch.token_ids[at - len(drafts) : at].tolist() == drafts.tolist()
                places = range(kv_len - len(drafts), kv_len)
                totals = [self._sum(slots[:place], windowed[:place]) for place in places]
                checked = [_choose(total, self.seeds[row]) % VOCAB for total in totals]
                checks[b] = np.array(checked, np.int32)
        if self.states is not None:
            assert batch.state_saves is not None
            assert not batch.drafts
            assert len(set(batch.state_saves[:, 1].tolist())) == len(batch.state_saves), "saved to one slot twice"
            for row, checkpoint in batch.state_saves.tolist():
                self.checkpoints[checkpoint] = self.states[row]
        tokens = [token if samples else -1 for token, samples in zip(tokens, batch.samples.tolist(), strict=True)]
        return batch, StepResult(np.array(tokens, np.int32), checks, input_logprobs=inputs)

    def sample(self, launched: tuple[Batch, StepResult], masks: TokenMasks | None = None) -> MockPending:
        batch, result = launched
        for b in np.flatnonzero(batch.samples).tolist():
            self.next_token[batch.rows[b]] = int(result.next_tokens[b])
        return MockPending(result)

    def launch(self, batch: Batch) -> MockPending:
        return self.sample(self.forward(batch))

    def _slots(self, pages: Int32Array, kv_len: int) -> list[int]:
        return [int(pages[p // self.page_size]) * self.page_size + p % self.page_size for p in range(kv_len)]

    def _sum(self, slots: list[int], windowed: list[int]) -> int:
        if isinstance(self.window, Mixed):
            seen = sum(self.window_kv[slot] for slot in windowed[-self.window :])
            return sum(self.kv[slot] for slot in slots) + _WINDOWED * seen
        return sum(self.kv[slot] for slot in (slots if self.window is None else slots[-self.window :]))


def expected_score(total: int, target: int) -> float:
    """A stand-in for the logprob of `target` after KV content `total`."""
    return -float(_choose(total, target) % 1000) / 100


def prefix_totals(tokens: Sequence[int], window: int | None = None) -> list[int]:
    """The KV content summed over what a token sees of tokens[: i + 1], for each i."""
    contents, totals = [0], []
    for token in tokens:
        contents.append(_mix(contents[-1], token))
        totals.append(_total(contents, window))
    return totals
