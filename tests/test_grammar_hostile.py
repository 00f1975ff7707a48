"""Hostile constraints of every kind, beside plain ones: each ends in a grammar or a typed error, what it asks of the
engine's thread stays within its allowance, and others are compiled meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.errors import GrammarError, GrammarTooLarge, SglError
from sgl.grammar.compiler import build, make_constraint
from sgl.grammar.schema import keywords
from sgl.runtime.constraints import cursor, service
from sgl.runtime.constraints.cursor import ALLOWANCE, FinishedGrammar, MatcherCursor
from sgl.runtime.constraints.process import GrammarProcess
from sgl.runtime.constraints.service import CompileService
from sgl.runtime.requests.waiting import settled
from sgl.time_limit import OutOfTime
from tests.grammar_oracles import piece_vocabulary
from tests.patience import PATIENCE

PIECES = piece_vocabulary()
SECONDS = PATIENCE
STRING = {"type": "string"}


def nested(depth: int, make: Any, schema: Any) -> Any:
    for _ in range(depth):
        schema = make(schema)
    return schema


def references(depth: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)}
    return {"$defs": {**definitions, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def tags(count: int, *, is_one: bool) -> dict[str, Any]:
    structures = [{"begin": f"<t{i:05d}>", "schema": {"type": "integer"}, "end": "</t>"} for i in range(count)]
    triggers = ["<t"] if is_one else [one["begin"][:-1] for one in structures]
    return {"triggers": triggers, "structures": structures}


SCHEMAS: dict[str, Any] = {
    "minLength and pattern": {"type": "string", "minLength": 10**9, "maxLength": 10**9, "pattern": "^[a-z]*$"},
    "minItems": {"type": "array", "minItems": 10**6},
    "minItems in minItems": nested(30, lambda s: {"type": "array", "minItems": 2, "items": s}, {"type": "integer"}),
    "minContains": {"type": "array", "contains": {"const": 1}, "minContains": 10**6},
    "uniqueItems": {"type": "array", "items": {"enum": list(range(3000))}, "uniqueItems": True, "minItems": 2500},
    "minProperties": {"type": "object", "minProperties": 900},
    "required": {"type": "object", "required": [f"k{i}" for i in range(30_000)]},
    "dependentRequired": {"dependentRequired": {f"k{i}": [f"j{i}"] for i in range(14)}, "type": "object"},
    "const": {"const": "x" * 10**6},
    "const array": {"const": [1] * 100_000},
    "enum": {"enum": [f"{i:010d}" for i in range(50_000)]},
    "enum of objects": {"enum": [{"a": i, "b": [i] * 5} for i in range(3000)]},
    "anyOf": nested(150, lambda s: {"anyOf": [{"type": "array", "items": s}, {"type": "null"}]}, {"type": "integer"}),
    "wide anyOf": {"anyOf": [{"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(1000)]},
    "oneOf": {"oneOf": [{"type": "string", "pattern": f"^.*{i}.*{i}.*$"} for i in range(12)]},
    "allOf of anyOf": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]},
    "not": {"type": "string", "not": {"pattern": "(a|b)*a(a|b){15}"}, "minLength": 300},
    "patterns": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(14)]},
    "patternProperties": {"type": "object", "patternProperties": {f"a.*{i}": STRING for i in range(14)}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "(a|b)*a(a|b){14}"}, "minProperties": 5},
    "multipleOf": {"type": "integer", "multipleOf": 99_991},
    "large multipleOf": {"type": "integer", "multipleOf": 10**40 + 7},
    "references": references(5000),
    "description": {"type": "integer", "description": "x" * 3_000_000},
}  # fmt: skip
HOSTILE: dict[str, dict[str, Any]] = {
    **{name: {"json_schema": schema} for name, schema in SCHEMAS.items()},
    "deep schema": {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "maximum": {"json_schema": '{"type": "number", "maximum": 1e400}'},
    "minLength 1e300": {"json_schema": '{"type": "string", "minLength": 1e300}'},
    "repeats": {"regex": "(a{1000}){1000}(b{1000}){1000}"},
    "exponential": {"regex": "(a|b)*a(a|b){40}"},
    "look-ahead": {"regex": "(?=.*a)(?=.*b)(?=.*c)(?=.*d)(?=.*e)(?=.*f)(?=.*g).{100,}"},
    "negative look-ahead": {"regex": "".join(f"(?!.*a.{{{i}}}b)" for i in range(12)) + ".*"},
    "long pattern": {"regex": "[a-z]" * 18_000},
    "alternatives": {"regex": "|".join(f"a{i}.*b{i}" for i in range(3000))},
    "choices": {"choices": [f"choice {i}" for i in range(200_000)]},
    "tags": {"structural_tag": tags(10_000, is_one=False)},
    "tags of one trigger": {"structural_tag": tags(10_000, is_one=True)},
    "ebnf": {"ebnf": "root ::= " + " | ".join(f'"w{i}"' for i in range(50_000))},
    "ambiguous ebnf": {"ebnf": 'root ::= root root root | "a" | "b" root | root "c" | ""'},
    "large ebnf": {"ebnf": "root ::= r0\n" + "\n".join(f'r{i} ::= "x{i}" [a-z]* r{i}?' for i in range(90_000))},
}


FEW = ["minLength and pattern", "uniqueItems", "required", "anyOf", "allOf of anyOf", "not", "large multipleOf"]
FEW += ["deep schema", "repeats", "exponential", "choices", "tags", "ambiguous ebnf", "large ebnf"]


@pytest.fixture(scope="module")
def compiling() -> Iterator[CompileService]:
    made = CompileService(PIECES, deadline=3.0)
    assert made.submit(make_constraint({"regex": "ready"})).result(SECONDS)
    yield made
    made.close()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plain(number: int) -> dict[str, Any]:
    """One that nobody else has."""
    return {
        "json_schema": {"type": "object", "properties": {f"name {number}": STRING}, "required": [f"name {number}"]}
    }


def generated(found: Any, seed: int) -> int:
    """How many tokens came of it, as an engine asks for them. Raises GrammarError."""
    assert not isinstance(found, FinishedGrammar)
    at, rng, output = MatcherCursor(found), random.Random(seed), list[int]()
    for left in range(500, 488, -1):
        allowed = np.flatnonzero(np.unpackbits(at.mask(left).view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        token = rng.choice(allowed.tolist())
        assert at.accept(token)
        output.append(token)
        if token in PIECES.eos_ids or at.is_complete():
            break
        at.forced_text(output)
    return len(output)


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param(list(HOSTILE), marks=pytest.mark.slow)], ids=["few", "all"])
def test_all_at_once_hold_up_no_plain_one_and_take_no_memory(names: list[str], compiling: CompileService) -> None:
    """Plain ones come while all the hostile ones wait or work, each of which ends; their masks too."""
    before = resident_bytes()
    hostile = {name: compiling.submit(make_constraint(given)) for name, given in HOSTILE.items() if name in names}
    first = len(names)
    for number in range(first, first + 10):
        assert generated(compiling.submit(make_constraint(plain(number))).result(SECONDS), number)
    still_under_way = sum(not flight.done() for flight in hostile.values())
    assert still_under_way > 0, "ten plain ones take less than all the hostile ones"
    for seed, (name, flight) in enumerate(hostile.items()):
        error = flight.exception(3 * SECONDS)
        assert error is None or isinstance(error, GrammarError), (name, error)
        if error is None:
            with contextlib.suppress(GrammarError):
                assert generated(flight.result(), seed)
    assert resident_bytes() - before < 1 << 30


def test_who_takes_longer_than_a_moment_waits_for_its_like_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that never end hold up others that take long, not those that are done in a first trial."""
    monkeypatch.setattr(service, "_SHORT_TRIAL", 0.0)
    made = CompileService(PIECES, deadline=SECONDS)
    hangs = threading.Event()
    try:
        monkeypatch.setattr(made._trial, "run", lambda *_: hangs.wait(SECONDS))
        stuck = [made.submit(make_constraint({"ebnf": f'start: "{i}"'})) for i in range(50)]
        easy = [made.submit(make_constraint(plain(i))) for i in range(20)]
        assert len(wait(easy, SECONDS).done) == len(easy)
        assert not any(flight.done() for flight in stuck)
    finally:
        hangs.set()
        made.close()


