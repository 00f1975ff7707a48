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
from tools.train_embedded.records import HELD_OUT_EVERY
from tools.train_embedded.values import Values

LANGUAGES = {
    "English": "the and is of to in that it was for on with as his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after words called just where most know",
    "French": "le la les de des et est un une dans pour que qui pas sur avec nous vous il elle mais ce cette sont ont plus tout bien très comme être avoir fait jour aussi leur deux même où jamais toujours maison temps homme femme enfant petit grand bonjour merci soupe était froide serveur charmant livre chat chien nuit après avant sans sous chez parce maintenant encore",
    "German": "der die das und ist nicht ein eine zu mit von auf für dem den des sich auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über so zum war haben nur oder aber vor zur bis mehr durch man sein wurde sei guten Tag danke Haus Zeit Kind Mann Frau Wasser heute morgen schön klein groß Suppe kalt Kellner Buch Katze Hund Nacht immer wieder",
    "Spanish": "el la los las de y que en un una es por con no para su al lo como más pero sus le ya o este sí porque esta entre cuando muy sin sobre también me hasta hay donde quien desde todo nos durante todos uno ni contra otros ese eso ante ellos gracias buenos días casa tiempo hombre mujer niño pequeño grande sopa estaba fría camarero libro gato perro noche siempre ahora",
    "Italian": "il lo la gli le di e che un una è per con non sono del della nel alla come più ma anche questo questa ha si dal molto quando dove chi tutto tutti essere fatto sempre ancora grazie buongiorno casa tempo uomo donna bambino piccolo grande zuppa era fredda cameriere libro gatto cane notte oggi domani bene perché senza dopo prima mai io lei noi",
    "Portuguese": "o a os as de e que em um uma é por com não para seu ao como mais mas foi ele das tem à sua ou quando muito nos já eu também só pelo pela até isso ela entre depois sem mesmo aos seus quem nas me esse eles você obrigado bom dia casa tempo homem mulher menino pequeno grande sopa estava fria garçom livro gato cachorro noite sempre agora",
    "Dutch": "de het een en van is dat op te in voor met niet zijn aan er om ook als maar bij door naar uit over dan nog wel geen hij zij wij jullie heeft hebben werd kan meer al veel heel goed dank je huis tijd man vrouw kind klein groot soep was koud ober boek kat hond nacht altijd weer vandaag morgen mooi lekker waar wie",
}  # fmt: skip


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
            name, _, phrases = line[2:].partition(": ")
            lists[name] = phrases.split(", ")  # what a word means cannot be held out
        elif line.startswith("== "):
            tasks.append(Task(line.partition("| ")[2].split(", ")))
        elif line.startswith("= "):
            tasks[-1].labels.append(Label(line[2:].split(", ")))
        elif line and not line.startswith("#"):
            tasks[-1].labels[-1].patterns.append(parse(line))
    for task in tasks:
        for label in task.labels:
            found = label.patterns
            held = [p for i, p in enumerate(found) if (i % HELD_OUT_EVERY == 3) == (split == "eval")]
            label.patterns = held if split == "eval" and held else [p for p in found if p in held] or found
    return tasks, lists


def text_of(label: Label, values: Values, lists: dict[str, list[str]]) -> str:
    """A text of that class."""

    def value(slot: Slot) -> str:
        name = slot.name.rstrip("23")
        return values.rng.choice(lists[name]) if name in lists else values.draw(name).text

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
    right = rng.choice(task.labels)
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
    answer = rng.choice(list(LANGUAGES))
    words = [word for word in LANGUAGES[answer].split() if len(word) > 1]
    text = " ".join(rng.choice(words) for _ in range(rng.randint(4, 12))).capitalize() + "."
    choices = rng.sample([name for name in LANGUAGES if name != answer], rng.randint(1, 4)) + [answer]
    rng.shuffle(choices)
    return Question(text, choices, answer, rng.choice(["language", "Language"]))


def classification_example(values: Values, split: str) -> Example:
    """A question in one of many forms."""
    return put(question(values, split), values.rng)


def put(asked: Question, rng: random.Random) -> Example:
    """The question as chat or as plain text."""
    joint = rng.choice([", ", ", ", " or ", " / ", "|", "; "])
    listed = joint.join(asked.choices)
    if rng.random() < 0.2 and len(asked.choices) > 1:
        listed = ", ".join(asked.choices[:-1]) + " or " + asked.choices[-1]
    if rng.random() < 0.1:
        listed = "\n" + "\n".join(f"- {choice}" for choice in asked.choices)
    word, text = asked.word, asked.text
    label = rng.choice(["Text", "Review", "Sentence", "Message", "Input"])
    if rng.random() < 0.4:
        shown = f"Choices: {listed}\n" if rng.random() < 0.5 else ""
        kind = word[0].upper() + word[1:]
        ending = rng.choice(
            [
                f"{kind}: ",
                f"{kind}:",
                f"The {word.lower()} is ",
                f"The {word.lower()} of the text is ",
                f"{kind} ({listed}): ",
                "Answer: ",
                "Label: ",
            ]
        )
        body = rng.choice([f"{label}: {text}\n", f"{text}\n", f'{label}: "{text}"\n', f"{label}: {text} "])
        answer = asked.answer if ending.endswith(" ") else rng.choice(["", " "]) + asked.answer
        prompt = shown + body + ending
        if "Answer" in ending or "Label" in ending:
            prompt = f"What is the {word.lower()}? Choose from {listed}.\n{body}{ending}"
        return Example().raw(prompt, answer, rng)
    lower = word.lower()
    task = rng.choice([
        f"Classify the {lower} of the text as {listed}.", f"What is the {lower}? Choices: {listed}.", f"Which {lower} fits: {listed}?",
        f"Is the {lower} {listed}?", f"Choose the {lower}: {listed}.", f"Classify the text. Labels: {listed}.",
        f"Pick one of {listed}.", f"Determine the {lower} ({listed}).", f"Answer with one of: {listed}.", f"Classify the {lower}: {listed}.",
    ])  # fmt: skip
    body = rng.choice([f"{label}: {text}", text, f'"{text}"', f"{label}:\n{text}"])
    example = Example()
    if rng.random() < 0.25:
        example.turn("system", task).turn("user", rng.choice([text, body]))
    elif rng.random() < 0.15:
        example.turn(
            "user",
            f"{body}\n{rng.choice(['What is the', 'Name the', 'Give the'])} {lower}{rng.choice(['?', ' of this text.', '.'])}",
        )
    else:
        example.turn("user", f"{task}\n{body}" if rng.random() < 0.7 else f"{body}\n{task}")
    return example.turn("assistant", asked.answer)
