"""Clauses that say of something what it has: "its anchor happens to be …", "we picked … as the anchor".

Put together from a few hundred pieces, so that a model learns that a value is what stands beside its label, whatever
the words between them. Every tenth piece is kept for the evaluation.
"""

from __future__ import annotations

import random

from tools.train_embedded.values import is_held_out

OWNERS = "the|the|the|its|its|our|their|my|her|his|a|this|that|every||the current|the new|the old|your|one|the usual|the official|the first|whose".split(
    "|"
)
AFTER_LABEL = (
    "is|is|was|:|:| =|->|equals|reads|says|shows|stands at|remains|became|turned out to be|happens to be|should be|"
    "must be|will be|is set to|has been set to|is called|is known as|goes by|comes out as|is listed as|is still|is now|"
    "seems to be|would be|was changed to|is given as|is marked|is recorded as|is fixed at|means|points to|refers to|"
    "belongs to|is basically| -| –|of|named|called|(|,|being|, namely|, which is|, that is|moved to|went to|went up to|"
    "dropped to|is expected to be|could be|may be|has always been|used to be|is reported as|amounts to|comes to|lies at|"
    "starts with|is simply|is probably|as|like|can be found under|is about|is roughly|gets|got|has|holds|carries|reached|"
    "is stored as|stays|sits at|ended up as|is registered as|appears as|is written as|is, as always,|is said to be||||"
).split("|")  # fmt: skip
AFTER_VALUE = (
    "is|was|as|for|serves as|works as|became|makes|is listed as|counts as|stands for|acts as|is what we call|will be|"
    "has been chosen as|is given as|is used as|should be|is now|is still|was picked as|is known as|is taken as|was named|"
    "is meant as|is noted as|goes in as|is set as|remains|is going to be|was entered as|happens to be|turned out to be|is registered as"
).split("|")  # fmt: skip
LED = (
    "we chose {v} as {l}|they picked {v} for {l}|I set {l} to {v}|put {v} under {l}|write {v} in {l} field|use {v} as {l}|"
    "someone changed {l} to {v}|call {l} {v}|it has {v} as {l}|with {v} as {l}|with {l} of {v}|there is {v} for {l}|"
    "enter {v} for {l}|please set {l} to {v}|we know {l} as {v}|you will find {v} as {l}|they gave it {v} as {l}|"
    "it comes with {l} of {v}|having {l} of {v}|it shows {v} for {l}|under {l} we wrote {v}|for {l} take {v}|"
    "as {l} we use {v}|regarding {l}, it is {v}|when asked about {l} she said {v}|{l}? {v}|about {l}: {v}|as for {l}, {v}|"
    "we went with {v} for {l}|he told me {l} is {v}|I think {l} is {v}|note that {l} is {v}|let {l} be {v}|make {l} {v}|"
    "change {l} to {v}|keep {v} as {l}|nobody knew that {l} was {v}|it lists {v} as {l}|{v}, {l}, is known|{v} ({l})"
).split("|")  # fmt: skip


def _of_split(pieces: list[str], split: str) -> list[str]:
    return [piece for piece in pieces if is_held_out(piece + "~") == (split == "eval")]


PIECES = {
    split: tuple(_of_split(pieces, split) for pieces in (AFTER_LABEL, AFTER_VALUE, LED))
    for split in ("train", "eval")
}


def attribute_clause(rng: random.Random, label: str, value: str, split: str) -> str:
    """A clause that says that the label's value is `value`."""
    after_label, after_value, led = PIECES[split]
    owner = rng.choice(OWNERS)
    owned = f"{owner} {label}".strip()
    form = rng.random()
    if form < 0.55:
        glue = rng.choice(after_label)
        gap = "" if glue[:1] in (":", ",") else " "
        return f"{owned}{gap}{glue} {value}".replace("  ", " ").replace("( ", "(") + (")" if glue == "(" else "")
    if form < 0.7:
        return f"{value} {rng.choice(after_value)} {owned}"
    return rng.choice(led).format(v=value, l=owned)
