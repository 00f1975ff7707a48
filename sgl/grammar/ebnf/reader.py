"""Reads EBNF as llama.cpp (GBNF) and XGrammar write it: one character is one terminal, there is no lexer.

    # a comment
    root   ::= "[" (number ("," number)*)? "]"
    number ::= [0-9]{1,3} | "\\x41" [^"\\n] .

It knows the notation and reports lines and columns; `cfg.py` knows what the rules mean together.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from sgl.errors import GrammarError, nearest_name
from sgl.grammar.ebnf.cfg import Cfg
from sgl.grammar.regular import charset
from sgl.grammar.regular.charset import CharSet
from sgl.time_limit import check_size, check_time

MAX_SOURCE = 1 << 20
"""Characters that a grammar may have."""
MAX_DEPTH = 500
"""Parentheses within parentheses."""
MAX_REPEATS = 1_000_000
"""The largest bound of `{m,n}`."""
_ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    |(?P<assign>::=)
    |(?P<name>[A-Za-z0-9_-](?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_]))*)
    |(?P<text>"(?:[^"\\\r\n]|\\[^\r\n])*"|'(?:[^'\\\r\n]|\\[^\r\n])*')
    |(?P<chars>\[(?:[^\]\\\r\n]|\\[^\r\n])*\])
    |(?P<times>\{[^{}\r\n]*\})
    |(?P<ahead>\([ \t\r\n]*=)
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}
_ITSELF = frozenset("\\\"'/?[]^-$.*+(){}|")  # characters that a backslash escapes to themselves
_TIMES = re.compile(r"\{\s*(\d+)\s*(,\s*(\d+|-1)?\s*)?\}")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MACRO = re.compile(r"\b(TagDispatch|Token|ExcludeToken|TokenTagDispatch|Regex|Substring)[ \t]*\(")
_CHECK_EVERY = 1024  # tokens


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Open(NamedTuple):
    """A rule or a parenthesis that is not closed yet."""

    at: int
    alternatives: list[tuple[int, ...]]


def read_ebnf(source: str) -> Cfg:
    """The rules, the first of which is `root`. Raises GrammarError with line and column, and GrammarTooLarge."""
    check_size(len(source), MAX_SOURCE, "the grammar has more than {} characters")
    return _Reader(source).read()


class _Reader:
    """Reads one grammar, left to right, without recursion."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = self._split()
        self._next = 0
        self._cfg = Cfg()
        self._rules: dict[str, int] = {}
        self._defined: dict[str, int] = {}  # where
        self._used: dict[str, int] = {}  # where first
        self._open: list[_Open] = []
        self._sequence: list[int] = []

    def read(self) -> Cfg:
        root = self._rule_named(_ROOT)
        assert root == 0, "the start symbol comes first"
        while (token := self._take()).kind != "end":
            if token.kind != "name" or self._peek().kind != "assign":
                if self._peek().kind == "chars" and self._tokens[self._next + 1].kind == "assign":
                    self._fail(self._peek(), "rules have no attributes")
                self._fail(token, f"a rule such as name ::= … is expected, not {_shown(token)}")
            self._read_rule(token)
        if _ROOT not in self._defined:
            hint = nearest_name(_ROOT, self._defined)
            raise GrammarError(f"the grammar has no rule named {_ROOT}, with which texts begin{hint}")
        for name, at in self._used.items():
            if name not in self._defined:
                self._fail_at(at, _undefined(name, self._defined))
        return self._cfg

    def _read_rule(self, name: _Token) -> None:
        if name.text in self._defined:
            line, _ = self._place(self._defined[name.text])
            self._fail(name, f"the rule {name.text} is defined twice, first in line {line}")
        if self._source[self._source.rfind("\n", 0, name.at) + 1 : name.at].strip():
            self._fail(name, f"the rule {name.text} must begin on a line of its own")
        self._defined[name.text] = name.at
        assign = self._take()
        rule = self._rule_named(name.text)
        self._open, self._sequence = [_Open(name.at, [])], []
        if self._is_end_of_rule():
            self._fail(assign, f'the rule {name.text} is empty; the empty text is written ""')
        while not self._is_end_of_rule():
            self._read_element(self._take())
        if len(self._open) > 1:
            self._fail_at(self._open[-1].at, "this parenthesis is not closed")
        last = self._tokens[self._next - 1]
        if last.text == "|":
            self._fail(last, 'nothing follows this |; the empty text is written ""')
        self._cfg.rules[rule] = [*self._open[0].alternatives, tuple(self._sequence)]

    def _read_element(self, token: _Token) -> None:
        match token.kind:
            case "text":
                codes = self._codes(token)
                symbols = [self._cfg.terminal(((code, code),)) for _, code in codes]
                self._append(symbols[0] if len(symbols) == 1 else self._cfg.rule([tuple(symbols)]))
            case "chars":
                self._append(self._cfg.terminal(self._class(token)))
            case "name":
                self._used.setdefault(token.text, token.at)
                if _MACRO.match(self._source, token.at) and token.text not in self._defined:
                    self._fail(token, _no_macro(token.text))
                self._append(self._rule_named(token.text))
            case "ahead":
                self._fail(token, "look-ahead (=…) is not supported")
            case "times":
                self._fail(token, f"{token.text} follows nothing that it could repeat")
            case "mark":
                self._read_mark(token)
            case "assign":
                before, last = self._tokens[max(self._next - 3, 0)], self._tokens[max(self._next - 2, 0)]
                if before.kind == "name" and last.kind == "chars":
                    self._fail(last, "rules have no attributes")
                self._fail(token, "::= follows no name of a rule")
            case _:
                self._fail(token, f"an element is expected, not {_shown(token)}")

    def _read_mark(self, token: _Token) -> None:
        match token.text:
            case ".":
                self._append(self._cfg.terminal(charset.EVERY_CHAR))
            case "(":
                self._open.append(_Open(token.at, [tuple(self._sequence)]))  # what stands before it, for later
                check_size(len(self._open) - 1, MAX_DEPTH, "parentheses are nested more than {} deep")
                self._sequence = []
            case ")":
                if len(self._open) < 2:
                    self._fail(token, "this parenthesis closes none")
                before, *alternatives = self._open.pop().alternatives
                group = self._cfg.add([*alternatives, tuple(self._sequence)])
                self._sequence = [*before]
                self._append(group)
            case "|":
                self._cfg.check_size(1)
                self._open[-1].alternatives.append(tuple(self._sequence))
                self._sequence = []
            case _:
                self._fail(token, f"{token.text} follows nothing that it could repeat")

    def _append(self, symbol: int) -> None:
        """Add a symbol, with the count behind it, to the sequence."""
        self._cfg.check_size(1)
        token = self._peek()
        if token.text in _COUNTS and token.kind == "mark":
            self._take()
            symbol = self._cfg.repeated(symbol, *_COUNTS[token.text])
        elif token.kind == "times":
            symbol = self._cfg.repeated(symbol, *self._times(self._take()))
        else:
            self._sequence.append(symbol)
            return
        after = self._peek()
        if (after.text in _COUNTS and after.kind == "mark") or after.kind == "times":
            self._fail(after, f"{after.text} follows {token.text}: put parentheses around what it repeats")
        self._sequence.append(symbol)

    def _times(self, token: _Token) -> tuple[int, int | None]:
        found = _TIMES.fullmatch(token.text)
        if found is None:
            self._fail(token, f"{{m}}, {{m,}} or {{m,n}} is expected, not {token.text}")
        few, comma, many = found.groups()
        least = int(few) if len(few) <= 9 else MAX_REPEATS + 1
        most = None if comma and many in (None, "-1") else least if not comma else int(many[:10])
        check_size(max(least, most or 0), MAX_REPEATS, "an element is repeated more than {} times")
        if most is not None and most < least:
            self._fail(token, f"{token.text} ends below where it begins")
        return least, most

    def _class(self, token: _Token) -> CharSet:
        codes = self._codes(token)
        is_negated = token.text[1] == "^"
        ranges: list[tuple[int, int]] = []
        at = 1 if is_negated else 0
        while at < len(codes):
            first = last = codes[at][1]
            if at + 2 < len(codes) and codes[at + 1] == ("-", ord("-")):
                last = codes[at + 2][1]
                at += 2
            if last < first:
                shown = f"{codes[at - 2][0]}-{codes[at][0]}"
                self._fail(token, f"the range {shown} ends before it begins")
            ranges.append((first, last))
            at += 1
        chars = charset.normalise(ranges)
        chars = charset.negate(chars) if is_negated else chars
        if not chars:
            self._fail(token, f"{token.text} matches no character")
        return chars

    def _codes(self, token: _Token) -> list[tuple[str, int]]:
        """The characters of a text or a class, as written and as they are."""
        codes, inside, at = [], token.text[1:-1], 0
        while at < len(inside):
            char = inside[at]
            code = ord(char)
            if char == "\\":
                found = _ESCAPE.match(inside, at)
                assert found is not None, "a token ends in no backslash"
                char = found[0]
                code = self._escaped(char, token, at + 1)
            if 0xD800 <= code <= 0xDFFF and token.kind == "text":
                self._fail_at(token.at + at + 1, f"{char!r} is half of a character; write it whole, as \\UHHHHHHHH")
            codes.append((char, code))
            at += len(char)
        return codes

    def _escaped(self, escape: str, token: _Token, offset: int) -> int:
        kind = escape[1]
        if len(escape) > 2:
            code = int(escape[2:], 16)
            if code > charset.MAX_CHAR:
                self._fail_at(token.at + offset, f"{escape} is beyond the last character, \\U0010FFFF")
            return code
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind in _ITSELF:
            return ord(kind)
        if kind in "xuU":
            what = {"x": "two", "u": "four", "U": "eight"}[kind]
            self._fail_at(token.at + offset, f"\\{kind} needs {what} hexadecimal digits")
        return self._fail_at(token.at + offset, f"there is no escape {escape}; a backslash is written \\\\")

    def _rule_named(self, name: str) -> int:
        if name not in self._rules:
            self._rules[name] = self._cfg.rule([])
        return self._rules[name]

    def _is_end_of_rule(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "name" and self._tokens[self._next + 1].kind == "assign")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        self._next += 1
        if self._next % _CHECK_EVERY == 0:
            check_time()
        return self._tokens[self._next - 1]

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while at < len(self._source):
            if len(tokens) % _CHECK_EVERY == 0:
                check_time()
            found = _TOKEN.match(self._source, at)
            if found is None:
                self._fail_at(at, self._unreadable(at))
            kind = found.lastgroup
            assert kind is not None, "all of the pattern is named"
            if kind != "space":
                tokens.append(_Token(kind, found[0], at))
            at = found.end()
        return [*tokens, _Token("end", "the end of the grammar", at)]

    def _unreadable(self, at: int) -> str:
        """The error where no token begins."""
        char = self._source[at]
        rest = self._source[at : at + 2]
        rule = self._source.rfind("::=", 0, at) + 1
        macro = _MACRO.search(self._source, rule, at) if rule else None
        if macro is not None:
            return _no_macro(macro[1])
        if char in "\"'":
            return f"this text is not closed by {char} in its line"
        if char == "[":
            return "this class is not closed by ] in its line"
        if char == "{":
            return "this { is not closed by } in its line"
        if rest[0] == "<" or rest == "!<":
            return "tokens of the vocabulary (<…>) are not supported: write their text"
        if char == "/":
            return "/ means nothing here; comments begin with #, and regular expressions are regex="
        if char in ":=":
            return f"{char} means nothing here; rules are written name ::= …"
        return f"{char!r} means nothing here"

    def _place(self, at: int) -> tuple[int, int]:
        before = self._source[:at]
        return before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1

    def _fail(self, token: _Token, message: str) -> NoReturn:
        self._fail_at(token.at, message)

    def _fail_at(self, at: int, message: str) -> NoReturn:
        line, column = self._place(at)
        raise GrammarError(f"the grammar cannot be read: line {line}, column {column}: {message}")


def _undefined(name: str, defined: dict[str, int]) -> str:
    if set(name) == {"-"}:
        return "- means nothing here: there are no exceptions, classes are negated as [^…]"
    return f"there is no rule {name}{nearest_name(name, defined)}"


def _no_macro(name: str) -> str:
    instead = {
        "TagDispatch": "structural_tag holds text to what follows a tag",
        "Regex": "write its rules, or give it as regex=",
        "Substring": "write its alternatives",
    }
    return f"{name}(…) is not supported here: {instead.get(name, 'write the text of the tokens')}"


def _shown(token: _Token) -> str:
    return token.text if len(token.text) <= 40 else f"{token.text[:37]}…"
