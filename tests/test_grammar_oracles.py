"""Regexes judged by other implementations: outlines-core's automata over single bytes, interegular's set algebra."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl.grammar.regular.expr import difference, intersect, is_empty, matches
from sgl.grammar.regular.regex import compile_regex

outlines_core = pytest.importorskip("outlines_core")
interegular = pytest.importorskip("interegular")

END = "\U0010ffff"  # closes a pattern, so that outlines-core drops no state from which a match could go on

_ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "é", "(?:ab)"])
PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)
TEXTS = st.text(alphabet="abcé", max_size=7)

_BYTES = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def outlines_accepts(pattern: str, text: str) -> bool:
    index = outlines_core.Index(f"(?:{pattern})\\x{{10FFFF}}", _BYTES)
    state = index.get_initial_state()
    for byte in (text + END).encode():
        state = index.get_next_state(state, byte)
        if state is None:
            return False
    return bool(index.is_final_state(state))


@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=6))
def test_outlines_core_accepts_the_same_texts(pattern: str, texts: list[str]) -> None:
    expr = compile_regex(pattern, dialect="python", search=False)
    for text in texts:
        assert matches(expr, text.encode()) == outlines_accepts(pattern, text), text


@given(PATTERNS, PATTERNS, st.lists(TEXTS, min_size=1, max_size=6))
def test_interegular_intersects_and_subtracts_alike(left: str, right: str, texts: list[str]) -> None:
    ours = [compile_regex(pattern, dialect="python", search=False) for pattern in (left, right)]
    theirs = [interegular.parse_pattern(pattern).to_fsm() for pattern in (left, right)]
    both, rest = intersect(*ours), difference(*ours)
    their_both, their_rest = theirs[0] & theirs[1], theirs[0] - theirs[1]
    for text in texts:
        assert matches(both, text.encode()) == their_both.accepts(text)
        assert matches(rest, text.encode()) == their_rest.accepts(text)
    assume(
        "[^" not in left + right
    )  # what interegular's complement may hold is no text of ours, such as a surrogate
    assert is_empty(both) == their_both.empty()
    assert is_empty(rest) == their_rest.empty()
