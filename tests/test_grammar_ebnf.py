"""EBNF means what llama.cpp and XGrammar read: every rule matches characters, and no lexer decides anything."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl import grammar
from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.backends import llguidance as ebnf
from sgl.grammar.compiler import make_constraint
from sgl.runtime.constraints.service import CompileService
from tests.cfg_oracle import Rules, can_go_on, matches, written
from tests.json_random import accepts
from tests.patience import PATIENCE

pytest.importorskip("llguidance")

BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])
TOKENS = ["a", "b", "", "c", "ab", "ba", "bb", "aab", "abc", "aaaa", "é", "ã", "bé"]
PARTS = [b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xf0\x9f\x98", b"\x80"]
END = TOKENS.index("")
PIECES = Vocabulary([*(token.encode() for token in TOKENS), *PARTS], eos_ids=[END])
CHARACTERS = "abcéã😀"
FIRST = {token[:1] for token in PIECES.token_bytes if token}


def compiled(source: str, vocabulary: Vocabulary = BYTES) -> Grammar:
    return grammar.compile(ebnf=source, vocabulary=vocabulary)


def expressions(names: list[str]) -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.tuples(st.just("chars"), st.sampled_from(["a", "b", "ab", "abc", "é", "aé"])),
        st.tuples(st.just("not"), st.sampled_from(["", "a", "é", "bã"])),
        st.tuples(st.just("text"), st.sampled_from(["", "ab", "ba", "bé", "abc"])),
        st.tuples(st.just("rule"), st.sampled_from(names)),
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=0, max_size=3)
        bounds = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (0, 3), (2, None), (1, 6), (0, 0)])
        return st.one_of(
            several.map(lambda parts: ("seq", *parts)),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("alt", *parts)),
            st.tuples(inner, bounds).map(lambda both: ("times", both[0], *both[1])),
        )

    return st.recursive(leaves, larger, max_leaves=6)


NAMES = ["root", "x", "y-1", "z_2"]
GRAMMARS = st.fixed_dictionaries({name: expressions(NAMES) for name in NAMES})
MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def compiled_or_empty(rules: Rules, source: str, vocabulary: Vocabulary) -> Grammar | None:
    """The grammar; None where it allows nothing, which must be so."""
    try:
        return compiled(source, vocabulary)
    except GrammarError:
        if can_go_on(rules, ""):
            raise
        return None


@MANY
@given(GRAMMARS, st.lists(st.text(CHARACTERS[:4], max_size=6), max_size=8), st.randoms(use_true_random=False))
def test_random_grammars_allow_what_their_rules_do(rules: Rules, texts: list[str], rng: random.Random) -> None:
    source = written(rules, rng)
    found = compiled_or_empty(rules, source, BYTES)
    if found is None:
        return
    for text in ["", "a", "b", "é", *texts]:
        matcher = found.matcher()
        assert matcher.accept_bytes(text.encode()) == can_go_on(rules, text), (source, text)
        assert accepts(found, text) == matches(rules, text), (source, text)


def split(data: bytes) -> tuple[str, bytes]:
    """The whole characters at the beginning, and what follows them."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]


def may_follow(rules: Rules, data: bytes) -> bool:
    """Whether the rules allow a text that begins with these bytes: whole characters, and maybe the start of one."""
    text, rest = split(data)
    if not rest:
        return can_go_on(rules, text)
    return any(can_go_on(rules, text + char) for char in CHARACTERS if char.encode().startswith(rest))


@pytest.mark.slow
@MANY
@given(GRAMMARS, st.randoms(use_true_random=False))
def test_masks_are_those_of_brute_force(rules: Rules, rng: random.Random) -> None:
    source = written(rules, rng)
    found = compiled_or_empty(rules, source, PIECES)
    if found is None:
        return
    matcher, data = found.matcher(), b""
    for _ in range(5):
        row = np.zeros(PIECES.words, np.int32)
        matcher.fill_mask(row)
        mask = np.unpackbits(row.view(np.uint8), bitorder="little")[: PIECES.size].astype(bool).tolist()
        text, rest = split(data)
        expected = [bool(token) and may_follow(rules, data + token) for token in PIECES.token_bytes]
        expected[END] = not rest and matches(rules, text)
        assert mask == expected, (source, data)
        assert matcher.is_accepting() == expected[END]
        forced = matcher.forced_bytes()
        assert not forced or all(not may_follow(rules, data + byte) for byte in FIRST - {forced[:1]})
        allowed = [token_id for token_id, may in enumerate(mask) if may and token_id != END]
        refused = [token_id for token_id, may in enumerate(mask) if not may]
        assert not any(map(matcher.accept, refused)), (source, data)
        if not allowed:
            break
        token_id = rng.choice(allowed)
        copy = matcher.copy()
        assert matcher.accept(token_id)
        matcher.rollback(1)
        assert (matcher.mask() == copy.mask()).all()
        assert matcher.accept(token_id)
        data += PIECES.token_bytes[token_id]


