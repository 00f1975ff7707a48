"""Speculation changes no token: engines with drafters of every kind against one without, on the CPU in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sgl import Engine
from sgl.errors import ConfigError
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from sgl.runtime.speculate.lookup import Lookup
from sgl.runtime.speculate.pools import Pools
from sgl.runtime.speculate.speculator import Speculator, _Guess, _within
from tests.every_draft import EveryDraft, every_draft
from tests.near_ties import Scored, without_reason
from tests.tiny_models import tiny_checkpoint

DATE = r"(?P<year>20[0-9]{2})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "maximum": 99},
        "surname": {"type": "string", "maxLength": 5},
        "telephone": {"enum": ["none", "nonesuch"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["identifier", "surname", "telephone", "flags"],
    "additionalProperties": False,
}


class Oracle:
    """Drafts what plain decoding gave, by prompt and seed, with mistakes now and then."""

    name = "oracle"

    def __init__(self, outputs: dict[tuple[tuple[int, ...], int], list[int]], mistakes: float, seed: int) -> None:
        self._outputs = outputs
        self._mistakes = mistakes
        self._rng = random.Random(seed)
        self.asked: set[int] = set()

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(asked) for asked in wanted]

    def _draft(self, asked: DraftRequest) -> Draft:
        request, rng = asked.request, self._rng
        assert request.row >= 0
        self.asked.add(request.uid)
        assert asked.num_computed < request.num_known
        assert asked.most > 0
        if rng.random() < 0.2:
            return NO_DRAFT
        known, done = self._outputs.get((tuple(request.prompt_ids.tolist()), request.seed), []), request.output_ids
        if known[: len(done)] != list(done):
            return NO_DRAFT  # a GPU's rounding chose another token
        ahead = known[len(done) :][: rng.randint(0, asked.most)]
        return Draft([rng.randrange(256) if rng.random() < self._mistakes else token for token in ahead])

    def ended(self, request: Request) -> None:
        self.asked.discard(request.uid)


def speculate(engine: Engine, drafters: list[Drafter], most: int = 5) -> None:
    """Give an engine these drafters."""
    loop = engine._loop

    def replace() -> None:
        loop._speculator = Speculator(engine._scheduler, drafters, most=most, budget=EveryDraft())

    loop.call(replace)


class Five(Oracle):
    """Five tokens of its one output."""

    def _draft(self, asked: DraftRequest) -> Draft:
        [known] = self._outputs.values()
        return Draft(known[len(asked.request.output_ids) :][:5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), with_tokenizer=True)


def requests(temperature: float) -> tuple[list[str], list[dict[str, Any]]]:
    base = {"temperature": temperature, "max_new_tokens": 40}
    kinds: list[dict[str, Any]] = [
        {"json_schema": RECORD, "max_new_tokens": 70},
        {"json_schema": RECORD, "max_new_tokens": 9},
        {"json_schema": RECORD, "stop": "phone"},
        {"json_schema": RECORD, "frequency_penalty": 0.5},
        {"regex": DATE},
        {"ignore_eos": True, "max_new_tokens": 25},
        {"stop": ["e", "q"], "min_new_tokens": 3},
        {"top_k": 5, "top_p": 0.9, "n": 2},
        {"logit_bias": {"70": 4.0}, "max_new_tokens": 1},
        {"json_schema": RECORD, "max_new_tokens": 33},
    ]
    params = [{**base, **kinds[i % len(kinds)], "seed": i} for i in range(20)]
    return [f"a record of {'very ' * (i % 5)}much:" for i in range(20)], params


def told(results: list[dict[str, Any]]) -> list[Any]:
    """What speculation may not change."""
    return [(r["text"], r["output_ids"], r["meta_info"]["finish_reason"]) for r in results]


@contextmanager
def recorded(engine: Engine) -> Iterator[dict[Any, list[int]]]:
    """Outputs of the requests inside, by prompt and seed."""
    outputs: dict[Any, list[int]] = {}
    loop_end = engine._loop._end

    def end(submission: Any, reason: Any) -> None:
        request = submission.request
        outputs[tuple(request.prompt_ids.tolist()), request.seed] = list(request.output_ids)
        loop_end(submission, reason)

    engine._loop._end = end  # type: ignore[method-assign]
    yield outputs
    engine._loop._end = loop_end  # type: ignore[method-assign]


def outputs_of(engine: Engine, prompts: list[str], params: list[dict[str, Any]]) -> dict[Any, list[int]]:
    """By prompt and seed, from plain requests."""
    with recorded(engine) as outputs:
        engine.generate(prompt=prompts, sampling_params=params)
    return outputs


@pytest.fixture(scope="module", params=[0.0, 1.2], ids=["greedy", "sampled"])
def plain(folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    prompts, params = requests(request.param)
    options = {"disable_overlap_schedule": True, "speculative_algorithm": "off"}
    with Engine(folder, dtype="float32", **options) as engine:
        expected = told(engine.generate(prompt=prompts, sampling_params=params))
        yield prompts, params, expected, outputs_of(engine, prompts, params)


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "page_size": 1,
            "chunked_prefill_size": 7,
            "max_running_requests": 4,
            "disable_overlap_schedule": False,
        },
        pytest.param(
            {"page_size": 4, "max_total_tokens": 160, "schedule_conservativeness": 0.01, "max_running_requests": 8},
            marks=pytest.mark.slow,
        ),
        pytest.param({"disable_radix_cache": True, "chunked_prefill_size": 3}, marks=pytest.mark.slow),
    ],
    ids=["plain", "run-ahead", "tight", "no-cache"],
)
def test_random_drafters_change_no_token(folder: Path, plain: Any, options: dict[str, Any]) -> None:
    prompts, params, expected, outputs = plain
    with Engine(folder, dtype="float32", check_ledger=True, **options) as engine:
        for mistakes in (0.0, 0.3, 1.0):
            oracle = Oracle(outputs, mistakes, seed=int(10 * mistakes))
            speculate(engine, [oracle])
            assert told(engine.generate(prompt=prompts, sampling_params=params)) == expected
            assert not oracle.asked
            counters = engine._scheduler.counters
            assert counters.drafted_tokens
            assert counters.verified_tokens < counters.drafted_tokens or not mistakes
        assert engine.check_ledger() == []


def test_lookups_change_no_token_and_save_steps(folder: Path, plain: Any) -> None:
    prompts, params, expected, _ = plain
    steps = []
    with Engine(folder, dtype="float32", check_ledger=True) as engine:
        for drafters in ([], [Lookup(Pools())]):
            speculate(engine, drafters)
            before = engine._scheduler.counters.steps
            assert told(engine.generate(prompt=prompts, sampling_params=params)) == expected
            steps.append(engine._scheduler.counters.steps - before)
    assert steps[1] <= steps[0]


def test_a_look_that_finds_nothing_takes_no_pages(folder: Path) -> None:
    """Others' cached prefixes and leases would give way to them."""
    with Engine(folder, dtype="float32", page_size=1, disable_overlap_schedule=True) as engine:
        ahead, rows = list[int](), engine._scheduler.memory.rows

        class Silent(Oracle):
            def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
                ahead.extend(int(rows.num_pages[its.request.row]) - its.request.num_known for its in wanted)
                return [NO_DRAFT] * len(wanted)

        speculate(engine, [Silent({}, 0.0, 0)])
        engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    assert len(ahead) > 10
    assert max(ahead) <= 0


