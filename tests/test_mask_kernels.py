"""Token masks on the device: torch and Triton (interpreted where there is no GPU) against plain Python."""

from __future__ import annotations

import importlib.util
import random
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.grammar import Grammar, Vocabulary, compile
from sgl.grammar.automaton.finished import complete
from sgl.grammar.automaton.nfa import Builder
from sgl.grammar.automaton.place import Place, advance, start_of
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.values import value_node
from sgl.grammar.text.json import WHITESPACE
from sgl.kernels.mask import ops as mask
from sgl.kernels.mask.layout import MAX_OPEN, Places
from sgl.kernels.sampling import ops as sampling
from sgl.runtime.batch import Batch, RowSetup
from sgl.runtime.runner.device_grammars import places_arrays, vocabulary_tensors
from sgl.runtime.runner.mask_table import MaskTable
from sgl.runtime.runner.results import Downloader, Landing, PendingStep
from sgl.runtime.runner.sampler import Sampler
from sgl.runtime.sampling_params import SamplingParams
from tests import mask_reference
from tests.grammar_shapes import dumps, random_schema, random_values

ON_GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)
MAX_DEPTH = 6


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    """The same functions twice: plain torch on the CPU, and the Triton kernels."""
    if request.param == "torch":
        return mask_reference
    from sgl.kernels.mask import triton as mask_triton

    return mask_triton


def device_of(kernels: ModuleType) -> torch.device:
    return CPU if kernels is mask_reference else ON_GPU


class Walker:
    """Grammars and places on the device, and what the host says of them."""

    def __init__(self, kernels: ModuleType, vocabulary: Vocabulary, automata: list[Automaton], block: int) -> None:
        self.kernels = kernels
        self.device = device_of(kernels)
        self.vocabulary = vocabulary
        self.automata = automata
        self.tokens = vocabulary_tensors(vocabulary, self.device, block)
        self.upload()

    def upload(self) -> None:
        tensors = [mask_reference.automaton_tensors(automaton, self.device) for automaton in self.automata]
        self.grammars = mask_reference.grammar_tensors(tensors, self.device)

    def masks(self, chosen: list[tuple[int, Place]]) -> torch.Tensor:
        """The masks of places, in order."""
        places = Places(*(torch.from_numpy(one).to(self.device) for one in places_arrays(chosen, MAX_DEPTH)))
        masks = torch.full((len(chosen) + 1, self.vocabulary.words), -1, dtype=torch.int32, device=self.device)
        rows = torch.arange(len(chosen), 0, -1, dtype=torch.int32, device=self.device)
        self.kernels.compute_masks_(masks, rows, places, self.grammars, self.tokens)
        assert masks[0].eq(-1).all(), "it is nobody's row"
        return masks.flip(0)[:-1].cpu()

    def allowed(self, number: int, place: Place) -> list[int]:
        """The tokens that the grammar allows, one by one."""
        automaton = self.automata[number]
        found = [
            token_id
            for token_id, data in enumerate(self.vocabulary.token_bytes)
            if data and advance(automaton, place, data) is not None
        ]
        ends = self.vocabulary.eos_ids if automaton.tables.accepting[place.state] else ()
        return sorted([*found, *ends])


