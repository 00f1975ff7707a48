"""Decides which host memory the ranks of an engine share: what rank 0 sends, pulls or keeps in files for all."""

from __future__ import annotations

from pathlib import Path

from sgl.runtime.config import EngineConfig
from sgl.runtime.memory_plan import KVPlan, page_bytes, token_bytes
from sgl.runtime.model.base import Config, Model, RecurrentModel
from sgl.runtime.runner.shared_rows import SharedHost, SharedRows
from sgl.runtime.transfer.shape import PageShape


def shared_host(
    config: EngineConfig, model_config: Config, model: Model, plan: KVPlan, path: str, rank: int
) -> SharedHost | None:
    """The host memory of an engine of several ranks, in files that begin with `path`; None if pages go nowhere. Raises
    ConfigError."""
    has_files, size = config.hicache_storage_backend is not None, config.num_ranks
    if not (plan.num_transfer_pages or has_files):
        return None
    option = "hicache_size" if plan.num_host_pages else "disaggregation_buffer_mb"

    def pages_of(name: str, shape: PageShape, num_rows: int) -> SharedRows:
        each = fragment_bytes(config, model, shape)
        every = shape.stages(1)[-1] * each
        whole, place = shape.num_parts(config.tp_size) * every, shape.place(rank, each)
        return SharedRows(Path(name), num_rows, config.tp_size * every, whole, place, rank, size, option)

    pages = pages_of(
        path, page_shape(config, model_config, model, plan), plan.num_host_pages + plan.num_transfer_pages
    )
    windowed, states = None, []
    if has_files and plan.num_host_window_pages:
        shape = page_shape(config, model_config, model, plan, windowed=True)
        windowed = pages_of(f"{path}-windowed", shape, plan.num_host_window_pages + 1)
    if has_files and plan.num_host_states and isinstance(model, RecurrentModel):
        for number, part in enumerate(model.new_states(1).fragments()):  # ranks' parts differ, and are one stage's
            each = part.shape[0] * part.shape[2]
            rows = Path(f"{path}-states-{number}"), plan.num_host_states + 1, size * each, size * each
            states.append(SharedRows(*rows, slice(rank * each, (rank + 1) * each), rank, size, option))
    return SharedHost(pages, windowed, states)


def page_shape(
    config: EngineConfig, model_config: Config, model: Model, plan: KVPlan, *, windowed: bool = False
) -> PageShape:
    """Of pages of all layers; windowed: of those of layers with a window of their own."""
    assert config.page_size is not None, "it is decided"
    fragments = 1 if model_config.latent_dim else 2
    layers = model_config.num_layers
    if config.pp_size == 1:  # else each layer has pages, of one kind
        layer_bytes = config.page_size * token_bytes(config, model) // model.most_layers
        layers = page_bytes(config, model, plan)[windowed] // layer_bytes
    return PageShape(layers, fragments, config.page_size, model_config.num_kv_heads, config.tp_size, config.pp_size)


def fragment_bytes(config: EngineConfig, model: Model, shape: PageShape) -> int:
    """Of a rank's page, keys or values of a layer."""
    return token_bytes(config, model) // model.most_layers // shape.num_fragments * shape.num_tokens