def test_logprobs_of_drafts_that_stand_are_those_of_plain_decoding(folder: Path, plain: Any) -> None:
    prompts, params, _, outputs = plain
    params = [{**its, "n": 1} for its in params]
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 9]}
    asked |= {"prompt": prompts, "sampling_params": params}
    with Engine(folder, dtype="float32", disable_overlap_schedule=True, disable_jump_forward=True) as engine:
        expected = engine.generate(**asked)
        speculate(engine, [Oracle(outputs, 0.2, seed=1)])
        results = engine.generate(**asked)
        assert engine._scheduler.counters.verified_tokens
    assert told(results) == told(expected)
    for result, wanted in zip(results, expected, strict=True):
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            got, right = ([_numbers(entry) for entry in r["meta_info"][name]] for r in (result, wanted))
            assert np.allclose(got, right, atol=1e-4)


def _numbers(entry: Any) -> list[float]:
    if isinstance(entry[0], list):
        return [x for each in entry for x in each[:2]]
    return entry[:2]


def test_streams_and_aborts_amid_drafts_leave_nothing_behind(folder: Path, plain: Any) -> None:
    prompts, params, expected, outputs = plain
    with Engine(folder, dtype="float32", check_ledger=True) as engine:
        oracle = Oracle(outputs, 0.1, seed=3)
        speculate(engine, [oracle])
        for number, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            if its.get("n", 1) > 1:
                continue
            events = engine.generate(prompt=prompt, sampling_params=its, stream=True)
            texts = []
            for event in events:
                texts.append(event["text"])
                if number % 3 == 0 and len(texts) > 2:
                    events.close()
                    break
            else:
                assert texts == sorted(texts, key=len)
                assert (texts[-1], event["output_ids"], event["meta_info"]["finish_reason"]) in expected
        engine.abort(None)
        assert not oracle.asked
        assert engine.check_ledger() == []


