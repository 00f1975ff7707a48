"""The token table of a tokenizer that has one: what the detokenizer reads, made when a tokenizer is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sgl.errors import TokenizerError
from sgl.grammar.vocabulary.token_table import TokenTable, read_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)


def token_table(backend: Backend) -> TokenTable | None:
    """The table of a tokenizer; None if its decoder does more than join tokens, or proves the table wrong.

    A few hundred ms for 150,000 tokens, which are all compared with the tokenizer's `decode`.
    """
    try:
        return read_tokens(backend)
    except TokenizerError as error:
        logger.warning("text is decoded in windows: %s", error)
        return None
