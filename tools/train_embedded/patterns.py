"""The small pattern language of records.txt and its kin: what a pattern can say, and one random way of saying it.

(a|b) is a choice, [a] and (a)? are optional, {slot} is a value, {slot=x} sets a slot to x without a word, a backslash
makes a parenthesis a plain one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"\\(.)|([(\[|)\]])(\?)?|\{(\w+)(?:=([^}]*))?\}|([^\\()\[\]|{}]+|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a value; with `setting`, a value that is not said."""

    name: str
    setting: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences, or nothing if it is optional."""

    options: tuple[Sequence, ...]
    optional: bool


Sequence = tuple["str | Slot | Choice", ...]


def parse(pattern: str) -> Sequence:
    """The pattern as a tree. Raises ValueError where brackets do not match."""
    tokens = list(_TOKEN.finditer(pattern))
    sequence, position = _sequence(tokens, 0, "")
    if position != len(tokens):
        raise ValueError(f"unbalanced brackets in {pattern!r}")
    return sequence


def _sequence(tokens: list[re.Match[str]], position: int, closing: str) -> tuple[Sequence, int]:
    parts: list[str | Slot | Choice] = []
    while position < len(tokens):
        escaped, bracket, _, slot, setting, literal = tokens[position].groups()
        if bracket in ("(", "["):
            choice, position = _choice(tokens, position + 1, ")" if bracket == "(" else "]")
            parts.append(choice)
            continue
        if bracket == "|" and not closing:
            parts.append("|")
        elif bracket:
            break
        elif slot:
            parts.append(Slot(slot, setting))
        else:
            parts.append(escaped or literal)
        position += 1
    return tuple(parts), position


def _choice(tokens: list[re.Match[str]], position: int, closing: str) -> tuple[Choice, int]:
    options: list[Sequence] = []
    while True:
        option, position = _sequence(tokens, position, closing)
        options.append(option)
        if position >= len(tokens) or tokens[position][2] not in ("|", closing):
            raise ValueError(f"{closing!r} is missing in {tokens[0].string!r}")
        position += 1
        if tokens[position - 1][2] == closing:
            return Choice(tuple(options), closing == "]" or tokens[position - 1][3] is not None), position


def slots_of(sequence: Sequence) -> Iterator[str]:
    """The names of all slots that the pattern may use."""
    for part in sequence:
        if isinstance(part, Slot):
            yield part.name
        elif isinstance(part, Choice):
            for option in part.options:
                yield from slots_of(option)


def say(
    sequence: Sequence,
    rng: random.Random,
    value: Callable[[Slot], str],
    literal: Callable[[str], str] = lambda text: text,
) -> str:
    """One way of saying it. `value` gives each slot's text and is told of settings too; `literal` may change the
    words between them."""
    out = ""
    for part in sequence:
        if isinstance(part, str):
            out += literal(part)
        elif isinstance(part, Choice):
            if not part.optional or rng.random() < 0.5:
                out += say(rng.choice(part.options), rng, value, literal)
        else:
            text = value(part)
            if part.setting is None:
                out = with_article(out, text) + text
    return out


def with_article(before: str, text: str) -> str:
    """`before`, whose last word may be an "a" or "an" that has to suit `text`."""
    match = re.search(r"\b([aA])n? $", before)
    if not match:
        return before
    return before[: match.start()] + match[1] + ("n " if text[:1].lower() in "aeio8" and text[:1] else " ")