@dataclass(frozen=True, slots=True)
class Verified:
    """Greedy outputs with drafts beside those of plain decoding."""

    accepted: float  # share of the drafts
    same: float  # share of the outputs
    breaches: list[str]


class Rounded:
    """An engine whose verified steps may round otherwise than its plain ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        texts, _ = requests(0.0)
        self._prompts = engine.tokenizer.encode_all(texts)
        self._params = [
            {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "seed": i} for i in range(20)
        ]
        speculate(engine, [])
        with recorded(engine) as self._outputs:
            results = engine.generate(input_ids=self._prompts, sampling_params=self._params, return_logprob=True)
        self._plain = [result["output_ids"] for result in results]
        scored = Scored.of(engine, self._prompts, self._plain)
        self.rounding = max(
            abs(entry[0] - own)
            for result, owns in zip(results, scored.own, strict=True)
            for entry, own in zip(result["meta_info"]["output_token_logprobs"], owns, strict=True)
        )
        """By how much log-probabilities of plain decoding and of prompts differ at most."""

    def verified(self, most: int, rounding: float, **params: Any) -> Verified:
        """With drafts of plain decoding's tokens, until an output parts from it. rounding: see `without_reason`."""
        engine, counters = self._engine, self._engine._scheduler.counters
        speculate(engine, [Oracle(self._outputs, 0.0, seed=most)], most=most)
        drafted, accepted = counters.drafted_tokens, counters.verified_tokens
        results = engine.generate(input_ids=self._prompts, sampling_params=[its | params for its in self._params])
        drafted, accepted = counters.drafted_tokens - drafted, counters.verified_tokens - accepted
        speculate(engine, [])
        outputs = [result["output_ids"] for result in results]
        scored = Scored.of(engine, self._prompts, outputs)
        same = [a == b for a, b in zip(outputs, self._plain, strict=True)]
        breaches = without_reason(self._plain, outputs, scored, rounding)
        return Verified(accepted / drafted, sum(same) / len(same), breaches)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("is_captured", [True, False])
def test_on_a_gpu_outputs_part_at_near_ties_alone(folder: Path, backend: Any, is_captured: bool) -> None:
    options: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "speculative_algorithm": "NGRAM"}
    with Engine(
        folder, dtype="bfloat16", check_ledger=True, disable_cuda_graph=not is_captured, **options
    ) as engine:
        its = Rounded(engine)
        assert its.rounding < 0.15, "four or more steps of bfloat16 at logits up to 8"
        for most in (1, 3, 4, 7):
            found = its.verified(most, max(its.rounding, 2**-5))
            assert found.breaches == []
            assert found.accepted > 0.8
            assert found.same > 0.5


@pytest.mark.parametrize("most", [1, 7])
def test_outputs_that_part_without_a_near_tie_are_found(folder: Path, most: int) -> None:
    """A bias takes the place of a GPU's rounding, which moves each logit by so much at most."""
    with Engine(folder, dtype="float32", speculative_algorithm="NGRAM") as engine:
        its = Rounded(engine)
        assert its.rounding < 1e-4
        assert its.verified(most, its.rounding) == Verified(1.0, 1.0, [])
        rng = random.Random(most)
        signs = {str(token): rng.choice([-1, 1]) for token in range(len(engine.tokenizer.hf))}
        near, far = (
            its.verified(most, 0.02, logit_bias={token: sign * bias for token, sign in signs.items()})
            for bias in (0.02, 0.2)
        )
    assert near.same < 1.0
    assert near.accepted > 0.8
    assert near.breaches == []
    assert len(far.breaches) > 10
    assert "below the likeliest" in far.breaches[0]


def test_outputs_are_looked_up_in_those_of_the_same_caller_and_kind_alone(folder: Path) -> None:
    origins = []
    params = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    with Engine(folder, dtype="float32") as engine:
        for options in (
            {},
            {"extra_key": "other"},
            {"owner": "somebody"},
            {"sampling_params": {**params, "json_schema": RECORD}},
            {"sampling_params": {**params, "regex": "a" * 10_000}},
            {"prompt": "another beginning, and a different one at that: a record"},
            {"origin": ("program", "x" * 10_000)},
            {"origin": ("program", "x" * 10_001)},
            {"extra_key": "k" * 1_000},
        ):
            call = engine.prepare(**{"prompt": "a record of much: ", "sampling_params": params, **options})
            origins.append(call.submissions[0].request.origin)
        assert (
            engine.prepare(prompt="a record of much: ", sampling_params=params).submissions[0].request.origin
            == (origins[0])
        )
    assert len(set(origins)) == len(origins)
    assert max(len(repr(origin)) for origin in origins) < 1_000, "they outlive requests, whose names may be long"


