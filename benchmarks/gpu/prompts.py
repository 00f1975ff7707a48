"""What W6 and W7 are asked: random token ids, or for a trained model requests in its chat template."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.workloads import PROMPT_IDS
from sgl.runtime.text.tokenizer import Tokenizer

Prompts = Callable[[list[dict[str, Any]]], list[list[int]]]  # token ids for each schema, other ones at every call
RANDOM_LENGTH = 128

NAMES = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Keiko", "Lars")
WORK = ("baker", "pilot", "nurse", "farmer", "painter", "teacher", "plumber", "chemist", "sailor", "judge")
PLACES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Cairo", "Hanoi", "Quito", "Perth", "Riga", "Tunis", "Bern")


def random_ids() -> Prompts:
    """128 ids each, below the first ten thousand."""
    rng = random.Random(1234)
    return lambda schemas: [[rng.randrange(PROMPT_IDS) for _ in range(RANDOM_LENGTH)] for _ in schemas]


def requests_for_json(tokenizer: Tokenizer) -> Prompts:
    """Each asks for an object with the schema's fields, about a person of its own. Raises InvalidRequest where the
    tokenizer has no chat template."""
    rng = random.Random(1234)

    def asked(schema: dict[str, Any]) -> str:
        person = f"{rng.choice(NAMES)}, a {rng.choice(WORK)} of {rng.randint(18, 90)} from {rng.choice(PLACES)}"
        fields = ", ".join(f"{name} ({_said(field)})" for name, field in schema["properties"].items())
        text = f"{person}: describe this person as one JSON object with these fields and no others: {fields}."
        message = {"role": "user", "content": text}
        return tokenizer.apply_chat_template([message], add_generation_prompt=True)

    return lambda schemas: tokenizer.encode_all([asked(schema) for schema in schemas], add_special_tokens=False)


def _said(field: dict[str, Any]) -> str:
    if "enum" in field:
        return f"one of {', '.join(field['enum'])}"
    return "list of strings" if field["type"] == "array" else str(field["type"])
