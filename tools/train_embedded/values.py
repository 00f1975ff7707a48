"""Values that generated sentences speak of: how each is written in a text, and what it is as data.

`Values(rng, split, ...)` draws them. Words come from words.txt, of which every tenth entry belongs to the split
"eval" alone, from values of public corpora where they are given, and, for a good part, from syllables: a model that
sees made-up names in every second sentence has to learn to copy.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
TENS = {
    20: "twenty",
    30: "thirty",
    40: "forty",
    50: "fifty",
    60: "sixty",
    70: "seventy",
    80: "eighty",
    90: "ninety",
}
ONSETS = "b br c ch cl d dr f fl g gl gr h j k kl kr l m n p pr qu r s sh sk sl st str t th tr v w x y z bh dh zh".split()
NUCLEI = "a e i o u ai ea ee ia io oo ou y á é í ö ü å".split()
NUCLEI_WEIGHTS = [12, 10, 10, 10, 7, 2, 2, 2, 2, 2, 2, 2, 2, 0.3, 0.4, 0.2, 0.3, 0.2, 0.2]
CODAS = [
    "",
    "",
    "",
    "",
    "n",
    "r",
    "s",
    "l",
    "m",
    "t",
    "k",
    "d",
    "nd",
    "rt",
    "x",
    "ng",
    "ck",
    "lf",
    "sh",
    "v",
    "b",
    "st",
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = (
    "January February March April May June July August September October November December".split()
)  # fmt: skip
CLOSED = ("weather", "sport", "seat", "language", "country", "first", "last")  # lists whose words say what they are
PHRASAL = ("task", "problem", "hobby", "reason")  # of these the first word at least is kept
CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}


@dataclass(slots=True)
class Value:
    """`text` stands in the sentence, `data` in the record; `parts` are data that follow from it, by name."""

    text: str
    data: Any
    parts: dict[str, Any] = field(default_factory=dict)


def read_lists(split: str) -> dict[str, list[str]]:
    """words.txt, of each list the entries of the split: "eval" has every tenth, "train" the others."""
    lists = {}
    for line in (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, entries = line.partition(": ")
            words = list(dict.fromkeys(entry.strip() for entry in entries.split(", ")))
            lists[name] = [word for word in words if is_held_out(word) == (split == "eval")] or words
    return lists


def is_held_out(text: str) -> bool:
    """Whether a word or pattern is kept for the evaluation."""
    return zlib.crc32(text.encode()) % 10 == 0


def number_text(number: int) -> str:
    """In words, up to ninety-nine."""
    if number <= 20:
        return NUMBER_WORDS[number]
    return TENS[number // 10 * 10] + (f"-{NUMBER_WORDS[number % 10]}" if number % 10 else "")


class Values:
    """Draws values by the name of their kind: `values.draw("person")`."""

    def __init__(self, rng: random.Random, split: str, corpora: dict[str, list[str]] | None = None) -> None:
        """`corpora`: further entries of lists, by the lists' names."""
        self.rng = rng
        self.split = split
        self.lists = read_lists(split)
        self.corpora = corpora or {}
        self.person_words: list[str] = []  # of the last person drawn: mail addresses often spell it

    def draw(self, kind: str) -> Value:
        """A value of that kind: a method of this class, a list of words.txt, or both."""
        method: Callable[[], Value] | None = getattr(self, f"_{kind}", None)
        return method() if method is not None else self._of_list(kind)

    def word(self, name: str) -> str:
        """An entry of a list, of the corpora now and then."""
        more = self.corpora.get(name)
        return self.rng.choice(more if more and self.rng.random() < 0.5 else self.lists[name])

    def made_up(self, low: int = 1, high: int = 3) -> str:
        """A word of syllables that no list holds, in lower case."""
        rng = self.rng
        count = rng.choice([low, 2, 2, high]) if low < 2 < high else rng.randint(low, high)
        text = "".join(
            rng.choice(ONSETS) * (i > 0 or rng.random() < 0.85)
            + rng.choices(NUCLEI, NUCLEI_WEIGHTS)[0]
            + rng.choice(CODAS) * (i == count - 1 or rng.random() < 0.4)
            for i in range(count)
        )
        return text if len(text) > 2 else text + rng.choice("nrslk") + rng.choice("aeo")

    def Made(self) -> str:  # noqa: N802 - the capital is what it is about
        """A made-up word with a capital."""
        return self.made_up().capitalize()

    def digits(self, count: int) -> str:
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

    def _of_list(self, name: str) -> Value:
        text = self.word(name)
        form = self.rng.random()
        if name in CLOSED or form < 0.5:
            return Value(text, text)
        if form < 0.7:
            text = f"{self.phrase(1, 2)} {text}" if form < 0.6 else f"{text} {self.phrase(1, 1)}"
            return Value(text, text)
        start = f"{text.split()[0]} " if name in PHRASAL else ""
        text = start + self.phrase()
        return Value(text, text)

    def _phrase(self) -> Value:
        text = self.phrase()
        return Value(text, text)

    # ── names ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _first(self) -> Value:
        text = self.word("first") if self.rng.random() < 0.55 else self.Made()
        self.person_words = [text]
        return Value(text, text)

    def _person(self) -> Value:
        rng = self.rng
        first, last = self._first().text, self.word("last") if rng.random() < 0.55 else self.Made()
        full = f"{first} {last}"
        if rng.random() < 0.05:
            full = f"{first} {rng.choice('ABCDEFGHJKLMRST')}. {last}"
        elif rng.random() < 0.05:
            full = f"{first} {self.word('first')} {last}"
        elif rng.random() < 0.04:
            full = f"{first} {last}-{self.Made()}"
        if rng.random() < 0.06:
            full = rng.choice(["Dr. ", "Mr. ", "Ms. ", "Mrs. ", "Prof. ", "Professor ", "Sir ", "Captain "]) + last
        elif rng.random() < 0.05:
            full = rng.choice(["Dr. ", "Mr. ", "Ms. ", "Mrs. ", "Prof. "]) + full
        elif rng.random() < 0.03:
            full = full.lower()
        self.person_words = [first, last]
        words = full.split()
        return Value(full, full, {"first": words[0], "last": words[-1]} if len(words) == 2 else {})

    def _someone(self) -> Value:
        """A person by the full name or the first one."""
        return self._first() if self.rng.random() < 0.4 else self._person()

    def _place_word(self) -> str:
        ends = [
            "",
            "",
            "ville",
            "ton",
            "burg",
            " Falls",
            "ford",
            " Springs",
            "berg",
            "field",
            " Bay",
            "ham",
            "stad",
        ]
        return self.Made() + self.rng.choice(ends)

    def _city(self) -> Value:
        text = self.word("city") if self.rng.random() < 0.6 else self._place_word()
        if self.rng.random() < 0.05:
            text = self.rng.choice(["Port ", "New ", "Saint ", "Lake ", "Mount ", "East ", "San "]) + text
        return Value(text, text)

    def _country(self) -> Value:
        text = (
            self.word("country") if self.rng.random() < 0.85 else self.Made() + self.rng.choice(["ia", "land", ""])
        )
        return Value(text, text.removeprefix("the ") if text.startswith("the ") else text)

    def _address(self) -> Value:
        kind = self.rng.choice(
            ["Street", "Road", "Avenue", "Lane", "Drive", "St", "Way", "Blvd", "Court", "Square"]
        )
        street = self.word("street") if self.rng.random() < 0.4 else f"{self.Made()} {kind}"
        text = f"{self.rng.randint(1, self.rng.choice([40, 400, 9999]))} {street}"
        if self.rng.random() < 0.15:
            text = f"{street} {self.rng.randint(1, 200)}"
        return Value(text, text)

    def _zip(self) -> Value:
        rng = self.rng
        text = rng.choice(
            [self.digits(5), self.digits(4), f"{rng.choice('ABEGLMNS')}{self.digits(1)} {self.digits(1)}XQ"]
        )
        return Value(text, text)

    def _company(self) -> Value:
        rng = self.rng
        words = [
            self.word("company_word") if rng.random() < 0.5 else self.Made() for _ in range(rng.choice([1, 1, 2]))
        ]
        if rng.random() < 0.5 or len(words) == 1:
            words.append(self.word("company_end"))
        if rng.random() < 0.15:
            words = [self.Made() + rng.choice(["", "ly", "ify", "soft", "Tech", "Works", "ware"])]
        return Value(" ".join(words), " ".join(words))

    def _restaurant(self) -> Value:
        rng = self.rng
        pair = [self.word("restaurant_word"), self.word("restaurant_word")]
        forms = [
            f"{self.word('first') if rng.random() < 0.5 else self.Made()}'s",
            f"The {pair[0]} {pair[1]}",
            f"{pair[0]} {pair[1]}",
            f"{self.Made()} {pair[1]}",
            self.Made(),
            f"{rng.choice(['Chez', 'Casa', 'La', 'El', 'Le', 'Il', 'Café', 'Bar'])} {self.Made()}",
            f"{pair[0]} & {pair[1]}",
            f"{self.Made()}'s {pair[1]}",
        ]
        text = rng.choice(self.corpora["restaurant"]) if self.corpora and rng.random() < 0.2 else rng.choice(forms)
        return Value(text, text)

    def _model_name(self) -> Value:
        """A product as brands name them: MacroPad X2, Zelkor 500 Pro."""
        rng = self.rng
        brand = rng.choice(
            [self.Made(), self.word("brand_piece") + self.word("brand_tail"), self.Made() + self.word("brand_tail")]
        )
        letter = rng.choice("ABCDEGKLMPQRSTVXZ")
        tails = [
            f"{letter}{rng.randint(1, 99)}",
            str(rng.randint(2, 9000)),
            "Pro",
            "Mini",
            "Max",
            f"{letter}{letter}-{self.digits(2)}",
        ]
        parts = [brand, *rng.sample(tails, rng.choice([0, 1, 1, 1, 2]))]
        if rng.random() < 0.2:
            parts.append(self.word("product"))
        return Value(" ".join(parts), " ".join(parts))

    def _thing(self) -> Value:
        """What one buys: a branded or a plain product."""
        rng = self.rng
        if rng.random() < 0.5:
            return self._model_name()
        prefix = rng.choice(["", "", f"{self.word('color')} ", f"{self.word('adjective')} "])
        text = prefix + (self.word("product") if rng.random() < 0.6 else self.phrase(1, 2).lower())
        return Value(text, text)

    def _title(self) -> Value:
        rng = self.rng
        if self.corpora and rng.random() < 0.35:
            text = rng.choice(self.corpora["title"])
            return Value(text, text)
        a, b = (self.word("title_word") if rng.random() < 0.75 else self.Made() for _ in range(2))
        forms = [
            f"The {a} {b}",
            f"{a} of the {b}",
            f"{a} {b}",
            f"The {a}",
            f"A {a} in {self.Made()}",
            f"{a} and {b}",
            f"{self.Made()}",
        ]
        text = rng.choice(forms)
        if rng.random() < 0.3:
            text = " ".join(word.capitalize() for word in self.phrase(1, 5).split())
        return Value(text, text)

    def _team(self) -> Value:
        place = self.word("city") if self.rng.random() < 0.5 else self.Made()
        text = f"{place} {self.word('team_end')}" if self.rng.random() < 0.7 else place
        return Value(text, text)

    def _pet_name(self) -> Value:
        names = [
            "Bella",
            "Max",
            "Luna",
            "Charlie",
            "Rex",
            "Milo",
            "Coco",
            "Buddy",
            "Daisy",
            "Rocky",
            "Whiskers",
            "Pip",
        ]
        text = self.rng.choice(names) if self.rng.random() < 0.4 else self.Made()
        return Value(text, text)

    def _car(self) -> Value:
        brand, model = self.word("carbrand"), self.word("carmodel") if self.rng.random() < 0.6 else self.Made()
        return Value(f"{brand} {model}", f"{brand} {model}", {"make": brand, "model": model})

    # ── contact, codes ──────────────────────────────────────────────────────────────────────────────────────────

    def _email(self) -> Value:
        rng = self.rng
        words = self.person_words if self.person_words and rng.random() < 0.55 else [self.made_up(), self.made_up()]
        ascii_words = [w.lower().replace("'", "").replace(" ", "") for w in words]
        ascii_words = [w.encode("ascii", "ignore").decode() or "x" for w in ascii_words]
        a, b = ascii_words[0], ascii_words[-1]
        local = rng.choice(
            [
                f"{a}.{b}",
                f"{a}{b}",
                f"{a[0]}{b}",
                f"{a}_{b}",
                f"{a}.{b[0]}",
                a,
                f"{a}{self.digits(2)}",
                f"{b}.{a}",
                f"{a}-{b}",
                "info",
                "sales",
                f"{b}+{self.made_up(1, 1)}",
            ]
        )
        known = [
            "example.org",
            "example.com",
            "gmail.com",
            "mail.com",
            "outlook.com",
            "yahoo.com",
            "proton.me",
            "acme.io",
            "university.edu",
            "company.net",
        ]
        end = rng.choice([".com", ".org", ".net", ".io", ".co.uk", ".de", ".edu", ".no", ".fr", ".dev"])
        made = self.made_up().encode("ascii", "ignore").decode() or "site"
        domain = rng.choice(known) if rng.random() < 0.45 else made + rng.choice(["", "", "-mail", "corp"]) + end
        text = f"{local}@{domain}"
        return Value(text, text, {"domain": domain, "user": local})

    def _phone(self) -> Value:
        rng, d = self.rng, self.digits
        forms = [
            f"555-{d(4)}",
            f"{d(3)}-{d(3)}-{d(4)}",
            f"({d(3)}) {d(3)}-{d(4)}",
            f"+{rng.randint(1, 99)} {d(3)} {d(3)} {d(3)}",
            f"+1-{d(3)}-{d(3)}-{d(4)}",
            d(10),
            f"0{d(3)} {d(6)}",
            f"{d(3)}.{d(3)}.{d(4)}",
            f"+{rng.randint(1, 99)} {d(2)} {d(2)} {d(2)} {d(2)}",
            f"{d(3)} {d(4)}",
            f"+{rng.randint(20, 99)}{d(9)}",
        ]
        text = rng.choice(forms)
        return Value(text, text)

    def _url(self) -> Value:
        made = self.made_up().encode("ascii", "ignore").decode() or "site"
        text = (
            self.rng.choice(["www.", "https://", "", "https://www."])
            + made
            + self.rng.choice([".com", ".org", ".io", ".net/shop", ".co/en"])
        )
        return Value(text, text)

    def _code(self) -> Value:
        rng, d = self.rng, self.digits
        letters = "".join(rng.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(rng.choice([2, 3])))
        text = rng.choice(
            [
                f"{letters}-{d(4)}",
                f"{letters}{d(5)}",
                f"#{d(5)}",
                d(6),
                f"{letters}-{d(2)}-{d(3)}",
                f"#{letters[0]}{d(3)}",
                f"{d(3)}-{letters}",
                f"{letters}-2025-{d(3)}",
                f"{letters[0]}{d(2)}{letters[1]}",
            ]
        )
        return Value(text, text)

    def _flight(self) -> Value:
        text = (
            "".join(self.rng.choice("ABCDEFKLNQRSTUWXY") for _ in range(2))
            + self.rng.choice(["", "", " "])
            + self.digits(self.rng.choice([2, 3, 4]))
        )
        return Value(text, text)

    def _username(self) -> Value:
        text = self.rng.choice(
            [
                self.made_up(),
                f"{self.made_up()}{self.digits(2)}",
                f"{self.made_up()}_{self.made_up()}",
                f"@{self.made_up()}",
            ]
        )
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
        grouped = f"{whole:,}" if rng.random() < 0.6 else str(whole)
        cents = rng.choice(["", f".{rng.choice(['99', '50', '95', '00', self.digits(2)])}"])
        data: Any = Number(f"{whole}{cents}") if cents else whole
        symbol = rng.choices(list(CURRENCIES), [6, 3, 3, 0.5, 0.5])[0]
        code = CURRENCIES[symbol]
        named = {
            "USD": ["dollars", "bucks", "US dollars"],
            "EUR": ["euros", "euro"],
            "GBP": ["pounds"],
            "JPY": ["yen"],
            "INR": ["rupees"],
        }
        amount = grouped + cents
        text = rng.choices(
            [
                symbol + amount,
                f"{amount} {rng.choice(named[code])}",
                f"{code} {amount}",
                f"{amount} {code}",
                f"{amount}{symbol}",
            ],
            [7, 2, 1, 1, 0.5],
        )[0]
        return Value(text, data, {"currency": code})

    # ── times ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _time(self) -> Value:
        rng = self.rng
        hour, minute = rng.randint(1, 12), rng.choice(["00", "15", "30", "45", f"{rng.randint(0, 59):02}"])
        half = rng.choice(["am", "pm", " am", " pm", "PM", " AM"])
        forms = [
            f"{hour}{half}",
            f"{hour}:{minute}{half}",
            f"{rng.randint(0, 23):02}:{minute}",
            f"{rng.randint(0, 23)}:{minute}",
            "noon",
            "midnight",
            f"{hour} o'clock",
            f"half past {NUMBER_WORDS[hour]}",
        ]
        text = rng.choices(forms, [4, 4, 3, 2, 0.6, 0.3, 0.8, 0.5])[0]
        return Value(text, text)

    def _weekday(self) -> Value:
        text = self.rng.choice(WEEKDAYS)
        return Value(text, text)

    def _date(self) -> Value:
        rng = self.rng
        day, month, year = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(2020, 2028)
        suffix = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        m = MONTHS.index(month) + 1
        forms = [
            rng.choice(WEEKDAYS),
            f"{month} {day}",
            f"{month} {day}{suffix}",
            f"{day} {month}",
            f"{day} {month} {year}",
            f"{month} {day}, {year}",
            f"{year}-{m:02}-{day:02}",
            f"{m:02}/{day:02}/{year}",
            f"next {rng.choice(WEEKDAYS)}",
            f"{rng.choice(WEEKDAYS)}, {month} {day}",
            f"the {day}{suffix} of {month}",
            f"{month[:3]} {day}",
            "tomorrow",
            "today",
            f"{day}.{m}.{year}",
            f"this {rng.choice(WEEKDAYS)}",
            f"{month} {year}",
            "tonight",
            "next week",
        ]
        text = rng.choices(forms, [5, 2, 2, 2, 2, 2, 2, 1, 2, 1.5, 1, 1, 1.5, 0.7, 0.7, 0.5, 0.5, 0.5, 0.5])[0]
        return Value(text, text)

    def _duration(self) -> Value:
        number = self._int(2, 90, 0.35)
        unit = self.rng.choice(["minutes", "hours", "days", "weeks", "months", "years"])
        text = f"{number.text} {unit}"
        if self.rng.random() < 0.1:
            text = self.rng.choice(["an hour", "half an hour", "a week", "one day", "a month", "a year"])
        return Value(text, text)

    # ── several at once ─────────────────────────────────────────────────────────────────────────────────────────

    def several(self, kind: str, low: int = 1, high: int = 4) -> Value:
        """A list in prose: "a", "a and b", "a, b and c"."""
        found = {value.text: value for value in (self.draw(kind) for _ in range(self.rng.randint(low, high)))}
        return Value(joined(self.rng, list(found)), [value.data for value in found.values()])

    def orders(self) -> Value:
        """Things with quantities: "two lattes and a bagel" → [{"item": …, "quantity": …}]."""
        texts, data = [], []
        kind = self.rng.choice(["dish", "drink", "item", "product", "food", "thing"])
        for _ in range(self.rng.choice([1, 2, 2, 3])):
            name = self.draw(self.rng.choice(["dish", "drink"]) if kind == "food" else kind).text
            if any(entry["item"] == name for entry in data):
                continue
            number = self.rng.choices([1, self.rng.randint(2, 12)], [1, 2])[0]
            article = "an" if name[0] in "aeiou" else "a"
            text = (
                article
                if number == 1 and self.rng.random() < 0.7
                else str(number)
                if self.rng.random() < 0.5
                else number_text(number)
            )
            texts.append(f"{text}x {name}" if text.isdigit() and self.rng.random() < 0.2 else f"{text} {name}")
            data.append({"item": name, "quantity": number})
        return Value(joined(self.rng, texts), data)


class Number(float):
    """A decimal that JSON writes as its text did: 49.90."""

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __repr__(self) -> str:
        return self.text


def joined(rng: random.Random, texts: list[str]) -> str:
    """As prose lists things."""
    if len(texts) < 2:
        return texts[0]
    end = rng.choice([" and ", " and ", ", and ", " & ", ", ", " plus "])
    return ", ".join(texts[:-1]) + end + texts[-1]
