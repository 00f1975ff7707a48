"""The embedded model's recipe: what is held out is never learnt, records are what their texts say, pieces encode like
whole texts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import sgl
from tools.train_embedded.classify import classification_example, read_classes
from tools.train_embedded.dialogues import dialogue_example
from tools.train_embedded.domains import read_domains
from tools.train_embedded.patterns import Sequence, Slot, say
from tools.train_embedded.records import attribute_example, record_example
from tools.train_embedded.rewriting import MARK, WAYS, mark, other_verb
from tools.train_embedded.toolcalls import read_tools, tool_example
from tools.train_embedded.train import Encoder
from tools.train_embedded.values import CURRENCIES, Values, read_synonyms

TOKENIZER = Path(sgl.__file__).parent / "models" / "embedded" / "tokenizer.json"


def sayings(patterns: Iterable[Sequence], count: int, *, share_changed: float = 0.0) -> set[str]:
    """What patterns say, with their slots' names for values, in lower case and without punctuation; so many of the
    words that have synonyms replaced by those."""
    rng, synonyms = random.Random(0), read_synonyms()

    def literal(text: str) -> str:
        words = (rng.choice(synonyms.get(word.lower(), [word])) if rng.random() < share_changed else word
                 for word in text.split(" "))  # fmt: skip
        return " ".join(words)

    texts = (
        say(pattern, rng, lambda slot: "" if slot.setting is not None else f"{{{slot.name}}}", literal)
        for pattern in patterns
        for _ in range(count)
    )
    return {" ".join(re.findall(r"\{\w+\}|[\w']+", text.lower())) for text in texts}


@pytest.mark.slow
def test_no_held_out_pattern_says_what_a_learnt_one_says() -> None:
    pairs: list[tuple[list[Sequence], list[Sequence]]] = []
    learnt = {domain.nouns[0]: domain for domain in read_domains("train")}
    for held in read_domains("eval"):
        known = learnt[held.nouns[0]]
        scraps = [p.sequence for p in known.scraps]
        pairs.append(([p.sequence for p in held.heads], [*(p.sequence for p in known.heads), *scraps]))
        pairs.append(([p.sequence for p in held.tails], [*(p.sequence for p in known.tails), *scraps]))
        for held_patterns, known_patterns in pairs[-2:]:
            assert not sayings(held_patterns, 40) & sayings(known_patterns, 40, share_changed=0.3)
    for held_task, known_task in zip(read_classes("eval")[0], read_classes("train")[0], strict=True):
        for held_label, known_label in zip(held_task.labels, known_task.labels, strict=True):
            pairs.append((held_label.patterns, known_label.patterns))
    for held_tool, known_tool in zip(read_tools("eval"), read_tools("train"), strict=True):
        pairs.append((held_tool.requests, known_tool.requests))
        pairs.append(([x for x, _ in held_tool.problems], [x for x, _ in known_tool.problems]))
    assert sum(len(held) for held, _ in pairs) > 150
    for held, known in pairs:
        assert not sayings(held, 40) & sayings(known, 40)


def test_texts_say_what_records_hold() -> None:
    values = Values(random.Random(1), "train")
    for make in (record_example, attribute_example):
        for _ in range(300):
            text, fields, record, _, _ = make(values, "train")
            assert [f.key for f in fields] == list(record)
            for f in fields:
                data = record[f.key]
                if isinstance(data, str) and data.upper() not in CURRENCIES.values():
                    assert data.casefold() in text.casefold(), (text, record)


def test_other_ways_of_saying_keep_every_value_once() -> None:
    rng, changed = random.Random(3), dict.fromkeys((*WAYS, other_verb), 0)
    for domain in read_domains("train"):
        for pattern in domain.heads * 3:
            slots: list[str] = []

            def marked(slot: Slot, slots: list[str] = slots) -> str:
                slots.append(slot.name)
                return mark(len(slots) - 1) if slot.setting is None else ""

            text = say(pattern.sequence, rng, marked).strip()
            for way in changed:
                made = (lambda: "vred",) if way is other_verb else ()
                said = way(text, rng, lambda _: "person", *made)
                assert sorted(re.findall(MARK, said)) == sorted(re.findall(MARK, text)), (text, said)
                changed[way] += said != text
    assert min(changed.values()) > 50, changed


def test_pieces_encode_as_whole_texts_do() -> None:
    values, tokenizer = Values(random.Random(2), "train"), Tokenizer.from_file(str(TOKENIZER))
    encode = Encoder(tokenizer)
    for make in (classification_example, tool_example, dialogue_example) * 60:
        example = make(values, "train")
        ids, weights = encode(example)
        assert ids == [i for text, _ in example.pieces for i in tokenizer.encode(text).ids]
        assert len(ids) == len(weights)
    example.pieces = [("x² – 3½m²\x00_é́ <|im_end|>\n東京 Ωmega's", True)]
    assert encode(example)[0] == tokenizer.encode(example.pieces[0][0]).ids
