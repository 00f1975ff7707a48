"""Sentences with records: texts composed from the patterns of records.txt, and what they say as fields.

A text is a head, often tails, or a list of labels and values; what is asked for is a subset of what it says, under
one of each field's names, with fields that it does not say as nulls. A second source makes up attributes of things.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.train_embedded.attributes import attribute_clause
from tools.train_embedded.patterns import Sequence, Slot, parse, say, settings_of, slots_of
from tools.train_embedded.prompts import Example, Field, extraction
from tools.train_embedded.values import NUMBER_WORDS, Number, Value, Values, phrases

TELLING = frozenset(phrases("telling"))
VAGUE = frozenset(phrases("vague"))
Made = tuple[
    str, list[Field], dict[str, Any], str, list[tuple[str, Any]]
]  # text, fields, record, noun, solved examples
HELD_OUT_EVERY = 7  # of a domain's heads and tails, one in so many is kept for the evaluation

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
    """A head or a tail; `kind` is h, h1, h3 or t."""

    kind: str
    sequence: Sequence
    slots: frozenset[str]
    text: str


@dataclass(slots=True)
class Domain:
    """What one may say about one sort of thing."""

    nouns: list[str]
    fields: dict[str, FieldKind] = field(default_factory=dict)
    heads: list[Pattern] = field(default_factory=list)
    tails: list[Pattern] = field(default_factory=list)

    def of_split(self, split: str) -> Domain:
        """With the patterns of one split only. Held out is what says nothing that no other pattern says: every field,
        and every value that is said without a word, can be learnt."""
        held = [p for patterns in (self.heads, self.tails) for p in patterns[3::HELD_OUT_EVERY]]
        learnt = {s for p in (*self.heads, *self.tails) if p not in held for s in settings_of(p.sequence)}
        held = [p for p in held if learnt.issuperset(settings_of(p.sequence))]

        def kept(patterns: list[Pattern]) -> list[Pattern]:
            return [p for p in patterns if (p in held) == (split == "eval")]

        return Domain(self.nouns, self.fields, kept(self.heads), kept(self.tails))


@functools.cache
def read_domains(split: str) -> list[Domain]:
    """records.txt. Raises ValueError, with the line, where a pattern names an unknown field."""
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
        elif kind in ("h", "h1", "h3", "t"):
            sequence = parse(rest)
            slots = frozenset(slots_of(sequence))
            if unknown := slots - domains[-1].fields.keys():
                raise ValueError(f"no field {sorted(unknown)} in {domains[-1].nouns[0]}: {line}")
            (domains[-1].tails if kind == "t" else domains[-1].heads).append(Pattern(kind, sequence, slots, rest))
    return [domain for domain in (domain.of_split(split) for domain in domains) if domain.heads]


class Telling:
    """One text about one thing: what has been said so far, by field."""

    def __init__(self, domain: Domain, values: Values) -> None:
        self.domain = domain
        self.values = values
        self.rng = values.rng
        self.said: dict[str, Value] = {}
        self.is_worn = values.split == "train" and values.rng.random() < 0.3

    def value(self, slot: Slot) -> str:
        """The text of a slot's value, drawn at its first mention."""
        name = slot.name
        if slot.setting is not None:
            self.said[name] = Value("", {"true": True, "false": False}.get(slot.setting, slot.setting))
        elif name not in self.said:
            self.said[name] = self.drawn(name)
        return self.said[name].text

    def drawn(self, name: str) -> Value:
        """A value for a field."""
        kind = self.domain.fields[name]
        if kind.options:
            text = self.rng.choice(kind.options)
            return Value(text, text)
        if kind.kind == "bool":
            data = self.rng.random() < 0.5
            return Value(self.rng.choice(["yes", "true"] if data else ["no", "false"]), data)
        if kind.kind == "orders":
            return self.values.orders()
        if kind.kind.startswith("list "):
            return self.values.several(kind.kind.removeprefix("list "))
        taken = {value.text for value in self.said.values()}
        for _ in range(5):
            value = self.values.draw(kind.kind.partition(".")[0])
            if value.text not in taken:
                break
        return value

    def text(self) -> str:
        """A whole text; `said` then holds what it says."""
        style = self.rng.random()
        if style < 0.1 and self.values.split == "train":
            return self._labelled()
        head = self.rng.choice(self.domain.heads)
        words = self.rng.choice(PERSPECTIVES[head.kind])
        text = self.sentence(head, words)
        for _ in range(self.rng.choices(range(5), [4, 4, 3, 1, 0.5])[0]):
            text = self._go_on(text, words)
        if text[0].islower() and text.split()[0] in NUMBER_WORDS:
            text = text[0].upper() + text[1:]
        if text[-1] not in ".!?" and self.rng.random() < 0.85:
            text += self.rng.choice([".", ".", ".", "!"])
        if self.rng.random() < 0.1:
            text = f"{self.rng.choice(phrases('before'))} {text}"
        if self.rng.random() < 0.12:
            text += ("" if text[-1] in ".!?" else ".") + " " + self.rng.choice(phrases("after"))
        return re.sub(r"  +", " ", text)

    def sentence(self, pattern: Pattern, words: dict[str, str]) -> str:
        """A pattern with `words` for the person it speaks of."""
        text = say(pattern.sequence, self.rng, self.value, self._worn if self.is_worn else str).strip()
        return re.sub(r"<(S|P|O|is|has|s)>", lambda match: words[match[1]], text)

    def _worn(self, text: str) -> str:
        """Some words left out or put in place of others, so that no one word is all there is to go by."""
        words = text.split(" ")
        for i, word in enumerate(words):
            if word.isalpha() and word.islower() and word not in TELLING and self.rng.random() < 0.15:
                words[i] = self.values.common() if self.rng.random() < 0.6 else ""
        return " ".join(words)

    def _go_on(self, text: str, words: dict[str, str]) -> str:
        rng = self.rng
        tails = [tail for tail in self.domain.tails if not tail.slots & self.said.keys()]
        if tails and rng.random() < 0.85:
            more = self.sentence(rng.choice(tails), words)
        elif self.values.split == "eval":
            return text
        else:
            name = rng.choice([*self.domain.fields])
            if name in self.said or "." in self.domain.fields[name].kind:
                return text
            label = spoken(rng.choice([n for n in self.domain.fields[name].names if n not in VAGUE] or [name]))
            value = self.value(Slot(name))
            more = attribute_clause(rng, label, value, self.values.split)
        joint = rng.choices(
            [". ", ", ", "; ", " and ", " - ", "\n", " (", "! "], [8, 3, 1, 2.5, 0.5, 0.5, 0.5, 0.7]
        )[0]
        if (
            joint in (". ", "\n", "! ")
            and more[:1].islower()
            and not any(more.startswith(v.text) for v in self.said.values() if v.text)
        ):
            more = more[0].upper() + more[1:]
        if not any(text.endswith(value.text) for value in self.said.values() if value.text):
            text = text.rstrip(".!?")
        return text + joint + more + (")" if joint == " (" else "")

    def _labelled(self) -> str:
        """As forms and notes have it: "Name: …; City: …"."""
        rng = self.rng
        names = [name for name, kind in self.domain.fields.items() if "." not in kind.kind]
        chosen = rng.sample(names, min(len(names), rng.randint(2, 6)))
        case = rng.choice([str.title, str.capitalize, str.lower, str.upper])
        between, joint = (
            rng.choice([": ", ": ", " = ", " - ", " is ", ":", " "]),
            rng.choice([", ", "\n", "; ", " | ", " / ", ". "]),
        )
        labels = {name: case(spoken(rng.choice(self.domain.fields[name].names))) for name in chosen}
        return joint.join(f"{labels[name]}{between}{self.value(Slot(name))}" for name in chosen)

    def data(self, name: str) -> tuple[Value, bool]:
        """What was said of a field (also by a value of another), and whether anything was."""
        source, _, part = self.domain.fields[name].kind.partition(".")
        if not part:
            return self.said.get(name, Value("", None)), name in self.said
        value = self.said.get(source)
        known = value is not None and part in value.parts
        return Value("", value.parts[part]) if value is not None and known else Value("", None), known


