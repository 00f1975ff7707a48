"""Clauses that say of something what it has: "its anchor happens to be …", "we picked … as the anchor".

Put together from a few hundred pieces, so that a model learns that a value is what stands beside its label, whatever
the words between them. Every tenth piece is kept for the evaluation.
"""

from __future__ import annotations

import functools
import random

from tools.train_embedded.values import is_held_out, phrases


@functools.cache
def _pieces(name: str, split: str) -> list[str]:
    return [piece for piece in phrases(name) if is_held_out(piece + "~") == (split == "eval")]


def attribute_clause(rng: random.Random, label: str, value: str, split: str) -> str:
    """A clause that says that the label's value is `value`."""
    owned = f"{rng.choice(phrases('owners'))} {label}".strip()
    form = rng.random()
    if form < 0.55:
        glue = rng.choice(_pieces("after_label", split))
        gap = "" if glue[:1] in (":", ",") else " "
        return f"{owned}{gap}{glue} {value}".replace("  ", " ").replace("( ", "(") + (")" if glue == "(" else "")
    if form < 0.7:
        return f"{value} {rng.choice(_pieces('after_value', split))} {owned}"
    return rng.choice(_pieces("led", split)).format(v=value, l=owned)
