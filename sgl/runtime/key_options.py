"""The keys that clients of a server send, as an option gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients send. Their programs and requests belong to its name."""

    name: str
    key: str = field(repr=False)


_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*[^=].*)")  # a key without a name may end in `==`
_NO_KEY = re.compile(r"[\x00-\x20\x7f,]")


def read_api_keys(given: Any) -> Any:
    """Read `NAME=KEY` or `KEY` texts, with commas between several. Keys without a name get one that users cannot
    choose. Messages never quote a key: they end up in logs."""
    if given is None or (isinstance(given, tuple) and all(isinstance(key, ApiKey) for key in given)):
        return given
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a key is a text, NAME=KEY or KEY")
    if not texts:
        raise ValueError("no key is given")
    keys: dict[str, ApiKey] = {}
    parts = [part.strip() for text in texts for part in text.split(",")]
    for i, part in enumerate(parts, 1):
        named = _NAMED_KEY.fullmatch(part)
        name, key = named.groups() if named else (f"#{i}", part)
        if not key or _NO_KEY.search(key):
            raise ValueError(f"key number {i} is empty, or has blanks or control characters")
        if key in keys:
            raise ValueError(f"keys number {i} and {list(keys).index(key) + 1} are the same")
        keys[key] = ApiKey(name, key)
    return tuple(keys.values())


def read_admin_key(given: Any) -> Any:
    """Check the key of an administrator."""
    if isinstance(given, str) and (not given or _NO_KEY.search(given)):
        raise ValueError("the key is empty, or has commas, blanks or control characters")
    return given