def spoken(key: str) -> str:
    """A key as people say it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).replace("_", " ").lower()


def cased(key: str, style: str) -> str:
    """A snake_case key in another style."""
    words = key.split("_")
    if style == "camel":
        return words[0] + "".join(word.title() for word in words[1:])
    return {"snake": key, "title": "_".join(w.title() for w in words), "space": " ".join(words)}[style]


def type_of(data: Any) -> str:
    """The JSON Schema type of a value of ours."""
    if isinstance(data, list):
        return "objects" if data and isinstance(data[0], dict) else "array"
    names = {bool: "boolean", int: "integer", float: "number", Number: "number"}
    return names.get(type(data), "string")


def asked_fields(telling: Telling) -> tuple[list[Field], dict[str, str], dict[str, Any]]:
    """What to ask about a text: fields, the domain's name for each, and the record."""
    rng, domain = telling.rng, telling.domain
    style = rng.choices(["snake", "camel", "title", "space"], [8, 1.5, 0.3, 0.2])[0]
    names = [name for name in domain.fields if telling.data(name)[1]]
    names = [name for name in names if rng.random() < 0.87] or names[:1]
    unsaid = [name for name in domain.fields if not telling.data(name)[1]]
    if rng.random() < 0.3:
        names += rng.sample(unsaid, min(len(unsaid), rng.randint(1, 2)))
    rng.shuffle(names)
    fields, sources, record = [], {}, {}
    for name in names:
        value, is_said = telling.data(name)
        found = domain.fields[name]
        key = cased(found.names[0] if rng.random() < 0.35 else rng.choice(found.names), style)
        if key in record:
            continue
        asked, data = _asked(key, found, value, is_said, telling.values)
        if rng.random() < 0.04:
            asked.description = rng.choice(
                ["The {}", "the {} of the " + domain.nouns[0].replace("_", " "), "{}"]
            ).format(spoken(found.names[0]))
        fields.append(asked)
        sources[key] = name
        record[key] = data
    return fields, sources, record


