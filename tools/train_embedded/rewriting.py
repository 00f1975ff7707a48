"""Saying a sentence otherwise: what comes last put first, clefts, passives, hearsay, requests, questions, remarks in
between, other verbs.

A sentence comes with a mark for each value, so that no way of saying it touches what it tells. Every way returns the
sentence as it was where it does not suit it.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

from tools.train_embedded.values import phrases

FIRST_MARK = 0xE100  # marks are private-use characters
MARK = "[\ue100-\ue1ff]"
Actor = Callable[[str], str]
"""What a mark's value is as one who acts: "person", "thing", or "" for numbers, dates and the like."""
BE = ("is", "was", "are", "were", "has", "had", "will", "would", "can", "could", "may", "might", "must", "should")
PREPOSITIONS = ("in", "on", "at", "by", "for", "from", "with", "near", "until", "before", "after", "since")
FRONTED = re.compile(rf"(.+{MARK}.*?),? ((?:in|at|on|for|near|since|before|after|until|during|around)"
                     rf"(?: the| around| about)? {MARK})([.!]?)")  # fmt: skip
STATED = re.compile(
    r"(?:the|a|an|our|my|its?|it's|we|i|i'm|we're|he|she|they|there|there's|this|that) .*", re.IGNORECASE
)
TRANSITIVE = re.compile(rf"({MARK}) ([a-z]+) ((?:(?:the|an?|his|her|its|their|our) )?{MARK}(?: {MARK})*)"
                        rf"((?:,| (?:{'|'.join(PREPOSITIONS)}|to|as)\b)(?!.* by ).*?)?([.!]?)")  # fmt: skip
INTERIOR = re.compile(r"[.!?:;] |\n")


def mark(index: int) -> str:
    """The mark of the value of that number."""
    return chr(FIRST_MARK + index)


@functools.cache
def _verbs() -> tuple[tuple[str, str, str], ...]:
    """Each verb's stem, third person and past."""
    found = []
    for entry in phrases("verbs"):
        stem, _, past = entry.partition(" ")
        y = stem[-1] == "y" and stem[-2] not in "aeiou"
        third = stem[:-1] + "ies" if y else stem + ("es" if re.search("(s|x|z|ch|sh|o)$", stem) else "s")
        regular = stem[:-1] + "ied" if y else stem + ("d" if stem[-1] == "e" else "ed")
        found.append((stem, third, past or regular))
    return tuple(found)


@functools.cache
def _forms() -> dict[str, tuple[int, str]]:
    """For each form of a verb its number in `_verbs` and the stem; a past that is also a stem counts as that."""
    return {forms[i]: (i, forms[0]) for i in (2, 1, 0) for forms in _verbs()}


@functools.cache
def _participles() -> dict[str, str]:
    """By a verb's stem."""
    irregular = dict(entry.split(" ") for entry in phrases("participles"))
    return {stem: irregular.get(stem, past) for stem, _, past in _verbs()}


def _lowered(text: str) -> str:
    """As it stands behind other words."""
    return text if re.match(rf"I\b|{MARK}", text) or text[1:2].isupper() else text[:1].lower() + text[1:]


def raised(text: str) -> str:
    """As it stands at the start."""
    return text[:1].upper() + text[1:]


def _one(name: str, rng: random.Random) -> str:
    return rng.choice(phrases(name))


def _acts(match: re.Match[str], actor: Actor) -> bool:
    return bool(actor(match[1])) and (match[2] in BE or _forms().get(match[2], (0, ""))[0] > 0)


def _predicate(text: str, actor: Actor) -> re.Match[str] | None:
    """The first verb behind one who acts; its group 1 is the mark, 2 the verb."""
    for match in re.finditer(rf"({MARK}) ([a-z]+)\b", text):
        if _acts(match, actor):
            return match
    return None


def _is_statement(text: str, actor: Actor) -> bool:
    found = _predicate(text, actor)
    words = set(re.findall("[a-z]+", text.lower().replace("'s", " is").replace("'m", " is").replace("'re", " are")))
    return "?" not in text and (
        bool(found and found.start() == 0)
        or bool(STATED.fullmatch(text) and (words & {*BE, "am"} or any(_forms().get(w, (0, ""))[0] for w in words)))
    )