def ones(packed: torch.Tensor) -> list[int]:
    bits = np.unpackbits(packed.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def vocabulary_of(rng: random.Random, *more: bytes) -> Vocabulary:
    """Every byte, random tokens of what JSON is made of, and two that end a text."""
    parts = [
        "a",
        "b",
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "1",
        "é",
        "\\",
        "ab",
        "xx",
        "   ",
        "true",
        "red",
        "😀",
        '":',
        '",',
    ]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += ["".join(rng.choices(parts, k=rng.randint(2, 6))).encode() for _ in range(300)]
    tokens += [b"a" * 140, b'"' + b" " * 40 + b'"', b"d" * 30, *more]
    rng.shuffle(tokens)
    return Vocabulary([*tokens, None, None, None], [len(tokens), len(tokens) + 2])


def opens_much(data: bytes) -> bool:
    return sum(data.count(bracket) for bracket in (b"{", b"[")) > MAX_OPEN


def depth_of(place: Place) -> int:
    depth, frame = 0, place.stack
    while frame is not None:
        depth, frame = depth + 1, frame.parent
    return depth


def places_along(number: int, automaton: Automaton, texts: list[bytes]) -> list[tuple[int, Place]]:
    """Every place on the way through the texts, as far as each is allowed."""
    found = []
    for text in texts:
        place: Place | None = start_of(automaton)
        for byte in text:
            assert place is not None
            found.append((number, place))
            place = advance(automaton, place, bytes([byte]))
            if place is None:
                break
        else:
            assert place is not None
            found.append((number, place))
    return found


def random_automata(rng: random.Random, count: int) -> tuple[list[Automaton], list[tuple[int, Place]]]:
    automata, chosen = [], []
    for number in range(count):
        schema = random_schema(rng)
        builder = Builder(WHITESPACE[rng.choice(["compact", "flexible"])], rng.choice(["schema", "any"]))
        automaton = Automaton(builder, value_node(builder, schema, builder.end))
        texts = [dumps(value).encode() for value in random_values(schema, rng, 12)]
        automata.append(automaton)
        chosen += places_along(number, automaton, texts)
    return automata, [(number, place) for number, place in chosen if depth_of(place) <= MAX_DEPTH]


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(3))
def test_masks_equal_a_walk_byte_by_byte(kernels: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = vocabulary_of(rng)
    automata, candidates = random_automata(rng, 3)
    chosen = rng.sample(candidates, min(8, len(candidates)))
    walker = Walker(kernels, vocabulary, automata, rng.choice([128, 512]))
    allowed = [walker.allowed(number, place) for number, place in chosen]
    walker.upload()  # with the states that those walks have met
    for row, expected in zip(walker.masks(chosen), allowed, strict=True):
        got = ones(row)
        assert set(got) <= set(expected)
        assert all(opens_much(vocabulary.token_bytes[token_id]) for token_id in set(expected) - set(got))


def walker_for(kernels: ModuleType, *more: bytes, **constraint: object) -> Walker:
    vocabulary = vocabulary_of(random.Random(0), *more)
    grammar: Grammar = compile(vocabulary=vocabulary, **constraint)  # type: ignore[arg-type]  # one constraint
    assert complete(grammar.automaton, 2000)
    return Walker(kernels, vocabulary, [grammar.automaton], 512)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "maxLength": 35}, b'"abcabcabc'),
        ({"type": "string", "minLength": 3, "maxLength": 5}, b'"\xc3\xa9a'),
        ({"type": "string", "minLength": 2}, b'"a'),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^[a-d]{1,30}$"}]}, b'"a'),
        ({"type": "array", "items": {"type": "array", "maxItems": 2}, "maxItems": 3}, b'[[1,"x"],[],'),
        ({}, b'{"a":[1,{"b":[[]]},tr'),
    ],
)
def test_a_closed_automaton_gives_every_mask_on_the_way(kernels: ModuleType, schema: object, text: bytes) -> None:
    walker = walker_for(kernels, json_schema=schema)
    chosen = places_along(0, walker.automata[0], [text])[-3:]
    for row, (number, place) in zip(walker.masks(chosen), chosen, strict=True):
        expected = walker.allowed(number, place)
        assert ones(row) == [i for i in expected if not opens_much(walker.vocabulary.token_bytes[i])]


def test_what_was_not_worked_out_is_not_allowed(kernels: ModuleType) -> None:
    vocabulary = vocabulary_of(random.Random(0), b"yesyes")
    grammar = compile(regex="(yes)+", vocabulary=vocabulary)
    automaton = grammar.automaton
    automaton.expand(automaton.start)
    walker = Walker(kernels, vocabulary, [automaton], 512)
    start = [(0, start_of(automaton))]
    assert ones(walker.masks(start)[0]) == [vocabulary.ids[b"y"]]
    assert complete(automaton, 100)
    walker.upload()
    assert ones(walker.masks(start)[0]) == sorted([vocabulary.ids[b"y"], vocabulary.ids[b"yesyes"]])


