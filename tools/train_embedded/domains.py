"""What may be said about each sort of thing: the domains of records.txt, with their fields and patterns."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from tools.train_embedded.patterns import Sequence, parse, say, slots_of

PERSPECTIVES = {
    "h1": [{"S": "I", "P": "my", "O": "me", "is": "am", "has": "have", "s": ""}],
    "h3": [
        {"S": "he", "P": "his", "O": "him", "is": "is", "has": "has", "s": "s"},
        {"S": "she", "P": "her", "O": "her", "is": "is", "has": "has", "s": "s"},
        {"S": "they", "P": "their", "O": "them", "is": "are", "has": "have", "s": ""},
    ],
}
PERSPECTIVES["h"] = PERSPECTIVES["h1"]


@dataclass(slots=True)
class FieldKind:
    """A field of a domain: the names it goes by and how its values are drawn."""

    names: list[str]
    kind: str
    options: list[str] = field(default_factory=list)  # of an enum


@dataclass(slots=True)
class Pattern:
    """Something to say; `kind` is that of PERSPECTIVES for what may open a text, else t or c."""

    kind: str
    sequence: Sequence
    slots: frozenset[str]
    tight: frozenset[str]  # of these, the ones that may stand next to another with only a space between


@dataclass(slots=True)
class Domain:
    """What one may say about one sort of thing."""

    nouns: list[str]
    fields: dict[str, FieldKind] = field(default_factory=dict)
    heads: list[Pattern] = field(default_factory=list)
    tails: list[Pattern] = field(default_factory=list)
    scraps: list[Pattern] = field(default_factory=list)


@functools.cache
def read_domains(split: str) -> list[Domain]:
    """records.txt, with the patterns of the split: "eval" has those whose kind is marked with "!", and no scraps.

    Raises ValueError, with the line, where a pattern names an unknown field.
    """
    domains: list[Domain] = []
    for line in (Path(__file__).parent / "records.txt").read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "==":
            domains.append(Domain(rest.split()))
        elif kind == "f":
            names, _, what = rest.partition(": ")
            what, _, options = what.partition(" ") if what.startswith("enum ") else (what, "", "")
            found = FieldKind(names.split(), what, options.split("/") if options else [])
            domains[-1].fields[found.names[0]] = found
        elif kind.rstrip("!") in (*PERSPECTIVES, "t", "c"):
            kind, domain, sequence = kind.rstrip("!"), domains[-1], parse(rest)
            slots = frozenset(slots_of(sequence))
            if unknown := slots - domain.fields.keys():
                raise ValueError(f"no field {sorted(unknown)} in {domain.nouns[0]}: {line}")
            if ("!" in line.partition(" ")[0]) == (split == "eval"):
                patterns = {"t": domain.tails, "c": domain.scraps}.get(kind, domain.heads)
                patterns.append(Pattern(kind, sequence, slots, _tight(sequence)))
    return [domain for domain in domains if domain.heads]


def _tight(sequence: Sequence) -> frozenset[str]:
    rng = random.Random(0)
    said = [say(sequence, rng, lambda slot: "" if slot.setting else f"<{slot.name}>") for _ in range(12)]
    pairs = (pair for text in said for pair in re.findall(r"<(\w+)>(?= ?<(\w+)>)", text))
    return frozenset(name for pair in pairs for name in pair)


def spoken(key: str) -> str:
    """A key as people say it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).replace("_", " ").lower()


def cased(key: str, style: str) -> str:
    """A snake_case key in another style."""
    words = key.split("_")
    if style == "camel":
        return words[0] + "".join(word.title() for word in words[1:])
    return {"snake": key, "title": "_".join(w.title() for w in words), "space": " ".join(words)}[style]
