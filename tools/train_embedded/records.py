"""Sentences with records: a text about one thing, what is asked about it, and what it says as fields.

What is asked for is a subset of what the text says, under one of each field's names, with fields that it does not say
as nulls. Further sources make up attributes of things, and values to be told by their form alone.
"""

from __future__ import annotations

import random
from typing import Any

from tools.train_embedded.attributes import attribute_clause
from tools.train_embedded.domains import FieldKind, cased, read_domains, spoken
from tools.train_embedded.prompts import Example, Field, extraction
from tools.train_embedded.telling import Telling
from tools.train_embedded.values import Number, Value, Values, phrases

COMPOUNDED = frozenset(phrases("compounded"))
PREFIXED = frozenset(phrases("prefixed"))  # keys that often stand behind a noun: order_date
COMMON = 26  # the first domains of records.txt, which people ask for most
Made = tuple[
    str, list[Field], dict[str, Any], str, list[tuple[str, Any]]
]  # text, fields, record, noun, solved examples


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
    kept = rng.choice([0.9, 0.9, 0.6])
    names = [name for name in names if rng.random() < kept] or names[:1]
    unsaid = [name for name in domain.fields if name not in telling.said and not telling.data(name)[1]]
    if rng.random() < 0.35:
        names += rng.sample(unsaid, min(len(unsaid), rng.randint(1, 2)))
    rng.shuffle(names)
    fields, sources, record = [], {}, {}
    for name in names:
        value, is_said = telling.data(name)
        found = domain.fields[name]
        key = found.names[0] if rng.random() < 0.35 else rng.choice(found.names)
        if telling.values.split == "train" and rng.random() < 0.12:
            key = _compound(key, found.kind, domain.nouns, rng)
        key = cased(key, style)
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


def _compound(key: str, kind: str, nouns: list[str], rng: random.Random) -> str:
    """A longer key, as programs have them: order_date, num_guests, price_usd."""
    if key in PREFIXED and rng.random() < 0.5:
        return f"{rng.choice(nouns)}_{key}"
    if kind not in COMPOUNDED:
        return key
    longer = rng.choice(phrases(f"keys_{kind}")).format(key)
    return key if len(set(longer.split("_"))) < len(longer.split("_")) else longer


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
    domains = read_domains(split)
    domain = rng.choice(domains[:COMMON] if split == "train" and rng.random() < 0.4 else domains)
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
    values.is_plain = True
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
    parts += [attribute_clause(values, label, value.text) for label, value in said.items()]
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
    values.is_plain = True
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
    make = record_example if source < 0.77 else attribute_example if source < 0.92 else loose_example
    text, fields, record, noun, shots = make(values, split)
    return extraction(text, fields, record, noun, values.rng, shots)
