"""Public corpora as further examples: Snips (CC0), RNNLG (Apache-2.0), Taskmaster-4 (CC BY 4.0), old books.

`Corpora.read(folder)` expects snips/, rnnlg/, taskmaster4/ and text/ as JSON lines and texts. Values in Snips
sentences are replaced by others half of the time, so that the sentences stay natural and the vocabulary is open.
"""

from __future__ import annotations

import collections
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.train_embedded.classify import Question, put
from tools.train_embedded.prompts import STOP, Example, Field, extraction
from tools.train_embedded.records import cased
from tools.train_embedded.values import NUMBER_WORDS, Values, is_held_out

FUNCTION_WORDS = frozenset(
    "the and was with for from that this his her she him you they have had not but are were has its our your at in on of to by as who will would be is it an all my me we us".split()
)
KINDS = {  # which kind of value may stand in for a slot of Snips
    "city": "city", "country": "country", "artist": "person", "restaurant_name": "restaurant", "object_name": "title",
    "movie_name": "title", "track": "title", "album": "title", "entity_name": "title", "playlist": "title",
    "cuisine": "cuisine", "served_dish": "dish", "party_size_number": "count", "year": "year", "genre": "genre",
}  # fmt: skip
KEYS = {
    "artist": "artist singer band performer musician", "playlist": "playlist list playlist_name", "city": "city town location",
    "restaurant_name": "restaurant_name restaurant place name", "party_size_number": "party_size_number party_size people guests",
    "timeRange": "timeRange time when date", "object_name": "object_name title name", "movie_name": "movie_name movie film title",
    "rating_value": "rating_value rating stars score", "served_dish": "served_dish dish food", "entity_name": "entity_name song title",
    "country": "country nation", "state": "state region", "genre": "genre style", "cuisine": "cuisine kitchen", "year": "year era",
    "object_type": "object_type type kind", "location_name": "location_name cinema theatre", "service": "service app platform",
}  # fmt: skip
NOUNS = {
    "AddToPlaylist": "request", "BookRestaurant": "booking", "GetWeather": "weather request", "PlayMusic": "request",
    "RateBook": "rating", "SearchCreativeWork": "search", "SearchScreeningEvent": "search",
}  # fmt: skip
INTENTS = {
    "AddToPlaylist": "add_to_playlist playlist", "BookRestaurant": "book_restaurant restaurant_booking", "GetWeather": "get_weather weather",
    "PlayMusic": "play_music music", "RateBook": "rate_book rating", "SearchCreativeWork": "search_creative_work search find_title",
    "SearchScreeningEvent": "search_screening_event movie_times showtimes",
}  # fmt: skip


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

        lists = {
            "restaurant": words("restaurant_name"), "title": words("object_name", "movie_name", "track", "album", "entity_name"),
            "city": words("city"), "dish": words("served_dish"), "country": words("country"), "genre": words("genre"),
        }  # fmt: skip
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
        lists["common"] = sorted(word for word, count in seen.items() if count >= 4 and word not in FUNCTION_WORDS)
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
        rng = values.rng
        row = rng.choice(self.snips)
        text, slots = row["text"], {k: v for k, v in row["json"].items() if k != "intent"}
        for key, value in list(slots.items()):
            if key in KINDS and rng.random() < 0.5 and len(re.findall(re.escape(value), text)) == 1:
                new = values.draw(KINDS[key]).text
                text, slots[key] = text.replace(value, new), new
        fields, record = [], {}
        for key in rng.sample(list(slots), len(slots)):
            if rng.random() < 0.12 and len(slots) > 1:
                continue
            name = (
                cased(rng.choice(KEYS.get(key, key).split()), rng.choice(["snake", "snake", "camel"]))
                if rng.random() < 0.6
                else key
            )
            if name in record:
                continue
            data: Any = slots[key]
            number = int(data) if data.isdigit() else NUMBER_WORDS.index(data) if data in NUMBER_WORDS else None
            if (
                key in ("party_size_number", "rating_value", "best_rating")
                and number is not None
                and rng.random() < 0.8
            ):
                data = number
            fields.append(
                Field(name, "integer" if isinstance(data, int) else "string", nullable=rng.random() < 0.05)
            )
            record[name] = data
        if not record:
            return self._snips(values)
        return extraction(text, fields, record, NOUNS[row["json"]["intent"]], rng, [])

    def _intent(self, rng: random.Random) -> Example:
        row = rng.choice(self.snips)
        plain = rng.random() < 0.4
        names = {intent: intent if plain else rng.choice(words.split()) for intent, words in INTENTS.items()}
        right = row["json"]["intent"]
        choices = [
            names[right],
            *rng.sample([name for intent, name in names.items() if intent != right], rng.randint(1, 6)),
        ]
        rng.shuffle(choices)
        return put(Question(row["text"], choices, names[right], rng.choice(["intent", "intention", "action"])), rng)

    def _rnnlg(self, values: Values) -> Example:
        rng = values.rng
        row = rng.choice(self.rnnlg)
        text, slots = row["text"], row["json"]
        record: dict[str, Any] = {}
        for key, value in slots.items():
            if (
                key in ("act", "domain", "type")
                or not isinstance(value, str)
                or text.count(value) != 1
                or len(value) < 2
            ):
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
