"""Masks worked out on the device by the engine: finished automata, cursors in them, and the arena they lie in."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl import Engine
from sgl.errors import GrammarError, RegexSyntaxError
from sgl.grammar import Vocabulary, compile
from sgl.grammar.automaton.finished import MAX_OPENED, Configuration, FinishedAutomaton, finish
from sgl.grammar.automaton.place import advance
from sgl.grammar.matching.jump import cut
from sgl.runtime.constraints.cursor import Cursor, FinishedCursor, FinishedGrammar, MatcherCursor
from sgl.runtime.constraints.service import CompileService
from sgl.runtime.requests.builder import RequestBuilder
from sgl.runtime.runner import device_masks
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.mask_table import MaskTable
from tests import mask_reference
from tests.json_random import SCHEMAS
from tests.patience import PATIENCE
from tests.test_constraints import CONSTRAINTS, DATE, FIELDS, PERSON, assert_matches
from tests.tiny_models import tiny_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOST_MASKS_ON_CPU = RequestBuilder.masks_on_device  # as it is where no test replaces it
NESTED: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
              "required": ["v"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def walked_in_plain_torch() -> Iterator[None]:
    """Without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(device_masks, "compute_masks_", mask_reference.compute_masks_)
        yield


def vocabulary(seed: int = 0) -> Vocabulary:
    rng = random.Random(seed)
    parts = ["a", '"', "{", "}", "[", "]", ",", ":", "1", "ab", "true", "red", '":', '",', '"name', "é"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += ["".join(rng.choices(parts, k=rng.randint(2, 5))).encode() for _ in range(200)]
    return Vocabulary([*dict.fromkeys(tokens), None], [len(dict.fromkeys(tokens))])


def finished_of(vocabulary: Vocabulary, **constraint: Any) -> FinishedGrammar:
    automaton = compile(vocabulary=vocabulary, **constraint).automaton
    assert automaton is not None
    finished = finish(automaton, 5000)
    assert finished is not None
    return FinishedGrammar(finished, vocabulary, lambda: compile(vocabulary=vocabulary, **constraint))


def forced(cursor: Cursor, output: list[int]) -> list[int]:
    """The token ids that follow for certain, if every byte of a text is a token."""
    ahead = cursor.forced_text(output)
    if ahead is None:
        return []
    [ids] = cut([ahead], lambda texts: [list(text.encode()) for text in texts])
    return cursor.forced(ahead, ids).token_ids


def follow(schema: Any, rng: random.Random, budget: int) -> None:
    """A random output, whose every step a finished cursor and a matcher see alike."""
    words = vocabulary(rng.randrange(4))
    try:
        grammar = compile(vocabulary=words, json_schema=schema)
    except GrammarError:
        return
    automaton = compile(vocabulary=words, json_schema=schema).automaton
    assert automaton is not None
    finished = finish(automaton, 5000)
    if finished is None:
        return
    cursor = FinishedCursor(FinishedGrammar(finished, words, lambda: grammar))
    host = MatcherCursor(grammar)
    walker = DeviceMasks(words, 2, DEVICE)
    masks = torch.zeros(2, words.words, dtype=torch.int32, device=DEVICE)
    output: list[int] = []
    for remaining in range(budget, 0, -1):
        mask, expected = cursor.mask(remaining), host.mask(remaining)
        if isinstance(mask, Configuration):
            walker.walk([mask], masks, np.array([1], np.int32))
            mask = masks[1].cpu().numpy()
        assert (mask == expected).all(), remaining
        assert forced(cursor, output) == forced(host, output)
        allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
        assert not cursor.accept(next(t for t in range(words.size + 1) if t not in allowed))
        output.append(int(rng.choice(allowed)))
        assert cursor.accept(output[-1])
        assert host.accept(output[-1])
        assert cursor.is_complete() == host.is_complete()
        if output[-1] in words.eos_ids or host.is_complete():
            return


@pytest.mark.costly
@pytest.mark.parametrize("schema", [PERSON, FIELDS, NESTED, {}], ids=["person", "fields", "nested", "any"])
@pytest.mark.parametrize("budget", [40, 90, 1200])
def test_a_closed_cursor_says_what_a_matcher_says(schema: Any, budget: int) -> None:
    """Masks, what is forced and what is complete, also when the budget comes near."""
    for seed in range(3):
        follow(schema, random.Random(seed), min(budget, 150) if budget < 1000 else budget)


@settings(deadline=None, max_examples=25)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_closed_cursors_of_random_schemas_say_what_matchers_say(schema: Any, seed: int) -> None:
    follow(schema, random.Random(seed), 50)


@settings(deadline=None, max_examples=40)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_so_many_bytes_end_the_text_from_everywhere(schema: Any, seed: int) -> None:
    rng = random.Random(seed)
    try:
        grammar = compile(vocabulary=vocabulary(), json_schema=schema)
    except GrammarError:
        return
    assert grammar.automaton is not None
    finished = finish(grammar.automaton, 5000)
    if finished is None:
        return
    matcher, place = grammar.matcher(), finished.start
    for _ in range(60):
        most = finished.bytes_to_end(place, 1)
        assert (
            len(matcher.shortest_end())
            <= most
            <= finished.bytes_to_end(place, MAX_OPENED)
            <= finished.max_bytes_to_end
        )
        live = [byte for byte in range(256) if advance(finished, place, bytes([byte])) is not None]
        if not live:
            break
        byte = bytes([rng.choice(live)])
        following = advance(finished, place, byte)
        assert following is not None
        assert matcher.accept_bytes(byte)
        assert len(matcher.shortest_end()) <= most
        place = following


def test_what_is_needed_counts_what_can_still_follow() -> None:
    def needed(schema: Any, text: bytes) -> int:
        finished = finished_of(vocabulary(), json_schema=schema).automaton
        place = advance(finished, finished.start, text)
        assert place is not None
        return finished.bytes_to_end(place, 1)

    assert needed(PERSON, b"") == len(b'{"name":"a","age":0,"tags":[],"ok":true}')
    assert needed(PERSON, b'{"name":"ab","age":7,"tags":["a"') == len(b'"a"],"ok":true}')
    assert needed(PERSON, b'{"name":"ab","age":7,"tags":[],"ok":') == len(b"true}")
    shallow, deep = (needed(NESTED, b'{"v":1,"next":' * depth + b'{"v":') for depth in (1, 9))
    assert deep == shallow + 8


def test_an_arena_that_is_full_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary()
    grammars = [finished_of(words, regex=f"[a-z]{{{n}}}\\d") for n in range(1, 7)]
    arrays = max(grammar.automaton.nbytes for grammar in grammars)
    monkeypatch.setattr(device_masks, "MAX_BYTES", arrays)
    walker = DeviceMasks(words, 2, DEVICE)
    masks = torch.zeros(2, words.words, dtype=torch.int32, device=DEVICE)
    for pair in [(0, 1), (2, 3), (1, 4), (5, 5), (0, 5)]:
        chosen = [Configuration(grammars[i].automaton, grammars[i].automaton.start) for i in pair]
        walker.walk(chosen, masks, np.array([1, 0], np.int32))
        for i, row in zip(pair, masks.flip(0), strict=True):
            assert (row.cpu().numpy() == grammars[i].grammar().matcher().mask()).all()


def test_the_mask_of_a_place_is_walked_once_while_there_is_room() -> None:
    words = vocabulary()
    grammar = finished_of(words, regex="[ab]{3}")
    place, places = grammar.automaton.start, [grammar.automaton.start]
    for byte in b"ab":
        following = advance(grammar.automaton, place, bytes([byte]))
        assert following is not None
        place = following
        places.append(place)
    first, second, third = (Configuration(grammar.automaton, place) for place in places)
    host = grammar.grammar().matcher().mask()
    table = MaskTable(2, words.size, DEVICE, DeviceMasks(words, 2, DEVICE))
    rows = table.ensure_rows([first, None, first, host])
    assert rows[0] == rows[2] != rows[3]
    assert rows[1] == -1
    assert (table.rows[int(rows[0])].cpu().numpy() == host).all()
    table.rows.zero_()
    assert table.ensure_rows([host, first]).tolist() == [rows[3], rows[0]]
    assert not table.rows.any()
    assert table.ensure_rows([second, 7]).tolist() == [rows[3], -1]  # the host's mask is the least recently used
    assert table.ensure_rows([third]).tolist() == [rows[0]]
    assert table.rows.any(1).all()


def test_a_service_closes_what_is_small_and_compiles_the_rest() -> None:
    words = vocabulary()
    service = CompileService(words, num_finishers=2, patience=PATIENCE)
    try:
        flights = {name: service.submit(constraint) for name, constraint in _constraints().items()}
        small = flights["small"].result()
        assert isinstance(small, FinishedGrammar)
        assert isinstance(small.automaton, FinishedAutomaton)
        assert service.submit(_constraints()["small"]) is flights["small"]
        assert not isinstance(flights["large"].result(), FinishedGrammar)
        with pytest.raises(RegexSyntaxError):
            flights["wrong"].result()
    finally:
        service.close()


def test_nobody_waits_long_for_a_closed_automaton_and_those_who_come_later_get_it() -> None:
    words = vocabulary()
    service = CompileService(words, num_finishers=1, patience=0.0)
    try:
        first = service.submit(_constraints()["small"]).result()
        assert not isinstance(first, FinishedGrammar)
        end = time.monotonic() + PATIENCE
        while not isinstance(service.submit(_constraints()["small"]).result(), FinishedGrammar):
            assert time.monotonic() < end, "it is finished some time"
            time.sleep(0.01)
    finally:
        service.close()


def _constraints() -> dict[str, Any]:
    from sgl.grammar.compiler import make_constraint

    return {
        "small": make_constraint({"json_schema": PERSON}),
        "large": make_constraint(
            {"json_schema": {"enum": ["".join(random.Random(i).choices("abcdefgh", k=12)) for i in range(2000)]}}
        ),
        "wrong": make_constraint({"regex": "(a"}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.fixture(params=["synchronous", "run-ahead"])
def walking(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose masks are walked where the model runs, by plain torch on a CPU."""
    monkeypatch.setattr(RequestBuilder, "masks_on_device", property(lambda self: True))
    synchronous = request.param == "synchronous"
    with Engine(folder, dtype="float32", check_ledger=True, disable_overlap_schedule=synchronous) as engine:
        yield engine


def test_an_engine_that_cannot_start_leaves_no_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestBuilder, "masks_on_device", property(lambda self: True))
    services: list[CompileService] = []
    started = CompileService.start

    def start(self: CompileService) -> None:
        services.append(self)
        started(self)

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CompileService, "start", start)
    monkeypatch.setattr(MaskTable, "__init__", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(folder, dtype="float32")
    [service] = services
    assert service._finishers is not None
    service._finishers._thread.join(PATIENCE)
    assert not service._finishers._thread.is_alive()
    assert all(process._process is None for process in service._finishers._processes)


def test_a_service_that_nobody_has_ends_its_processes() -> None:
    service = CompileService(vocabulary(), num_finishers=2)
    service.start()
    assert service._finishers is not None
    thread, processes = service._finishers._thread, service._finishers._processes
    del service
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert all(process._process is None for process in processes)


@pytest.mark.costly
def test_an_engine_that_walks_masks_gives_the_same_tokens(
    folder: Path, walking: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    base: dict[str, Any] = {"max_new_tokens": 150}
    kinds = [*CONSTRAINTS, {"json_schema": FIELDS}, {"json_schema": FIELDS, "max_new_tokens": 40}, {"regex": DATE},
             {"json_schema": NESTED}, {"json_schema": {}, "max_new_tokens": 60}, {"ignore_eos": True}]  # fmt: skip
    params = [{**base, **kind, "temperature": t, "seed": 7} for kind in kinds for t in (0.0, 1.2)]
    prompts = ["the answer is"] * len(params)
    got = walking.generate(prompt=prompts, sampling_params=params)
    monkeypatch.setattr(RequestBuilder, "masks_on_device", HOST_MASKS_ON_CPU)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        expected = engine.generate(prompt=prompts, sampling_params=params)
        [state] = engine.get_server_info()["internal_states"]
    assert state["host_masks"]
    assert not state["device_masks"]
    for its, one, other in zip(params, got, expected, strict=True):
        if DEVICE.type == "cpu":
            assert one["output_ids"] == other["output_ids"], its
        if one["meta_info"]["finish_reason"]["type"] != "stop" or its.get("ignore_eos"):
            continue
        if its.get("json_schema") == NESTED:
            jsonschema.validate(json.loads(one["text"]), NESTED)
        else:
            assert_matches(one, its)


@pytest.mark.costly
def test_a_list_with_one_bad_constraint_is_refused_and_leaves_nothing_behind(walking: Engine) -> None:
    """Also where others of the list have started by then."""
    params = [{"regex": f"[ab]{{{200 + i}}}", "max_new_tokens": 300} for i in range(6)]
    for at in (0, 3, 5):
        asked = [{"regex": f"(a{at}"} if i == at else its for i, its in enumerate(params)]
        with pytest.raises(RegexSyntaxError, match="position"):
            walking.generate(prompt=["so"] * 6, sampling_params=asked)
    [state] = walking.get_server_info()["internal_states"]
    assert state["num_queue_reqs"] == 0
    assert walking.check_ledger() == []
    results = walking.generate(prompt=["so"] * 6, sampling_params=params)
    assert [len(result["text"]) for result in results] == [200 + i for i in range(6)]


def test_errors_are_the_same_where_masks_are_walked(walking: Engine) -> None:
    with pytest.raises(RegexSyntaxError, match="position"):
        walking.generate(prompt="so", sampling_params={"regex": "(a"})
    assert walking.generate(prompt="so", sampling_params={"regex": "ab"})["text"] == "ab"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}, {"disable_jump_forward": True}],
    ids=["graphs", "no graphs", "synchronous", "no jumps"],
)
def test_constrained_rows_on_a_gpu_match_and_never_make_the_host_wait(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """In steps beside free rows, replayed or not. Masks are worked out on the device, once automata are finished, but
    for documents that nest without end, whose deep places the host has, and for the last tokens of a budget."""
    sizes = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    tiny_checkpoint(tmp_path, with_tokenizer=True, **sizes)
    kinds: list[dict[str, Any]] = [
        *CONSTRAINTS,
        {"json_schema": FIELDS},
        {"json_schema": NESTED},
        {"ignore_eos": True},
    ]
    params = [
        {"max_new_tokens": 400, **kinds[i % len(kinds)], "temperature": (0.0, 1.0)[i % 2], "seed": i}
        for i in range(40)
    ]
    with Engine(tmp_path, dtype="bfloat16", check_ledger=True, **options) as engine:

        def run(chosen: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int]:
            """The results, how many masks were found on the device, and how many on the host beyond those that had to
            be found there."""
            [before] = engine.get_server_info()["internal_states"]
            results = engine.generate(prompt=["the answer is"] * len(chosen), sampling_params=chosen)
            [after] = engine.get_server_info()["internal_states"]
            on_device, on_host = (after[name] - before[name] for name in ("device_masks", "host_masks"))
            # Those of whom fewer than 150 tokens may still come: 256 is the model's context.
            late = [
                result["meta_info"] for result, its in zip(results, chosen, strict=True) if "ignore_eos" not in its
            ]
            on_host -= sum(max(its["prompt_tokens"] + its["completion_tokens"] - (256 - 150), 0) for its in late)
            return results, on_device, on_host

        nested = [its for its in params if its.get("json_schema") is NESTED]
        others = [its for its in params if its.get("json_schema") is not NESTED]
        end = time.monotonic() + PATIENCE
        while run(others)[2] > 0:
            assert time.monotonic() < end, "their automata are finished some time"
        for jump_cost in (engine._loop.jumps.cost, 0.0, 100.0):
            engine._loop.jumps.cost = jump_cost
            for chosen in (others, nested):
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    results, on_device, on_host = run(chosen)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert on_device
                assert chosen is nested or on_host <= 0
                for result, its in zip(results, chosen, strict=True):
                    if chosen is nested:
                        jsonschema.validate(json.loads(result["text"]), NESTED)
                    elif "ignore_eos" not in its:
                        assert_matches(result, its)
        assert engine.check_ledger() == []