# What the two notations' own documents and tests say, in our words: a grammar, texts that it allows, and others.

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
# of any kind
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws   # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
RIGHT = r"""
root ::= array | text
array ::= "[" ("" | ws any (ws "," ws any)*) ws "]"
any ::= array | text
text ::= (([\"] rest [\"]))
rest ::= "" | [^"\\\r\n] rest | "\\" ["\\/bfnrt] rest
ws ::= [ \n\t]*
"""
TABLE: list[tuple[str, str, list[str], list[str]]] = [
    ("repeated rules", "root ::= r r\nr ::= [a-z]+", ["ab", "abc"], ["", "a", "a1"]),
    ("an end in the middle", 'root ::= [a-z]* "end"', ["end", "endend", "xendyend"], ["en", "ende"]),
    ("arithmetic", ARITHMETIC, ["1+2=3\n", "a_1 *(b -2) = c\n1=1\n", "x =\ty\n"], ["1+2=3", "=\n", "1+=2\n"]),
    (
        "json",
        JSON,
        ['{"a": [1, -2.5e+1, "\\u00e9é"], "b": {}}', '{"" :null}'.replace(" ", "")],
        ["[1]", '{"a":01}'],
    ),
    ("right recursion", RIGHT, ['["a\\n", [ ], [["é"]]]', '"' + "long " * 400 + '"'], ['["a]', '["a",]']),
    ("choices", 'root ::= "Hello" | "Hi" | "Hey"', ["Hello", "Hi", "Hey"], ["H", "Hell", "HiHey"]),
    ("escapes", r'root ::= "\x41\u00e9\U0001F600\n\t\r\"\\\[\]\/"', ['Aé😀\n\t\r"\\[]/'], ["A"]),
    ("quotes", "root ::= 'it\\'s' \" \" '\"'", ["it's \""], ["it's"]),
    (
        "classes",
        r"root ::= [a-cx-z] [-A] [A-] [^\]\\] [\--\]] [.]",
        ["a-Ab[.", "z--\n-."],
        ["d-Ab[.", "a-A]-.", "a-Ab-x"],
    ),
    ("negated", "root ::= [^0-9\\n]+", ["世界 é", "a"], ["", "a1", "a\n"]),
    ("any character", "root ::= . .", ["\né", "😀a"], ["a", "abc"]),
    ("other scripts", "root ::= [а-яё]+ [一-龥] [😀-😿]*", ["ёя中", "а龥😀😃"], ["中", "aя中", "я中🌍"]),
    ("counts", 'root ::= x {2, 3}\nx ::= ("a" | [bc] {4,})', ["aaa", "abcbc", "bcbcbcbcbcbcbcb"], ["d", "aaaa"]),
    (
        "many",
        'root ::= "x"{129} [0-9]{0,2048} "y"{3,}',
        ["x" * 129 + "0" * 2048 + "yyy"],
        ["x" * 129 + "0" * 2049 + "yyy"],
    ),
    (
        "counts of counts",
        'root ::= row{150}\nrow ::= "(" [a-c]{130} ")"',
        [("(" + "abc" * 43 + "a)") * 150],
        ["(" * 150],
    ),
    (
        "of the empty text",
        'root ::= x{2,3} "d"?\nx ::= ("a" | [bc]{4,}) | ""',
        ["", "d", "a", "aaad"],
        ["aaaa", "bc"],
    ),
    ("printed counts", 'root ::= "a"{2, -1} "b"{0}', ["aa", "aaaa"], ["a", "aab"]),
    ("layout", '\n\nroot::="a"  "b" ("c""d"\n"e") |\n\n"f" | "g"\n', ["abcde", "f", "g"], ["ab"]),
    (
        "alternatives below",
        'root ::= "a" # one\n  | "b" #two\n  | x\nx ::= | "c" | ("d" |)',
        ["a", "b", "", "c", "d"],
        ["ab"],
    ),
    ("nothing", 'root ::= "a" ( ) x\nx ::= ( )', ["a"], ["", "aa"]),
    ("names", 'root ::= a-b c_d E.f 1st\na-b ::= "1"\nc_d ::= "2"\nE.f ::= "3"\n1st ::= "4"', ["1234"], ["12"]),
    ("both recursions", 'root ::= root "b" | "a" root | "c"', ["c", "aacbb", "acb"], ["ab", "bca"]),
    (
        "mutual recursion",
        'root ::= "a" x\nx ::= "b" root | "c" y | ""\ny ::= "d" x',
        ["a", "aba", "abacdcd"],
        ["ab", "acdb"],
    ),
    ("brackets", 'root ::= x\nx ::= "{" y | ""\ny ::= root "}"', ["", "{}", "{{{}}}"], ["{", "{}{}", "{{}"]),
    ("names of names", 'root ::= x* y*\nx ::= z\nz ::= x | "a"\ny ::= w\nw ::= y', ["", "aa"], ["b"]),
    ("ambiguous", 'root ::= root root | "a" | "" | [ab]*', ["", "abab", "a" * 50], ["c"]),
    ("a way that never ends", 'root ::= x | y\nx ::= "a" x\ny ::= "a" "b"', ["ab"], ["a", "aab"]),
    ("rules of no use", 'root ::= "a"\nunused ::= other "b"\nother ::= unused', ["a"], ["b"]),
    ("carriage returns", 'root ::= "a"\r\n  x # y\r\nx ::= "b"\r\n', ["ab"], ["a"]),
    ("long words in a repeat", 'root ::= ([a-z]+ | " ")*', ["", "a" * 3000, " a"], ["A"]),
    ("repeats of repeats", 'root ::= (("a"*)*)*', ["", "a" * 3000], ["b"]),
    (
        "a long choice",
        "root ::= " + " | ".join(f'"word {i}"' for i in range(3000)),
        ["word 0", "word 2999"],
        ["word", "word 3000"],
    ),
]