def _asked(key: str, found: FieldKind, value: Value, is_said: bool, values: Values) -> tuple[Field, Any]:
    rng, data = values.rng, value.data
    if not is_said:
        kind = {"bool": "boolean", "orders": "objects"}.get(found.kind, "string")
        if found.kind.startswith("list "):
            kind = "array"
        elif kind == "string" and not found.options:
            kind = type_of(values.draw(found.kind.partition(".")[0]).data) if "." not in found.kind else "string"
        if kind in ("array", "objects"):
            kind, data = "array", []
        elif kind == "boolean":
            data = False
        asked = Field(key, kind, list(found.options) or None, nullable=kind != "array" and data is None)
        return asked, data
    if found.kind == "orders" and rng.random() < 0.3:
        data = [entry["item"] for entry in data]
    asked = Field(key, type_of(data), nullable=rng.random() < 0.08)
    if asked.type == "objects":
        asked.items = (
            (rng.choice(["item", "name", "product", "dish"]), "string"),
            (rng.choice(["quantity", "qty", "count", "amount"]), "integer"),
        )
        (item, _), (quantity, _) = asked.items
        data = [{item: entry["item"], quantity: entry["quantity"]} for entry in data]
    elif asked.type == "integer" and rng.random() < 0.15:
        asked.type = "number"
    elif asked.type in ("integer", "number") and value.text and rng.random() < 0.05:
        asked.type, data = "string", value.text
    elif found.options and rng.random() < 0.75:
        others = [option for option in found.options if option != data]
        asked.enum = [data, *rng.sample(others, rng.randint(1, len(others)))]
        rng.shuffle(asked.enum)
    elif (
        asked.type == "string"
        and rng.random() < 0.03
        and found.kind in ("color", "city", "cuisine", "weather", "device")
    ):
        asked.enum = list(dict.fromkeys([data, *(values.draw(found.kind).data for _ in range(3))]))
        rng.shuffle(asked.enum)
    return asked, data


def record_example(
    values: Values, split: str
) -> tuple[str, list[Field], dict[str, Any], str, list[tuple[str, Any]]]:
    """A text, what is asked about it, its record, a noun for it, and sometimes solved examples."""
    rng = values.rng
    domain = rng.choice(read_domains(split))
    telling = Telling(domain, values)
    text = telling.text()
    fields, sources, record = asked_fields(telling)
    shots: list[tuple[str, Any]] = []
    if rng.random() < 0.06 and all(f.type in ("string", "integer") and not f.enum for f in fields):
        for f in fields:
            f.nullable = True
        for _ in range(rng.choice([1, 1, 2])):
            other = Telling(domain, values)
            shot = other.text()
            found = {f.key: other.data(sources[f.key])[0] for f in fields}
            solved = {f.key: _as_type(found[f.key], f.type) for f in fields}
            shots.append((shot, solved))
    if rng.random() < 0.05 and not shots:
        text, record = text.lower(), {f.key: _lower(record[f.key]) if not f.enum else record[f.key] for f in fields}
    return text, fields, record, rng.choice(domain.nouns), shots


