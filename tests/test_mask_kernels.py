"""Token masks on the device: torch and Triton (interpreted where there is no GPU) against plain Python."""

from __future__ import annotations

import importlib.util
import random
from types import ModuleType

import numpy as np
import pytest
import torch

from sgl.grammar import Grammar, Vocabulary, compile
from sgl.grammar.automaton import Automaton
from sgl.grammar.closure import complete
from sgl.grammar.jsontext import WHITESPACE
from sgl.grammar.place import Frame, Place, advance, start_of
from sgl.grammar.threads import Builder
from sgl.grammar.values import value_node
from sgl.kernels import mask, sampling
from sgl.kernels.mask_layout import DEPENDS, FINISHED, INCOMPLETE, MAX_OPEN, OPEN, REFUSED, STUCK, Places
from sgl.runtime.batch import Batch, RowSetup
from sgl.runtime.runner.device_grammars import (
    automaton_tensors,
    empty_places,
    grammar_tensors,
    set_place,
    vocabulary_tensors,
)
from sgl.runtime.runner.mask_table import MaskTable
from sgl.runtime.runner.sampler import Sampler
from sgl.runtime.sampling_params import SamplingParams
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
        return mask
    from sgl.kernels import mask_triton

    return mask_triton


def device_of(kernels: ModuleType) -> torch.device:
    return CPU if kernels is mask else ON_GPU


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
        tensors = [automaton_tensors(automaton, self.device) for automaton in self.automata]
        assert None not in tensors
        self.grammars = grammar_tensors(tensors, self.device)  # type: ignore[arg-type]  # none of them is None

    def places(self, chosen: list[tuple[int, Place]]) -> Places:
        places = empty_places(len(chosen), MAX_DEPTH, self.device)
        for row, (number, place) in enumerate(chosen):
            assert set_place(places, row, number, place)
        return places

    def masks(self, places: Places, num_cached: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, flags, and all masks."""
        num_rows = len(places.states)
        masks = torch.full(
            (num_rows + num_cached, self.vocabulary.words), -1, dtype=torch.int32, device=self.device
        )
        rows = torch.arange(num_rows, dtype=torch.int32, device=self.device)
        found, flags = self.kernels.find_masks_(masks, rows, places, self.grammars, self.tokens)
        return found.cpu(), flags.cpu(), masks.cpu()

    def advance(self, places: Places, token_ids: list[int]) -> list[int]:
        """The statuses after it."""
        rows = torch.arange(len(token_ids), dtype=torch.int32, device=self.device)
        ids = torch.tensor(token_ids, device=self.device)
        self.kernels.advance_(places, rows, ids, self.grammars, self.tokens)
        return places.statuses.tolist()

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


@pytest.mark.parametrize("seed", range(6))
def test_masks_and_advances_equal_a_walk_byte_by_byte(kernels: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = vocabulary_of(rng)
    automata, candidates = random_automata(rng, 3)
    chosen = rng.sample(candidates, min(8, len(candidates)))
    walker = Walker(kernels, vocabulary, automata, rng.choice([128, 512]))
    allowed = [walker.allowed(number, place) for number, place in chosen]
    walker.upload()  # with the states that those walks have met
    places = walker.places(chosen)
    rows, flags, masks = walker.masks(places)
    assert rows.tolist() == list(range(len(chosen)))
    many = {i for i, data in enumerate(vocabulary.token_bytes) if opens_much(data)}
    for row, expected in enumerate(allowed):
        if flags[row] & INCOMPLETE:
            assert set(expected) - many <= set(ones(masks[row])) <= set(expected)
        else:
            assert ones(masks[row]) == expected

    tokens = [rng.choice(one) if one and rng.random() < 0.8 else rng.randrange(vocabulary.size) for one in allowed]
    statuses = walker.advance(places, tokens)
    for row, ((number, place), token_id) in enumerate(zip(chosen, tokens, strict=True)):
        data = vocabulary.token_bytes[token_id]
        following = advance(automata[number], place, data) if data else None
        if token_id in vocabulary.eos_ids:
            assert statuses[row] == (FINISHED if token_id in allowed[row] else REFUSED)
        elif statuses[row] == STUCK:
            assert opens_much(data) or (following is not None and depth_of(following) > MAX_DEPTH)
        else:
            assert (statuses[row] == OPEN) == (following is not None)
        expected_place = following if following is not None and statuses[row] == OPEN else place
        assert place_at(places, row, automata[number].has_counters) == without_counts(
            expected_place, automata[number].has_counters
        )


def place_at(places: Places, row: int, counts: bool) -> Place:
    frame: Frame | None = None
    for symbol, item_count in places.stacks[row, : int(places.depths[row])].tolist():
        frame = Frame(frame, symbol, item_count)
    place = Place(int(places.states[row]), frame, int(places.char_counts[row]), int(places.item_counts[row]))
    return without_counts(place, counts)


def without_counts(place: Place, counts: bool) -> Place:
    """The place; if its grammar has no counters, what they hold means nothing."""
    if counts:
        return place
    frames = []
    frame = place.stack
    while frame is not None:
        frames.append(frame.symbol)
        frame = frame.parent
    bare: Frame | None = None
    for symbol in reversed(frames):
        bare = Frame(bare, symbol, 0)
    return Place(place.state, bare, 0, 0)


def walker_for(kernels: ModuleType, *more: bytes, **constraint: object) -> Walker:
    vocabulary = vocabulary_of(random.Random(0), *more)
    grammar: Grammar = compile(vocabulary=vocabulary, **constraint)  # type: ignore[arg-type]  # one constraint
    assert complete(grammar.automaton, 2000)
    return Walker(kernels, vocabulary, [grammar.automaton], 512)


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
    _, flags, masks = walker.masks(walker.places(chosen))
    for row, (number, place) in enumerate(chosen):
        expected = walker.allowed(number, place)
        if flags[row] & INCOMPLETE:
            expected = [i for i in expected if not opens_much(walker.vocabulary.token_bytes[i])]
        assert ones(masks[row]) == expected


def test_a_state_that_was_not_worked_out_makes_a_mask_incomplete_and_a_place_stuck(kernels: ModuleType) -> None:
    vocabulary = vocabulary_of(random.Random(0), b"yesyes")
    grammar = compile(regex="(yes)+", vocabulary=vocabulary)
    automaton = grammar.automaton
    automaton.expand(automaton.start)
    walker = Walker(kernels, vocabulary, [automaton], 512)
    places = walker.places([(0, start_of(automaton))])
    _, flags, masks = walker.masks(places)
    assert flags.tolist() == [INCOMPLETE]
    assert ones(masks[0]) == [vocabulary.ids[b"y"]]
    assert walker.advance(places, [vocabulary.ids[b"yesyes"]]) == [STUCK]
    assert place_at(places, 0, True) == start_of(automaton)
    assert complete(automaton, 100)
    walker.upload()
    _, flags, masks = walker.masks(walker.places([(0, start_of(automaton))]))
    assert flags.tolist() == [0]
    assert ones(masks[0]) == sorted([vocabulary.ids[b"y"], vocabulary.ids[b"yesyes"]])


def test_masks_that_do_not_depend_on_the_stack_or_a_counter_hold_wherever_the_state_is_met(
    kernels: ModuleType,
) -> None:
    schema = {"type": "array", "items": {"enum": [[], "x"]}, "maxItems": 4}
    walker = walker_for(kernels, json_schema=schema)
    automaton = walker.automata[0]
    chosen = places_along(0, automaton, [b'["x",[]', b'["x"', b"[[],["])
    _, flags, masks = walker.masks(walker.places(chosen))
    by_state: dict[int, list[int]] = {}
    for row, (_, place) in enumerate(chosen):
        by_state.setdefault(place.state, []).append(row)
        looks_outside = any(advance(automaton, place, data) for data in (b"]", b'"]', b"]]", b",", b'",'))
        assert bool(flags[row] & DEPENDS) or not looks_outside
    assert not flags[0] & DEPENDS
    for rows in by_state.values():
        same = {tuple(masks[row].tolist()) for row in rows if not flags[row] & DEPENDS}
        assert len(same) <= 1


def test_rows_that_need_no_walk_get_none(kernels: ModuleType) -> None:
    walker = walker_for(kernels, regex="[a-c]+")
    start = (0, start_of(walker.automata[0]))
    places = walker.places([start] * 4)
    places.grammars[1] = -1
    places.statuses[2] = FINISHED
    rows, _, masks = walker.masks(places, num_cached=1)
    assert rows.tolist() == [0, -1, -1, 3]
    assert masks[1].eq(-1).all()
    walker.grammars.automata[0].cached[start[1].state] = 4
    rows, _, masks = walker.masks(places, num_cached=1)
    assert rows.tolist() == [4, -1, -1, 4]
    assert masks.eq(-1).all()


def test_a_stack_deeper_than_fits_is_left_to_the_host(kernels: ModuleType) -> None:
    walker = walker_for(kernels, b"[[[[", json_schema={})
    place = start_of(walker.automata[0])
    for _ in range(MAX_DEPTH - 2):
        following = advance(walker.automata[0], place, b"[")
        assert following is not None
        place = following
    places = walker.places([(0, place), (0, place)])
    ids = walker.vocabulary.ids
    assert walker.advance(places, [ids[b"["], ids[b"[[[["]]) == [OPEN, STUCK]
    assert place_at(places, 1, walker.automata[0].has_counters) == without_counts(
        place, walker.automata[0].has_counters
    )
    assert not set_place(places, 0, 0, Place(0, deep_stack(MAX_DEPTH + 1), 0, 0))


def deep_stack(depth: int) -> Frame | None:
    frame: Frame | None = None
    for _ in range(depth):
        frame = Frame(frame, 0, 0)
    return frame


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


@needs_triton
@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_one_pass_draws_what_masking_and_sampling_draw(vocab_size: int) -> None:
    from sgl.kernels import sampling_triton

    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.normal(0, 4, (6, vocab_size)).astype(np.float32))
    packed = torch.from_numpy(random_masks(generator, 4, vocab_size)[1])
    mask_rows = torch.tensor([0, -1, 1, 2, 3, 2], dtype=torch.int32)
    parameters = torch.tensor([[0.0, 9], [1.0, 9], [0.7, 9], [2.0, 9], [0.01, 9], [1.0, 9]])
    temperature = parameters[:, 0]  # a column, as the sampler has it
    seeds = torch.from_numpy(generator.integers(-(2**62), 2**62, 6))
    positions = torch.from_numpy(generator.integers(0, 10_000, 6))
    arguments = [one.to(ON_GPU) for one in (temperature, seeds, positions)]
    drawn = sampling_triton.draw(logits.to(ON_GPU), *arguments, packed.to(ON_GPU), mask_rows.to(ON_GPU)).cpu()
    free = sampling_triton.draw(logits.to(ON_GPU), *arguments).cpu()
    assert torch.equal(free, sampling.sample(logits, temperature, seeds, positions))
    mask.apply_token_mask_(logits, packed, mask_rows)
    assert torch.equal(drawn, sampling.sample(logits, temperature, seeds, positions))


@needs_triton
def test_where_nothing_is_allowed_the_first_token_is_drawn_and_nothing_is_read_behind() -> None:
    from sgl.kernels import sampling_triton

    logits = torch.randn(2, 70, device=ON_GPU)
    masks = torch.zeros(1, 3, dtype=torch.int32, device=ON_GPU)
    zeros = torch.zeros(2, dtype=torch.int32, device=ON_GPU)
    warm = torch.ones(2, device=ON_GPU)
    assert sampling_triton.draw(logits, warm, zeros.long(), zeros.long(), masks, zeros).tolist() == [0, 0]


@needs_triton
def test_the_sampler_draws_the_same_in_one_pass() -> None:
    params = [
        {"temperature": 0},
        {"temperature": 1.3},
        {"top_k": 5},
        {"temperature": 0.2},
        {"top_p": 0.6, "frequency_penalty": 1.0},
        {"logit_bias": {3: 4.0}},
    ]
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
        token_masks=[None if row < 0 else packed[row] for row in mask_rows],
    )
    logits = torch.from_numpy(generator.normal(0, 2, (20, size, 40)).astype(np.float32))
    drawn = []
    for in_one_pass in (False, True):
        sampler = Sampler(max_rows=8, vocab_size=40, device=ON_GPU)
        sampler.setup(setups)
        sampler._takes_one_pass = in_one_pass  # as it is on a GPU
        drawn.append([sampler(one.clone().to(ON_GPU), batch).ids.tolist() for one in logits])
    for ids in drawn[1]:
        assert all(allowed[mask_row, i] for mask_row, i in zip(mask_rows, ids, strict=True) if mask_row >= 0)
    assert drawn[0] == drawn[1]


def test_the_mask_table_holds_what_was_asked_for_last() -> None:
    generator = np.random.default_rng(0)
    masks = list(random_masks(generator, 12, 100)[1])
    table = MaskTable(5, 100, CPU)
    for _ in range(200):
        chosen = generator.choice(12, size=generator.integers(0, 6), replace=False)
        wanted = [masks[i] for i in chosen] + [None] * int(generator.integers(0, 2))
        wanted += wanted[:1]
        for given, row in zip(wanted, table.find(wanted), strict=True):
            assert (row == -1) == (given is None)
            if given is not None:
                assert table.rows[row].tolist() == given.tolist()


def test_a_mask_is_uploaded_once_while_it_is_in_use() -> None:
    first, second, third = random_masks(np.random.default_rng(0), 3, 64)[1]
    table = MaskTable(2, 64, CPU)
    rows = table.find([first, second])
    table.rows.zero_()
    assert table.find([second, first]).tolist() == rows[::-1].tolist()
    assert not table.rows.any()
    replaced = table.find([third])  # second is the least recently used
    assert replaced.tolist() == [rows[1]]
    assert table.find([first]).tolist() == [rows[0]]
