"""Which writer a model has, and which models have none."""

from __future__ import annotations

from sgl.errors import WeightsError
from sgl.runtime.model.base import Model
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.update.decoder import DecoderWriter
from sgl.runtime.model.update.hybrid import HybridWriter
from sgl.runtime.model.update.latent import LatentWriter
from sgl.runtime.model.update.writer import Writer


def writer_of(model: Model, quantization: str | None) -> Writer:
    """A model's, or one rank's part of it. quantization: the engine's option. Raises WeightsError for what is
    quantised."""
    scheme = getattr(model.config, "scheme", None)
    if quantization is not None or scheme is not None:
        kept = f"quantization={quantization!r}" if quantization is not None else f"a checkpoint in {scheme}"
        raise WeightsError(
            f"quantised weights take no new ones in place ({kept}): start the engine on an unquantised model"
        )
    if isinstance(model, Decoder):
        return DecoderWriter(model)
    if isinstance(model, LatentDecoder):
        return LatentWriter(model)
    if isinstance(model, Hybrid):
        return HybridWriter(model)
    # imported only where it serves: transformers takes seconds
    from sgl.runtime.model.hf.model import TransformersModel
    from sgl.runtime.model.update.transformers import TransformersWriter

    assert isinstance(model, TransformersModel), "there is no other"
    return TransformersWriter(model)
