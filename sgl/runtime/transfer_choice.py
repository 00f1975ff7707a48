"""Decides whether and how an engine gives KV pages to others, or pulls them, and opens that."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sgl.errors import ConfigError
from sgl.machine_limits import memory_limit
from sgl.native_code import private_folder
from sgl.runtime.cache.pages import NeighbourPool
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import kv_dtype
from sgl.runtime.memory_plan import KVPlan, gib, has_mapped_transfers, transfer_bytes
from sgl.runtime.model.base import Config, Model, RecurrentModel
from sgl.runtime.model.weight_files import weight_files
from sgl.runtime.option_checks import wrong
from sgl.runtime.parallel.tcp import secret_of
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.scheduler.exports import EngineAddress, Exports
from sgl.runtime.scheduler.imports import Imports
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.shared_choice import fragment_bytes, page_shape
from sgl.runtime.tier_choice import identity, weights_hash
from sgl.runtime.transfer.mapped import MappedReader, MappedRemote
from sgl.runtime.transfer.nixl import NixlReader, NixlRemote
from sgl.runtime.transfer.offers import Offers
from sgl.runtime.transfer.params import PageLayout, TransferParams
from sgl.runtime.transfer.reader import Reader, TcpReader
from sgl.runtime.transfer.server import Remote, TransferServer

logger = logging.getLogger(__name__)

_HASHED_BYTES = 1 << 26  # of a weight file, at once and on the model's device
_KEY = "disaggregation.key"


def plan_transfers(config: EngineConfig, model_config: Config, model: Model, plan: KVPlan) -> KVPlan:
    """The plan with pages of memory that transfers go through, if there are to be any. Raises ConfigError."""
    mode = config.disaggregation_mode
    if mode in (None, "null"):
        return plan
    name = model.config.architecture
    if isinstance(model, RecurrentModel):
        raise wrong(config, "disaggregation_mode", f"sends no recurrent states, and {name} has layers with some")
    if plan.num_window_pages:
        raise wrong(
            config,
            "disaggregation_mode",
            f"sends pages of all layers, and {name} has layers with windows of their own",
        )
    shape = page_shape(config, model_config, model, plan)
    page_bytes = config.tp_size * shape.stages(1)[-1] * fragment_bytes(config, model, shape)
    limit = memory_limit()
    num_bytes, is_mapped = transfer_bytes(config, plan.num_pages * page_bytes), has_mapped_transfers(config)
    if config.disaggregation_buffer_mb is not None:
        if not is_mapped and num_bytes * config.dp_size > limit.num_bytes:
            raise wrong(config, "disaggregation_buffer_mb", f"is more than {gib(limit.num_bytes)} ({limit.what})")
        if num_bytes < page_bytes:
            raise wrong(config, "disaggregation_buffer_mb", f"holds no page, of which one takes {gib(page_bytes)}")
    pages = max(1, min(num_bytes // page_bytes, plan.num_pages))
    logger.info("transfers of KV pages go through %s, %d tokens", gib(pages * page_bytes), pages * shape.num_tokens)
    return replace(plan, num_transfer_pages=pages + 1, has_mapped_transfers=is_mapped)


def open_transfers(
    config: EngineConfig, model_config: Config, model: Model, host: HostPages | None, plan: KVPlan
) -> Transfers | None:
    """Of an engine whose runner is ready; None if it is for prompts and outputs alike. Raises ConfigError."""
    if not plan.num_transfer_pages:
        return None
    assert host is not None, "the runner was made with host pages"
    assert config.page_size is not None, "it is decided"
    secret, shared, rows = _secret(config), host.shared, host.memory
    memory, rows = (rows, rows) if shared is None else (shared.whole, shared.rows)
    dtype, kv = str(model.dtype).removeprefix("torch."), str(kv_dtype(config) or model.dtype).removeprefix("torch.")
    layout = PageLayout(
        model=identity(
            replace(config, dtype="auto"), model, model_config, _weights(config, model_config, model)
        ).hex(),
        dtype=dtype,
        kv_cache_dtype=kv,
        page_size=config.page_size,
        page_bytes=memory.shape[1],
        tp_size=config.tp_size,
        pp_size=config.pp_size,
    )
    pool = NeighbourPool(plan.num_transfer_pages, config.page_size)
    first = plan.num_host_pages
    by_nixl, name = config.disaggregation_transport == "nixl", secrets.token_hex(16)
    if config.disaggregation_mode == "decode":
        shape = page_shape(config, model_config, model, plan)

        def fit(row: int, params: TransferParams) -> None:
            shape.fit(rows[row], params.tp_size, params.pp_size)

        reader: Reader
        if host.mapped is not None:
            reader = MappedReader(host.mapped, secret)
        else:
            reader = NixlReader(memory, fit, name) if by_nixl else TcpReader(memory, fit)
        imports = Imports(reader, layout, pool, first, time.monotonic)
        return Transfers(pool, layout, secret, imports=imports)
    offers = Offers()
    remote: Remote | None = NixlRemote(memory, name) if by_nixl else None
    if host.mapped is not None:
        remote = MappedRemote(host.mapped, secret)
    port = config.disaggregation_port and config.disaggregation_port + (config.dp_rank or 0)
    server = TransferServer(memory, offers, config.disaggregation_host, port, remote)
    address = EngineAddress(name, server.host, server.port)
    logger.info("decode engines pull KV pages from %s:%d", address.host, address.port)
    exports = Exports(offers, server, address, layout, secret, pool, first, config.disaggregation_lease)
    return Transfers(pool, layout, secret, exports=exports)


def _weights(config: EngineConfig, model_config: Config, model: Model) -> bytes:
    """A hash of the model's weights, whatever part of them each rank has."""
    if config.load_format == "dummy":
        return f"drawn on {model.device.type}".encode()
    files = (torch.from_numpy(np.memmap(its, np.uint8, mode="c")) for its in weight_files(Path(model_config.path)))
    return weights_hash(part.to(model.device) for file in files for part in torch.split(file, _HASHED_BYTES))


def _secret(config: EngineConfig) -> bytes:
    """What `kv_transfer_params` are signed with. Raises ConfigError."""
    option = "disaggregation_key_file"
    if config.disaggregation_key_file is not None:
        return secret_of(config.disaggregation_key_file, option)
    folder = private_folder()
    if folder is None:
        raise ConfigError(f"there is no home folder for a key: name a file by {option}", option=option)
    path = folder / _KEY
    if not path.exists():
        _make_key(path)
    return secret_of(str(path), option)


def _make_key(path: Path) -> None:
    """Make a key file that appears whole, and is the first maker's where there are several."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, secrets.token_hex(32).encode())
        finally:
            os.close(file)
        try:
            os.link(made, path)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as error:
        raise ConfigError(
            f"no key can be made at {path} ({error.strerror}): name a file by disaggregation_key_file",
            option="disaggregation_key_file",
        ) from error
