"""Products of several tokens with packed matrices, by a library where one is installed."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec

import torch

from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.runtime.model.weights import Weights

logger = logging.getLogger(__name__)


def multiply_by_library(weights: Weights, dtype: torch.dtype) -> None:
    """Give the layers' packed matrices to humming-kernels, too, which is faster than our kernels with more than one
    token: a second copy. Its products are compared with ours first; if they are wrong, or it fails, it is not used."""
    found = [
        (layer, name, matrix)
        for layer in weights.layers
        for name, matrix in layer.matrices()
        if isinstance(matrix, GroupedMatrix)
    ]
    if not found:
        return
    if find_spec("humming") is None:
        logger.info("packed matrices: sgl's own kernels; those of humming-kernels (sgl[quant]) are not installed")
        return
    error = None
    try:
        from sgl.kernels.layers import grouped_humming

        checked = set()
        for layer, name, matrix in found:
            if grouped_humming.why_not(matrix, dtype) is None:
                product = grouped_humming.HummingProduct(matrix, dtype)
                kind = matrix.shape, matrix.group, matrix.zeros is None
                if kind not in checked and (error := product.error(matrix, dtype)) is not None:
                    break
                checked.add(kind)
                setattr(layer, name, replace(matrix, of_several=product))
    except Exception as reason:  # it compiles on this machine, where much can be missing
        error = repr(reason)
    if error is not None:
        for layer, name, matrix in found:
            setattr(layer, name, matrix)
        logger.warning("packed matrices: sgl's own kernels, as humming-kernels cannot be used: %.500s", error)
        return
    count = sum(getattr(layer, name).of_several is not None for layer, name, _ in found)
    logger.info(
        "packed matrices: %s multiplies several tokens with %d of %d", grouped_humming.name(), count, len(found)
    )