def _as_type(value: Value, kind: str) -> Any:
    return value.text if kind == "string" and value.data is not None and value.text else value.data


def _lower(data: Any) -> Any:
    if isinstance(data, str):
        return data.lower()
    if isinstance(data, list):
        return [{k: _lower(v) for k, v in d.items()} if isinstance(d, dict) else _lower(d) for d in data]
    return data


# ── attributes of made-up things ────────────────────────────────────────────────────────────────────────────────────

ATTRIBUTE_KINDS = phrases("attribute_kinds")


def attribute_example(values: Values, split: str) -> Made:
    """Like `record_example`, about something with attributes of any name: what a key means must come from the text."""
    rng = values.rng
    said: dict[str, Value] = {}
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5, 6])):
        label = values.word("noun") if rng.random() < 0.5 else values.common()
        if rng.random() < 0.2:
            label = values.made_up()
        if rng.random() < 0.3:
            label = f"{values.common()} {label}".lower()
        said[label] = _attribute_value(values)
    opener = rng.choice(phrases("openers")).format(
        thing=rng.choice([values.name_like(), values.draw("thing").text])
    )
    parts = [opener] if rng.random() < 0.4 else []
    parts += [attribute_clause(rng, label, value.text, split) for label, value in said.items()]
    joint = rng.choice([", ", ". ", ". ", "; ", "\n", " and "])
    if joint in (". ", "\n"):
        parts = [_sentence_case(part, said) if rng.random() < 0.8 else part for part in parts]
    style = rng.choices(["snake", "camel", "space"], [8, 1.5, 1])[0]
    keys = {label: cased(label.replace("-", "_").replace(" ", "_"), style) for label in said}
    asked = [label for label in said if rng.random() < 0.8] or list(said)
    rng.shuffle(asked)
    record = {keys[label]: said[label].data for label in asked}
    fields = [Field(key, type_of(data)) for key, data in record.items()]
    return (
        joint.join(parts) + rng.choice([".", ""]),
        fields,
        record,
        rng.choice(["record", "item", "thing", "object", "data"]),
        [],
    )


def _sentence_case(part: str, said: dict[str, Value]) -> str:
    return part if any(part.startswith(v.text) for v in said.values()) else part[0].upper() + part[1:]


def _attribute_value(values: Values) -> Value:
    kind = values.rng.choice(ATTRIBUTE_KINDS)
    if kind != "made":
        return values.draw(kind)
    words = [
        values.name_like() if values.rng.random() < 0.5 else values.made_up()
        for _ in range(values.rng.choice([1, 1, 2, 3]))
    ]
    return Value(" ".join(words), " ".join(words))


# ── what is known by its form ───────────────────────────────────────────────────────────────────────────────────────

SAID_AS = {"age": ["{} years old", "aged {}", "a {}-year-old"], "thing": ["the {}", "a {}"]}


def loose_example(values: Values, split: str) -> Made:
    """Values of different kinds between scraps of books, to be told by their form and nothing else."""
    rng = values.rng
    kinds = rng.sample(phrases("forms"), rng.choice([1, 2, 2, 3, 3, 4]))
    pieces, record = [], {}
    for kind in kinds:
        value = values.draw(kind)
        if rng.random() < 0.9:
            pieces.append(rng.choice(values.corpora["scraps"]))
        pieces.append(rng.choice(SAID_AS.get(kind, ["{}"])).format(value.text))
        key = rng.choice(phrases(f"key_of_{kind}"))
        if key not in record and rng.random() < 0.9:
            record[key] = value.data
    if rng.random() < 0.6:
        pieces.append(rng.choice(values.corpora["scraps"]))
    if not record:
        return loose_example(values, split)
    text = rng.choice([" ", " ", ", "]).join(pieces)
    keys = rng.sample(list(record), len(record))
    fields = [Field(key, type_of(record[key])) for key in keys]
    return text + rng.choice([".", "", "!"]), fields, {key: record[key] for key in keys}, "record", []


def extraction_example(values: Values, split: str) -> Example:
    """One of the three sources, put to the model."""
    source = values.rng.random()
    make = record_example if source < 0.66 else attribute_example if source < 0.85 else loose_example
    text, fields, record, noun, shots = make(values, split)
    return extraction(text, fields, record, noun, values.rng, shots)