def test_a_trial_that_asks_for_too_much_memory_fails_alone() -> None:
    trial = GrammarProcess(PIECES)
    try:
        greedy = make_constraint({"json_schema": json.dumps({"enum": ["x" * 300 + str(i) for i in range(12_000)]})})
        assert trial.run(greedy, SECONDS) is None
        assert trial._process is not None
        limits = Path(f"/proc/{trial._process.pid}/limits").read_text(encoding="ascii").splitlines()
        [limit] = [line.split()[3] for line in limits if line.startswith("Max address space")]
        assert int(limit) < 4 << 30
    finally:
        trial.kill()


def test_an_output_has_so_much_of_the_engines_time_and_then_fails_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock of its thread, which is what the cursors read; others go on."""
    now = [0.0]
    monkeypatch.setattr(cursor, "thread_time", lambda: now[0])
    with CompileServiceOf() as made:
        found = made.submit(make_constraint({"regex": "[a-c]{3,900}x"})).result(SECONDS)
        at, other = MatcherCursor(found), MatcherCursor(found)
        mask = at._matcher.mask

        def slow(remaining: int | None = None) -> Any:
            now[0] += ALLOWANCE / 3
            return mask(remaining)

        monkeypatch.setattr(at._matcher, "mask", slow)
        with pytest.raises(GrammarTooLarge, match="engine's time"):
            _ = [at.mask(500) for _ in range(5)]
        assert other.mask(500).any()


def test_guesses_leave_an_output_half_of_its_time() -> None:
    """Or a constraint that would do without drafts fails with them."""
    with CompileServiceOf() as made:
        at = MatcherCursor(made.submit(make_constraint({"regex": "abab[a-c]{3,900}x"})).result(SECONDS))
        assert at.likely_text([], 3)[0] is not None
        at._left.seconds = ALLOWANCE / 2
        assert at.likely_text([], 3) == (None, 0)
        assert at.behind(PIECES.ids[b"a"]) is None
        assert at.accept(PIECES.ids[b"a"])


@pytest.mark.slow
@pytest.mark.parametrize("num_texts", [pytest.param(12, marks=pytest.mark.slow), 14])
def test_a_mask_that_takes_too_long_is_not_taken_for_the_deadline(num_texts: int) -> None:
    """It is refused for what it is, in the engine and in its own process, and not tried for longer."""
    slow = make_constraint({"regex": "".join(f"(?!.*a.{{{i}}}b)" for i in range(num_texts)) + ".*"})
    trial = GrammarProcess(PIECES)
    try:
        with pytest.raises(GrammarTooLarge, match=r"mask takes more than 0\.5 s") as failed:
            trial.run(slow, SECONDS)
        assert not isinstance(failed.value, OutOfTime)
    finally:
        trial.kill()
    with CompileServiceOf() as made:
        made.deadline = SECONDS
        error = made.submit(slow).exception(SECONDS)
        assert isinstance(error, GrammarTooLarge)
        assert not isinstance(error, OutOfTime)
        assert "mask takes more than 0.5 s" in str(error)


def test_an_output_is_told_that_one_mask_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that all of its masks did."""
    with CompileServiceOf() as made:
        found = made.submit(make_constraint({"regex": "[a-c]{3,900}x"})).result(SECONDS)
        assert not isinstance(found, FinishedGrammar)
        assert found.masks is not None
        monkeypatch.setattr(found.masks, "max_seconds", -1.0)
        at = MatcherCursor(found)
        assert at.accept(PIECES.ids[b"a"])
        with pytest.raises(GrammarTooLarge, match="one token's mask"):
            at.mask(500)


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties", "propertyNames"])
def test_a_pattern_past_the_deadline_is_out_of_time(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be enforced: no UnsupportedSchema is said of it, which would not be tried for longer."""
    given: dict[str, Any] = {"pattern": {"type": "string", "pattern": "ab+c"}}
    given["patternProperties"] = {"type": "object", "patternProperties": {"ab+c": STRING}}
    given["propertyNames"] = {"type": "object", "propertyNames": {"pattern": "ab+c"}}

    def slow(pattern: str) -> Any:
        raise OutOfTime(1.0)

    monkeypatch.setattr(keywords, "pattern_strings", slow)
    with pytest.raises(OutOfTime):
        build(make_constraint({"json_schema": given[keyword]}), PIECES)


class CompileServiceOf:
    """A service that is closed."""

    def __enter__(self) -> CompileService:
        self.service = CompileService(PIECES)
        return self.service

    def __exit__(self, *_: object) -> None:
        self.service.close()


def test_grammars_that_take_much_room_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(service, "_LOOKS", 1)
    with CompileServiceOf() as made:
        for number in range(60):
            generated(made.submit(make_constraint(plain(number))).result(SECONDS), number)
        assert len(made._futures) < 60
        kept = sum(flight.result().num_bytes for flight in made._futures.values())
        largest = max(flight.result().num_bytes for flight in made._futures.values())
        assert kept <= (1 << 20) + 2 * largest


def test_what_waits_for_futures_is_called_once() -> None:
    called = threading.Semaphore(0)
    settled([], None).add_done_callback(lambda _: called.release())
    assert called.acquire(timeout=SECONDS)
    futures: list[Future[int]] = [Future(), Future()]
    settled(futures, None).add_done_callback(lambda _: called.release())
    futures[0].set_result(1)
    assert not called.acquire(blocking=False)
    futures[1].set_exception(SglError("it failed"))
    assert called.acquire(timeout=SECONDS)
    late: Future[int] = Future()
    settled([late], 1.0).add_done_callback(lambda _: called.release())  # over long ago
    assert called.acquire(timeout=SECONDS)
    late.set_result(1)
    assert not called.acquire(blocking=False)
