"""What endpoints of embeddings answer, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from sgl.runtime.server.replies import MetaInfo


class PromptUsage(TypedDict):
    """Tokens of the prompts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """One text's."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Encoded(TypedDict):
    """The answer of /encode, or a list of them."""

    embedding: list[float]
    meta_info: MetaInfo


class PairScore(TypedDict):
    """Of two texts."""

    object: Literal["score"]
    index: int
    score: float


class PairScores(TypedDict):
    """The answer of /v1/score to text_1 and text_2."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class LabelScores(TypedDict):
    """The answer of /v1/score to a query and items: by item and label."""

    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: PromptUsage


class Rank(TypedDict):
    """One document's."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class Ranks(TypedDict):
    """The answer of /v1/rerank, the best first."""

    id: str
    model: str
    results: list[Rank]
    usage: PromptUsage


class OllamaEmbeddings(TypedDict):
    """The answer of /api/embed; times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """The answer of /api/embeddings."""

    embedding: list[float]
