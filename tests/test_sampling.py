"""Sampling holds to its definitions; the oracles are transformers, brute force in Python, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sgl.kernels.sampling import ops as sampling
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import FROM_DEVICE, Batch, Logprobs, RowSetup, StepResult
from sgl.runtime.runner import results
from sgl.runtime.runner.results import Downloader, PendingStep, score_inputs
from sgl.runtime.runner.sampler import Sampler
from sgl.runtime.sampling_params import SamplingParams

Options = dict[str, Any]


def logits_like(shape: tuple[int, ...], seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# The draw


def hash32(bits: int, key: int = 0) -> int:
    bits ^= bits >> 16
    bits = bits * 0x21F0AAAD % 2**32
    bits ^= bits >> 15
    bits = (bits + key) * 0xD35A2D97 % 2**32
    return bits ^ (bits >> 15)


def gumbel_by_hand(seed: int, position: int, token_id: int) -> float:
    first, second = (
        hash32((hash32((hash32((seed + salt) % 2**32) + (seed >> 32)) % 2**32) + position) % 2**32)
        for salt in (0x243F6A88, 0x13198A2E)
    )
    bits = hash32((token_id + first) % 2**32, second) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


def test_noise_is_the_documented_function_of_seed_position_and_token(device: str) -> None:
    seeds = [0, 1, 2**32, 2**63 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 7, 131_071, 2**31 - 1]
    noise = sampling.gumbel(int64(*seeds).to(device), int64(*positions).to(device), 1000)
    by_hand = [[gumbel_by_hand(s, p, t) for t in range(1000)] for s, p in zip(seeds, positions, strict=True)]
    torch.testing.assert_close(noise.cpu(), torch.tensor(by_hand), rtol=2e-5, atol=2e-5)


def test_noise_of_a_row_does_not_depend_on_the_other_rows_or_the_vocabulary() -> None:
    seeds, positions = torch.arange(50) * 7919, torch.arange(50) % 5
    noise = sampling.gumbel(seeds, positions, 640)
    for row in (0, 17, 49):
        alone = sampling.gumbel(seeds[row : row + 1], positions[row : row + 1], 333)
        assert torch.equal(noise[row, :333], alone[0])


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = sampling.gumbel(torch.arange(1000), torch.full((1000,), 5), 1000)
    uniform = torch.exp(-torch.exp(-noise.double())).flatten().sort().values
    steps = torch.arange(1, len(uniform) + 1) / len(uniform)
    assert (uniform - steps).abs().max() * math.sqrt(len(uniform)) < 1.95  # Kolmogorov–Smirnov, 0.1 %
    tail = (noise > 9).sum().item()  # 123.4 expected
    assert 80 < tail < 170


@pytest.mark.parametrize("varied", ["token", "position", "seed", "high half of the seed", "seed and position"])
def test_noise_of_neighbours_is_uncorrelated(varied: str) -> None:
    steps = torch.arange(4000)
    zeros = torch.zeros_like(steps)
    seeds = {"seed": steps, "high half of the seed": steps << 32, "seed and position": steps}.get(varied, zeros)
    positions = {"position": steps, "seed and position": 4000 - steps}.get(varied, zeros)
    if varied == "token":
        noise = sampling.gumbel(int64(*range(64)), int64(*range(64)), 4000).T
    else:
        noise = sampling.gumbel(seeds, positions, 64)
    uniform = torch.exp(-torch.exp(-noise)) - 0.5
    uniform /= uniform.std()
    for lag in (1, 2, 3, 64, 256):
        same_token = (uniform[lag:] * uniform[:-lag]).mean().item()
        next_token = (uniform[lag:, 1:] * uniform[:-lag, :-1]).mean().item()
        assert abs(same_token) < 5 / math.sqrt(64 * 4000)
        assert abs(next_token) < 5 / math.sqrt(64 * 4000)


@pytest.mark.parametrize("bits", [0, 1, 0x7FFFFFFF, -1])
def test_noise_is_finite_whatever_the_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_mix_", lambda hashed, key=0: hashed.fill_(bits))
    assert sampling.gumbel(int64(1), int64(1), 3).isfinite().all()


CASES: list[Options] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_warped_distribution(case: Options, varied: str, device: str) -> None:
    draws, vocab = 20_000, 8
    logits = torch.tensor([1.2, -0.3, 0.8, 2.0, -1.0, 0.1, 1.9, -4.0])
    steps = torch.arange(draws)
    options: Options = {name: torch.full((draws,), value).to(device) for name, value in case.items()}
    ids = sampling.sample(
        logits.expand(draws, vocab).contiguous().to(device),
        seeds=(steps if varied == "seed" else torch.full_like(steps, 42)).to(device),
        positions=(steps if varied == "position" else torch.full_like(steps, 9)).to(device),
        **options,
    )
    expected = warped_by_transformers(logits, case).softmax(-1) * draws
    counts = torch.bincount(ids.cpu(), minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert chi_square < 24.3  # 0.1 % of 7 degrees of freedom


# Warping


def warped_by_transformers(logits: torch.Tensor, case: Options) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(case.get("temperature", 1.0)))])
    if 0 < case.get("top_k", 0) < len(logits):
        warpers.append(TopKLogitsWarper(case["top_k"]))
    if case.get("top_p", 1.0) < 1:
        warpers.append(TopPLogitsWarper(case["top_p"]))
    if case.get("min_p", 0.0) > 0:
        warpers.append(MinPLogitsWarper(case["min_p"]))
    no_tokens: Any = torch.zeros(1, 1, dtype=torch.int64)
    warped: torch.Tensor = warpers(no_tokens, logits[None])
    return warped[0]


def warp_rows(logits: torch.Tensor, cases: Sequence[Options], max_top_k: int, device: str = "cpu") -> torch.Tensor:
    vocab = logits.shape[1]
    off: Options = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0}
    columns = {name: torch.tensor([case.get(name, off[name]) for case in cases]).to(device) for name in off}
    temperature = columns.pop("temperature")
    return sampling.warp(logits.to(device), temperature, max_top_k=max_top_k, **columns).cpu()


def some_cases(count: int, vocab: int, seed: int) -> list[Options]:
    random = np.random.default_rng(seed)
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: float(random.uniform(0.1, 3)),
        "top_k": lambda: int(random.integers(1, vocab + 1)),
        "top_p": lambda: float(random.uniform(0.01, 0.999)),
        "min_p": lambda: float(random.uniform(0, 0.5)),
    }
    return [{name: draw() for name, draw in choices.items() if random.random() < 0.5} for _ in range(count)]


@pytest.mark.parametrize("max_known", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 50, 257, 1024])
def test_warping_keeps_the_tokens_that_transformers_keeps(vocab: int, max_known: bool, device: str) -> None:
    cases = some_cases(64, vocab, seed=vocab)
    logits = logits_like((64, vocab), seed=vocab)
    max_top_k = max((c["top_k"] for c in cases if c.get("top_k", vocab) < vocab), default=0) if max_known else 0
    warped = warp_rows(logits, cases, max_top_k, device)
    for row, case in enumerate(cases):
        expected = warped_by_transformers(logits[row], case)
        assert torch.equal(warped[row].isinf(), expected.isinf()), case
        torch.testing.assert_close(warped[row].log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


def kept_by_hand(logits: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """From the definitions, in exact order of logits: a token stays if what is likelier does not suffice."""
    likelier_than = [[other for other in logits if other > logit] for logit in logits]
    by_k = [len(likelier) < top_k for likelier in likelier_than]
    mass = sum(math.exp(logit) for logit, stays in zip(logits, by_k, strict=True) if stays)
    by_p = [top_p >= 1 or sum(map(math.exp, likelier)) < top_p * mass * (1 - 1e-6) for likelier in likelier_than]
    by_min = [math.exp(logit - max(logits)) >= min_p * (1 - 1e-6) for logit in logits]
    return [all(stays) for stays in zip(by_k, by_p, by_min, strict=True)]


@given(
    # few distinct values, so that there are ties, and powers of two, so that sums of probabilities are exact
    st.lists(st.integers(-4, 2).map(lambda power: power * math.log(2)), min_size=1, max_size=12),
    st.integers(1, 13),
    st.sampled_from([0.3, 0.77, 1.0]),
    st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    st.booleans(),
)
def test_tokens_of_equal_logits_stay_or_go_together(
    logits: list[float], top_k: int, top_p: float, min_p: float, max_known: bool
) -> None:
    case = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    max_top_k = top_k if max_known and top_k < len(logits) else 0
    kept = warp_rows(torch.tensor([logits]), [case], max_top_k).isfinite()[0].tolist()
    exact = torch.tensor(logits, dtype=torch.float32).tolist()
    by_hand = kept_by_hand(exact, top_k, top_p, min_p)
    assert kept == by_hand


def test_what_a_row_keeps_does_not_depend_on_the_other_rows() -> None:
    vocab = 300
    cases = some_cases(40, vocab, seed=5)
    logits = logits_like((40, vocab), seed=5).round()  # with ties
    together = warp_rows(logits, cases, 0)
    for row, case in enumerate(cases):
        top_k = case.get("top_k", vocab)
        alone = sampling.warp(
            logits[row : row + 1],
            torch.tensor([case.get("temperature", 1.0)]),
            top_k=int64(top_k) if "top_k" in case else None,
            top_p=torch.tensor([case["top_p"]]) if "top_p" in case else None,
            min_p=torch.tensor([case["min_p"]]) if "min_p" in case else None,
            max_top_k=top_k if top_k < vocab else 0,
        )
        assert torch.equal(together[row], alone[0])


def test_sums_of_a_row_depend_neither_on_the_number_of_rows_nor_on_that_of_threads() -> None:
    values = logits_like((4, 128_256), seed=15).softmax(-1)
    expected = sampling._row_sums(values)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        alone = [sampling._row_sums(values[i : i + 1]) for i in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), expected)


def test_forbidden_tokens_stay_forbidden_whatever_the_parameters() -> None:
    logits = torch.full((3, 6), -math.inf)
    logits[:, 4] = -7.0
    cases = [{"temperature": 1e6}, {"temperature": 1e-6, "top_p": 1e-6}, {"top_k": 3, "min_p": 1.0}]
    warped = warp_rows(logits, cases, 0)
    assert torch.equal(warped, torch.where(logits.isinf(), -math.inf, 0.0))


# Greedy


@pytest.mark.parametrize("vocab", [1, 5, 128, 256, 500, 1280])
def test_greedy_takes_the_likeliest_and_the_lowest_id_among_equals(vocab: int, device: str) -> None:
    logits = logits_like((100, vocab), seed=vocab, spread=1.0).round()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sampling.greedy(logits.to(device)).tolist() == expected
    zeros = torch.zeros(100, dtype=torch.int64, device=device)
    drawn = sampling.sample(logits.to(device), torch.zeros(100, device=device), zeros, zeros)
    assert drawn.tolist() == expected


def test_greedy_rows_are_unaffected_by_seeds_and_by_rows_that_draw() -> None:
    logits = logits_like((20, 384), seed=1)
    temperature = torch.tensor([0.0, 1.5] * 10)
    ids = [
        sampling.sample(
            logits,
            temperature,
            torch.arange(20) + offset,
            torch.arange(20),
            top_k=torch.full((20,), 200),
            top_p=torch.full((20,), 0.5),
            min_p=torch.full((20,), 0.01),
        )
        for offset in (0, 1000)
    ]
    for drawn in ids:
        assert torch.equal(drawn[::2], logits[::2].argmax(-1))
    assert not torch.equal(ids[0][1::2], ids[1][1::2])


def test_working_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, seeds = logits_like((37, 90), seed=2), torch.arange(37)
    options: Options = {"top_p": torch.linspace(0.1, 1, 37), "top_k": torch.arange(1, 38), "min_p": torch.zeros(37)}

    def outcome() -> tuple[torch.Tensor, ...]:
        ids = sampling.sample(logits, torch.full((37,), 0.9), seeds, seeds, **options)
        chosen, top_values, top_ids, of_given = sampling.logprobs(logits, ids, 3, ids[:, None])
        assert top_values is not None
        assert top_ids is not None
        assert of_given is not None
        return ids, chosen, top_values, top_ids, of_given

    whole = outcome()
    monkeypatch.setattr(sampling, "CHUNK_BYTES_CPU", 5 * 4 * 90)
    for one, other in zip(whole, outcome(), strict=True):
        assert torch.equal(one, other)


# Penalties and edits


def penalised_by_hand(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    if params.repetition_penalty != 1.0:
        repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = repetition(torch.tensor([[*prompt, *output]]), logits[None])[0]
    changed: list[float] = logits.tolist()
    for token in set(output):
        changed[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return torch.tensor(changed)


def test_penalties_are_what_transformers_and_the_definition_say(device: str) -> None:
    random = np.random.default_rng(0)
    rows, vocab = 12, 30
    logits = logits_like((rows, vocab), seed=3)
    occurrences = torch.zeros(rows, vocab, dtype=torch.int32)
    params, expected = [], []
    for row in range(rows):
        prompt, output = random.integers(0, vocab, 9).tolist(), random.integers(0, vocab, 20).tolist()
        occurrences[row, prompt] = 1
        for token in output:
            occurrences[row, token] += 2
        params.append(
            SamplingParams(
                frequency_penalty=random.uniform(-2, 2),
                presence_penalty=random.uniform(-2, 2),
                repetition_penalty=random.uniform(0.1, 2),
            )
            if row
            else SamplingParams()
        )
        expected.append(penalised_by_hand(logits[row], prompt, output, params[-1]))
    columns = [
        torch.tensor([getattr(each, name) for each in params], dtype=torch.float32).to(device)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    ]
    changed = sampling.penalize_(logits.clone().to(device), occurrences.to(device), *columns).cpu()
    torch.testing.assert_close(changed, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(changed[0], logits[0])


def test_edits_add_up_and_forbid(device: str) -> None:
    logits = torch.zeros(2, 4, device=device)
    values = torch.tensor([1.0, 2.0, -math.inf, 5.0], device=device)
    sampling.add_edits_(logits, int64(0, 0, 1, 1).to(device), int64(3, 3, 0, 0).to(device), values)
    assert logits.tolist() == [[0, 0, 0, 3], [-math.inf, 0, 0, 0]]


# Log-probabilities


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 99])
def test_logprobs_are_those_of_log_softmax(top_k: int, device: str) -> None:
    logits = logits_like((9, 40), seed=4)
    ids = torch.arange(9)
    wanted = torch.stack([ids, 39 - ids], dim=1)
    chosen, top_values, top_ids, of_given = sampling.logprobs(
        logits.to(device), ids.to(device), top_k, wanted.to(device)
    )
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(chosen.cpu(), expected[ids, ids])
    assert of_given is not None
    torch.testing.assert_close(of_given.cpu(), expected.gather(1, wanted))
    if top_k == 0:
        assert top_values is None
        assert top_ids is None
        return
    assert top_values is not None
    assert top_ids is not None
    values, places = expected.sort(descending=True, stable=True)
    torch.testing.assert_close(top_values.cpu(), values[:, :top_k])
    assert torch.equal(top_ids.cpu(), places[:, :top_k].to(torch.int32))


def test_top_logprobs_list_lower_ids_first_among_equals(device: str) -> None:
    logits = torch.tensor([[1.0, -2.0, 1.0, 3.0, 1.0, -math.inf, -2.0]], device=device)
    _, _, top_ids, _ = sampling.logprobs(logits, int64(0).to(device), 7)
    assert top_ids is not None
    assert top_ids.tolist() == [[3, 0, 2, 4, 1, 6, 5]]


# The sampler


def row_setup(
    row: int, seed: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **params: Any
) -> RowSetup:
    return RowSetup(row, SamplingParams(**params), seed, np.array(prompt, np.int32), np.array(output, np.int32))


def decode_batch(rows: Sequence[int], positions: Sequence[int], **fields: Any) -> Batch:
    """Every row samples the token at its position."""
    size = len(rows)
    defaults: dict[str, Any] = {
        "rows": np.array(rows, np.int32),
        "q_lens": np.ones(size, np.int32),
        "kv_lens": np.array(positions, np.int32),
        "token_ids": np.full(size, FROM_DEVICE, np.int32),
        "page_writes": np.empty((0, 3), np.int32),
        "samples": np.ones(size, np.bool_),
        "score_from": np.full(size, -1, np.int32),
        "top_logprobs": np.full(size, -1, np.int32),
    }
    return Batch(**(defaults | fields))


def make_sampler(device: str, setups: list[RowSetup], vocab: int = 40, eos_ids: Sequence[int] = (0,)) -> Sampler:
    sampler = Sampler(max_rows=16, vocab_size=vocab, device=torch.device(device), eos_ids=eos_ids)
    sampler.setup(setups)
    return sampler


def step(sampler: Sampler, logits: torch.Tensor, batch: Batch) -> StepResult:
    output = sampler.sample(logits.clone().to(sampler.next_tokens.device), batch)
    downloader = Downloader(sampler.next_tokens.device)
    return PendingStep(batch, output.ids, output.logprobs, None, downloader).wait()


MIXED: list[Options] = [
    {"temperature": 0},
    {"temperature": 1.3},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 1, "temperature": 2.0},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.7},
    {"presence_penalty": -1.0, "top_p": 0.9, "top_k": 30},
    {"logit_bias": {3: 4.0, 39: -100.0}},
    {"min_new_tokens": 9, "stop_token_ids": [7]},
]


def test_tokens_depend_neither_on_the_order_of_the_batch_nor_on_its_other_rows(device: str) -> None:
    setups = [row_setup(row, seed=row * 1000 + 5, **params) for row, params in enumerate(MIXED)]
    logits = logits_like((6, len(MIXED), 40), seed=6)
    random = np.random.default_rng(0)

    def run(rows_of_step: Callable[[int], Sequence[int]]) -> dict[tuple[int, int], int]:
        sampler = make_sampler(device, [])
        sampler.setup(setups)
        tokens = {}
        generated = dict.fromkeys(range(len(MIXED)), 0)
        for t in range(60):
            rows = [row for row in rows_of_step(t) if generated[row] < 6]
            if not rows:
                continue
            batch = decode_batch(rows, [3 + generated[row] for row in rows])
            result = step(sampler, torch.stack([logits[generated[row], row] for row in rows]), batch)
            for row, token in zip(rows, result.next_tokens.tolist(), strict=True):
                tokens[row, generated[row]] = token
                generated[row] += 1
        assert len(tokens) == 6 * len(MIXED)
        return tokens

    all_in_order = run(lambda t: range(len(MIXED)))
    one_by_one = run(lambda t: [t % len(MIXED)])
    shuffled = run(lambda t: random.permutation(len(MIXED))[: 1 + t % len(MIXED)].tolist() if t < 40 else range(10))
    assert all_in_order == one_by_one == shuffled


def test_the_sampled_tokens_wait_on_the_device_for_the_next_step(device: str) -> None:
    sampler = make_sampler(device, [row_setup(row, temperature=0) for row in (2, 9, 4)])
    logits = logits_like((2, 40), seed=7)
    batch = decode_batch([9, 4, 2], [3, 3, 3], samples=np.array([True, False, True]))
    result = step(sampler, logits, batch)
    likeliest = logits.argmax(-1).tolist()
    assert result.next_tokens.tolist() == [likeliest[0], -1, likeliest[1]]
    assert sampler.next_tokens[[9, 4, 2]].tolist() == [likeliest[0], 0, likeliest[1]]


def test_a_step_in_which_no_row_samples_yields_nothing(device: str) -> None:
    sampler = make_sampler(device, [row_setup(0, frequency_penalty=1.0)])
    result = step(sampler, torch.empty(0, 40), decode_batch([0], [2], samples=np.array([False])))
    assert result.next_tokens.tolist() == [-1]
    assert result.output_logprobs == {}


@pytest.mark.parametrize(
    "params",
    [{}, {"ignore_eos": True}, {"stop_token_ids": [5, 6]}, {"stop_token_ids": [6, 5, 40, 2**31 - 1]}],
    ids=str,
)
def test_tokens_that_end_the_request_wait_for_min_new_tokens(params: Options, device: str) -> None:
    sampler = make_sampler(device, [row_setup(1, temperature=0, min_new_tokens=2, **params)], eos_ids=(0, 4))
    logits = torch.arange(40, 0, -1).float()[None]  # likelier the lower the id
    tokens = [step(sampler, logits, decode_batch([1], [3 + i])).next_tokens.item() for i in range(3)]
    allowed = 0 if "ignore_eos" in params else 1
    assert tokens == [allowed, allowed, 0]
    logits[0, 1:4] = -50.0
    fourth = step(sampler, logits, decode_batch([1], [4])).next_tokens.item()
    assert fourth == (7 if "stop_token_ids" in params else 0 if "ignore_eos" in params else 5)


def test_logit_bias_moves_its_own_row_only(device: str) -> None:
    setups = [row_setup(0, temperature=0), row_setup(1, temperature=0, logit_bias={7: 50, 8: 60, 9: -100})]
    logits = torch.zeros(2, 40)
    logits[:, 9] = 3.0
    assert step(make_sampler(device, setups), logits, decode_batch([0, 1], [3, 3])).next_tokens.tolist() == [9, 8]


@pytest.mark.parametrize("retracted_after", [None, 0, 1, 11])
def test_penalties_follow_the_tokens_as_they_are_sampled(retracted_after: int | None, device: str) -> None:
    vocab, prompt = 12, [1, 1, 5]
    wishes: list[Options] = [
        {"frequency_penalty": 0.9},
        {},
        {"presence_penalty": 1.5, "repetition_penalty": 1.2},
        {"frequency_penalty": -0.3, "presence_penalty": 0.4, "repetition_penalty": 0.8},
    ]
    params = [SamplingParams(temperature=0, **wish) for wish in wishes]
    rows = [3, 0, 15, 8]
    outputs: list[list[int]] = [[] for _ in rows]
    logits = logits_like((20, len(rows), vocab), seed=8, spread=1.0)

    def setups() -> list[RowSetup]:
        return [
            row_setup(row, prompt=prompt, output=output, temperature=0, **wish)
            for row, output, wish in zip(rows, outputs, wishes, strict=True)
        ]

    sampler = make_sampler(device, setups(), vocab)
    for t in range(20):
        if t == retracted_after:
            rows = [15, 3, 1, 2]
            sampler.setup(setups())
        expected = [
            int(penalised_by_hand(logits[t, i], prompt, outputs[i], params[i]).argmax()) for i in range(len(rows))
        ]
        result = step(sampler, logits[t], decode_batch(rows, [len(prompt) + t] * len(rows)))
        assert result.next_tokens.tolist() == expected
        for output, token in zip(outputs, expected, strict=True):
            output.append(token)


def test_a_row_that_is_set_up_again_forgets_its_former_request(device: str) -> None:
    heavy = row_setup(
        4, temperature=0, frequency_penalty=2.0, logit_bias={2: 90.0}, min_new_tokens=100, output=[1] * 5
    )
    sampler = make_sampler(device, [heavy])
    sampler.setup([row_setup(4, temperature=0)])
    logits = torch.zeros(1, 40)
    logits[0, 0] = 1.0  # the end-of-sequence token
    assert step(sampler, logits, decode_batch([4], [3])).next_tokens.item() == 0
    sampler.setup([row_setup(4, temperature=0, frequency_penalty=2.0)])
    logits[0, 1] = 2.0
    assert step(sampler, logits, decode_batch([4], [3])).next_tokens.item() == 1


def test_extreme_parameters_still_draw_allowed_tokens(device: str) -> None:
    wishes: list[Options] = [
        {"temperature": 1e300, "logit_bias": {0: -100}},
        {"temperature": 1e-6, "top_p": 1e-300},
        {"repetition_penalty": 1e-300, "temperature": 2.0},
        {"top_k": 10**9, "min_p": 1.0},
        {"min_new_tokens": 5, "temperature": 1e300},
    ]
    sampler = make_sampler(device, [row_setup(i, seed=i, **wish) for i, wish in enumerate(wishes)])
    logits = logits_like((len(wishes), 40), seed=9)
    result = step(sampler, logits, decode_batch(range(len(wishes)), [3] * len(wishes)))
    tokens = result.next_tokens.tolist()
    assert all(0 <= token < 40 for token in tokens)
    assert tokens[1] == logits[1].argmax()
    assert tokens[2] in (1, 2, 3)  # those of the prompt, made vastly likelier
    assert tokens[3] == logits[3].argmax()
    assert tokens[4] != 0


def test_output_logprobs_are_of_the_models_own_logits(device: str) -> None:
    strong: Options = {"temperature": 0.3, "frequency_penalty": 2.0, "logit_bias": {9: 50.0}, "min_new_tokens": 5}
    setups = [row_setup(row, prompt=[1], output=[2, 3], **strong) for row in range(4)]
    logits = logits_like((4, 40), seed=10)
    batch = decode_batch(
        [3, 1, 0, 2],
        [3] * 4,
        top_logprobs=np.array([2, -1, 0, 5], np.int32),
        token_ids_logprob={0: np.array([7, 8, 9], np.int32), 2: np.array([39], np.int32)},
    )
    result = step(make_sampler(device, setups), logits, batch)
    expected = logits.log_softmax(-1).numpy()
    assert set(result.output_logprobs) == {0, 2, 3}
    for b, found in result.output_logprobs.items():
        token = result.next_tokens[b]
        check_logprobs(found, expected[b : b + 1], np.array([token]), int(batch.top_logprobs[b]))
        given_ids = batch.token_ids_logprob.get(b)
        if given_ids is None:
            assert found.given is None
        else:
            assert found.given is not None
            np.testing.assert_allclose(found.given, expected[b : b + 1, given_ids], atol=1e-6)


def check_logprobs(
    found: Logprobs, expected: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], top_k: int
) -> None:
    """expected: [n, V]."""
    np.testing.assert_allclose(found.chosen, expected[np.arange(len(tokens)), tokens], atol=1e-6)
    assert found.chosen.dtype == np.float32
    if top_k <= 0:
        assert found.top_values is None
        assert found.top_ids is None
        return
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :top_k]
    assert found.top_values is not None
    assert found.top_ids is not None
    assert found.top_ids.dtype == np.int32
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_values, np.take_along_axis(expected, order, -1), atol=1e-6)


@pytest.mark.parametrize("positions_at_once", [1, 3, 1000])
def test_input_logprobs_are_of_the_tokens_that_follow(
    positions_at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, width = 25, 6
    monkeypatch.setattr(results, "SCORE_BYTES", positions_at_once * 4 * vocab)
    weight = logits_like((width, vocab), seed=11, spread=1.0)
    q_lens = np.array([4, 1, 6, 3], np.int32)
    hidden = logits_like((int(q_lens.sum()), width), seed=12, spread=1.0)
    batch = decode_batch(
        [0, 1, 2, 3],
        [4, 9, 6, 3],
        q_lens=q_lens,
        token_ids=np.zeros(14, np.int32),
        samples=np.array([True, True, False, True]),
        score_from=np.array([1, -1, 0, 2], np.int32),
        score_targets={
            0: np.array([3, 24], np.int32),  # the last position has nothing that follows
            2: np.array([1, 2, 3, 4, 5, 6], np.int32),
            3: np.array([], np.int32),
        },
        top_logprobs=np.array([3, 1, 0, 2], np.int32),
        token_ids_logprob={2: np.array([11, 12], np.int32)},
    )
    calls: list[int] = []

    def lm_head(chunk: torch.Tensor) -> torch.Tensor:
        calls.append(len(chunk))
        return chunk @ weight.to(device)

    scored = score_inputs(batch, hidden.to(device), lm_head, vocab, Uploader(torch.device(device)))
    assert max(calls) <= positions_at_once
    ids = torch.zeros(3, dtype=torch.int64, device=device)
    result = PendingStep(batch, ids, None, scored, Downloader(torch.device(device))).wait()
    expected = (hidden @ weight).log_softmax(-1).numpy()
    assert set(result.input_logprobs) == {0, 2}
    check_logprobs(result.input_logprobs[0], expected[1:3], batch.score_targets[0], 3)
    check_logprobs(result.input_logprobs[2], expected[5:11], batch.score_targets[2], 0)
    given_logprobs = result.input_logprobs[2].given
    assert given_logprobs is not None
    np.testing.assert_allclose(given_logprobs, expected[5:11, [11, 12]], atol=1e-6)
    assert result.input_logprobs[0].given is None


def test_a_step_without_scored_positions_calls_no_head() -> None:
    def unwanted(chunk: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is scored")

    batch = decode_batch([0], [3])
    assert score_inputs(batch, torch.zeros(1, 2), unwanted, 5, Uploader(torch.device("cpu"))) is None


@pytest.mark.gpu
def test_sampling_never_waits_for_the_device() -> None:
    sampler = make_sampler("cuda", [row_setup(row, seed=row, **params) for row, params in enumerate(MIXED)])
    batch = decode_batch(
        range(len(MIXED)), [5] * len(MIXED), top_logprobs=np.arange(-1, len(MIXED) - 1, dtype=np.int32)
    )
    logits = logits_like((len(MIXED), 40), seed=13).cuda()
    downloader = Downloader(torch.device("cuda"))
    pending = None
    for _ in range(2):  # the first allocates
        if pending is not None:
            pending.wait()
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = sampler.sample(logits.clone(), batch)
            pending = PendingStep(batch, output.ids, output.logprobs, None, downloader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert pending is not None
    assert (pending.wait().next_tokens >= 0).all()


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_positions_to_sample_from_are_each_rows_last_and_those_before_its_drafts(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    for _ in range(30):
        samples = random.random(num_rows) < 0.7
        drafts = {
            int(b): np.zeros(random.integers(1, 5), np.int32)
            for b in np.flatnonzero(samples)
            if random.random() < 0.6
        }
        batch = decode_batch(range(num_rows), [9] * num_rows, samples=samples, drafts=drafts)
        rows, behind = batch.sampling
        assert rows.dtype == behind.dtype == np.int64
        assert list(zip(rows.tolist(), behind.tolist(), strict=True)) == [
            (b, i) for b in np.flatnonzero(samples).tolist() for i in reversed(range(1 + len(drafts.get(b, ()))))
        ]
        assert batch.sampling[0] is rows
