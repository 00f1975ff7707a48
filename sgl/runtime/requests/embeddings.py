"""Embeddings: what is asked of the engine for one, and its vector as a caller wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import shown
from sgl.runtime.batch import Float32Array
from sgl.runtime.requests.results import check_all
from sgl.runtime.sampling_params import integer
from sgl.runtime.scheduler.request import Pooling

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def embedding_arguments(pooling: Any, prompts: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Engine.prepare for the embeddings of prompts. Raises InvalidRequest for another pooling."""
    if pooling not in POOLINGS:
        known = " or ".join(map(repr, POOLINGS))
        raise InvalidRequest(f"pooling must be {known}, not {shown(pooling)}", param="pooling")
    return {**prompts, "pooling": pooling, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}


def check_dimensions(dimensions: Any, hidden_size: int) -> int | None:
    """How many of an embedding's first numbers are kept. Raises InvalidRequest."""
    return None if dimensions is None else integer("dimensions", dimensions, 1, hidden_size)


def finished(embedding: Float32Array, *, normalize: bool, dimensions: int | None = None) -> Float32Array:
    """An embedding's first `dimensions` numbers, of length 1 if `normalize`. What is all zeros stays so."""
    found = embedding[:dimensions]
    if normalize:
        length = float(np.linalg.norm(found.astype(np.float64)))
        found = found / np.float32(length) if length > 0 else found
    return found


def embeddings(
    results: Sequence[dict[str, Any]], *, normalize: bool, dimensions: int | None
) -> list[dict[str, Any]]:
    """What Engine.encode returns of each result. Raises the first failure."""
    check_all(results)
    vectors = (finished(its["embedding"], normalize=normalize, dimensions=dimensions) for its in results)
    return [
        {"embedding": vector.tolist(), "meta_info": its["meta_info"]}
        for vector, its in zip(vectors, results, strict=True)
    ]