def fronted(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X works in Y" → "In Y, X works"."""
    match = FRONTED.fullmatch(text)
    if not match or "?" in text or re.search(r"(and|or|,|ask\w*|pay|paid|wait\w*|look\w*|turn\w*)$", match[1]):
        return text
    rest = _lowered(match[1])
    gap = ", " if ord(rest[0]) >= FIRST_MARK or rng.random() < 0.6 else " "
    return f"{raised(match[2])}{gap}{rest}{match[3]}"


def cleft(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X works in Y" → "the one who works in Y is X"."""
    found = _predicate(text, actor)
    if not found or found.start() or "?" in text:
        return text
    end = text[-1] if text[-1] in ".!" else ""
    form = _one(f"clefts_{actor(found[1])}", rng)
    return form.format(x=found[1], did=text[2 : len(text) - len(end)]) + end


def hearsay(text: str, rng: random.Random, actor: Actor) -> str:
    """ "…" → "they say that …", or with such words behind."""
    if not _is_statement(text, actor):
        return text
    if rng.random() < 0.25:
        return f"{text.rstrip('.!')}, {_one('hearsay_after', rng)}"
    return f"{raised(_one('hearsay', rng))} {_lowered(text)}"


def asked(text: str, rng: random.Random, actor: Actor) -> str:
    """ "Book …" → "could you book …?"."""
    first = text.split(" ", 1)[0].lower()
    if "?" in text or first not in phrases("imperatives"):
        return text
    form = _one("asking", rng)
    return form.format(_lowered(text.rstrip(".!")))


def remarked(text: str, rng: random.Random, actor: Actor) -> str:
    """Words that say nothing behind a value, or behind a name a clause about the person."""
    places = [m for m in re.finditer(rf"({MARK}) ([a-z]+)\b", text) if _follows(m, actor)]
    if not places:
        return text
    place = rng.choice(places)
    name = "asides_person" if actor(place[1]) == "person" and rng.random() < 0.5 else "remarks"
    return text[: place.end(1)] + _one(name, rng).replace("~", " ") + text[place.end(1) :]


def _follows(match: re.Match[str], actor: Actor) -> bool:
    """Whether what stands behind the mark is no part of its value, as a unit would be."""
    return match[2] in PREPOSITIONS or _acts(match, actor)


def adverb(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X works" → "X still works"."""
    found = _predicate(text, actor)
    if not found:
        return text
    said = _one("adverbs", rng)
    at, said = (found.end(), f" {said}") if found[2] in BE else (found.start(2), f"{said} ")
    return text[:at] + said + text[at:]


def modal(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X works" → "X is said to work"."""
    found = _predicate(text, actor)
    if not found or found[2] in BE:
        return text
    number, stem = _forms()[found[2]]
    said = _one("modals" if number == 1 else "past_modals", rng)
    return f"{text[: found.start(2)]}{said} {stem}{text[found.end() :]}"


def punctuated(text: str, rng: random.Random, actor: Actor) -> str:
    """Other marks between the parts."""
    old = rng.choice([", ", " and ", ": ", " - "])
    return text.replace(old, rng.choice([" - ", "; ", " ... ", " / ", " & " if old == " and " else ", "]), 1)


def other_verb(text: str, rng: random.Random, actor: Actor, made_up: Callable[[], str]) -> str:
    """The first verb behind a value replaced by any other in the same form: only for where no role hangs on it."""
    found = _predicate(text, actor)
    if not found or found[2] in BE or found[2] in phrases("telling"):
        return text
    number, _ = _forms()[found[2]]
    verb = made_up() + ("", "s", "ed")[number] if rng.random() < 0.3 else rng.choice(_verbs())[number]
    return text[: found.start(2)] + verb + text[found.end() :]


def opened(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X hires Y" → "watch X hire Y", "ask X to hire Y", "does X hire Y?": a verb before the first value."""
    found = _predicate(text, actor)
    if not found or found.start() or found[2] in BE or "?" in text:
        return text
    number, stem = _forms()[found[2]]
    end = text[-1] if text[-1] in ".!" else ""
    said = _one("opening", rng).format(x=found[1], do=stem + text[found.end() : len(text) - len(end)],
                                       did=text[2 : len(text) - len(end)], does=("do", "does", "did")[number],
                                       who="who" if actor(found[1]) == "person" else "which")  # fmt: skip
    return raised(said) if said[-1] == "?" else said + end


def passive(text: str, rng: random.Random, actor: Actor) -> str:
    """ "X hired Y in Z" → "Y was hired in Z by X", where X and Y are ones who act."""
    match = TRANSITIVE.fullmatch(text)
    if not match or not _acts(match, actor) or match[2] in BE or not actor(match[3][-1]):
        return text
    stem = _forms()[match[2]][1]
    be = rng.choice(("was", "is", "has been", "will be", "got"))
    by, rest = f" by {match[1]}", match[4] or ""
    after = rest + by if rng.random() < 0.4 and not re.search("[,;:(-]| and ", rest) else by + rest
    return f"{raised(match[3])} {be} {_participles()[stem]}{after}{match[5]}"


WAYS = (fronted, fronted, cleft, hearsay, asked, remarked, adverb, modal, punctuated, opened, passive)


def rewritten(text: str, rng: random.Random, actor: Actor) -> str:
    """The sentence said in one or two other ways; texts of several sentences stay as they are."""
    if INTERIOR.search(text.rstrip()):
        return text
    for way in rng.sample(WAYS, len(WAYS)):
        said = way(text, rng, actor)
        if said != text:
            return said if rng.random() < 0.7 else rng.choice((remarked, adverb, punctuated))(said, rng, actor)
    return text
