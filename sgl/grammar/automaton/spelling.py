"""How the special tokens in a structural tag are spelled in bytes, so that no text is mistaken for one.

A special token stands for its name between two bytes that no UTF-8 has. `Vocabulary` spells it so too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sgl.errors import GrammarError
from sgl.grammar.vocabulary.special import spelled


class Spelling(NamedTuple):
    """The names of the special tokens that a structural tag speaks of."""

    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Those that end a text: nothing follows them."""

    def read(self, text: str) -> tuple[bytes, bool]:
        """The bytes of a text, and whether it ends with a token that ends texts, which has none."""
        names = sorted({*self.special, *self.ends}, key=len, reverse=True)
        found = b""
        at = 0
        for match in re.finditer("|".join(map(re.escape, names)), text) if names else ():
            found += text[at : match.start()].encode()
            if match.group() in self.ends:
                return found, True
            found += spelled(match.group())
            at = match.end()
        return found + text[at:].encode(), False

    def trigger(self, text: str) -> bytes:
        """The bytes of what free text is interrupted by. Raises GrammarError for a token that ends texts."""
        found, is_end = self.read(text)
        if is_end:
            raise GrammarError(f"{text!r} ends the text in this model's vocabulary, so that nothing can follow it")
        return found

    def mistakable(self, texts: Sequence[str]) -> tuple[bytes, ...]:
        """The texts that hold special tokens, as somebody would write them who has no such token."""
        return tuple(text.encode() for text in texts if self.read(text) != (text.encode(), False))
