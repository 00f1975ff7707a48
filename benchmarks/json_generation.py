"""Documents drawn at random from the grammars of schemas must be valid: `python -m benchmarks.json_generation
FOLDER`.

FOLDER holds MaskBench files (a schema under "schema" each). From every grammar some texts are drawn byte by byte
among the allowed ones, leaning towards an end; those that end are read back and judged by the jsonschema library.
Prints what is invalid, and a line of totals.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar import Grammar, Vocabulary, compile

BYTES = Vocabulary([bytes([i]) for i in range(256)] + [None], [256], 257)
"""One token for each byte, and the end."""
_END = 256
_CLOSING = frozenset((*b'"]}', _END))


def random_text(grammar: Grammar, rng: random.Random, budget: int) -> bytes | None:
    """A random text of a grammar over BYTES, or None if it is not complete after `budget` bytes.

    Closing bytes are the more likely the more of the budget is used.
    """
    matcher = grammar.matcher()
    row = np.zeros(9, np.int32)
    text = bytearray()
    while len(text) < budget:
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        closing = [int(byte) for byte in allowed if int(byte) in _CLOSING]
        lean = rng.random() < 0.3 + len(text) / budget
        byte = rng.choice(closing) if closing and lean else int(rng.choice(allowed))
        if byte == _END:
            return bytes(text)
        if not matcher.accept_bytes(bytes([byte])):
            raise AssertionError(f"the mask allows byte {byte} behind {bytes(text)!r} and the matcher does not")
        text.append(byte)
    return None


def is_valid(schema: Any, value: object) -> bool:
    """What the jsonschema library says, formats left aside."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(validator(schema).is_valid(value))


def judge(
    schema: Any, rng: random.Random, texts: int, budget: int, **options: Any
) -> tuple[Counter[str], list[str]]:
    """Counts of refused, too large, unfinished, valid and invalid, and the invalid texts, of one schema compiled
    strictly.
    """
    counts: Counter[str] = Counter()
    invalid: list[str] = []
    try:
        grammar = compile(json_schema=schema, vocabulary=BYTES, **options)
    except GrammarError:
        return Counter(refused=1), invalid
    for _ in range(texts):
        try:
            text = random_text(grammar, rng, budget)
        except GrammarTooLarge:
            counts["too large"] += 1
            continue
        if text is None:
            counts["unfinished"] += 1
        elif is_valid(schema, json.loads(text)):
            counts["valid"] += 1
        else:
            counts["invalid"] += 1
            invalid.append(text.decode())
    return counts, invalid


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=100, help="how many, drawn at random")
    parser.add_argument("--texts", type=int, default=4, help="how many from each")
    parser.add_argument("--budget", type=int, default=1500, help="bytes of a text at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--whitespace", choices=["compact", "flexible"], default="compact")
    parser.add_argument("--key-order", choices=["schema", "any"], default="schema")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    files = sorted(options.folder.rglob("*.json"))
    totals: Counter[str] = Counter()
    for path in rng.sample(files, min(options.schemas, len(files))):
        schema = json.loads(path.read_text())["schema"]
        counts, invalid = judge(
            schema, rng, options.texts, options.budget, whitespace=options.whitespace, key_order=options.key_order
        )
        totals += counts
        if counts["too large"]:
            sys.stdout.write(f"TOO LARGE {path.name}\n")
        for text in invalid:
            sys.stdout.write(f"INVALID {path.name}: {text[:500]}\n")
    sys.stdout.write(json.dumps(totals) + "\n")
    sys.exit(1 if totals["invalid"] else 0)


if __name__ == "__main__":
    main()
