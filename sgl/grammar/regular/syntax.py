"""A parser of regexes: from a pattern to a small tree of character sets, repeats and assertions.

The dialects "ecma" (JSON Schema's `pattern`) and "python" (`re` with re.ASCII) differ in `.`, `\\s`, `$`, case and a
few escapes. Features that no automaton expresses are refused by name: back-references, look-behind, word boundaries,
atomic groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from sgl.errors import RegexSyntaxError
from sgl.grammar.regular import charset
from sgl.grammar.regular.charset import CharSet

Dialect = Literal["ecma", "python"]
MAX_NESTING: Final = 150
MAX_PATTERN_LEN: Final = 100_000


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of the set."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """The body from `low` to `high` times (None: without end)."""

    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Start:
    """The start of the text."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the text, or, as Python's `$`, before a line break at its end."""

    before_newline: bool


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What follows matches the body, or must not."""

    body: Node
    is_negative: bool


Node = Chars | Sequence | Choice | Repetition | Start | End | LookAhead

_DIGIT: Final = ((0x30, 0x39),)
_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_PYTHON_SPACE: Final = ((0x09, 0x0D), (0x20, 0x20))
_ECMA_SPACE: Final = charset.union_of(
    _PYTHON_SPACE, charset.of("\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_REFUSED: Final = {
    "b": "the word boundary \\b",
    "B": "the word boundary \\B",
    "G": "the anchor \\G",
    "k": "a back-reference",
    "K": "the reset \\K",
    "X": "the grapheme class \\X",
    "R": "the line break class \\R",
}
_REFUSED_GROUPS: Final = {
    "<=": "look-behind",
    "<!": "look-behind",
    ">": "an atomic group",
    "(": "a conditional group",
    "P=": "a back-reference",
}
_COUNTS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_QUANTIFIER: Final = re.compile(r"([*+?])|\{(\d*)(,?)(\d*)\}", re.ASCII)
_GROUP_NAME: Final = re.compile(r"([^\W\d]\w*)>")
_COMMENT: Final = re.compile(r"([^)]*)\)")
_BRACES: Final = re.compile(r"\{([^}]*)\}")
_BRACED_CODE: Final = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")
_HEX: Final = re.compile("[0-9A-Fa-f]*")


def parse(pattern: str, dialect: Dialect) -> Node:
    """The tree of a pattern. Raises RegexSyntaxError with the position of the fault."""
    if len(pattern) > MAX_PATTERN_LEN:
        raise RegexSyntaxError(
            f"the pattern has {len(pattern)} characters and {MAX_PATTERN_LEN} is the limit", pattern=pattern[:100]
        )
    return _Parser(pattern, dialect).parse()


class _Parser:
    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.position = 0
        self.is_ecma = dialect == "ecma"
        self.ignore_case = False
        self.dot_all = False
        self.nesting = 0

    def parse(self) -> Node:
        node = self.choice()
        if self.position < len(self.pattern):
            self.fail("an unmatched )")
        return node

    def fail(self, what: str, position: int | None = None) -> NoReturn:
        at = self.position if position is None else position
        shown = self.pattern if len(self.pattern) <= 200 else self.pattern[:200] + "…"
        raise RegexSyntaxError(f"{what} at position {at} of the regex {shown!r}", pattern=self.pattern, position=at)

    def refuse(self, what: str, position: int) -> NoReturn:
        self.fail(f"{what} cannot be expressed as an automaton", position)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.position += len(text)
            return True
        return False

    def expect(self, form: re.Pattern[str], otherwise: str, at: int) -> str:
        """The first group of a form that must follow."""
        found = form.match(self.pattern, self.position)
        if found is None:
            self.fail(otherwise, at)
        self.position = found.end()
        return found[1]

    def next(self) -> str:
        if self.position >= len(self.pattern):
            self.fail("the pattern ends too early")
        char = self.pattern[self.position]
        self.position += 1
        return char

    def chars(self, chars: CharSet) -> Node:
        return Chars(self.folded(chars))

    def folded(self, chars: CharSet) -> CharSet:
        return charset.fold_case(chars, ascii_only=not self.is_ecma) if self.ignore_case else chars

    def choice(self) -> Node:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.fail(f"groups are nested deeper than {MAX_NESTING}")
        flags = self.ignore_case, self.dot_all
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.ignore_case, self.dot_all = flags
        self.nesting -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.position < len(self.pattern) and self.pattern[self.position] not in "|)":
            at = self.position
            atom = self.atom()
            if atom is not None:
                parts.append(self.quantified(atom, at))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def atom(self) -> Node | None:
        at = self.position
        if self.quantifier() is not None:
            self.fail("a quantifier has nothing to repeat", at)
        char = self.next()
        if char == "(":
            return self.group(at)
        if char == "[":
            return self.char_class(at)
        if char == ".":
            line_breaks = "\n\r\u2028\u2029" if self.is_ecma else "\n"
            return Chars(charset.EVERY_CHAR if self.dot_all else charset.negate(charset.of(line_breaks)))
        if char == "^":
            return Start()
        if char == "$":
            return End(before_newline=not self.is_ecma)
        if char == "\\":
            if self.position < len(self.pattern) and self.pattern[self.position] in "AZz" and not self.is_ecma:
                return Start() if self.next() == "A" else End(before_newline=False)
            return self.chars(self.escape(in_class=False))
        return self.chars(((ord(char), ord(char)),))

    def quantified(self, atom: Node, at: int) -> Node:
        while True:
            start = self.position
            bounds = self.quantifier()
            if bounds is None:
                return atom
            low, high = bounds
            if high is not None and high < low:
                self.fail("the bounds of a repeat are reversed", start)
            if self.take("+"):
                self.refuse("a possessive quantifier", start)
            self.take("?")  # lazy or greedy: the language is the same
            if isinstance(atom, Start | End) and self.is_ecma:
                self.fail("a quantifier has nothing to repeat", at)
            atom = Repetition(atom, low, high)
            if self.position < len(self.pattern) and self.pattern[self.position] in "*+?":
                self.fail("a quantifier follows a quantifier")

    def quantifier(self) -> tuple[int, int | None] | None:
        """The bounds of a quantifier that comes next; None, with nothing read, if none does."""
        found = _QUANTIFIER.match(self.pattern, self.position)
        if found is None:
            return None
        sign, low, comma, high = found.groups(default="")
        if sign:
            self.position += 1
            return _COUNTS[sign]
        if not low and (self.is_ecma or not high):
            return None
        if len(low) > 9 or len(high) > 9:
            self.fail("the bound of a repeat is too large", self.position + 1)
        self.position = found.end()
        least = int(low or 0)
        return least, (int(high) if high else None) if comma else least

    def group(self, at: int) -> Node | None:
        before = self.ignore_case, self.dot_all
        negative: bool | None = None
        if self.take("?"):
            if self.take("#"):
                self.expect(_COMMENT, "a comment is not closed, which begins", at)
                return None
            for start, what in _REFUSED_GROUPS.items():
                if self.peek(start):
                    self.refuse(what, at)
            if self.take("P<") or self.take("<"):
                self.expect(_GROUP_NAME, "a group's name is malformed", at)
            elif self.take("="):
                negative = False
            elif self.take("!"):
                negative = True
            else:
                self.flags(at)
                if self.take(")"):
                    if before != (self.ignore_case, self.dot_all) and at > 0:
                        self.fail("flags without a colon stand at the start of the pattern", at)
                    return None
                if not self.take(":"):
                    self.fail("a group is not closed, which begins", at)
        body = self.choice()
        self.ignore_case, self.dot_all = before
        if not self.take(")"):
            self.fail("a group is not closed, which begins", at)
        return body if negative is None else LookAhead(body, negative)

    def flags(self, at: int) -> None:
        value = True
        while self.position < len(self.pattern) and self.pattern[self.position] not in ":)":
            flag = self.next()
            if flag == "-":
                value = False
            elif flag == "i":
                self.ignore_case = value
            elif flag == "s":
                self.dot_all = value
            elif flag in "mxLu":
                self.refuse(f"the flag {flag}", at)
            elif flag != "a":
                self.fail(f"an unknown flag {flag!r}", at)

    def char_class(self, at: int) -> Node:
        is_negated = self.take("^")
        found: list[CharSet] = []
        is_first = True
        while True:
            if self.position >= len(self.pattern):
                self.fail("a character class is not closed, which begins", at)
            if self.peek("]") and (self.is_ecma or not is_first):
                self.position += 1
                break
            is_first = False
            low = self.class_atom()
            if self.peek("-") and self.pattern[self.position + 1 : self.position + 2] not in ("]", ""):
                dash = self.position
                self.position += 1
                high = self.class_atom()
                if not (_is_one(low) and _is_one(high)):
                    if not self.is_ecma:
                        self.fail("a class stands at the end of a range", dash)
                    found += [low, charset.of("-"), high]
                    continue
                if low[0][0] > high[0][0]:
                    self.fail("a range is reversed", dash)
                found.append(charset.normalise([(low[0][0], high[0][0])]))
            else:
                found.append(low)
        chars = self.folded(charset.union_of(*found))
        return Chars(charset.negate(chars) if is_negated else chars)

    def class_atom(self) -> CharSet:
        char = self.next()
        return self.escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def escape(self, *, in_class: bool) -> CharSet:
        at = self.position - 1
        char = self.next()
        if char in "dDwWsS":
            space = _ECMA_SPACE if self.is_ecma else _PYTHON_SPACE
            chars: CharSet = {"d": _DIGIT, "w": _WORD, "s": space}[char.lower()]
            return chars if char.islower() else charset.negate(self.folded(chars))
        if char in _CONTROLS:
            return charset.of(_CONTROLS[char])
        if char == "b" and in_class:
            return charset.of("\b")
        if char == "a" and not self.is_ecma:
            return charset.of("\a")
        if char in _REFUSED and not in_class:
            self.refuse(_REFUSED[char], at)
        if char in "pP":
            return self.property_class(at, is_negated=char == "P")
        if char == "x":
            return _one(self.hex_digits(2, at))
        if char == "u":
            return _one(self.unicode_escape(at))
        if char == "U" and not self.is_ecma:
            return _one(self.hex_digits(8, at))
        if char == "c" and self.is_ecma and self.pattern[self.position : self.position + 1].isalpha():
            return _one(ord(self.next()) % 32)
        if char == "0":
            return _one(0)
        if char in "123456789":
            self.refuse("a back-reference", at)
        if char.isascii() and char.isalnum() and not self.is_ecma:
            self.fail(f"an unknown escape \\{char}", at)
        return _one(ord(char))

    def property_class(self, at: int, *, is_negated: bool) -> CharSet:
        is_long = self.peek("{")
        name = self.expect(_BRACES, "a property name does not end", at) if is_long else self.next()
        key, _, value = name.partition("=")
        if value and key.lower() not in ("gc", "general_category"):
            self.refuse(f"the property {name}", at)
        chars = charset.category(value or name)
        if chars is None:
            self.refuse(f"the property {name}", at)
        return charset.negate(chars) if is_negated else chars

    def hex_digits(self, digits: int, at: int) -> int:
        text = self.pattern[self.position : self.position + digits]
        if len(text) < digits or not _HEX.fullmatch(text):
            self.fail(f"an escape needs {digits} hexadecimal digits", at)
        self.position += digits
        return int(text, 16)

    def unicode_escape(self, at: int) -> int:
        if self.peek("{"):
            return int(self.expect(_BRACED_CODE, "an escape \\u{…} is malformed", at), 16)
        code = self.hex_digits(4, at)
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):
            low = self.hex_digits(4, at)
            if not 0xDC00 <= low < 0xE000:
                self.fail("a surrogate stands alone", at)
            return 0x10000 + (code - 0xD800 << 10) + low - 0xDC00
        return code


def _one(code: int) -> CharSet:
    return ((code, code),)


def _is_one(chars: CharSet) -> bool:
    return len(chars) == 1 and chars[0][0] == chars[0][1]
