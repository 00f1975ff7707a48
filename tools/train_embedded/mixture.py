"""The mixture of tasks that the model is trained on, as an endless stream of examples for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.train_embedded.classify import classification_example
from tools.train_embedded.corpora import Corpora
from tools.train_embedded.dialogues import dialogue_example, story_example
from tools.train_embedded.prompts import Example
from tools.train_embedded.records import extraction_example
from tools.train_embedded.toolcalls import tool_example
from tools.train_embedded.values import Values

SHARES = {
    "extraction": 66,
    "corpora": 5,
    "classification": 13,
    "tools": 9,
    "dialogues": 5,
    "stories": 1,
    "books": 1,
}


def examples(corpora: Corpora, seed: int) -> Iterator[Example]:
    """Training examples without end."""
    rng = random.Random(seed)
    values = Values(rng, "train", corpora.lists)
    make = {
        "extraction": lambda: extraction_example(values, "train"),
        "corpora": lambda: corpora.example(values),
        "classification": lambda: classification_example(values, "train"),
        "tools": lambda: tool_example(values, "train"),
        "dialogues": lambda: dialogue_example(values, "train"),
        "stories": lambda: story_example(values, "train"),
        "books": lambda: corpora.text(rng),
    }
    names, shares = list(SHARES), list(SHARES.values())
    while True:
        values.is_plain = False
        yield make[rng.choices(names, shares)[0]]()
