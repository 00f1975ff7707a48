"""Which options of an engine do not go together, as far as they alone tell: before there is a model or a device."""

from __future__ import annotations

import dataclasses

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig
from sgl.runtime.constraints.packages import check_backend

_LAST_PORT = 65535
_NO_HOSTS = ("", "0.0.0.0", "::", "*")


def check_options(config: EngineConfig) -> None:
    """Raises ConfigError, also as MissingExtra."""
    _check_tiers(config)
    _check_transfers(config)
    _check_events(config)
    _check_adapters(config)
    check_backend(config.grammar_backend)


def _check_tiers(config: EngineConfig) -> None:
    options = {
        field.name: field.default for field in dataclasses.fields(config) if field.name.startswith("hicache_")
    }
    changed = [option for option, default in options.items() if getattr(config, option) != default]
    if not config.enable_hierarchical_cache:
        for option in changed:
            raise wrong(config, option, "is part of enable_hierarchical_cache, which is off")
        return
    if config.disable_radix_cache:
        raise wrong(config, "disable_radix_cache", "leaves nothing for enable_hierarchical_cache to keep")
    if config.speculative_draft_model_path is not None:
        raise wrong(
            config,
            "enable_hierarchical_cache",
            f"keeps pages of the model alone, and speculative_draft_model_path={config.speculative_draft_model_path!r} "
            "has others beside them",
        )
    if config.hicache_storage_backend is None:
        for option in changed:
            if option.startswith("hicache_storage_"):
                raise wrong(config, option, "is for hicache_storage_backend='file'")
    elif config.hicache_storage_dir is None:
        raise wrong(config, "hicache_storage_backend", "needs a folder: name it by hicache_storage_dir")
    if config.hicache_storage_backend is not None and config.nnodes > 1:
        raise wrong(
            config,
            "hicache_storage_backend",
            f"is for engines on one host, whose ranks share the memory that files are read into, and nnodes="
            f"{config.nnodes}; host memory is for any",
        )


def _check_transfers(config: EngineConfig) -> None:
    mode = config.disaggregation_mode
    if mode in (None, "null"):
        for each in dataclasses.fields(config):
            name, is_mode = each.name, each.name == "disaggregation_mode"
            if name.startswith("disaggregation_") and not is_mode and getattr(config, name) != each.default:
                raise wrong(config, name, "is for disaggregation_mode prefill or decode")
        return
    if config.disable_radix_cache:
        raise wrong(config, "disable_radix_cache", f"leaves no pages for disaggregation_mode={mode!r}")
    if config.nnodes > 1:
        raise wrong(
            config,
            "nnodes",
            f"with disaggregation_mode={mode!r}: the ranks of an engine share the memory that pages go through, so "
            "they are on one host: start an engine on each",
        )
    if config.speculative_draft_model_path is not None:
        raise wrong(
            config,
            "speculative_draft_model_path",
            f"with disaggregation_mode={mode!r}: the draft model's pages are not sent; look-ups (NGRAM) are fine",
        )
    if config.disaggregation_transport == "cuda_ipc" and config.num_ranks > 1:
        raise wrong(
            config,
            "tp_size" if config.tp_size > 1 else "pp_size",
            "with disaggregation_transport='cuda_ipc', by which one GPU's pages are read: 'tcp' and 'nixl' gather "
            "those of several ranks",
        )
    if config.disaggregation_port and config.disaggregation_port + config.dp_size - 1 > _LAST_PORT:
        raise wrong(
            config, "disaggregation_port", f"leaves no port for each of {config.dp_size} engines, from there on"
        )
    if mode == "prefill" and config.disaggregation_host in _NO_HOSTS:
        raise wrong(
            config,
            "disaggregation_host",
            "is no address that decode engines could connect to: name one of this host",
        )


def _check_events(config: EngineConfig) -> None:
    """Of endpoints that would do nothing, or listen twice at one port."""
    events, replay, engines = config.kv_events, config.kv_events_replay, config.dp_size
    for option, endpoint, other, is_needless in (
        ("kv_events", events, "disable_radix_cache, which leaves nothing to tell", config.disable_radix_cache),
        ("kv_events_replay", replay, "no kv_events: nothing is published that could be missed", events is None),
    ):
        if is_needless and endpoint is not None:
            raise ConfigError(f"{option}={endpoint!r} with {other}", option=option)
    ports = [int(each.rpartition(":")[2]) for each in (events, replay) if each is not None]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < engines:
        raise ConfigError(
            f"kv_events_replay={replay!r}: each of {engines} engines takes the port after the one before, and so do "
            f"those of kv_events={events!r}: give a port that is {engines} or more away",
            option="kv_events_replay",
        )


def _check_adapters(config: EngineConfig) -> None:
    paths = config.lora_paths or ()
    if config.enable_lora is False or not (paths or config.enable_lora):
        if paths:
            raise ConfigError(
                "enable_lora=False, and lora_paths names adapters: leave one out", option="enable_lora"
            )
        return
    if config.nnodes > 1:
        raise ConfigError(f"LoRA adapters are served on one host, and nnodes={config.nnodes}", option="enable_lora")
    num_pinned = sum(path.pinned for path in paths)
    if num_pinned >= config.max_loras_per_batch:
        raise ConfigError(
            f"{num_pinned} adapters are pinned, and max_loras_per_batch={config.max_loras_per_batch} must leave a slot "
            "for others",
            option="max_loras_per_batch",
        )


def wrong(config: EngineConfig, option: str, why: str) -> ConfigError:
    """An option's value that cannot be."""
    return ConfigError(f"{option}={getattr(config, option)!r} {why}", option=option)