def test_closing_an_automaton_stops_where_it_is_too_large() -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], [])
    assert not complete(compile(regex="(a|b)*a(a|b){12}", vocabulary=vocabulary).automaton, 1000)
    assert complete(compile(regex="(a|b)*a(a|b){5}", vocabulary=vocabulary).automaton, 1000)


def random_masks(generator: np.random.Generator, num_rows: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Allowed tokens, bool [R, V], and the same packed."""
    words = -(-vocab_size // 32)
    allowed = generator.random((num_rows, words * 32)) < generator.random((num_rows, 1))
    allowed[-1, :] = False
    allowed[-1, vocab_size // 2] = True
    return allowed[:, :vocab_size], np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 5000, 9001])
def test_forbidden_tokens_become_minus_infinity_and_nothing_else_changes(
    kernels: ModuleType, vocab_size: int
) -> None:
    generator = np.random.default_rng(vocab_size)
    allowed, packed = random_masks(generator, 5, vocab_size)
    logits = generator.normal(size=(7, vocab_size)).astype(np.float32)
    logits[generator.random(logits.shape) < 0.1] = -np.inf
    mask_rows = np.array([3, -1, 0, 4, 3, -1, 2], np.int32)
    expected = logits.copy()
    for row, mask_row in enumerate(mask_rows):
        if mask_row >= 0:
            expected[row, ~allowed[mask_row]] = -np.inf
    device = device_of(kernels)
    given = torch.from_numpy(logits).to(device)
    kernels.apply_token_mask_(given, torch.from_numpy(packed).to(device), torch.from_numpy(mask_rows).to(device))
    assert given.cpu().numpy().tobytes() == expected.tobytes()


def test_a_batch_without_constraints_is_left_alone(kernels: ModuleType) -> None:
    device = device_of(kernels)
    logits = torch.randn(3, 40, device=device)
    given = logits.clone()
    masks = torch.zeros(1, 2, dtype=torch.int32, device=device)
    kernels.apply_token_mask_(given, masks, torch.full((3,), -1, dtype=torch.int32, device=device))
    assert torch.equal(given, logits)


@pytest.mark.costly
@needs_triton
@pytest.mark.parametrize(("vocab_size", "block"), [(700, 32), (5, 2048), (4096, 2048), (9001, 1024)])
def test_one_pass_draws_what_masking_and_sampling_draw(
    vocab_size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part or several."""
    from sgl.kernels.sampling import triton as sampling_triton

    monkeypatch.setattr(sampling_triton, "_BLOCK", block)
    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.normal(0, 4, (6, vocab_size)).astype(np.float32))
    packed = torch.from_numpy(random_masks(generator, 4, vocab_size)[1])
    mask_rows = torch.tensor([0, -1, 1, 2, 3, 2], dtype=torch.int32)
    parameters = torch.tensor([[0.0, 9], [1.0, 9], [0.7, 9], [2.0, 9], [0.01, 9], [1.0, 9]])
    temperature = parameters[:, 0]  # a column, as the sampler has it
    seeds = torch.from_numpy(generator.integers(-(2**62), 2**62, 6))
    positions = torch.from_numpy(generator.integers(0, 10_000, 6))
    rows = torch.tensor([4, 0, 5, 1, 6, 3])  # of seven request rows
    of_requests = [torch.full((7, *one.shape[1:]), 5, dtype=one.dtype) for one in (parameters, seeds, seeds)]
    for held, given in zip(of_requests, (parameters, seeds), strict=False):
        held[rows] = given
    warmth, theirs, latest = (one.to(ON_GPU) for one in of_requests)
    arguments = logits.to(ON_GPU), warmth[:, 0], theirs, rows.to(ON_GPU), positions.to(ON_GPU), latest
    drawn = sampling_triton.draw(*arguments, packed.to(ON_GPU), mask_rows.to(ON_GPU)).cpu()
    assert torch.equal(latest.cpu()[rows], drawn)
    assert latest[2] == 5
    free = sampling_triton.draw(*arguments).cpu()
    assert torch.equal(free, sampling.sample(logits, temperature, seeds, positions))
    # Few rows' inputs and tokens in the host's memory; of one row the token is known.
    some_known = mask_rows.clone()
    some_known[3] = -2 - 3
    with_known = drawn.clone()
    with_known[3] = 3
    latest.fill_(5)
    landing = torch.cat((torch.full((6,), -1), some_known, rows, positions)).int()
    landing = landing.pin_memory() if ON_GPU.type == "cuda" else landing
    nowhere = None, None
    assert sampling_triton.draw(*arguments[:3], *nowhere, latest, packed.to(ON_GPU), landing=landing) is landing
    assert latest.tolist()[2] == 5  # waits
    assert torch.equal(landing[:6].long(), with_known)
    assert torch.equal(latest.cpu()[rows], with_known)
    half = -(-vocab_size // 64) * 32
    keys = []
    for start, end in ((0, half), (half, vocab_size))[: 1 + (half < vocab_size)]:
        part = logits[:, start:end].contiguous().to(ON_GPU), *arguments[1:5], start
        words = packed[:, start // 32 : -(-end // 32)].contiguous().to(ON_GPU)
        keys.append(
            [
                sampling_triton.draw_keys(*part).cpu(),
                sampling_triton.draw_keys(*part, words, mask_rows.to(ON_GPU)).cpu(),
            ]
        )
    for expected, parts in zip((free, drawn), zip(*keys, strict=True), strict=True):
        assert torch.equal(sampling.drawn_ids(torch.stack(parts).amax(0)), expected)
    mask.apply_token_mask_(logits, packed, mask_rows)
    assert torch.equal(drawn, sampling.sample(logits, temperature, seeds, positions))


@pytest.mark.slow
@needs_triton
def test_many_rows_are_drawn_several_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl.kernels.sampling import triton as sampling_triton

    monkeypatch.setattr(sampling_triton, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 150, generator=generator).round()  # the first of equal ones counts
    logits[7] = -torch.inf
    temperature = torch.tensor([0.0, 1.0]).repeat(20)
    rows = torch.arange(40)
    given = [one.to(ON_GPU) for one in (logits, temperature, rows + 3, rows, rows, rows.clone())]
    drawn = sampling_triton.draw(*given).cpu()
    keys = [
        sampling_triton.draw_keys(given[0][:, start : start + 64].contiguous(), *given[1:5], start).cpu()
        for start in (0, 64, 128)
    ]
    assert torch.equal(sampling.drawn_ids(torch.stack(keys).amax(0)), drawn)
    logits[7, 0] = 0
    assert torch.equal(drawn, sampling.sample(logits, temperature, rows + 3, rows))


@needs_triton
@pytest.mark.parametrize(("size", "count"), [(2, 1), (2, 300), (8, 70)])
def test_the_largest_key_of_all_ranks_by_a_sum(size: int, count: int) -> None:
    from sgl.kernels import keys_triton

    keys = torch.from_numpy(np.random.default_rng(3).integers(-(2**63), 2**63 - 1, (size, count)))
    keys[0, 0] = -(2**63)
    spread = [keys_triton.spread(keys[rank].to(ON_GPU), rank, size, torch.bfloat16) for rank in range(size)]
    found = torch.empty(count, dtype=torch.int64, device=ON_GPU)
    keys_triton.largest(torch.stack(spread).float().sum(0).to(torch.bfloat16), size, found)
    assert torch.equal(found.cpu(), keys.amax(0))


@needs_triton
def test_where_nothing_is_allowed_the_first_token_is_drawn_and_nothing_is_read_behind() -> None:
    from sgl.kernels.sampling import triton as sampling_triton

    logits = torch.randn(2, 70, device=ON_GPU)
    masks = torch.zeros(1, 3, dtype=torch.int32, device=ON_GPU)
    zeros = torch.zeros(2, dtype=torch.int32, device=ON_GPU)
    warm = torch.ones(2, device=ON_GPU)
    seeds, rows = zeros.long(), torch.arange(2, device=ON_GPU)
    assert sampling_triton.draw(logits, warm, seeds, rows, seeds, seeds, masks, zeros).tolist() == [0, 0]


@needs_triton
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_sampler_draws_the_same_in_one_pass(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """is_cut: all rows take several passes, so none is drawn from before."""
    params = [
        {"temperature": 0},
        {"temperature": 1.3},
        {"top_k": 5},
        {"temperature": 0.2},
        {"top_p": 0.6, "frequency_penalty": 1.0},
        {"logit_bias": {3: 4.0}},
    ]
    if is_cut:
        params = [{"temperature": 0.8 + i / 4, "top_p": 0.9, "min_p": 0.1} for i in range(6)]
    prompt, nothing = np.arange(1, 4, dtype=np.int32), np.empty(0, np.int32)
    setups = [RowSetup(row, SamplingParams(**one), 7 * row, prompt, nothing) for row, one in enumerate(params)]
    generator = np.random.default_rng(0)
    allowed, packed = random_masks(generator, 3, 40)
    packed = packed[:2]
    mask_rows = np.array([0, 1, 1, -1, 0, 0], np.int32)
    size = len(params)
    batch = Batch(
        rows=np.arange(size, dtype=np.int32),
        q_lens=np.ones(size, np.int32),
        kv_lens=np.arange(5, 5 + size, dtype=np.int32),
        token_ids=np.zeros(size, np.int32),
        page_writes=np.empty((0, 3), np.int32),
        samples=np.ones(size, np.bool_),
        score_from=np.full(size, -1, np.int32),
        top_logprobs=np.full(size, -1, np.int32),
    )
    masks = [None if row < 0 else packed[row] for row in mask_rows]
    logits = torch.from_numpy(generator.normal(0, 2, (6, size, 40)).astype(np.float32))
    drawn = []
    for in_one_pass in (False, True):
        sampler = Sampler(max_rows=8, vocab_size=40, device=ON_GPU)
        sampler.setup(setups)
        sampler._takes_one_pass = in_one_pass  # as it is on a GPU
        if is_cut and in_one_pass:
            monkeypatch.setattr("sgl.kernels.sampling.triton.draw", None)
        drawn.append([])
        for one in logits:
            drawn[-1].append(sampler.sample(one.clone().to(ON_GPU), batch, masks).ids.tolist())
            assert sampler.next_tokens[:size].tolist() == drawn[-1][-1]
    for ids in drawn[1]:
        assert all(allowed[mask_row, i] for mask_row, i in zip(mask_rows, ids, strict=True) if mask_row >= 0)
    assert drawn[0] == drawn[1]


class Landings(Downloader):
    """Of a GPU that is here, or where there is none, memory that a kernel writes at once."""

    def landing(self, size: int) -> Landing:
        if ON_GPU.type == "cuda":
            return super().landing(size)
        event = cast(torch.cuda.Event, SimpleNamespace(record=lambda: None, synchronize=lambda: None))
        memory = torch.full((size,), -1, dtype=torch.int32)
        return Landing(memory, memory.numpy(), event)


@needs_triton
@pytest.mark.parametrize("kind", ["placed", "drafts", "penalties"])
def test_tokens_that_land_on_the_host_are_those_that_others_draw(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, single tokens, masks and rows without; and nothing is uploaded but what is added to logits, and
    which rows are penalised."""
    is_placed, is_penalised = kind != "drafts", kind == "penalties"
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.3}, {"min_new_tokens": 3}]
    if is_penalised:
        ways[0]["frequency_penalty"] = ways[1]["presence_penalty"] = 2.0
    prompt, nothing = np.arange(1, 4, dtype=np.int32), np.empty(0, np.int32)
    setups = [RowSetup(row, SamplingParams(**way), 7 * row, prompt, nothing) for row, way in enumerate(ways)]
    drafts = {} if is_placed else {1: np.array([4, 5], np.int32)}
    q_lens = np.array([1, 1 if is_placed else 3, 1], np.int32)
    batch = Batch(
        rows=np.array([2, 0, 1], np.int32),
        q_lens=q_lens,
        kv_lens=np.array([4, 5, 6], np.int32) + q_lens,
        token_ids=np.zeros(q_lens.sum(), np.int32),
        page_writes=np.empty((0, 3), np.int32),
        samples=np.ones(3, np.bool_),
        score_from=np.full(3, -1, np.int32),
        top_logprobs=np.full(3, -1, np.int32),
        drafts=drafts,
    )
    size = int(q_lens.sum())
    generator = np.random.default_rng(1)
    packed = random_masks(generator, 3, 40)[1]
    masks = [packed[0], 7, packed[1], None, packed[0]][-size:]
    logits = torch.from_numpy(generator.normal(0, 2, (size, 40)).astype(np.float32))
    placed = [
        torch.from_numpy(its).to(ON_GPU) for its in (batch.rows.astype(np.int64), batch.kv_lens.astype(np.int64))
    ]
    results: list[Any] = []
    for one_pass, lands in ((False, None), (True, None), (True, Landings(ON_GPU))):
        sampler = Sampler(max_rows=8, vocab_size=40, device=ON_GPU, eos_ids=(0, 1, 2))
        sampler._takes_one_pass = one_pass  # as it is on a GPU
        sampler.setup(setups)
        given = batch, masks, placed if is_placed else None
        sampler.sample(logits.to(ON_GPU, copy=True), *given, lands)  # uploads masks
        uploads = []
        upload = sampler._uploader.upload
        monkeypatch.setattr(sampler._uploader, "upload", lambda *its: uploads.append(its) or upload(*its))  # noqa: B023
        results.append([])
        for _ in range(4):
            uploads.clear()
            output = sampler.sample(logits.to(ON_GPU, copy=True), *given, lands)
            assert isinstance(output.ids, Landing) == (lands is not None)
            assert lands is None or len(uploads) == 1 + is_penalised
            result = PendingStep(batch, output.ids, output.logprobs, None, lands or Downloader(ON_GPU)).wait()
            checks, tokens = {b: its.tolist() for b, its in result.checks.items()}, result.next_tokens.tolist()
            results[-1].append((checks, tokens))
            latest = sampler.next_tokens[torch.from_numpy(batch.rows).long().to(ON_GPU)].tolist()
            for b in {0, 1, 2} - drafts.keys():
                assert latest[b] == tokens[b]
    assert results[0] == results[1] == results[2]
    assert is_penalised == (results[0][0] != results[0][3])


def test_the_mask_table_holds_what_was_asked_for_last() -> None:
    generator = np.random.default_rng(0)
    masks = list(random_masks(generator, 12, 100)[1])
    table = MaskTable(5, 100, CPU)
    for _ in range(200):
        chosen = generator.choice(12, size=generator.integers(0, 6), replace=False)
        wanted = [masks[i] for i in chosen] + [None] * int(generator.integers(0, 2))
        wanted += wanted[:1]
        for given, row in zip(wanted, table.ensure_rows(wanted), strict=True):
            assert (row == -1) == (given is None)
            if given is not None:
                assert table.rows[row].tolist() == given.tolist()


def test_a_mask_is_uploaded_once_while_it_is_in_use() -> None:
    first, second, third = random_masks(np.random.default_rng(0), 3, 64)[1]
    table = MaskTable(2, 64, CPU)
    rows = table.ensure_rows([first, second])
    table.rows.zero_()
    assert table.ensure_rows([second, first]).tolist() == rows[::-1].tolist()
    assert not table.rows.any()
    replaced = table.ensure_rows([third])  # second is the least recently used
    assert replaced.tolist() == [rows[1]]
    assert table.ensure_rows([first]).tolist() == [rows[0]]
