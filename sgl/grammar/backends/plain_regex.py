"""Regexes of our dialects, rewritten in the few signs that all engines read alike.

`\\d` is ASCII here and Unicode there, lazy quantifiers change some automata, and escapes differ. So classes become
lists of characters, and everything else groups and counts.
"""

from __future__ import annotations

from collections.abc import Sequence as Texts

from sgl.errors import GrammarError
from sgl.grammar.regular.charset import ESCAPED, EVERY_CHAR, CharSet, negate, union_of
from sgl.grammar.regular.syntax import Chars, Choice, Dialect, End, Node, Repetition, Sequence, Start, parse

NOTHING = r"[^\s\S]"
"""A class that holds no character."""
_SHORT_ESCAPES = {code: escape.decode() for code, escape in ESCAPED.items() if len(escape) == 2}
# Left out, bare and escaped: outlines-core's own strings cannot hold them.
_CONTROLS: CharSet = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x9F))


def refusal(backend: str, feature: str) -> GrammarError:
    """The error for a feature that a backend lacks or gets wrong."""
    return GrammarError(f'grammar_backend "{backend}" cannot enforce {feature}; grammar_backend "sgl" may')


def would_be_rounded(value: object) -> bool:
    """Whether libraries that read a number as a double, or its last digits carelessly, would change it."""
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return abs(value) > 2**53 and (type(value) is int or abs(value) > 1e22)
    return isinstance(value, float) and len(repr(value).split("e")[0].strip("-0.").replace(".", "")) > 15


def plain_regex(
    pattern: str, backend: str, dialect: Dialect = "python", *, search: bool = False, json: bool = False
) -> str:
    """A plain regex, matched in full, of the texts that the pattern matches somewhere (`search`) or in full. With
    `json`, of their JSON texts without quotes and without control characters that have no short escape. Raises
    RegexSyntaxError, and GrammarError for assertions within it."""
    tree = parse(pattern, dialect)
    any_text = "" if not search else f"{_class(EVERY_CHAR, json=json)}*"
    found = []
    for option in tree.options if isinstance(tree, Choice) else (tree,):
        parts = list(option.parts) if isinstance(option, Sequence) else [option]
        before, behind = any_text, any_text
        while parts and isinstance(parts[0], Start):
            del parts[0]
            before = ""
        while parts and isinstance(parts[-1], End):
            if search and parts[-1].before_newline:
                raise refusal(backend, "$ before a line break")
            del parts[-1]
            behind = ""
        found.append(before + "".join(_text(part, backend, json=json) for part in parts) + behind)
    return f"(?:{'|'.join(found)})"


def regex_of_choices(texts: Texts[str]) -> str:
    """A regex of just these texts."""
    return f"(?:{'|'.join(map(literal, dict.fromkeys(texts)))})"


def literal(text: str) -> str:
    """A regex of one text."""
    return "".join([_char(ord(char)) for char in text])


def _text(node: Node, backend: str, *, json: bool) -> str:
    match node:
        case Chars(chars):
            return _class(chars, json=json)
        case Sequence(parts):
            return f"(?:{''.join(_text(part, backend, json=json) for part in parts)})"
        case Choice(options):
            return f"(?:{'|'.join(_text(option, backend, json=json) for option in options)})"
        case Repetition(body, low, high):
            counts = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
            return f"(?:{_text(body, backend, json=json)}){counts}"
        case _:
            raise refusal(backend, "look-ahead and anchors within a regex")


def _class(chars: CharSet, *, json: bool) -> str:
    if not json:
        return _set(chars)
    escapes = [
        literal(escape)
        for code, escape in _SHORT_ESCAPES.items()
        if any(first <= code <= last for first, last in chars)
    ]
    bare = negate(union_of(negate(chars), _CONTROLS))
    return f"(?:{'|'.join([*([_set(bare)] if bare or not escapes else []), *escapes])})"


def _set(chars: CharSet) -> str:
    if chars == EVERY_CHAR:
        return r"[\s\S]"
    if not chars:
        return NOTHING
    # Some engines write out a range character by character: what holds the last one is written by what it lacks.
    is_negated = chars[-1][1] == EVERY_CHAR[-1][1]
    ranges = (
        _char(first) if first == last else f"{_char(first)}-{_char(last)}"
        for first, last in (negate(chars) if is_negated else chars)
    )
    return f"[{'^' if is_negated else ''}{''.join(ranges)}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if code >= 0x80 or char.isalnum() else f"\\x{code:02x}"
