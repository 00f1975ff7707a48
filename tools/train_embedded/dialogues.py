"""Conversations: an assistant that asks for what it still needs and ends with the record as JSON, and small stories.

The slots of a conversation are fields of a domain of records.txt; the user answers in words of its tails or with the
bare value, often with more than was asked, and sometimes changes their mind.
"""

from __future__ import annotations

from tools.train_embedded.domains import PERSPECTIVES, read_domains, spoken
from tools.train_embedded.patterns import Slot, parse, say
from tools.train_embedded.prompts import STOP, Example, Field, compact, describe
from tools.train_embedded.records import type_of
from tools.train_embedded.telling import Telling
from tools.train_embedded.values import Values, phrases

DOMAINS = frozenset(phrases("conversed"))
DECIMALS = ("measure", "money", "decimal", "percent")


def dialogue_example(values: Values, split: str) -> Example:
    """A conversation that fills slots and ends in JSON."""
    rng = values.rng
    domain = rng.choice([d for d in read_domains(split) if d.nouns[0] in DOMAINS])
    telling = Telling(domain, values)
    plain = [
        name for name, kind in domain.fields.items() if "." not in kind.kind and kind.kind not in ("bool", "orders")
    ]
    names = rng.sample(plain, min(len(plain), rng.randint(2, 5)))
    noun = domain.nouns[0].replace("_", " ")
    keys = {name: name if rng.random() < 0.5 else rng.choice(domain.fields[name].names) for name in names}
    example = Example()
    kinds = {name: domain.fields[name].kind for name in names}
    fields = [
        Field(keys[name], "number" if kinds[name] in DECIMALS else type_of(telling.drawn(name).data))
        for name in names
    ]
    fixed = rng.random() < 0.5  # a system message says what to ask for
    asks_for_summary = not fixed or rng.random() < 0.4
    if fixed:
        ending = (
            "When you have them all, answer with JSON"
            if not asks_for_summary
            else "Summarize them as JSON when asked"
        )
        example.turn(
            "system",
            f"You help with a {noun}. Ask for what is missing. Fields: {describe(fields, rng, noun)}. {ending}.",
        )
    said = _opening(example, telling, noun)
    for name in names:
        if name in said:
            continue
        example.turn("assistant", rng.choice(phrases("asks")).format(spoken(keys[name])))
        example.turn("user", _told(telling, name, names, said))
    if asks_for_summary and rng.random() < 0.12:
        name = rng.choice(names)
        example.turn("assistant", "Anything else?")
        telling.said[name] = telling.drawn(name)
        change = rng.choice(
            [
                "Sorry, change the {} to {}.",
                "Actually, make the {} {}.",
                "Wait, the {} is {}.",
                "The {} should be {} instead.",
            ]
        )
        example.turn("user", change.format(spoken(keys[name]), telling.said[name].text))
        example.turn("assistant", "Okay, I have changed it.")
    elif asks_for_summary:
        example.turn(
            "assistant",
            rng.choice(["Anything else?", "Thank you, I have everything.", "Got it. Anything else?", "All set."]),
        )
    if asks_for_summary:
        request = rng.choice(phrases("done"))
        if not fixed or rng.random() < 0.3:
            request = rng.choice(
                ["Summarize as JSON with the fields {}.", "Return the record as JSON: {}.", "Give me JSON with {}."]
            ).format(describe(fields, rng, noun))
        example.turn("user", request)
    record = {keys[name]: telling.said[name].data for name in names}
    return example.turn("assistant", compact(record))


def _opening(example: Example, telling: Telling, noun: str) -> set[str]:
    """The user's first words: a greeting, or a head of the domain with some slots."""
    rng = telling.rng
    if rng.random() < 0.5:
        text = rng.choice(phrases("openings")).format(noun)
        example.turn("user", text[0].upper() + text[1:])
        return set()
    head = rng.choice(telling.domain.heads)
    example.turn("user", telling.sentence(head, PERSPECTIVES["h1"][0]) + ".")
    return set(telling.said)


def _told(telling: Telling, name: str, names: list[str], said: set[str]) -> str:
    """The answer with a slot's value, and at times with the next slots'."""
    rng = telling.rng
    tails = [t for t in telling.domain.tails if name in t.slots and not t.slots & said and t.slots <= set(names)]
    words = PERSPECTIVES["h1"][0]
    if tails and rng.random() < 0.5:
        tail = rng.choice(tails)
        text = telling.sentence(tail, words)
        if name in telling.said:
            said |= tail.slots & telling.said.keys()
            return text[0].upper() + text[1:] + rng.choice([".", ""])
    value = telling.value(Slot(name))
    said.add(name)
    text = rng.choice(
        ["{}", "{}", "{}.", "{}, please.", "It's {}.", "Let's say {}.", "{} would be good.", "I think {}."]
    ).format(value)
    rest = [other for other in names if other not in said]
    if rest and rng.random() < 0.15:
        label = spoken(rng.choice(telling.domain.fields[rest[0]].names))
        text = f"{text.rstrip('.')}, and the {label} is {telling.value(Slot(rest[0]))}."
        said.add(rest[0])
    return text


# ── stories ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def story_example(values: Values, split: str) -> Example:
    """A short tale, from its beginning, or written when asked."""
    rng = values.rng
    known = {name: rng.choice(phrases(name)) for name in ("trait", "trait2", "beast", "friend", "place", "wish")}
    known["name"] = values.draw("first").text

    def told(part: str) -> str:
        return say(parse(rng.choice(phrases(part))), rng, lambda slot: known.get(slot.name) or told(slot.name))

    parts = ["start", "longing", "meeting", "talk", *["deed"] * rng.randint(1, 3), "end"]
    text = " ".join(dict.fromkeys(told(part) for part in parts))
    style = rng.random()
    if style < 0.25:
        return Example().turn("user", told("story_request")).turn("assistant", text)
    if style < 0.5:
        mood = rng.choice(["", f"\nThe mood of the story is {rng.choice(['happy', 'exciting'])}."])
        text = f"A story about a {known['beast']}.\n{text}{mood}"
    return Example([(text + STOP, True)])
