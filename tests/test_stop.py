"""Stops are found where a search of the text so far first finds them, and not a character of one is sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import InvalidRequest
from sgl.runtime.text import stop_regex
from sgl.runtime.text.stop import MAX_STOP_CHARACTERS, StopMatch, StopMatcher
from sgl.runtime.text.stop_regex import MAX_LOOK_BACK


def stopped_by_search(text: str, strings: Sequence[str], regexes: Sequence[str]) -> tuple[str, StopMatch | None]:
    """The oracle: text before the stop, and the stop, by searching every prefix of the text."""
    for arrival in range(1, len(text) + 1):
        so_far = text[:arrival]
        found = [(arrival - len(each), each, each) for each in strings if so_far.endswith(each)]
        found += [(m.start(), each, m[0]) for each in regexes if (m := re.search(each, so_far)) is not None]
        if found:
            start, stop, matched = min(found, key=lambda each: each[0])
            return so_far[:start], StopMatch(stop, matched)
    return text, None


def stopped_in_pieces(matcher: StopMatcher, text: str, cuts: Sequence[int]) -> tuple[list[str], StopMatch | None]:
    """What the matcher sends at each piece, up to the stop or the flush."""
    sent = []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        piece, match = matcher.feed(text[start:end])
        sent.append(piece)
        if match is not None:
            return sent, match
    return [*sent, matcher.flush()], None


def texts(alphabet: str = "aab\n") -> st.SearchStrategy[str]:
    return st.text(st.sampled_from(alphabet), max_size=40)


STRINGS = st.lists(st.text(st.sampled_from("aab\n"), min_size=1, max_size=5), max_size=4, unique=True)
CUTS = st.lists(st.integers(0, 40), max_size=30)

ATOMS = st.sampled_from([*"aaabb\n", ".", "[ab]", "[^a]", r"\w", r"\s", "(?i:A)", r"(?s:.)"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["+", "*?", "?", "{2}", "{1,3}", "{,2}", "{,}", "*", "++"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        st.tuples(inner, inner).map(lambda two: rf"({two[0]}){two[1]}"),
        st.tuples(st.sampled_from(["(?=", "(?!", "(?>"]), inner, inner).map(
            lambda all: f"{all[0]}{all[1]}){all[2]}"
        ),
        st.tuples(inner, st.sampled_from(["(?=a)", "(?!b)", r"\b", "$", "^", r"\Z", "(?<=a)", "(?<!b)"])).map(
            "".join
        ),
        st.tuples(st.sampled_from([r"\b", "(?<=a)", "(?<!a)", "^", "(?m)^", ""]), inner).map(
            lambda two: "".join(two)
        ),
    ),
    max_leaves=6,
).filter(lambda source: compiles(source) and re.search(source, "") is None)


def compiles(source: str) -> bool:
    try:
        re.compile(source)
    except (re.error, OverflowError):
        return False
    return True


@given(text=texts(), strings=STRINGS, cuts=CUTS)
def test_stop_strings_stop_where_a_search_finds_them_however_the_text_is_cut(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    cuts = [cut for cut in cuts if cut <= len(text)]
    sent, match = stopped_in_pieces(StopMatcher(strings), text, cuts)
    assert ("".join(sent), match) == stopped_by_search(text, strings, [])


@given(text=texts(), strings=STRINGS)
def test_no_more_is_withheld_than_may_become_a_stop_string(text: str, strings: list[str]) -> None:
    matcher, sent = StopMatcher(strings), ""
    for position in range(len(text)):
        piece, match = matcher.feed(text[position])
        if match is not None:
            break
        sent += piece
        so_far = text[: position + 1]
        starts = (each[:k] for each in strings for k in range(len(each)))
        assert len(so_far) - len(sent) == max((len(each) for each in starts if so_far.endswith(each)), default=0)


@given(text=texts("aab\n "), strings=STRINGS, regexes=st.lists(REGEXES, min_size=1, max_size=3), cuts=CUTS)
def test_regexes_stop_where_a_search_finds_them_however_the_text_is_cut(
    text: str, strings: list[str], regexes: list[str], cuts: list[int]
) -> None:
    cuts = [cut for cut in cuts if cut <= len(text)]
    sent, match = stopped_in_pieces(StopMatcher(strings, regexes), text, cuts)
    assert ("".join(sent), match) == stopped_by_search(text, strings, regexes)


@pytest.mark.parametrize(
    ("regex", "text", "before", "matched"),
    [
        (r"\n\s*Q:", "A: 4\n\n Q: 5", "A: 4", "\n\n Q:"),
        (r"\d{4}-\d{2}-\d{2}", "on 2024-1-1 or 2024-12-31.", "on 2024-1-1 or ", "2024-12-31"),
        (r"foo(?=bar)", "foo foobar", "foo ", "foo"),
        (r"(?<=answer: )\w+\.", "the answer: yes.", "the answer: ", "yes."),
        (r"(\w)\1\1", "aabbbc", "aa", "bbb"),
        (r"{end}", "x{end}y", "x", "{end}"),
        (r"a{e}", "aa{e}", "a", "a{e}"),
        (r"\N{EM DASH}+x", "a—x", "a", "—x"),
        (r"(?x) a b  # a comment {2}", "xab", "x", "ab"),
        (r"(?i)stop", "don't STOP", "don't ", "STOP"),
        (r"[一-龥]+。", "hi 你好。", "hi ", "你好。"),
    ],
)
def test_a_regex_means_what_it_means_to_re(regex: str, text: str, before: str, matched: str) -> None:
    for cuts in [], range(1, len(text)):
        sent, match = stopped_in_pieces(StopMatcher([], [regex]), text, list(cuts))
        assert ("".join(sent), match) == (before, StopMatch(regex, matched))


def test_of_stops_that_arrive_together_the_one_that_starts_first_wins() -> None:
    assert StopMatcher(["b", "ab", "cab"]).feed("xxab") == ("xx", StopMatch("ab", "ab"))
    assert StopMatcher(["b"], ["a?b", "ab"]).feed("xxab") == ("xx", StopMatch("a?b", "ab"))
    assert StopMatcher(["ab"], ["ab"]).feed("xxab") == ("xx", StopMatch("ab", "ab"))


def test_the_stop_that_is_complete_first_wins_over_one_that_starts_first() -> None:
    assert StopMatcher(["abcd", "bc"]).feed("abcd") == ("a", StopMatch("bc", "bc"))


def test_without_stops_all_text_passes() -> None:
    assert StopMatcher().feed("any text\n") == ("any text\n", None)
    assert StopMatcher().flush() == ""


def test_text_behind_the_stop_is_gone() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("one\n") == ("one", None)
    assert matcher.feed("\ntwo") == ("", StopMatch("\n\n", "\n\n"))
    assert matcher.flush() == ""


def test_what_only_looked_like_a_stop_is_sent_later() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("a </s")[0] == "a "
    assert matcher.feed("pan>") == ("</span>", None)
    assert matcher.feed("</")[0] == ""
    assert matcher.flush() == "</"


def test_a_match_longer_than_the_look_back_is_not_waited_for() -> None:
    matcher = StopMatcher([], ["(?s)<a>.*</a>"])
    text = "<a>" + "x" * 3 * MAX_LOOK_BACK
    sent = "".join(matcher.feed(character)[0] for character in text)
    assert len(text) - len(sent) <= MAX_LOOK_BACK
    assert matcher.feed("</a>")[1] is None
    assert matcher.feed("<a>yes</a>")[1] == StopMatch("(?s)<a>.*</a>", "<a>yes</a>")


def test_positions_stay_right_over_a_long_text() -> None:
    matcher = StopMatcher(["###"], [r"(?<=\n)Q\d+:"])
    paragraph = "Q: lorem Q1 ipsum ## dolor\n"
    sent = "".join(matcher.feed(paragraph)[0] for _ in range(500))
    piece, match = matcher.feed("Q42: tail")
    assert match == StopMatch(r"(?<=\n)Q\d+:", "Q42:")
    assert sent + piece == paragraph * 500


def test_the_cost_of_a_character_does_not_grow_with_the_text() -> None:
    """The text that is kept, and thereby searched and copied, stays short; a held-back text does too."""
    matcher = StopMatcher(["a" * 50 + "b"], ["a+b{3}", "(?s)<a>.*</a>"])
    for _ in range(200):
        assert matcher.feed("<a>" + "a" * 100)[1] is None
        assert matcher._regexes is not None
        assert len(matcher._regexes._text) <= 3 * MAX_LOOK_BACK + 103
        assert len(matcher._withheld) <= MAX_LOOK_BACK


@pytest.mark.parametrize(
    "regex",
    ["(", "[a", "a{2", "*a", "(?P<x>a)(?P<x>b)", "\\", r"\p{L}", "(?R)", "a" * 3 + "{99999999999}", r"\1", "(?r)a"],
)
def test_what_re_refuses_is_refused(regex: str) -> None:
    if compiles(regex):
        assert StopMatcher([], [regex]).feed("x")[1] is None
    else:
        with pytest.raises(InvalidRequest, match="malformed") as caught:
            StopMatcher([], [regex])
        assert caught.value.param == "stop_regex"


@pytest.mark.parametrize("regex", ["a*", "", "$", "^", "(?:x|)", "(?=)", r"\Z"])
def test_a_regex_that_matches_nothing_at_all_is_refused(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="empty text"):
        StopMatcher([], [regex])


@pytest.mark.parametrize(
    "regex", ["(?:a{999}){999}", "((((((a?){1000}){1000}){1000}){1000}){1000}){1000}b", "(?:(?:[a-z]{99}){99}){9}"]
)
def test_a_regex_that_would_compile_to_gigabytes_is_refused(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        StopMatcher([], [regex])


def feed(matcher: StopMatcher, pieces: list[str]) -> None:
    for piece in pieces:
        matcher.feed(piece)


@pytest.mark.parametrize("regex", ["(a|aa)+$", "(?:a+)+[bc]d", "(.*)*x|y", r"(?:\w+\s?)+[!?]"])
def test_a_catastrophic_regex_ends_with_an_error_or_an_answer(regex: str) -> None:
    """Without limits, longer than a test may take."""
    matcher = StopMatcher([], [f"(?:{regex})!!"])
    refused = None
    try:
        feed(matcher, ["aaaa"] * 60)
    except InvalidRequest as error:
        refused = error
    assert refused is None or (refused.param == "stop_regex" and "too long" in str(refused))


def test_a_regex_that_the_empty_text_takes_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too long") as refused:
        StopMatcher([], ["(?:a?|b?|c?)" * 24 + r"\b"])
    assert refused.value.param == "stop_regex"


def test_many_slow_searches_end_in_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "SECONDS_PER_CHARACTER", 0.0)
    monkeypatch.setattr(stop_regex, "FREE_SECONDS", 1e-4)
    matcher = StopMatcher([], ["(?s)a.*[bc]d"])
    with pytest.raises(InvalidRequest, match="too long"):
        feed(matcher, ["aaaa"] * 1000)


def test_a_time_limit_that_other_threads_used_up_is_not_held_against_the_regex() -> None:
    class Impatient:
        """Times out twice before it answers, having taken no time of its own."""

        def __init__(self, matcher: StopMatcher) -> None:
            assert matcher._regexes is not None
            [self.pattern] = matcher._regexes._regexes
            self.compiled, self.calls = self.pattern.compiled, 0
            self.pattern.compiled = self

        def search(self, *args: object, **options: object) -> object:
            self.calls += 1
            if self.calls <= 2:
                raise TimeoutError
            return self.compiled.search(*args, **options)

    matcher = StopMatcher([], ["ab"])
    impatient = Impatient(matcher)
    assert matcher.feed("xab") == ("x", StopMatch("ab", "ab"))
    assert impatient.calls > 2


@pytest.mark.parametrize("string", ["", "x" * (MAX_STOP_CHARACTERS + 1)])
def test_a_stop_string_that_is_empty_or_too_long_is_refused(string: str) -> None:
    with pytest.raises(InvalidRequest, match="characters") as caught:
        StopMatcher([string])
    assert caught.value.param == "stop"