@pytest.mark.parametrize(("source", "allowed", "others"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_grammars_allow_what_they_say(source: str, allowed: list[str], others: list[str]) -> None:
    found = compiled(source)
    for text in allowed:
        assert accepts(found, text), text
    for text in others:
        assert not accepts(found, text), text


BAD: list[tuple[str, str]] = [
    ('root ::= "a" "', r'line 1, column 14: this text is not closed by "'),
    ("root ::= [a\n]", "line 1, column 10: this class is not closed"),
    (r'root ::= "\@"', r"line 1, column 11: there is no escape \\@"),
    (r'root ::= "\uFF"', r"line 1, column 11: \\u needs four hexadecimal digits"),
    (r'root ::= "\U00110000"', "beyond the last character"),
    (r'root ::= "\ud83d"', "half of a character"),
    (r"root ::= [\d]", r"there is no escape \\d"),
    ('::= "a"', "line 1, column 1: a rule such as name ::="),
    ("root ::= b", "line 1, column 10: there is no rule b"),
    ('root ::= digits\ndigit ::= "1"', "line 1, column 10: there is no rule digits \\(did you mean 'digit'"),
    ('root ::= "a" |', "line 1, column 14: nothing follows this |"),
    ('root ::=\nx ::= "a"', "line 1, column 6: the rule root is empty"),
    ("root ::= [Z-A]", "the range Z-A ends before it begins"),
    ("root ::= []", "matches no character"),
    ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice, first in line 1"),
    ('a ::= "a"', "no rule named root"),
    ('root ::= "a" b ::= "c"', "line 1, column 14: the rule b must begin on a line of its own"),
    ('root ::= "a"++', "line 1, column 14: \\+ follows \\+"),
    ('root ::= "a"{1,3}{1,3}', "line 1, column 18"),
    ('root ::= * "a"', "line 1, column 10: \\* follows nothing"),
    ('root ::= "a"{3,2}', "ends below where it begins"),
    ('root ::= "a"{,2}', "is expected, not {,2}"),
    ('root ::= ("a"', "line 1, column 10: this parenthesis is not closed"),
    ('root ::= "a")', "line 1, column 13: this parenthesis closes none"),
    ('root ::= "a" (="b")', "line 1, column 14: look-ahead"),
    ('root ::= x\nx[max_tokens=5] ::= "b"', "line 2, column 2: rules have no attributes"),
    ('root ::= TagDispatch(\n  ("<a>", b),\n  loop=true\n)\nb ::= "b"', "TagDispatch\\(…\\) is not supported"),
    ('root ::= "a" |\n  Regex("[0-9]{2}", json=false)', "line 2, column 19: Regex.* regex="),
    ('root ::= Token(5) "b"', "Token.* write the text of the tokens"),
    ('root ::= "a" ( = "b" "c")', "line 1, column 14: look-ahead"),
    ("root ::= <think> .", "line 1, column 10: tokens of the vocabulary"),
    ("root ::= !<[12]>", "tokens of the vocabulary"),
    ('root ::= TagDispatch(("a", b))', "TagDispatch\\(…\\) is not supported"),
    ('root[max_tokens=3] ::= "a"', "rules have no attributes"),
    ("root ::= [a-z] - [x]", "there are no exceptions"),
    ('root := "a" ::=', "rules are written name ::="),
    ('root ::= "a" root', "no text at all"),
    ("root ::= x\nx ::= y\ny ::= x", "no text at all"),
]


@pytest.mark.parametrize(("source", "message"), BAD)
def test_malformed_grammars_are_refused_where_they_are_wrong(source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(source)


HUGE: dict[str, str] = {
    "source": 'root ::= "' + "a" * 3_700_000 + '"',
    "rules": 'root ::= "a"\n' + "\n".join(f'r{i} ::= "b"' for i in range(20_000)),
    "symbols": "root ::= " + "root " * 150_000,
    "parentheses": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "repeats": 'root ::= ("a"{1000}){1000}',
    "a repeat": 'root ::= "a"{0,1000000000000}',
    "one text": 'root ::= "' + "a" * 200_000 + '"',
    "classes": "root ::= " + " | ".join(f'[^{chr(0x4E00 + i)}] "{i}"' for i in range(5_000)),
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_grammars_that_are_too_large_are_refused(source: str) -> None:
    with pytest.raises(GrammarTooLarge):
        compiled(source)


def test_rules_within_rules_end_no_process() -> None:
    """llguidance calls itself for each, and an ordinary stack holds 3,000."""
    chain = "\n".join(f'r{i} ::= "x" r{i + 1} "y" | "z"' for i in range(4_000))
    found = compiled(f'root ::= r0\n{chain}\nr4000 ::= "z"')
    assert accepts(found, "x" * 100 + "z" + "y" * 100)
    lark = "\n".join(f'r{i}: "x" r{i + 1} "y" | "z"' for i in range(4_000))
    assert accepts(compiled(f'start: r0\n{lark}\nr4000: "z"'), "xzy")
    with pytest.raises(GrammarTooLarge):
        compiled("start: " + "(" * 50_000 + '"a"' + ")" * 50_000)


def test_a_mask_that_takes_too_much_is_an_error_and_the_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ebnf._LIMITS, "step_max_items", 1000)
    long = [bytes(97 + (i * i * j + i) % 8 for i in range(120)) for j in range(200)]
    found = compiled('root ::= root root root | [a-h] | "" | "x"', Vocabulary([b"", b"x", *long], eos_ids=[0]))
    matcher = found.matcher()
    assert matcher.accept_bytes(b"x")
    with pytest.raises(GrammarTooLarge, match="too many readings"):
        matcher.mask()
    assert matcher.is_accepting()
    assert matcher.accept_bytes(b"xa")
    matcher.rollback(2)
    assert not matcher.accept_bytes(b"y")
    assert matcher.accept_bytes(b"ax")


def test_a_token_that_takes_too_much_is_an_error_and_the_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ebnf._LIMITS, "max_items_in_row", 40)
    matcher = compiled(
        'root ::= root root root | [a-h] | "" | "x"', Vocabulary([b"", b"x", b"a" * 99], [0])
    ).matcher()
    assert matcher.accept(1)
    with pytest.raises(GrammarTooLarge, match="too many readings"):
        matcher.accept(2)
    assert not matcher.accept_bytes(b"a" * 99)
    assert matcher.is_accepting()
    assert matcher.accept(1)


def test_a_mask_or_a_token_that_takes_too_long_is_an_error_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock of the thread. What failed is not read again before somebody asks for more of it."""
    matcher = compiled('root ::= "xa" | "xb" root', Vocabulary([b"", b"x", b"a"], [0])).matcher()
    assert matcher.accept(1)
    ticks = itertools.count()
    monkeypatch.setattr(ebnf, "thread_time", lambda: 1.1 * ebnf._MOST_SECONDS * next(ticks))
    with pytest.raises(GrammarTooLarge, match="too many readings"):
        matcher.mask()
    with pytest.raises(GrammarTooLarge, match="too many readings"):
        matcher.accept(2)
    monkeypatch.undo()
    assert bits(matcher.mask())[2]
    assert matcher.accept(2)
    assert matcher.is_accepting()
    monkeypatch.setitem(ebnf._LIMITS, "step_max_items", 1)
    failed = compiled('root ::= [a-z]+ "x"', Vocabulary([b"", b"x", b"abcdefgh"], [0])).matcher()
    with pytest.raises(GrammarTooLarge, match="too many readings"):
        failed.mask()
    assert failed._current is None


def test_lark_keeps_its_own_meaning_and_never_raises_on_text() -> None:
    stopped = compiled('start: r "c"\nr[stop="b"]: /[a-z]*/').matcher()
    assert not stopped.accept_bytes(b"abbc")
    assert stopped.accept_bytes(b"abc")
    assert stopped.is_accepting()
    stopped.rollback(1)
    assert not stopped.is_accepting()
    assert [stopped.accept_bytes(bytes([byte])) for byte in b"abc"] == [True] * 3
    greedy = compiled("start: r r\nr: /[a-z]+/")  # a lexeme is as long as it can be
    assert not accepts(greedy, "ab")
    assert accepts(compiled('start: "::=" /x+/'), "::=xx")


EXCLUSIVE = "\n".join(f"{name}: /.*{name.lower()}.{{{number}}}/" for number, name in enumerate("ABCD", 15))
HOSTILE: dict[str, str] = {
    "endless": f"start: T\nT: A & B & C & ~D\n{EXCLUSIVE}",  # keeps llguidance for minutes, out of reach of a check
    "lark repeats": 'start: (("a"{1000}){1000}){1000}',
    "lark alternatives": "start: " + " | ".join(f'"w{i}"' for i in range(9_000)),
    "repeats": 'root ::= (("a"{0,1000}){0,1000}){0,1000}',
    "ambiguous": 'root ::= e "c"\ne ::= e e | . e . | .',
    "chain": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "x" r{i + 1} "y" | "z"' for i in range(4_000))
    + '\nr4000 ::= "z"',
    "counters": "root ::= (" + " | ".join(f'"a"{{0,{i}}}' for i in range(1, 300)) + ")*",
}


def test_hostile_grammars_end_in_time_and_others_go_on() -> None:
    service = CompileService(PIECES, deadline=3.0, num_threads=1)
    try:
        for source in HOSTILE.values():
            try:
                matcher = service.submit(make_constraint({"ebnf": source})).result(PATIENCE).matcher()
                for _ in range(10):
                    assert matcher.accept(int(np.flatnonzero(bits(matcher.mask()))[-1]))
                    assert len(matcher.forced_bytes()) <= 4096
            except GrammarError:
                continue
        service.deadline = PATIENCE
        plain = service.submit(make_constraint({"ebnf": 'root ::= "a"'})).result(PATIENCE)
        assert accepts(plain, "a")
        lark = service.submit(make_constraint({"ebnf": 'start: "a"'})).result(PATIENCE)
        assert accepts(lark, "a")
    finally:
        service.close()


def bits(row: Any) -> Any:
    return np.unpackbits(row.view(np.uint8), bitorder="little")


def test_tokens_without_bytes_are_never_allowed() -> None:
    matcher = compiled("start: <[0-3]> start | /a+/", PIECES).matcher()
    assert [token_id for token_id in range(PIECES.size) if bits(matcher.mask())[token_id]] == [0, 1, 3, 9]


def test_what_follows_for_certain_is_known() -> None:
    matcher = compiled('root ::= "é, " ("ab" | "ac") [^x]', PIECES).matcher()
    assert matcher.forced_bytes() == "é, a".encode()
    assert matcher.accept_bytes("é, ab".encode())
    assert matcher.forced_bytes() == b""
