"""Clauses that say of something what it has: "its anchor happens to be …", "we picked … as the anchor".

Put together from a few hundred pieces and, in training, as often from words of books by their endings, so that a model
learns that a value is what stands beside its label, whatever the words between them. Every tenth piece is kept for the
evaluation, and no piece made of words is one of those.
"""

from __future__ import annotations

import functools
import random

from tools.train_embedded.values import Values, is_held_out, phrases

BE = "is was has~been will~be had~been got gets may~be used~to~be stays becomes would~be had~to~be".split()  # noqa: SIM905
PREPOSITIONS = "at to on as with in by for under over".split()  # noqa: SIM905
WHO = "we they she he I everyone nobody people someone both it you".split()  # noqa: SIM905
ENDINGS = {"did": ("ed",), "how": ("ly",), "does": ("ts", "ds", "ns", "ks", "ls", "es")}
SHAPES = {
    "after_label": "be did on|be how|did on|does on|be how did on|does|does how on|be did|, word word,|(word)",
    "after_value": "be did on|did on|does on|be how did as|be did as|does how on|, be how",
    "led": "who did that {l} be {v}|who how did {v} on {l}|who did {l} on {v}|who be did {v} on {l}|{v}, {l}, be did|"
    "{l}, word word, {v}|did how on {v}, {l}|who did that {v} be {l}",
}


@functools.cache
def _pieces(name: str, split: str) -> list[str]:
    return [piece for piece in phrases(name) if is_held_out(piece + "~") == (split == "eval")]


def _piece(name: str, values: Values) -> str:
    rng = values.rng
    if "common" not in values.corpora or rng.random() < 0.5:
        return rng.choice(_pieces(name, values.split))
    words = {"be": BE, "on": PREPOSITIONS, "who": WHO, "word": values.corpora["common"]}
    shape = rng.choice(SHAPES[name].split("|"))
    for ending in ENDINGS:
        words[ending] = values.corpora[f"common_{ending}"]
    bare = shape.replace("(", "( ").replace(")", " )").replace(",", " ,")
    made = " ".join(rng.choice(words[word]).replace("~", " ") if word in words else word for word in bare.split())
    made = made.replace("( ", "(").replace(" )", ")").replace(" ,", ",")
    return _piece(name, values) if is_held_out(made + "~") else made


def attribute_clause(values: Values, label: str, value: str) -> str:
    """A clause that says that the label's value is `value`."""
    rng: random.Random = values.rng
    owned = f"{rng.choice(phrases('owners'))} {label}".strip()
    form = rng.random()
    if form < 0.5:
        glue = _piece("after_label", values)
        gap = "" if glue[:1] in (":", ",") else " "
        return f"{owned}{gap}{glue} {value}".replace("  ", " ").replace("( ", "(") + (")" if glue == "(" else "")
    if form < 0.7:
        glue = _piece("after_value", values)
        return f"{value}{'' if glue[:1] == ',' else ' '}{glue} {owned}"
    return _piece("led", values).format(v=value, l=owned)
