"""Automata over vocabularies that lack bytes: what is finished for a device never runs into an end that needs one."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.grammar import Vocabulary
from sgl.grammar.automaton import missing_bytes
from sgl.grammar.automaton.finished import FinishedAutomaton, finish
from sgl.grammar.automaton.missing_bytes import does_without
from sgl.grammar.automaton.place import Place, advance
from sgl.grammar.compiler import compile as compile_grammar
from sgl.grammar.compiler import make_constraint
from sgl.runtime.constraints.cursor import FinishedGrammar
from sgl.runtime.constraints.service import CompileService
from tests.patience import PATIENCE

BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])
SMOLLM2 = bytes([4, 6, 19, 20, 22, 29, 192, 193, 241, 242, *range(245, 254)])
"""What the vocabulary of a widely used small model lacks."""
NOTE = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 300},
            "code": {"type": "string", "pattern": "^[^x]{1,40}$"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 90},
        },
        "required": ["name", "code", "tags"],
        "additionalProperties": False,
    }
)
PIECES = [
    "a",
    "b",
    "é",
    "ê",
    "ж",
    "€",
    "\U00040000",
    "\U00090000",
    "[aé]",
    "[bж€]",
    ".",
    "[^a]",
    r"\x04",
    r"[\s\S]",
]


def finished(**kind: object) -> FinishedAutomaton:
    automaton = compile_grammar(vocabulary=BYTES, **kind).automaton  # type: ignore[arg-type]
    assert automaton is not None
    made = finish(automaton, 5000)
    assert made is not None, "it is small"
    return made


def distances(automaton: FinishedAutomaton, allowed: Iterable[int]) -> dict[Place, int]:
    """By place that any text reaches: the fewest of the allowed bytes that end the text."""
    places, edges = [automaton.start], dict[Place, list[Place]]()
    seen = {automaton.start}
    usable = set(allowed)
    for place in places:
        for byte in automaton.next_bytes(place):
            following = advance(automaton, place, bytes([byte]))
            assert following is not None
            if byte in usable:
                edges.setdefault(following, []).append(place)
            if following not in seen:
                seen.add(following)
                places.append(following)
    found = {place: 0 for place in places if automaton.tables.accepting[place.state] and place.stack is None}
    ring = list(found)
    for place in ring:
        for before in edges.get(place, ()):
            if before not in found:
                found[before] = found[place] + 1
                ring.append(before)
    return found


def regexes() -> st.SearchStrategy[str]:
    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        several = st.lists(inner, min_size=2, max_size=3)
        counts = st.sampled_from(["*", "?", "{2}", "{1,3}", "{2,9}"])
        return (
            several.map("".join)
            | several.map(lambda texts: f"({'|'.join(texts)})")
            | st.builds("({}){}".format, inner, counts)
        )

    return st.recursive(st.sampled_from(PIECES), more, max_leaves=4)


@settings(max_examples=80)
@given(
    regexes(), st.sets(st.sampled_from([*"aé€ж\U00040000b".encode(), 4, 0x80, 0xC3, 0xF1]), min_size=1, max_size=4)
)
def test_where_bytes_can_be_missed_no_end_is_farther(regex: str, missing: set[int]) -> None:
    automaton = finished(regex=regex)
    if does_without(automaton.tables, bytes(missing)):
        assert distances(automaton, set(range(256)) - missing) == distances(automaton, range(256))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"json_schema": NOTE}, True),
        ({"json_schema": True}, True),
        ({"regex": r".{3,40}x"}, True),
        ({"regex": "[a\U00040000-\U0007ffff]x"}, True),
        ({"regex": "\x04abc"}, False),
        ({"regex": "(\x04|abcdef)z"}, False),
        ({"regex": "[\U00040000-\U0007ffff]"}, False),
    ],
)
def test_only_what_ends_without_them_is_finished(kind: dict[str, object], expected: bool) -> None:
    assert does_without(finished(**kind).tables, SMOLLM2) is expected
    assert does_without(finished(**kind).tables, b"")


def test_of_many_effects_no_more_are_found() -> None:
    """No text needs a second's comparing: one byte has at most as many effects as there are bytes."""
    many = "|".join(f"{chr(0x40000 + 97 * number)}{number:x}" for number in range(300))
    tables = finished(regex=f"(a|{many})").tables
    with pytest.raises(missing_bytes._TooMany):
        missing_bytes._Characters(tables, SMOLLM2).all_have_others()
    assert not does_without(tables, SMOLLM2)


def test_a_vocabulary_that_lacks_bytes_has_masks_on_the_device() -> None:
    tokens = [bytes([byte]) for byte in range(256) if byte not in (*SMOLLM2, 0xFE, 0xFF)]
    vocabulary = Vocabulary([*tokens, b"</s>"], [len(tokens)])
    assert vocabulary.missing_bytes == SMOLLM2
    assert not vocabulary.is_byte_complete
    service = CompileService(vocabulary, num_finishers=1, patience=PATIENCE)
    try:
        schema = service.submit(make_constraint({"json_schema": NOTE})).result(PATIENCE)
        control = service.submit(make_constraint({"regex": "\x04|abc"})).result(PATIENCE)
    finally:
        service.close()
    assert isinstance(schema, FinishedGrammar)
    assert not isinstance(control, FinishedGrammar)
