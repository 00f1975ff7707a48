"""A slow reader of context-free rules, to compare grammars with: no tables, no lexer, no transformation.

Expressions are tuples: ("chars", characters), ("not", characters), ("text", text), ("rule", name), ("seq", …),
("alt", …), ("times", expression, least, most or None).
"""

from __future__ import annotations

import random
from typing import Any

Expression = tuple[Any, ...]
Rules = dict[str, Expression]
BEYOND = -1
"""Where an expression ends that the text is too short for, and that some longer text completes."""


def ends(rules: Rules, text: str) -> set[int]:
    """Where the rule `root` may end in the text from its beginning: positions, and BEYOND."""
    found: dict[tuple[str, int], set[int]] = {}

    def of(expression: Expression, starts: set[int]) -> set[int]:
        kind, *rest = expression
        match kind:
            case "chars" | "not":
                beyond = {BEYOND} if starts & {len(text), BEYOND} else set()
                inside = {i for i in starts if 0 <= i < len(text) and (text[i] in rest[0]) == (kind == "chars")}
                return beyond | {i + 1 for i in inside}
            case "text":
                return of(("seq", *(("chars", char) for char in rest[0])), starts)
            case "seq":
                for part in rest:
                    starts = of(part, starts)
                return starts
            case "alt":
                return set().union(*(of(part, starts) for part in rest))
            case "times":
                part, least, most = rest
                for _ in range(least):
                    starts = of(part, starts)
                reached, count = set(starts), least
                while starts and (most is None or count < most):
                    starts = of(part, starts) - (reached if most is None else set())
                    count += 1
                    reached |= starts
                return reached
        [name] = rest
        return set().union(*(found.setdefault((name, i), set()) for i in starts))

    found["root", 0] = set()
    before = -1
    while before != (before := sum(map(len, found.values())) + len(found)):
        for name, start in list(found):
            found[name, start] |= of(rules[name], {start})
    return found["root", 0]


def matches(rules: Rules, text: str) -> bool:
    """Whether the rules allow the text."""
    return len(text) in ends(rules, text)


def can_go_on(rules: Rules, text: str) -> bool:
    """Whether they allow it or a longer text that begins with it."""
    return bool(ends(rules, text) & {len(text), BEYOND})


def written(rules: Rules, rng: random.Random) -> str:
    """The rules in EBNF, laid out at random."""
    lines = []
    for name, expression in rules.items():
        space = rng.choice(["", " ", "  ", "\t"])
        comment = rng.choice(["", "", ' # "a" ::= b'])
        lines.append(f"{rng.choice(['', ' '])}{name} ::={space}{_shown(expression, rng, outside=True)}{comment}")
    return rng.choice(["\n", "\n\n", "\r\n"]).join(lines)


def _shown(expression: Expression, rng: random.Random, *, outside: bool = False) -> str:
    kind, *rest = expression
    gap = rng.choice([" ", "  ", "\n  "])
    match kind:
        case "chars":
            if len(rest[0]) == 1 and rng.random() < 0.5:
                return f'"{_escaped(rest[0], rng)}"'
            return f"[{''.join(_escaped(char, rng) for char in rest[0])}]"
        case "not":
            return f"[^{''.join(_escaped(char, rng) for char in rest[0])}]" if rest[0] else "."
        case "text":
            return f'"{"".join(_escaped(char, rng) for char in rest[0])}"'
        case "rule":
            return str(rest[0])
        case "seq":
            inside = gap.join(_shown(part, rng) for part in rest) if rest else '""'
        case "alt":
            inside = f"{gap}| ".join(_shown(part, rng) for part in rest)
        case "times":
            part, least, most = rest
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            bounds = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
            shown = _shown(part, rng)
            if part[0] == "times":
                shown = f"({shown})"
            return shown + (sign if sign is not None and rng.random() < 0.8 else bounds)
    return inside if outside else f"({inside})"


def _escaped(char: str, rng: random.Random) -> str:
    code = ord(char)
    forms = [char, f"\\u{code:04x}", f"\\U{code:08X}"] + ([f"\\x{code:02x}"] if code < 256 else [])
    return rng.choice(forms)
