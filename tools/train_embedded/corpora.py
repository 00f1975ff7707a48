"""Public corpora as further examples: Snips (CC0), RNNLG (Apache-2.0), Taskmaster-4 (CC BY 4.0), old books.

`Corpora.read(folder)` expects snips/, rnnlg/, taskmaster4/ and text/ as JSON lines and texts. Values in Snips
sentences are replaced by others half of the time, so that the sentences stay natural and the vocabulary is open.
"""

from __future__ import annotations

import collections
import functools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.train_embedded.attributes import ENDINGS
from tools.train_embedded.classify import Question, put
from tools.train_embedded.domains import cased
from tools.train_embedded.prompts import STOP, Example, Field, extraction
from tools.train_embedded.values import NUMBER_WORDS, Values, is_held_out, phrases


@functools.cache
def read_names(what: str) -> dict[str, list[str]]:
    """snips.txt: the words after each "slot" or "intent"."""
    lines = (Path(__file__).parent / "snips.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.removeprefix(f"{what} ").partition(": ") for line in lines if line.startswith(f"{what} "))
    return {name: words.split() for name, _, words in pairs}


@dataclass(slots=True)
class Corpora:
    """What was read, and word lists made of it."""

    snips: list[dict[str, Any]]
    rnnlg: list[dict[str, Any]]
    orders: list[str]
    texts: list[str]
    lists: dict[str, list[str]]

    @classmethod
    def read(cls, folder: Path) -> Corpora:
        """Raises OSError if a corpus is missing."""
        snips = [_repaired(row) for row in _rows(folder / "snips" / "train.jsonl")]
        slots: dict[str, set[str]] = {}
        for row in snips:
            for key, value in row["json"].items():
                if isinstance(value, str) and "Ã" not in value:
                    slots.setdefault(key, set()).add(value)

        def words(*keys: str) -> list[str]:
            return sorted(
                word for key in keys for word in slots[key] if 2 < len(word) < 40 and not is_held_out(word)
            )

        titles = words("object_name", "movie_name", "track", "album", "entity_name")
        lists = {"restaurant": words("restaurant_name"), "title": titles, "dish": words("served_dish")}
        lists |= {name: words(name) for name in ("city", "country", "genre")}
        told = ("inform", "recommend", "inform_only_match")
        rnnlg = [row for row in _rows(folder / "rnnlg" / "train.jsonl") if row["json"]["act"] in told]
        orders = [
            turn["u"]
            for row in _rows(folder / "taskmaster4" / "dialogues.jsonl")
            for turn in row["turns"]
            if turn["s"] == "U"
        ]
        texts = [
            chunk
            for path in sorted((folder / "text").glob("*.txt"))
            for chunk in _chunks(path.read_text(encoding="utf-8", errors="replace"))
        ]
        seen = collections.Counter(
            re.findall(r"\b[a-z]{3,11}\b", " ".join([*texts, *orders, *(row["text"] for row in snips)]))
        )
        lists["common"] = sorted(
            word for word, count in seen.items() if count >= 4 and word not in phrases("English")[:30]
        )
        for name, endings in ENDINGS.items():
            lists[f"common_{name}"] = [word for word in lists["common"] if word.endswith(endings) and len(word) > 4]
        prose = " ".join(texts)
        lists["sentences"] = sorted(set(re.findall(r"(?<=[.!?] )[A-Z][^A-Z\d.!?\"“”‘’_]{15,80}[.!?](?= )", prose)))
        lists["clauses"] = sorted(
            set(re.findall(rf"(?<=, )(?:{'|'.join(phrases('conjunctions'))})(?: [a-z']+){{2,8}}(?=[,.;!])", prose))
        )
        lists["scraps"] = sorted(
            {scrap.strip(" '") for text in texts for scrap in re.findall(r"(?:\b[a-z']{1,11} ){2,7}", text)}
        )
        return cls(snips, rnnlg, [text for text in orders if len(text) > 30], texts, lists)

    def example(self, values: Values) -> Example:
        """One from the sentences."""
        rng = values.rng
        choice = rng.random()
        if choice < 0.55:
            return self._snips(values)
        if choice < 0.72:
            return self._intent(rng)
        return self._rnnlg(values) if choice < 0.97 else Example([(rng.choice(self.orders) + STOP, True)])

    def text(self, rng: random.Random) -> Example:
        """A passage of a book."""
        return Example([(rng.choice(self.texts), True)])

    def _snips(self, values: Values) -> Example:
        rng, known = values.rng, read_names("slot")
        row = rng.choice(self.snips)
        text, slots = row["text"], {k: v for k, v in row["json"].items() if k != "intent"}
        for key, value in list(slots.items()):
            kind = known.get(key, ["-"])[0]
            if kind != "-" and rng.random() < 0.5 and text.count(value) == 1:
                slots[key] = values.draw(kind).text
                text = text.replace(value, slots[key])
        fields, record = [], {}
        for key in rng.sample(list(slots), len(slots)):
            style = rng.choice(["snake", "snake", "camel"])
            names = known.get(key, [key])[-3:]
            name = cased(rng.choice(names), style) if rng.random() < 0.6 else key
            if name in record or (len(slots) > 1 and rng.random() < 0.12):
                continue
            data: Any = slots[key]
            if key in ("party_size_number", "rating_value", "best_rating") and rng.random() < 0.8:
                data = int(data) if data.isdigit() else NUMBER_WORDS.index(data) if data in NUMBER_WORDS else data
            kind = "integer" if isinstance(data, int) else "string"
            fields.append(Field(name, kind, nullable=rng.random() < 0.05))
            record[name] = data
        if not record:
            return self._snips(values)
        return extraction(text, fields, record, read_names("intent")[row["json"]["intent"]][0], rng, [])

    def _intent(self, rng: random.Random) -> Example:
        row = rng.choice(self.snips)
        plain = rng.random() < 0.4
        known = {k: k if plain else rng.choice(names[1:]) for k, names in read_names("intent").items()}
        right = known.pop(row["json"]["intent"])
        choices = [right, *rng.sample(list(known.values()), rng.randint(1, 6))]
        rng.shuffle(choices)
        return put(Question(row["text"], choices, right, rng.choice(["intent", "intention", "action"])), rng)

    def _rnnlg(self, values: Values) -> Example:
        rng = values.rng
        row = rng.choice(self.rnnlg)
        text, slots = row["text"], row["json"]
        record: dict[str, Any] = {}
        for key, value in slots.items():
            if key in ("act", "domain", "type") or len(str(value)) < 2 or text.count(str(value)) != 1:
                continue
            if key == "name" and rng.random() < 0.6:
                new = values.draw(rng.choice(["restaurant", "model_name", "company"])).text
                text, value = text.replace(value, new), new
            record[key] = value
        if not record:
            return self._rnnlg(values)
        keys = [key for key in rng.sample(list(record), len(record)) if rng.random() < 0.85] or list(record)
        text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
        fields = [Field(key, "string") for key in keys]
        return extraction(text, fields, {key: record[key] for key in keys}, slots["domain"], rng, [])


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _repaired(row: dict[str, Any]) -> dict[str, Any]:
    """Undo the double encoding of some texts."""

    def repair(text: str) -> str:
        try:
            return text.encode("latin-1").decode("utf-8")
        except UnicodeError:
            return text

    return {
        "text": repair(row["text"]),
        "json": {k: repair(v) if isinstance(v, str) else v for k, v in row["json"].items()},
    }


def _chunks(text: str) -> list[str]:
    """Passages of some hundred words that begin at a paragraph; lines joined."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    chunks, current = [], ""
    for paragraph in paragraphs:
        current = f"{current}\n{paragraph}" if current else paragraph
        if len(current) > 900:
            chunks.append(current[:1400])
            current = ""
    return chunks
