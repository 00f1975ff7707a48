"""Texts to classify, from the patterns of classes.txt, and the ways of asking: as chat or as plain text.

The choices vary: some of a task's labels, each under one of its names, in any order. Texts in several languages, to be
told apart, are drawn from short lists of their words.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from tools.train_embedded.patterns import Sequence, Slot, parse, say
from tools.train_embedded.prompts import Example
from tools.train_embedded.values import Values, phrases


@dataclass(slots=True)
class Label:
    """A class: its names and the patterns of its texts."""

    names: list[str]
    patterns: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Task:
    """What one asks, in several words, and the labels to choose from."""

    words: list[str]
    labels: list[Label] = field(default_factory=list)


@functools.cache
def read_classes(split: str) -> tuple[list[Task], dict[str, list[str]]]:
    """classes.txt: the tasks with the patterns of the split, and the lists of phrases."""
    tasks: list[Task] = []
    lists: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "classes.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("* "):
            name, _, words = line[2:].partition(": ")
            lists[name] = words.split(", ")  # what a word means cannot be held out
        elif line.startswith("== "):
            tasks.append(Task(line.partition("| ")[2].split(", ")))
        elif line.startswith("= "):
            tasks[-1].labels.append(Label(line[2:].split(", ")))
        elif line and not line.startswith("#") and line.startswith("! ") == (split == "eval"):
            tasks[-1].labels[-1].patterns.append(parse(line.removeprefix("! ")))
    return tasks, lists


def text_of(label: Label, values: Values, lists: dict[str, list[str]]) -> str:
    """A text of that class."""

    def value(slot: Slot) -> str:
        name = slot.name.rstrip("23")
        if name not in lists:
            return values.draw(name).text
        word = values.rng.choice(lists[name])
        several = name.startswith("W") and word[-1].isalpha() and word[-1] != "s" and values.rng.random() < 0.25
        return f"{word}s" if several else word

    text = re.sub(r"  +", " ", say(values.rng.choice(label.patterns), values.rng, value)).strip()
    text = text[0].upper() + text[1:] if values.rng.random() < 0.9 else text[0].lower() + text[1:]
    if text[-1] not in ".?!" and values.rng.random() < 0.8:
        asks = re.match(r"(?i)(what|where|when|who|how|is|are|do|does|can|could|will|should|which|has)\b", text)
        text += "?" if asks and values.rng.random() < 0.8 else values.rng.choice([".", ".", "!"])
    return text.lower() if values.rng.random() < 0.05 else text


@dataclass(slots=True)
class Question:
    """A text, the choices, the right one, and words for what is asked."""

    text: str
    choices: list[str]
    answer: str
    word: str


def question(values: Values, split: str) -> Question:
    """A text of a random class with some classes of its task as choices."""
    rng = values.rng
    if rng.random() < 0.07:
        return _language(values)
    tasks, lists = read_classes(split)
    task = rng.choices(tasks, [3.5, 1.2, 2.5, 2.5, 0.4, 0.4])[0]
    if task is tasks[0]:  # mostly without "neutral" and "mixed"
        task = Task(task.words, task.labels[: rng.choice([2, 2, 3, 4])])
    right = rng.choice([label for label in task.labels if label.patterns])
    others = [label for label in task.labels if label is not right]
    if len(others) > 1 and task is not tasks[0]:
        others = rng.sample(others, rng.randint(1, min(len(others), 7)))
    plain = rng.random() < 0.55
    chosen = [right, *others]
    rng.shuffle(chosen)
    names = {id(label): label.names[0] if plain else rng.choice(label.names) for label in chosen}
    text = text_of(right, values, lists)
    if rng.random() < 0.2:
        text += " " + text_of(right, values, lists)
    case = rng.choice([str, str, str, str.title, str.upper, lambda name: name.replace("_", " ")])
    choices = [case(names[id(label)]) for label in chosen]
    if len(set(choices)) < len(choices):
        return question(values, split)
    return Question(
        text, choices, case(names[id(right)]), rng.choice(task.words[:2] if rng.random() < 0.6 else task.words)
    )


def _language(values: Values) -> Question:
    rng = values.rng
    choices = rng.sample(phrases("languages"), rng.randint(2, 5))
    answer = rng.choice(choices)
    text = " ".join(rng.choice(phrases(answer)) for _ in range(rng.randint(4, 12))).capitalize() + "."
    return Question(text, choices, answer, rng.choice(["language", "Language"]))


def classification_example(values: Values, split: str) -> Example:
    """A question in one of many forms."""
    return put(question(values, split), values.rng)


def put(asked: Question, rng: random.Random) -> Example:
    """The question as chat or as plain text."""
    listed = rng.choice([", ", ", ", " or ", " / ", "|", "; "]).join(asked.choices)
    form = rng.random()
    if form < 0.2:
        listed = ", ".join(asked.choices[:-1]) + " or " + asked.choices[-1] if len(asked.choices) > 1 else listed
    elif form < 0.3:
        listed = "\n" + "\n".join(f"- {choice}" for choice in asked.choices)
    text, word = asked.text, asked.word.lower()
    label = rng.choice(["Text", "Review", "Sentence", "Message", "Input"])
    body = rng.choice([f"{label}: {text}", text, f'"{text}"', f"{label}:\n{text}"])
    if rng.random() < 0.4:
        kind = asked.word[0].upper() + asked.word[1:]
        ending = rng.choice(phrases("question_endings")).format(kind=kind, word=word, listed=listed)
        shown = f"Choices: {listed}\n" if rng.random() < 0.5 else ""
        if ending in ("Answer: ", "Label: "):
            shown = f"What is the {word}? Choose from {listed}.\n"
        answer = asked.answer if ending.endswith(" ") else rng.choice(["", " "]) + asked.answer
        return Example().raw(f"{shown}{body}{rng.choice([' ', chr(10), chr(10)])}{ending}", answer, rng)
    task = rng.choice(phrases("questions")).format(word=word, listed=listed)
    example = Example()
    if rng.random() < 0.25:
        example.turn("system", task).turn("user", rng.choice([text, body]))
    elif rng.random() < 0.15:
        example.turn("user", f"{body}\n{rng.choice(phrases('open_questions')).format(word=word)}")
    else:
        example.turn("user", f"{task}\n{body}" if rng.random() < 0.7 else f"{body}\n{task}")
    return example.turn("assistant", asked.answer)
