"""Values that generated sentences speak of: how each is written in a text, and what it is as data.

`Values(rng, split, …)` draws them. Words come from words.txt, of which every tenth entry belongs to the split "eval"
alone, from values of public corpora where they are given, and, for a good part, from syllables: a model that sees
made-up names in every second sentence has to learn to copy. What is put together of words and digits is in kinds.txt.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.train_embedded.patterns import Sequence, Slot, parse, say

NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()  # noqa: SIM905
TENS = dict(
    zip(
        range(20, 100, 10),
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
        strict=True,
    )
)
ONSETS = """b br c ch cl d dr f fl g gl gr h j k kl kr l m n p pr qu r s sh sk sl st str t th tr v w x y z bh dh
zh""".split()  # noqa: SIM905
NUCLEI = {
    "a": 12, "e": 10, "i": 10, "o": 10, "u": 7, "ai": 2, "ea": 2, "ee": 2, "ia": 2, "io": 2, "oo": 2, "ou": 2, "y": 2,
    "á": 0.3, "é": 0.4, "í": 0.2, "ö": 0.3, "ü": 0.2, "å": 0.2,
}  # fmt: skip
CODAS = (*[""] * 4, *"n r s l m t k d x v b".split(), *"nd rt ng ck lf sh st".split())  # noqa: SIM905
CLOSED = ("weather", "sport", "seat", "language")  # lists whose words say what they are
PHRASAL = ("task", "problem", "hobby", "reason")  # of these the first word at least is kept
CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}
CURRENCY_WORDS = {"USD": "dollars bucks", "EUR": "euros euro", "GBP": "pounds", "JPY": "yen", "INR": "rupees"}
TITLES = ("Dr.", "Mr.", "Ms.", "Mrs.", "Prof.", "Professor", "Sir", "Captain")


@dataclass(slots=True)
class Value:
    """`text` stands in the sentence, `data` in the record; `parts` are data that follow from it, by name."""

    text: str
    data: Any
    parts: dict[str, Any] = field(default_factory=dict)


class Number(float):
    """A decimal that JSON writes as its text did: 49.90."""

    text: str

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


@functools.cache
def read_lists(split: str) -> dict[str, list[str]]:
    """words.txt, of each list the entries of the split: "eval" has every tenth, "train" the others."""
    lists = {}
    for name, entries in _read("words.txt"):
        words = list(dict.fromkeys(entry.strip() for entry in entries.split(", ")))
        lists[name] = [word for word in words if is_held_out(word) == (split == "eval")] or words
    return lists


@functools.cache
def read_kinds() -> dict[str, tuple[list[Sequence], list[float]]]:
    """kinds.txt: the forms of each kind, with their weights."""
    kinds = {}
    for name, forms in _read("kinds.txt"):
        found = [re.fullmatch(r"(?:(\d+)\*)?(.*)", form) for form in forms.split(" | ")]
        kinds[name] = ([parse(m[2]) for m in found if m], [float(m[1] or 1) for m in found if m])
    return kinds


@functools.cache
def phrases(name: str) -> list[str]:
    """An entry of phrases.txt."""
    return dict(_read("phrases.txt"))[name].split("|")


@functools.cache
def read_synonyms() -> dict[str, list[str]]:
    """synonyms.txt: for each word the others of the first group that holds it."""
    known: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "synonyms.txt").read_text(encoding="utf-8").splitlines():
        replaced, _, more = line.partition("||")
        group = [*replaced.split("|"), *(more.split("|") if more else [])]
        for word in replaced.split("|") if not line.startswith("#") else []:
            known.setdefault(word, [other for other in group if other != word])
    return known


def _read(name: str) -> list[tuple[str, str]]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return [(key, text) for key, _, text in pairs]


def is_held_out(text: str) -> bool:
    """Whether a word or pattern is kept for the evaluation."""
    return zlib.crc32(text.encode()) % 10 == 0


def number_text(number: int) -> str:
    """In words, up to ninety-nine."""
    if number <= 20:
        return NUMBER_WORDS[number]
    return TENS[number // 10 * 10] + (f"-{NUMBER_WORDS[number % 10]}" if number % 10 else "")


def joined(rng: random.Random, texts: list[str]) -> str:
    """As prose lists things."""
    if len(texts) < 2:
        return texts[0]
    return ", ".join(texts[:-1]) + rng.choice([" and ", " and ", ", and ", " & ", ", ", " plus "]) + texts[-1]


class Values:
    """Draws values by the name of their kind: `values.draw("person")`."""

    def __init__(self, rng: random.Random, split: str, corpora: dict[str, list[str]] | None = None) -> None:
        """`corpora`: further entries of lists, by the lists' names."""
        self.rng = rng
        self.split = split
        self.lists = read_lists(split)
        self.corpora = corpora or {}
        self.is_plain = split == "eval"  # listed values stay as they are, without words that may be anything
        self.person_words: list[str] = []  # of the last person drawn: mail addresses often spell it

    def draw(self, kind: str) -> Value:
        """A value of that kind: a method of this class, a kind of kinds.txt or a list of words.txt."""
        method: Callable[[], Value] | None = getattr(self, f"_{kind}", None)
        if method is not None:
            return method()
        if kind in read_kinds():
            text = self._put_together(kind)
            return Value(text, text.removeprefix("the ") if kind == "country" else text)
        return self._of_list(kind)

    def word(self, name: str) -> str:
        """An entry of a list, of the corpora now and then."""
        more = self.corpora.get(name)
        known = self.lists.get(name) or more or self.lists["title_word"]
        return self.rng.choice(more if more and self.rng.random() < 0.5 else known)

    def made_up(self, low: int = 1, high: int = 3) -> str:
        """A word of syllables that no list holds, in lower case."""
        rng = self.rng
        count = rng.choice([low, 2, 2, high]) if low < 2 < high else rng.randint(low, high)
        nuclei = rng.choices(list(NUCLEI), list(NUCLEI.values()), k=count)
        text = "".join(
            rng.choice(ONSETS) * (i > 0 or rng.random() < 0.85)
            + nucleus
            + rng.choice(CODAS) * (i == count - 1 or rng.random() < 0.4)
            for i, nucleus in enumerate(nuclei)
        )
        return text if len(text) > 2 else text + rng.choice("nrslk") + rng.choice("aeo")

    def name_like(self) -> str:
        """A made-up word with a capital, now and then two joined by a mark."""
        name = self.made_up().capitalize()
        if self.rng.random() < 0.05:
            other = self.made_up(1, 2)
            name = self.rng.choice([f"{name}'{other}", f"{name}-{other.capitalize()}", f"{name[:2]}'{other}"])
        return name

    def digits(self, count: int) -> str:
        """So many digits."""
        return "".join(self.rng.choice("0123456789") for _ in range(count))

    def common(self) -> str:
        """A plain word: of the corpora's books where there are any, else of a list of nouns."""
        return self.rng.choice(self.corpora.get("common") or self.lists["noun"])

    def phrase(self, low: int = 1, high: int = 3) -> str:
        """Words that may be anything, so that what they are must be told from where they stand."""
        rng = self.rng
        words = [self.made_up() if rng.random() < 0.25 else self.common() for _ in range(rng.randint(low, high))]
        case = rng.random()
        if case < 0.25:
            words = [word.capitalize() for word in words]
        elif case < 0.3:
            words[0] = words[0].capitalize()
        return " ".join(words)

    def several(self, kind: str, low: int = 1, high: int = 4) -> Value:
        """A list in prose: "a", "a and b", "a, b and c"."""
        found = {value.text: value for value in (self.draw(kind) for _ in range(self.rng.randint(low, high)))}
        some = "some " if kind in ("item", "ingredient") and self.rng.random() < 0.25 else ""
        said = [some + text if self.rng.random() < 0.6 else text for text in found]
        return Value(joined(self.rng, said), [value.data for value in found.values()])

    def orders(self) -> Value:
        """Things with quantities: "two lattes and a bagel" → [{"item": …, "quantity": …}]."""
        rng = self.rng
        kind = rng.choice(["dish", "drink", "item", "product", "food", "thing"])
        counts: dict[str, int] = {}
        for _ in range(rng.choice([1, 2, 2, 3])):
            counts[self.draw(rng.choice(["dish", "drink"]) if kind == "food" else kind).text] = rng.choice(
                [1, 2, rng.randint(2, 12)]
            )
        texts = []
        for name, number in counts.items():
            said = str(number) if rng.random() < 0.5 else number_text(number)
            if number == 1 and rng.random() < 0.7:
                said = "an" if name[0] in "aeiou" else "a"
            texts.append(f"{said}x {name}" if said.isdigit() and rng.random() < 0.2 else f"{said} {name}")
        return Value(joined(rng, texts), [{"item": name, "quantity": number} for name, number in counts.items()])

    # ── words and what is put together of them ──────────────────────────────────────────────────────────────────

    def _put_together(self, kind: str) -> str:
        forms, weights = read_kinds()[kind]
        [form] = self.rng.choices(forms, weights)
        return say(form, self.rng, self._piece, self._filled)

    def _filled(self, literal: str) -> str:
        if "0" in literal or "^" in literal:
            literal = re.sub("0", lambda _: self.digits(1), literal)
            literal = re.sub(r"\^", lambda _: self.rng.choice("ABCDEFGHKLMNPRSTVXZ"), literal)
        return literal

    def _piece(self, slot: Slot) -> str:
        name, rng = slot.name, self.rng
        if name.startswith("listed_"):
            return self.word(name.removeprefix("listed_"))
        if name.startswith("open_"):
            return self._of_list(name.removeprefix("open_")).text
        day = rng.randint(1, 28)
        ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        pieces: dict[str, Callable[[], str]] = {
            "Made": self.name_like,
            "made": self.made_up,
            "ascii": lambda: _ascii(self.made_up()),
            "Phrase": lambda: self.phrase(1, 4).title() if self.split == "train" else self.name_like(),
            "house": lambda: str(rng.randint(1, rng.choice([40, 400, 9999]))),
            "a": lambda: _ascii(self.person_words[0] if self.person_words else self.made_up()),
            "b": lambda: _ascii(self.person_words[-1] if self.person_words else self.made_up()),
            "blank": lambda: " ",
            "hour": lambda: str(rng.randint(1, 12)),
            "hour24": lambda: f"{rng.randint(0, 23):02}",
            "hour_word": lambda: NUMBER_WORDS[rng.randint(1, 12)],
            "minute": lambda: rng.choice(["00", "15", "30", "45", f"{rng.randint(0, 59):02}"]),
            "day": lambda: str(day),
            "day_th": lambda: f"{day}{ending}",
            "two": lambda: f"{rng.randint(1, 12):02}",
            "near_year": lambda: str(rng.randint(2020, 2028)),
            "many": lambda: self._int(2, 90, 0.35).text,
        }
        if name in pieces:
            return pieces[name]()
        return self.draw(name).text if name in read_kinds() else self.word(name)

    def _of_list(self, name: str) -> Value:
        text, form = self.word(name), self.rng.random()
        if name in CLOSED or form < 0.7 or self.is_plain:
            return Value(text, text.removeprefix("the ") if name == "venue" else text)
        if form < 0.78:
            text = f"{self.phrase(1, 1)} {text}" if form < 0.74 else f"{text} {self.phrase(1, 1)}"
            return Value(text, text)
        start = f"{text.split()[0]} " if name in PHRASAL else ""
        text = start + (self.phrase(1, 1) if form < 0.88 else self.phrase())
        return Value(text, text)

    def _phrase(self) -> Value:
        text = self.phrase()
        return Value(text, text)

    # ── names ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _first(self) -> Value:
        text = self.word("first") if self.rng.random() < 0.55 else self.name_like()
        self.person_words = [text]
        return Value(text, text)

    def _person(self) -> Value:
        rng = self.rng
        first, last = self._first().text, self.word("last") if rng.random() < 0.55 else self.name_like()
        self.person_words = [first, last]
        form = rng.random()
        if form < 0.8:
            return Value(f"{first} {last}", f"{first} {last}", {"first": first, "last": last})
        forms = (
            f"{first} {rng.choice('ABCDEFGHJKLMRST')}. {last}",
            f"{first} {self.word('first')} {last}",
            f"{first} {last}-{self.name_like()}",
            f"{first} {rng.choice(phrases('particles'))} {last}",
            f"{first} {rng.choice(['O', 'D', 'N', 'Mc', 'L'])}'{last}",
            f"{rng.choice(TITLES)} {last}",
            f"{rng.choice(TITLES)} {first} {last}",
            f"{first} {last}".lower(),
        )
        text = rng.choice(forms)
        return Value(text, text)

    def _someone(self) -> Value:
        """A person by the full name or the first one."""
        return self._first() if self.rng.random() < 0.4 else self._person()

    def _code(self) -> Value:
        """In training now and then as long as a tracking number or an account's: long copies slip most."""
        is_long = self.split == "train" and self.rng.random() < 0.2
        text = self._put_together("long_code" if is_long else "code")
        return Value(text, text)

    def _car(self) -> Value:
        is_made_up = self.split == "train" and self.rng.random() < 0.35
        make = self.name_like() if is_made_up else self.word("carbrand")
        model = self.word("carmodel") if self.rng.random() < 0.6 else self.name_like()
        return Value(f"{make} {model}", f"{make} {model}", {"make": make, "model": model})

    def _email(self) -> Value:
        known, self.person_words = self.person_words, self.person_words if self.rng.random() < 0.6 else []
        text = f"{self._put_together('local')}@{self._put_together('domain')}"
        self.person_words = known
        return Value(text, text)

    # ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _int(self, low: int, high: int, words: float = 0.25) -> Value:
        number = self.rng.randint(low, high)
        return Value(number_text(number) if number < 100 and self.rng.random() < words else str(number), number)

    def _age(self) -> Value:
        return self._int(1 if self.rng.random() < 0.1 else 16, 95, 0.15)

    def _small_age(self) -> Value:
        return self._int(1, 15)

    def _count(self) -> Value:
        if self.rng.random() < 0.03:
            return Value(
                *self.rng.choice([("a couple of", 2), ("a dozen", 12), ("a pair of", 2), ("half a dozen", 6)])
            )
        return self._int(2, self.rng.choice([6, 12, 30]), 0.4)

    def _size_int(self) -> Value:
        return self._int(1, self.rng.choice([10, 50, 200]), 0.3)

    def _big(self) -> Value:
        if self.rng.random() < 0.04 and self.split == "train":
            number = self.rng.randint(2, 900)
            return Value(f"{number}{self.rng.choice([' thousand', ',000', 'k'])}", number * 1000)
        number = self.rng.randint(10, 10 ** self.rng.randint(2, 6))
        return Value(f"{number:,}" if self.rng.random() < 0.6 else str(number), number)

    def _year(self) -> Value:
        return self._int(1900 if self.rng.random() < 0.3 else 1985, 2026, 0)

    def _stars(self) -> Value:
        return self._int(1, 5, 0.3)

    def _score(self) -> Value:
        return self._int(0, self.rng.choice([6, 120]), 0.1)

    def _decimal(self) -> Value:
        text = f"{self.rng.randint(0, self.rng.choice([9, 99, 500]))}.{self.digits(self.rng.choice([1, 1, 2]))}"
        return Value(text, Number(text))

    def _measure(self) -> Value:
        """A bare quantity: a whole number or a decimal."""
        return self._decimal() if self.rng.random() < 0.5 else self._int(1, self.rng.choice([20, 300, 2000]), 0)

    def _percent(self) -> Value:
        number = self._decimal() if self.rng.random() < 0.2 else self._int(1, 100, 0)
        return Value(number.text + self.rng.choice(["%", "%", " percent"]), number.data)

    def _money(self) -> Value:
        rng = self.rng
        whole = rng.randint(1, rng.choice([20, 100, 1000, 20000]))
        cents = rng.choice(["", f".{rng.choice(['99', '50', '95', '00', self.digits(2)])}"])
        amount = (f"{whole:,}" if rng.random() < 0.6 else str(whole)) + cents
        [symbol] = rng.choices(list(CURRENCIES), [6, 3, 3, 0.5, 0.5])
        code = CURRENCIES[symbol]
        named = f"{amount} {rng.choice(CURRENCY_WORDS[code].split())}"
        forms = [symbol + amount, named, f"{code} {amount}", f"{amount} {code}", f"{amount}{symbol}"]
        [text] = rng.choices(forms, [7, 2, 1, 1, 0.5])
        return Value(text, Number(f"{whole}{cents}") if cents else whole, {"currency": code})


def _ascii(text: str) -> str:
    """As mail and web addresses spell it."""
    return re.sub("[^a-z0-9-]", "", text.lower().encode("ascii", "ignore").decode()) or "site"
