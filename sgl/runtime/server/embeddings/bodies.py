"""Bodies of requests for embeddings, scores and ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sgl.errors import InvalidRequest
from sgl.runtime.server.fields import Anything, Lenient, Nothing, Off, On, Strict, Zero, also_takes
from sgl.runtime.server.protocol import ChatBody, Message

MAX_NUMBERS = 1 << 22
"""Of all embeddings of one answer, before they are cut: 80 MB of JSON."""
MAX_LABELS = 1024

Text = str | list[int]
"""A text, or its token ids."""
Texts = str | list[str] | list[int] | list[list[int]]
Pooling = Literal["last", "mean"]


class Truncating(Strict):
    """A body whose prompts may be cut."""

    truncate_prompt_tokens: int | None = None
    """Only the last so many tokens of each prompt; -1: as many as fit."""


@also_takes(
    (Anything, "user priority request_id mm_processor_kwargs ignore_eos"),
    (Nothing, "task embed_dtype endianness"),
    (On, "add_special_tokens use_activation"),
)
class EmbeddingBody(Truncating):
    """POST /v1/embeddings."""

    input: Texts | None = None
    """Texts, or their token ids."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """In place of an input: one conversation, as the chat template writes it."""
    add_generation_prompt: bool = False
    """Of messages: open the answer's turn behind them."""
    continue_final_message: bool = False
    """Of messages: leave the last one open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Of messages: variables of the template."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""
    dimensions: int | None = None
    """So many of the first numbers."""
    normalize: bool = True
    """Vectors of length 1."""
    lora_path: str | None = None
    """The name of a loaded LoRA adapter, which may also stand in `model`."""
    pooling: Pooling | None = None
    """Null: the server's."""

    def chat(self) -> ChatBody | None:
        """Of messages, if they are given. Raises InvalidRequest unless either they or an input are."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("either input or messages is needed: texts, or one conversation", param="input")
        if self.messages is None:
            return None
        return ChatBody(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class EncodeBody(Lenient):
    """POST /encode."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    """Null: the server's."""


@also_takes(
    (Anything, "user priority request_id mm_processor_kwargs"),
    (Nothing, "softmax activation"),
    (On, "add_special_tokens use_activation"),
)
class ScoreBody(Truncating):
    """POST /v1/score. With text_1 and text_2: how alike texts are. With query, items and label_token_ids: how likely
    these tokens are behind each item."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    pooling: Pooling | None = None
    """Null: the server's."""
    query: Text | None = None
    items: str | list[str] | list[list[int]] | None = None
    label_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool = False
    """Probabilities among these tokens. False: among all."""
    item_first: bool = False
    """The item comes before the query."""


class Document(Lenient):
    """A text to rank."""

    text: str


@also_takes(
    (Anything, "user priority request_id mm_processor_kwargs rank_fields"),
    (Nothing, "max_tokens_per_doc max_chunks_per_doc instruct"),
    (Zero, "min_score"),
    (On, "truncation use_activation add_special_tokens"),
    (Off, "return_embeddings"),
)
class RerankBody(Truncating):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1)]
    model: str | None = None
    top_n: int | None = None
    """The best so many. Null or 0: all."""
    return_documents: bool = True
    pooling: Pooling | None = None
    """Null: the server's."""

    def texts(self) -> list[str]:
        """Of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def pairs(first: str | list[str], second: str | list[str]) -> list[tuple[int, int]]:
    """Which texts to compare, by their places: one with each, or each with its like. Raises InvalidRequest."""
    left, right = (1 if isinstance(one, str) else len(one) for one in (first, second))
    if left == right:
        return [(i, i) for i in range(left)]
    if left == 1:
        return [(0, i) for i in range(right)]
    message = f"text_1 holds {left} texts and text_2 {right}: one for all, or as many"
    raise InvalidRequest(message, param="text_2")


def listed(given: Any) -> list[Any]:
    """One text or several as a list of them."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    return [given] if is_one else given
