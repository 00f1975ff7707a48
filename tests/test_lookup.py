"""Drafts that are looked up: what is found, from where, and within which bounds."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.runtime.config import EngineConfig
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.speculate import choice
from sgl.runtime.speculate import lookup as lookup_module
from sgl.runtime.speculate.drafter import Draft, Drafter, DraftRequest
from sgl.runtime.speculate.lookup import MAX_CONTEXT, MOST_PLACES, Lookup, search
from sgl.runtime.speculate.pools import START, Pools
from tests.scheduler_driver import Driver, Setting

_IDS = st.lists(st.integers(0, 2), max_size=40)


def _request(uid: int, prompt: list[int], output: list[int] | None = None, origin: str | None = None) -> Request:
    params = SamplingParams(max_new_tokens=100)
    request = Request(uid, np.array(prompt, np.int32), params, seed=0, max_new_tokens=100, origin=origin)
    request.output_ids += output or []
    return request


def _draft(drafter: Drafter, request: Request, most: int = 4) -> Draft:
    [draft] = drafter.propose([DraftRequest(request, most, request.num_known - 1)])
    return draft


def _end(drafter: Drafter, request: Request, reason: str = "stop") -> None:
    request.finish_reason = FinishReason(reason)  # type: ignore[arg-type]
    drafter.ended(request)


@given(_IDS, _IDS.filter(bool))
def test_the_newest_of_the_longest_matches_is_found(text: list[int], context: list[int]) -> None:
    best = (0, 0)
    for end in range(1, len(text)):
        pairs = zip(reversed(text[:end]), reversed(context[-MAX_CONTEXT:]), strict=False)
        in_common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(end, len(context), MAX_CONTEXT))
        if in_common and in_common >= best[1]:
            best = end, in_common
    assert search(np.array(text, np.int32), np.array(context, np.int32))[:2] == best


def test_of_a_token_that_is_everywhere_the_newest_places_are_compared() -> None:
    text = np.full(4 * MOST_PLACES, 7, np.int32)
    text[100] = 8
    assert search(text, np.array([8, 7], np.int32)) == (len(text) - 1, 1, MOST_PLACES)
    assert search(text[: MOST_PLACES + 1], np.array([8, 7], np.int32)) == (102, 2, MOST_PLACES - 1)


def test_what_is_compared_counts_among_what_is_searched() -> None:
    """A text of one token is compared fifteen times at each of its places."""
    lookup, asked = Lookup(), []
    requests = [_request(uid, [7] * 2 * MOST_PLACES, [8] + [7] * 15) for uid in range(16)]
    with mock.patch.object(lookup_module, "search", side_effect=search) as searched:
        for _ in range(8):
            for request in requests:
                request.output_ids += [8] + [7] * 15
            searched.reset_mock()
            lookup.propose([DraftRequest(request, 4, request.num_known - 1) for request in requests])
            asked.append(sum(len(call.args[0]) == 2 * MOST_PLACES for call in searched.mock_calls))
    assert max(asked) == 5, "of all 16, so that the step does not wait"


def test_a_draft_is_what_followed_in_the_prompt_and_then_is_read_on() -> None:
    lookup = Lookup()
    request = _request(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [3])
    assert _draft(lookup, request).token_ids == [4, 5, 6, 7]
    request.output_ids += [4, 5]
    assert _draft(lookup, request).token_ids == [6, 7, 8, 9]
    request.output_ids += [0]
    assert _draft(lookup, request).token_ids == ()
    request.output_ids += [4]
    assert _draft(lookup, request, most=2).token_ids == [5, 0], "the output is newer than the prompt"


def test_outputs_of_one_origin_are_drafted_from_their_first_token_on() -> None:
    lookup = Lookup(Pools())
    first = _request(1, [9, 9], [1, 2, 3, 4], origin="a")
    _end(lookup, first)
    second = _request(2, [8], origin="a")
    draft = _draft(lookup, second)
    assert (draft.token_ids, draft.grade) == ([1, 2, 3, 4], 7)
    second.output_ids += [5, 3]
    assert _draft(lookup, second).token_ids == [4], "no further than the end of the earlier output"


def test_an_output_of_one_token_does_not_hide_longer_ones() -> None:
    lookup = Lookup(Pools())
    for uid, output in enumerate(([1, 2, 3, 4], [1])):
        _end(lookup, _request(uid, [9], output, origin="a"))
    assert _draft(lookup, _request(9, [8], origin="a")).token_ids == [1, 2, 3, 4]


def test_no_output_is_shown_to_another_origin_nor_kept_of_an_aborted_request() -> None:
    lookup = Lookup(Pools())
    for uid, (origin, reason) in enumerate([("a", "stop"), (None, "stop"), ("b", "abort")]):
        request = _request(uid, [9], [1, 2, 3, 4], origin=origin)
        _end(lookup, request, reason)
    for uid, origin in enumerate(["b", None, "c"], 10):
        request = _request(uid, [8], [1, 2], origin=origin)
        assert _draft(lookup, request).token_ids == ()


def test_no_more_than_so_many_origins_are_kept() -> None:
    pools = Pools(most_origins=3)
    for origin in range(10):
        pools.add(origin, [1])
    assert [len(pools.ids(origin)) > 0 for origin in range(10)] == [False] * 7 + [True] * 3
    assert pools.num_tokens == 6


def test_a_flush_forgets_earlier_outputs() -> None:
    scheduler = Driver(Setting()).scheduler
    speculator = choice.speculator(EngineConfig(speculative_algorithm="NGRAM"), scheduler)
    [lookup] = speculator._drafters
    first, second = (_request(uid, [9, 8], [1, 2, 3, 4], origin="a") for uid in range(2))
    second.output_ids.clear()
    _end(lookup, first)
    assert _draft(lookup, second).token_ids == [1, 2, 3, 4]
    scheduler.memory.flush()
    third = _request(3, [9, 8], origin="a")
    assert _draft(lookup, third).token_ids == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=30)), max_size=60))
def test_pools_stay_within_their_bounds_and_keep_the_newest(outputs: list[tuple[int, list[int]]]) -> None:
    pools = Pools(pool_tokens=40, all_tokens=100)
    for origin, output in outputs:
        pools.add(origin, output)
        ids = pools.ids(origin)
        assert len(ids) <= 40
        assert ids.tolist()[-len(output[:19]) - 1 :] == [START, *output[:19]]
        assert pools.num_tokens == sum(len(p) for p in pools._pools.values()) <= 100


@settings(max_examples=30)
@given(st.integers(0, 1000))
def test_the_tokens_searched_in_a_step_are_bounded_and_every_request_gets_its_turn(seed: int) -> None:
    lookup = Lookup(scanned_tokens=50)
    rng = np.random.default_rng(seed)
    prompt = np.append(rng.permutation(40), 3).tolist()
    requests = [_request(uid, prompt) for uid in range(3)]
    drafted = set()
    for token in rng.permutation(40)[:6].tolist():
        for request in requests:
            request.output_ids.append(token)
        wanted = [DraftRequest(request, 2, request.num_known - 1) for request in requests]
        with mock.patch.object(lookup_module, "search", wraps=search) as searched:
            found = [bool(draft.token_ids) for draft in lookup.propose(wanted)]
        assert sum(len(call.args[0]) for call in searched.call_args_list) <= 50
        drafted |= {i for i, each in enumerate(found) if each}
    assert drafted == {0, 1, 2}
