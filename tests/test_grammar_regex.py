"""Regexes mean what Python's `re` means by them, in full and with ASCII classes; JSON Schema's mean ECMAScript's."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl.errors import GrammarError, RegexSyntaxError
from sgl.grammar.regular.byteset import bytes_of
from sgl.grammar.regular.expr import Expr, complement, difference, intersect, is_empty, matches, repeat, union
from sgl.grammar.regular.regex import compile_regex, counted_regex
from sgl.grammar.regular.shortest import shortest
from sgl.grammar.text.json import string_body

CHARS = 'abc01 _-.\n"\\é😀'
TEXTS = st.text(alphabet=CHARS, max_size=8)

_ATOMS = st.sampled_from(
    ["a", "b", "c", "0", " ", ".", "é", "\\d", "\\w", "\\s", "\\D", "\\W", "\\S", "\\n", "\\.", "\\\\", '"',
     "[abc]", "[^a]", "[a-c0]", "[^\\w]", "[\\d_-]", "\\x61", "\\u00e9", "😀", "[]a]", "[^]a]", "(?:)"]
)  # fmt: skip


def patterns(*, assertions: bool = False) -> st.SearchStrategy[str]:
    """Random patterns that both dialects read alike."""

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = inner.map(lambda body: f"(?:{body})")
        quantified = st.tuples(group, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?", "+?", "??"]))
        return st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join).map(lambda body: f"({body})"),
            quantified.map("".join),
        )

    atoms = _ATOMS
    if assertions:
        atoms = st.one_of(_ATOMS, st.sampled_from(["^", "$", "(?=a)", "(?!b)", "(?=.*0)", "(?!.*c$)"]))
    return st.recursive(atoms, grown, max_leaves=6)


def near(pattern: str, text: str, rng: random.Random) -> list[str]:
    """The text, and texts that the pattern is more likely to match."""
    found = [text]
    with_none = compile_regex(pattern, dialect="python", search=False)
    if not is_empty(with_none):
        base = (shortest(with_none) or b"").decode()
        found += [base, base + rng.choice(CHARS), base[1:], text + base, base * 2]
    return found


@given(patterns(), TEXTS, st.randoms(use_true_random=False))
def test_python_patterns_match_in_full(pattern: str, text: str, rng: random.Random) -> None:
    expr = compile_regex(pattern, dialect="python", search=False)
    compiled = re.compile(pattern, re.ASCII)
    for one in near(pattern, text, rng):
        assert matches(expr, one.encode()) == bool(compiled.fullmatch(one)), one


@given(patterns(assertions=True), TEXTS, st.randoms(use_true_random=False))
def test_patterns_with_assertions_match_or_are_refused(pattern: str, text: str, rng: random.Random) -> None:
    try:
        full = compile_regex(pattern, dialect="python", search=False)
        found = compile_regex(pattern, dialect="python", search=True)
    except RegexSyntaxError as error:
        assert "assertion" in str(error) or "quantifier" in str(error)  # noqa: PT017
        return
    compiled = re.compile(pattern, re.ASCII)
    for one in near(pattern, text, rng):
        assert matches(full, one.encode()) == bool(compiled.fullmatch(one)), one
        assert matches(found, one.encode()) == bool(compiled.search(one)), one


@given(patterns(), TEXTS)
def test_json_text_of_a_pattern_is_the_canonical_text_of_its_matches(pattern: str, text: str) -> None:
    assume(all(code not in pattern for code in ("\\s", "\\S", ".", "[]", "[^]")))  # where ECMAScript differs
    expr = compile_regex(pattern, json=True, search=False)
    expected = bool(re.compile(pattern, re.ASCII).fullmatch(text))
    assert matches(expr, string_body(text)) == expected
    assert json.loads(b'"' + string_body(text) + b'"') == text


@given(patterns(), patterns(), TEXTS)
def test_boolean_operations_are_those_of_sets(first: str, second: str, text: str) -> None:
    one = compile_regex(first, dialect="python", search=False)
    two = compile_regex(second, dialect="python", search=False)
    data = text.encode()
    in_one, in_two = matches(one, data), matches(two, data)
    assert matches(intersect(one, two), data) == (in_one and in_two)
    assert matches(union(one, two), data) == (in_one or in_two)
    assert matches(difference(one, two), data) == (in_one and not in_two)
    assert matches(complement(one), data) != in_one
    assert is_empty(difference(one, one))
    both = intersect(one, complement(two))
    word = shortest(both)
    assert (word is None) == is_empty(both)
    assert word is None or (matches(one, word) and not matches(two, word))
    assert word == first_of_the_shortest(both)


def first_of_the_shortest(expr: Expr) -> bytes | None:
    """All beginnings of a length, in the order of bytes, before those that are longer; one for each place."""
    level = {expr: b""}
    seen: set[Expr] = set()
    while level:
        ends = [word for place, word in level.items() if place.nullable]
        if ends:
            return min(ends)
        seen.update(level)
        following: dict[Expr, bytes] = {}
        for place, word in sorted(level.items(), key=lambda item: item[1]):
            for mask, target in sorted(place.arcs(), key=lambda arc: bytes_of(arc[0])):
                if target not in seen:
                    following.setdefault(target, word + bytes_of(mask)[:1])
        level = following
    return None


@given(patterns(), st.integers(0, 3), st.integers(0, 3), TEXTS)
def test_repeats_of_repeats_are_what_they_say(pattern: str, low: int, more: int, text: str) -> None:
    expr = repeat(repeat(compile_regex(pattern, dialect="python", search=False), low, low + more), 1, 2)
    expected = re.compile(f"(?:(?:{pattern}){{{low},{low + more}}}){{1,2}}", re.ASCII)
    assert matches(expr, text.encode()) == bool(expected.fullmatch(text))


DIALECTS = [
    # pattern, text, Python (in full), ECMAScript (search)
    ("a.b", "a\rb", True, False),
    ("a.b", "a\u2028b", True, False),
    ("a$", "a\n", False, False),
    (r"\s", "\u00a0", False, True),
    (r"\d", "٣", False, False),
    (r"\w", "é", False, False),
    ("b", "abc", False, True),
    (r"^\cA$", "\x01", None, True),
    (r"\a", "\x07", True, False),
    (r"^\/$", "/", True, True),
    (r"^\-$", "-", True, True),
    (r"^\_$", "_", True, True),
    (r"^[\d-z]$", "-", None, True),
    ("^[]$", "", None, False),
    ("^[^]$", "x", None, True),
    (r"\A\Z", "", True, False),
    (r"^\p{Lu}\P{L}$", "Ä1", True, True),
    (r"^\p{Lowercase_Letter}\p{nd}$", "ä1", True, True),
    ("(?:a|(?!b))?^c$", "c", True, True),
    ("(?:a|(?!b))?^c$", "ac", False, False),
    ("(?:^a|b){2}", "ab", True, True),
    ("(?:^a|b){2}", "aa", False, False),
    (r"^\u{1F600}$", "😀", True, True),
    (r"^\ud83d\ude00$", "😀", True, True),
    ("(?i:é)", "É", False, True),
    ("(?i:^[à-ö]$)", "É", False, True),
    ("(?i:k)", "\u212a", False, True),  # the Kelvin sign
    ("(?i:\u212a)", "k", False, True),
    ("(?i:\u212a)", "\u212a", True, True),
    ("(?i:S)", "ſ", False, True),
    ("(?i:ſ)", "S", False, True),
    ("(?i:^[^k]$)", "\u212a", True, False),
    ("(?i:^[^k]$)", "K", False, False),
    ("(?i:^[Z-a]$)", "z", True, True),
    ("(?i:^[Z-a]$)", "A", True, True),
    ("(?i:^[Z-a]$)", "b", False, False),
    (r"(?i:^\W$)", "s", False, False),
    (r"(?i:^\w$)", "ſ", False, True),
    (r"(?i:^\p{Lu}$)", "a", True, True),
    ("(?i:ẞ)", "ß", False, True),
    ("(?i:^(?-i:a)B$)", "ab", True, True),
    ("(?i:^(?-i:a)B$)", "Ab", False, False),
    ("(?i)abc", "aBC", True, True),
    ("(?s:.)", "\n", True, None),
]


@pytest.mark.parametrize(("pattern", "text", "python", "ecma"), DIALECTS)
def test_where_the_dialects_differ(pattern: str, text: str, python: bool | None, ecma: bool | None) -> None:
    if python is None:
        with pytest.raises(RegexSyntaxError):
            compile_regex(pattern, dialect="python", search=False)
    else:
        assert matches(compile_regex(pattern, dialect="python", search=False), text.encode()) == python
    if ecma is not None:
        assert matches(compile_regex(pattern), text.encode()) == ecma


def test_case_is_ignored_as_python_does_in_ascii() -> None:
    rng = random.Random(0)
    chars = [*"aAkKsSzZ_^éÉàÀµμΜßẞſıİ1-", "\u212a", "\u1c88"]
    for _ in range(400):
        inside = "".join(rng.sample(chars, 3)).replace("^", "").replace("-", "")
        low, high = sorted(rng.sample([char for char in chars if char != "-"], 2))
        body = rng.choice(
            [f"[{inside}]", f"[^{inside}]", f"[{low}-{high}]", f"[^{low}-{high}]", inside, r"\w", r"[^\W]"]
        )
        pattern = rng.choice(["(?i:{})", "(?i){}", "(?i:x|{})", "(?i:(?-i:{})|Q)"]).format(body)
        expr = compile_regex(pattern, dialect="python", search=False)
        expected = re.compile(pattern, re.ASCII)
        for text in [*chars, inside, inside.swapcase(), "q", "X"]:
            assert matches(expr, text.encode()) == bool(expected.fullmatch(text)), (pattern, text)


REFUSED = [
    (r"(a)\1", "back-reference"),
    (r"(?i:(a)\1)", "back-reference"),
    (r"(?P<x>a)(?P=x)", "back-reference"),
    (r"\bword", "word boundary"),
    (r"(?<=a)b", "look-behind"),
    (r"(?<!a)b", "look-behind"),
    (r"(?>a+)", "atomic"),
    (r"a++", "possessive"),
    (r"(?m:^a$)", "flag m"),
    (r"(a)?(?(1)b|c)", "conditional"),
    (r"\p{Script=Greek}", "property"),
    (r"(a", "a group is not closed, which begins at position 0"),
    (r"a)", "unmatched"),
    (r"[a", "is not closed"),
    (r"*a", "nothing to repeat"),
    (r"a{3,2}", "reversed"),
    (r"[z-a]", "reversed"),
    (r"\x1", "hexadecimal"),
]


@pytest.mark.parametrize(("pattern", "reason"), REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(RegexSyntaxError, match=reason) as caught:
        compile_regex(pattern, dialect="python", search=False)
    assert caught.value.pattern == pattern
    assert isinstance(caught.value, GrammarError)


def test_bounded_repeats_cost_nothing_to_build() -> None:
    assert counted_regex("[a-z ]{1,4096}") is not None
    assert counted_regex(r"(.|\n){0,100000}") is not None
    assert counted_regex("(ab){1,4096}") is None
    expr = compile_regex("(ab|cd){3,100000}x", dialect="python", search=False)
    assert matches(expr, b"ab" * 3_000 + b"x")
    assert not matches(expr, b"abx")


def test_any_number_of_parts_may_be_left_out() -> None:
    """Each asked the next one what may come behind it, at a depth of 800."""
    expr = compile_regex("".join(f"(w{i} )?" for i in range(1_200)), search=False)
    assert matches(expr, b"")
    assert matches(expr, b"w5 w700 w1199 ")
    assert not matches(expr, b"w700 w5 ")
    assert matches(compile_regex("x" + "(a|b)?" * 1_200 + "c?" * 3, search=False), b"xabbacc")