def test_usage_tells_what_was_drafted_and_what_stood(folder: Path, plain: Any) -> None:
    prompts, params, _, outputs = plain
    with Engine(folder, dtype="float32", speculative_algorithm="off") as engine:
        assert "drafted_tokens" not in engine.generate(prompt=prompts[5], sampling_params=params[5])["meta_info"]
        speculate(engine, [Oracle(outputs, 0.2, seed=1)])
        meta = engine.generate(prompt=prompts[5], sampling_params=params[5])["meta_info"]
        counters = engine._scheduler.counters
        assert meta["drafted_tokens"] == counters.drafted_tokens > 0
        assert meta["accepted_tokens"] == counters.verified_tokens > 0


@pytest.mark.parametrize(
    ("options", "is_default"),
    [
        ({}, True),
        ({"deterministic": True}, True),
        ({"model_impl": "transformers"}, True),
        ({"speculative_algorithm": "off"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"tp_size": 2}, False),
    ],
    ids=str,
)
def test_without_an_option_there_are_drafts_where_outputs_stay_the_same(
    folder: Path, options: dict[str, Any], is_default: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """But for log-probabilities, whose last bits would depend on their number."""
    caplog.set_level("INFO")
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    with Engine(folder, **{"device": "cpu", "dtype": "float32", **options}) as engine, every_draft(engine):
        for _ in range(2):
            found = engine.generate(prompt="a record:", sampling_params=params)
        assert ("drafted_tokens" in found["meta_info"]) is is_default
        before = engine._scheduler.counters.drafted_tokens
        scored = engine.generate(prompt="a record:", sampling_params=params, return_logprob=True)
        assert engine._scheduler.counters.drafted_tokens == before
    assert scored["output_ids"] == found["output_ids"]
    assert ("drafts: of earlier text" in caplog.text) is is_default


@pytest.mark.parametrize(("options", "is_kept"), [({}, True), ({"disable_radix_cache": True}, False)], ids=str)
def test_by_default_outputs_of_others_are_looked_up_where_prefixes_are_shared(
    folder: Path, options: dict[str, Any], is_kept: bool
) -> None:
    params = {"temperature": 1.0, "seed": 5, "max_new_tokens": 40, "ignore_eos": True}
    with Engine(folder, device="cpu", dtype="float32", **options) as engine, every_draft(engine):
        found = [engine.generate(prompt="a record:", sampling_params=params)["meta_info"] for _ in range(3)]
    first, *others = [meta.get("accepted_tokens", 0) for meta in found]
    assert first < 20
    assert all((accepted > 30) if is_kept else (accepted == first) for accepted in others)


@pytest.mark.parametrize("stop", ["token", "text"])
def test_drafts_behind_the_end_of_an_output_are_not_accepted(folder: Path, stop: str) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_new_tokens": 30, "ignore_eos": True}
    with Engine(folder, dtype="float32") as engine:
        whole = engine.generate(prompt="abc", sampling_params=params)["output_ids"]
        outputs = outputs_of(engine, ["abc"], [params])
        counters, lengths = engine._scheduler.counters, set()

        speculate(engine, [Five(outputs, 0.0, 0)])
        for token in dict.fromkeys(whole[:24]):
            end: dict[str, Any] = {"stop_token_ids": [token]}
            if stop == "text":
                end = {"stop": [engine.tokenizer.decode([token])]}
            before = counters.verified_tokens
            meta = engine.generate(prompt="abc", sampling_params={**params, **end})["meta_info"]
            steps, of_last = divmod(meta["completion_tokens"] - 1, 6)
            assert meta.get("accepted_tokens", 0) == 5 * steps + min(of_last, 5)
            assert counters.verified_tokens - before == meta.get("accepted_tokens", 0)
            lengths.add(of_last)
    assert len(lengths) > 3


def test_each_event_of_a_stream_has_the_counts_of_what_it_holds(folder: Path) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_new_tokens": 30, "ignore_eos": True}
    with Engine(folder, dtype="float32") as engine:
        speculate(engine, [Five(outputs_of(engine, ["abc"], [params]), 0.0, 0)])
        metas = [event["meta_info"] for event in engine.generate(prompt="abc", sampling_params=params, stream=True)]
        assert len(metas) > 3
        for meta in metas[:-1]:
            steps, of_last = divmod(meta["completion_tokens"] - 1, 6)
            assert meta.get("accepted_tokens", 0) == 5 * steps + min(of_last, 5)
        text = {"temperature": 0.0, "max_new_tokens": 60, "regex": "[a-z]{4}: certainly forced: [0-9]{9}"}
        events = list(engine.generate(prompt="abc", sampling_params=text, stream=True))
        counts = [its["meta_info"]["forced_tokens"] for its in events if "forced: " in its["text"]]
        assert len(counts) > 2
        assert set(counts) == {counts[-1]}
        assert counts[-1] > 5


@pytest.mark.costly
@pytest.mark.parametrize("algorithm", ["NGRAM", "GRAMMAR", "auto"])
def test_each_algorithm_changes_no_token_of_constrained_outputs(folder: Path, plain: Any, algorithm: Any) -> None:
    prompts, params, expected, _ = plain
    with Engine(folder, dtype="float32", check_ledger=True, speculative_algorithm=algorithm) as engine:
        engine._loop.call(lambda: setattr(engine._loop._speculator, "_budget", EveryDraft()))
        assert told(engine.generate(prompt=prompts, sampling_params=params)) == expected
        assert engine._scheduler.counters.verified_tokens


def test_an_engine_drafts_no_more_where_nothing_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Draft([7] * 7)
    monkeypatch.setattr(Lookup, "propose", lambda self, wanted: [wrong] * len(wanted))
    params = {"max_new_tokens": 200, "ignore_eos": True, "logit_bias": {"7": -100}}
    with Engine(folder, dtype="float32", speculative_algorithm="NGRAM") as engine:
        found = engine.generate(prompt="abc", sampling_params=params)["meta_info"]
    assert (found["completion_tokens"], found["accepted_tokens"]) == (200, 0)
    assert 0 < found["drafted_tokens"] <= 7 * 30  # until the share that stands is known to be small


@pytest.mark.parametrize("is_on_host", [False, True])
def test_looks_that_find_nothing_are_rare_where_they_cost(is_on_host: bool) -> None:
    speculator = Speculator(cast(Any, None), budget=Budget(), is_on_host=is_on_host)
    costs = speculator._budget.costs
    costs.saw(4, 0, 1, 0.01)
    looks = steps = 0
    while looks < 50:
        steps += 1
        if speculator._until_look <= 0:
            looks += 1
            speculator._rest_from_looks(4, 0.0005, has_guesses=True)
        speculator._until_look -= 1
    assert steps == pytest.approx(50 * (5 if is_on_host else 128), rel=0.2)


def test_looks_that_find_nothing_are_as_rare_as_waiting_costs() -> None:
    """Where no step is begun before the results of the one before are there."""
    speculator = Speculator(cast(Any, None), budget=Budget())
    costs = speculator._budget.costs
    costs.saw(1, 0, 1, 0.010)
    speculator._rest_from_looks(1, 0.0, has_guesses=False)
    assert speculator._until_look == 0, "it is not known what waiting costs"
    costs.saw(1, 0, 1, 1.0, waited=True)
    speculator._rest_from_looks(1, 0.0, has_guesses=False)
    assert speculator._until_look <= 25, "one step of many is not believed whole"
    for _ in range(50):
        costs.saw(1, 0, 1, 0.013, waited=True)
    speculator._rest_from_looks(1, 0.0, has_guesses=False)
    assert speculator._until_look in (15, 16)
    for _ in range(50):
        costs.saw(1, 0, 1, 0.0095, waited=True)
    speculator._rest_from_looks(1, 0.0, has_guesses=False)
    assert speculator._until_look == 0


@pytest.mark.parametrize(("gain", "every", "most"), [(1.5, 3, 1.0), (0.5, 10, 0.25), (0.0, 1, 0.1)])
def test_looks_go_on_while_they_gain_more_than_waiting_costs(gain: float, every: int, most: float) -> None:
    """One of so many looks gains so many steps, and each of the others 0.4 steps of waiting."""
    speculator = Speculator(cast(Any, None), budget=Budget())
    costs = speculator._budget.costs
    costs.saw(1, 0, 1, 0.010)
    for _ in range(50):
        costs.saw(1, 0, 1, 0.014, waited=True)
        speculator._looks.saw(1, 1000, 0.010, looked=False)
    looks, total = 0, 0.0
    for step in range(5000):
        is_look = speculator._until_look <= 0
        found = 0.0 if step % every else gain
        if is_look:
            looks += 1
            total += found or -costs.waiting(1)
            speculator._looked(1, 0.0, gains=found > 0, has_guesses=False)
        tokens = round(1000 * (found + 1.4)) if is_look and found else 1000
        speculator._looks.saw(1, tokens, 0.014 if is_look else 0.010, looked=is_look)
        speculator._until_look -= 1
    assert (looks > 4900) == (most == 1.0)
    assert looks <= most * 5000
    assert total > -0.025 * 5000


def test_looks_rest_though_nobody_knows_what_waiting_costs() -> None:
    """Steps with prompts are not measured."""
    speculator = Speculator(cast(Any, None), budget=Budget())
    speculator._budget.costs.saw(1, 0, 1, 0.010)
    speculator._looked(1, 0.0, gains=True, has_guesses=True)
    looks = 0
    for _ in range(1000):
        if speculator._until_look <= 0:
            looks += 1
            speculator._looked(1, 0.0, gains=False, has_guesses=True)
        speculator._until_look -= 1
    assert looks < 60


@pytest.mark.parametrize("is_on_host", [False, True])
def test_drafts_without_room_gain_nothing(is_on_host: bool) -> None:
    """Nor do those that a constraint cuts off, behind which there is more to guess: on a CPU looks go on."""
    scheduler = SimpleNamespace(
        may_draft=lambda request: True, memory=SimpleNamespace(reach=lambda request, end: 1)
    )
    budget = Budget(is_padded=True)
    speculator = Speculator(cast(Any, scheduler), budget=budget, is_on_host=is_on_host)
    speculator._budget.costs.saw(1, 0, 1, 0.010)
    request = SimpleNamespace(max_new_tokens=100, output_ids=[], num_known=1, owner=SimpleNamespace(matcher=None))
    guesses = [_Guess(cast(Any, request), cast(Any, None), Draft([1] * 7), 0.9, 0)]
    for looked in (False, True):
        for _ in range(2):  # so looks do not pay
            speculator._looks.saw(1, 1, 0.014 if looked else 0.010, looked=looked)
    assert speculator._divide(guesses, 1, room=99) == is_on_host
    speculator._looked(1, 0.001, gains=is_on_host, has_guesses=True)
    assert (speculator._until_look > 0) == (not is_on_host)
    speculator._looked(1, 0.001, gains=False, has_guesses=True)
    assert speculator._until_look > 0


def test_drafts_without_gain_are_tried_again_a_few_at_a_time() -> None:
    class Scheduled:
        def __init__(self) -> None:
            self.given: list[int] = []
            self.memory = SimpleNamespace(reach=lambda request, end: end)

        def may_draft(self, request: Any) -> bool:
            return True

        def draft(self, request: Any, token_ids: Any) -> None:
            self.given.append(len(token_ids))

    scheduler = Scheduled()
    speculator = Speculator(cast(Any, scheduler), budget=Budget(is_padded=True))
    costs = speculator._budget.costs
    costs.saw(4, 0, 1, 0.010)
    for _ in range(30):
        costs.saw(4, 28, 8, 0.040)
    request = cast(
        Any, SimpleNamespace(max_new_tokens=100, output_ids=[], num_known=1, owner=SimpleNamespace(matcher=None))
    )
    guesses = [_Guess(request, cast(Any, None), Draft([1] * 7), 0.3, 0)] * 4
    assert not speculator._divide(guesses, 4, room=99)
    assert scheduler.given == []
    speculator._since_drafts = 128
    assert not speculator._divide(guesses, 4, room=99)
    assert scheduler.given == [1] * 4
    assert not speculator._divide(guesses, 4, room=99)
    assert len(scheduler.given) == 4, "not again at once"
    scheduler.given.clear()
    speculator._since_drafts = 128
    assert not speculator._divide(guesses, 4, room=3)
    assert scheduler.given == [1] * 3


@pytest.mark.parametrize(
    ("room", "given"),
    [
        (99, [7, 3, 0, 5]),
        (15, [7, 3, 0, 5]),
        (14, [6, 3, 0, 5]),
        (9, [3, 3, 0, 3]),
        (2, [1, 1, 0, 0]),
        (0, [0] * 4),
    ],
)
def test_drafts_of_a_step_are_as_many_as_it_has_room_for(room: int, given: list[int]) -> None:
    assert _within(room, [7, 3, 0, 5]) == given
    assert _within(room, []) == []


@pytest.mark.parametrize("chunk", [1, 2, 9, 64])
def test_steps_with_little_room_have_drafts_where_there_is_some_and_are_no_more(chunk: int) -> None:
    """A row advances in every step, whatever others draft, and outputs are those without drafts."""
    steps, texts = [], []
    for algorithm in ("off", "NGRAM"):
        options: Any = {"max_running_requests": 8, "chunked_prefill_size": chunk, "random_seed": 0}
        with Engine(speculative_algorithm=algorithm, check_ledger=True, **options) as engine:
            params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
            for _ in range(2):
                before = engine._scheduler.counters.steps
                found = engine.generate(prompt=["One two three, one two three, one"] * 8, sampling_params=params)
            steps.append(engine._scheduler.counters.steps - before)
            texts.append([each["text"] for each in found])
    assert texts[0] == texts[1]
    assert steps[1] < 2 * steps[0], "drafts may hold up prompts by half a step each"


class Model:
    """A model that takes time and is never asked."""

    name, is_resting, is_on = "model", False, True

    def follow(self, *, is_on: bool) -> None:
        self.is_on = is_on

    @property
    def is_ready(self) -> bool:
        return True

    def grade(self, request: Any) -> int | None:
        return cast(int | None, request.grade)


class Steps:
    """Decode steps of one row, timed by a clock of their own."""

    def __init__(self) -> None:
        self.model, self.seconds = Model(), 0.0
        scheduler = cast(Any, SimpleNamespace(counters=NOTHING))
        self.speculator = Speculator(scheduler, [], [cast(Any, self.model)], most=7, budget=Budget())
        self.speculator._clock = lambda: self.seconds

    def run(self, count: int, seconds: float) -> int:
        """How many had drafts. seconds: of such a step; others take 10 ms."""
        found = 0
        for _ in range(count):
            is_asked = self.speculator.wants_results
            if is_asked:
                self.speculator._choose(1)
            if is_asked := is_asked and self.model.is_on:
                found += 1
                if self.speculator._trials.is_on:
                    self.speculator._trials.looked(is_drafted=True)
            self.seconds += seconds if is_asked else 0.010
            lens = np.array([5 if is_asked else 1])
            self.speculator.measure(step_of(lens))
        return found


NOTHING = SimpleNamespace(generated_tokens=0, forced_tokens=0)


class Sized(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.q_lens)


def step_of(lens: Any, *, is_observed: bool = False) -> Any:
    """Of rows behind their prompts, with so many tokens each."""
    batch = Sized(q_lens=lens, kv_lens=lens + 9, longest=int(lens.max()), token_ids=range(lens.sum()))
    batch.__dict__.update(setups=[], samples=lens > 0, is_observed=is_observed, is_ahead=False)
    return SimpleNamespace(batch=batch, requests=[SimpleNamespace(prompt_len=9)] * len(lens))


@pytest.mark.parametrize("seconds", [0.030, 0.100])
def test_models_that_do_not_pay_are_tried_as_rarely_as_trials_are_long(seconds: float) -> None:
    its = Steps()
    budget = its.speculator._budget
    budget.costs.saw(1, 0, 1, 0.010)
    for _ in range(100):
        budget.costs.saw(1, 4, 5, seconds)
        budget.acceptance("model", 0).saw(0, 1)
    its.run(1, seconds)
    assert not its.model.is_on
    began, drafted = its.seconds, its.run(50_000, seconds)
    assert drafted >= 8 * 5
    assert drafted % 8 == 0
    assert its.seconds - began < 1.012 * 50_000 * 0.010
    for _ in range(100):
        budget.acceptance("model", 0).saw(4, 4)
    assert its.run(20_000, 0.011) > 1_000, "and when they pay again, it is seen"


def test_models_are_asked_where_they_pay_whatever_others_found() -> None:
    """With fewer rows, at once."""
    its = Steps()
    budget = its.speculator._budget
    for rows in (1, 64):
        for _ in range(30):
            budget.costs.saw(rows, 0, 1, 0.010)
            budget.costs.saw(rows, 4 * rows, 5, 0.011 if rows == 1 else 0.080)
    its.speculator._choose(64)
    assert not its.model.is_on
    assert not its.speculator.wants_results
    its.run(1, 0.011)
    assert its.model.is_on
    assert its.speculator.wants_results


def test_models_are_asked_where_they_pay_for_the_requests_that_there_are() -> None:
    """A head may be right of texts that it has read, and wrong behind a prefix that was cached while it rested."""
    its = Steps()
    budget, choose = its.speculator._budget, its.speculator._choose
    whole, holed, unknown = (cast(Any, SimpleNamespace(grade=grade)) for grade in (0, 1, None))
    budget.costs.saw(1, 0, 1, 0.010)
    for _ in range(50):
        budget.costs.saw(1, 4, 5, 0.012)
        budget.acceptance("model", 0).saw(4, 4)
        budget.acceptance("model", 1).saw(0, 1)
    for requests, is_on in (([holed], False), ([whole], True), ([holed, unknown], False), ([holed, whole], True)):
        choose(len(requests), requests)
        assert its.model.is_on == is_on
    choose(1, [holed])
    choose(1, [unknown])
    assert its.model.is_on, "those to come may be read from their first token on"


@pytest.mark.parametrize("batches", [[16], [16, 17], [3, 17, 40]])
def test_trials_take_their_share_of_the_time_whatever_rows_steps_have(batches: list[int]) -> None:
    """Other numbers than there are running requests: some may wait."""
    running = {i: SimpleNamespace(uid=i, row=i) for i in range(17)}
    memory = SimpleNamespace(running=running, rows=SimpleNamespace(kv_len=None))
    scheduler = SimpleNamespace(memory=memory, may_draft=lambda request: False, num_running=17, counters=NOTHING)
    scheduler.shares = SimpleNamespace(draft_room=lambda: 1 << 40)
    model, seconds, extra = Model(), 0.0, 0.0
    speculator = Speculator(cast(Any, scheduler), [], [cast(Any, model)], most=7, budget=Budget())
    speculator._clock = lambda: seconds
    budget = speculator._budget
    for num_rows in (17, *batches):
        budget.costs.saw(num_rows, 0, 1, 0.010)
    for _ in range(100):
        budget.acceptance("model", 0).saw(0, 1)
    num_on = 0
    for i in range(30_000):
        speculator.draft()
        num_on += model.is_on
        extra += 0.001 * model.is_on
        seconds += 0.010 + 0.001 * model.is_on
        lens = np.ones(batches[i % len(batches)], int)
        speculator.measure(step_of(lens, is_observed=model.is_on))
    assert num_on >= 64, "trials come"
    assert extra < 0.012 * seconds


def test_what_an_idle_engine_is_asked_next_is_followed() -> None:
    """What pays with no rows says nothing of those to come."""
    model, running = Model(), dict[int, Any]()
    scheduler = SimpleNamespace(memory=SimpleNamespace(running=running), may_draft=lambda request: False)
    speculator = Speculator(cast(Any, scheduler), [], [cast(Any, model)], most=7, budget=Budget())
    for num_rows in (0, 1):
        speculator._budget.costs.saw(num_rows, 0, 1, 0.010)
    speculator.draft()
    assert model.is_on
    assert speculator.wants_results


def test_options_that_cannot_be_are_refused_by_name(folder: Path) -> None:
    for options, words in (
        ({"speculative_algorithm": "NGRAM", "pp_size": 2}, "pp_size=2"),
        ({"speculative_algorithm": "DRAFT"}, "speculative_draft_model_path"),
        ({"speculative_draft_model_path": "x"}, "a speculative_algorithm that asks a model, not None"),
        ({"speculative_algorithm": "off", "speculative_draft_model_path": "x"}, "asks a model, not 'off'"),
        ({"speculative_algorithm": "GRAMMAR", "speculative_draft_model_path": "x"}, "asks a model, not 'GRAMMAR'"),
        (
            {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": "/no/such"},
            "speculative_draft_model_path='/no/such': /no/such is neither a checkpoint folder",
        ),
        ({"speculative_num_draft_tokens": 4}, "speculative_num_draft_tokens=4 needs a speculative_algorithm"),
        ({"speculative_num_steps": 2}, "speculative_num_steps=2 needs a draft model"),
        ({"speculative_algorithm": "GRAMMAR", "speculative_num_steps": 2}, "speculative_num_steps=2 needs a draft"),
        ({"speculative_algorithm": "auto", "speculative_num_steps": 2}, "speculative_num_steps=2 needs a draft"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 8}, "speculative_num_steps=8"),
        (
            {
                "speculative_algorithm": "DRAFT",
                "speculative_draft_model_path": str(folder),
                "speculative_num_draft_tokens": 8,
                "speculative_num_steps": 8,
            },
            "speculative_num_steps=8 drafts do not fit .*: give 9, or leave it out",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(folder, **options)


def test_a_model_has_room_for_the_steps_that_it_is_given(folder: Path) -> None:
    options = {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": str(folder)}
    with Engine(folder, **options, speculative_num_steps=12) as engine:
        assert engine._loop._speculator._most == 12
    with Engine(folder, **options, speculative_num_steps=2) as engine:
        assert engine._loop._speculator._most == 7
