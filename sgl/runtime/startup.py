"""Turns options into a model on a device with KV pages. Decides and logs every "auto"."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sgl.errors import ConfigError
from sgl.runtime.adapter_choice import choose_adapters
from sgl.runtime.attention_choice import choose_attention
from sgl.runtime.cache.page_events import PageEvents
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.config import EngineConfig
from sgl.runtime.deterministic import check_deterministic
from sgl.runtime.devices import device_name
from sgl.runtime.draft_choice import load_drafts
from sgl.runtime.kv_events import KvEvents
from sgl.runtime.memory_plan import NO_DRAFTER, DrafterMemory, KVPlan, held_bytes, kv_bytes, plan_memory
from sgl.runtime.model.base import Config, Model, SizedModel
from sgl.runtime.model.choice import count_weights, media_of, vision_of
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.update.group import TrainerGroups
from sgl.runtime.option_checks import check_options
from sgl.runtime.parallel.group import RankGroup
from sgl.runtime.parallel.leader import LeadingRunner
from sgl.runtime.parallel.wire import Build
from sgl.runtime.platform.registry import platform_of
from sgl.runtime.rank_start import build_runner, checked_model, device_of, load, most_tokens, step_tokens
from sgl.runtime.runner.own import EngineRunner, OwnRunner
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits
from sgl.runtime.scheduler.tiers import Tiers
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.shared_choice import shared_host
from sgl.runtime.speculate import choice as speculate
from sgl.runtime.speculate.models import ModelDrafter
from sgl.runtime.speculate.speculator import Speculator
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.tier_choice import open_tiers, plan_host
from sgl.runtime.transfer_choice import open_transfers, plan_transfers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Started:
    """A loaded model, ready for a loop."""

    config: EngineConfig  # every None resolved
    model_config: Config
    model: Model | None  # rank 0's part; None: torch does not compute it
    tokenizer: Tokenizer | None
    runner: EngineRunner
    scheduler: Scheduler
    eos_ids: frozenset[int]
    kv_bytes: int  # of rank 0
    weight_bytes: int  # of rank 0
    num_weights: int
    group: RankGroup | None
    speculator: Speculator
    kv_events: KvEvents | None
    trainers: TrainerGroups = field(default_factory=TrainerGroups)

    def close(self) -> None:
        """End other ranks and what writes files, and give back the device's memory. Idempotent."""
        with contextlib.ExitStack() as stack:  # from the last, and each though another raises
            for part in (self.group, self.runner, self.kv_events, self.scheduler.memory, self.trainers):
                if part is not None:
                    stack.callback(part.close)

    def facts(self) -> dict[str, Any]:
        """Facts for users beside the options."""
        return {
            "architecture": self.model_config.architecture,
            "checkpoint_format": self.model_config.checkpoint_format,
            "hidden_size": self.model_config.hidden_size,
            "vocab_size": self.model_config.vocab_size,
            "has_image_understanding": media_of(self.model_config) is not None,
            "num_weights": self.num_weights,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "eos_token_ids": sorted(self.eos_ids),
            "torch_version": torch.__version__,
            "device_name": device_name(self.config),
            **({} if self.kv_events is None or self.config.dp_size > 1 else self.kv_events.endpoints),
        }

    def state(self) -> dict[str, Any]:
        """What each engine of a server has of its own."""
        return {
            "dp_rank": self.config.dp_rank or 0,
            "ranks": [] if self.group is None else self.group.told(),
            "encoded_images": self.runner.num_encoded,
            **({} if self.kv_events is None else self.kv_events.endpoints),
        }

    def name_adapters(self, name_of: Callable[[int], str | None]) -> None:
        """Say how LoRA adapters' numbers become names."""
        if self.kv_events is not None:
            self.kv_events.adapter_name = name_of


def start(config: EngineConfig) -> Started:
    """Load the model and tokenizer and allocate KV pages, on all ranks. Raises ConfigError, ModelError and
    EngineDead."""
    if (config.dp_rank or 0) >= config.dp_size or (config.dp_size > 1) > (config.dp_rank is not None):
        raise ConfigError(
            f"dp_size={config.dp_size} and dp_rank={config.dp_rank}: a server runs several engines (`sgl serve --dp`), "
            "and one of them needs its number, from 0",
            option="dp_size",
        )
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank} follows host 0, which has the engine: run `sgl serve` here instead",
            option="node_rank",
        )
    if config.nnodes > 1:
        _ = config.address  # before anything starts
    check_options(config)
    with device_of(config, 0) as device:
        model_config = checked_model(config, device)
        if config.deterministic:
            check_deterministic(config, model_config, device)
        group = None
        if config.num_ranks > 1 and not isinstance(platform_of(config.device), OwnRunner):
            group = RankGroup(replace(config, device=config.device or platform_of(None).name), device)
        try:
            return _start(config, model_config, device, group)
        except BaseException:
            if group is not None:
                group.close()
            raise


def _start(config: EngineConfig, model_config: Config, device: torch.device, group: RankGroup | None) -> Started:
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.load(config.tokenizer_path or model_config.path, vocab_size=model_config.vocab_size)
    is_native = isinstance(model_config, ModelConfig | LatentConfig | HybridConfig)
    layers = "sgl's own layers" if is_native else "transformers' modules, with sgl's attention and cache"
    logger.info("%s: %s by %s", config.model_name, model_config.architecture, layers)
    config = choose_adapters(replace(config, model_impl="sgl" if is_native else "transformers"), model_config)
    eos_ids = frozenset(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        eos_ids |= {tokenizer.eos_id}  # the end of a turn, where the config has the base model's end of a text
    if isinstance(platform := platform_of(config.device), OwnRunner):
        own = platform.load(config, model_config, device)
        config, plan = plan_memory(config, own, own.config)
        its = _Ready(config, own, plan, platform.runner(config, own, plan.num_pages, eos_ids))
    else:
        its = _with_torch(config, model_config, device, group, tokenizer, eos_ids)
    config, model, plan, runner = its.config, its.model, its.plan, its.runner
    assert config.page_size is not None
    assert config.context_length is not None
    assert config.max_running_requests is not None
    limits = Limits(
        max_running_requests=config.max_running_requests,
        context_length=config.context_length,
        step_tokens=step_tokens(config),
        max_queued_requests=config.max_queued_requests,
        schedule_policy=config.schedule_policy,
        conservativeness=config.schedule_conservativeness,
        adapter_slots=config.max_loras_per_batch if config.enable_lora else 0,
    )
    pool, window_pool = PagePool(plan.num_pages, config.page_size), None
    if plan.num_window_pages:
        window_pool = PagePool(plan.num_window_pages, config.page_size)
    scheduler = Scheduler(
        limits,
        pool,
        share=not config.disable_radix_cache,
        depth=config.pp_size,
        num_checkpoints=config.state_checkpoints,
        window=plan.window,
        window_pool=window_pool,
        tiers=its.tiers,
        transfers=its.transfers,
    )
    is_recurrent = isinstance(model_config, HybridConfig)
    by_default = speculate.is_default(config, model.dtype, is_recurrent=is_recurrent)
    if by_default:
        logger.info("drafts: of earlier text and of constraints (speculative_algorithm='off' turns them off)")
    return Started(
        config,
        model_config,
        its.of_torch,
        tokenizer,
        runner,
        scheduler,
        eos_ids,
        kv_bytes=kv_bytes(config, model, plan) + its.drafter_memory.token_bytes * plan.num_pages * config.page_size,
        weight_bytes=held_bytes(model) + its.drafter_memory.weight_bytes,
        num_weights=count_weights(model_config) + (0 if (part := vision_of(model)) is None else part.num_weights),
        group=group,
        speculator=speculate.speculator(
            config, scheduler, [] if its.drafter is None else [its.drafter], by_default=by_default
        ),
        kv_events=_kv_events(config, scheduler),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """A model with its KV pages, and the options that it decided."""

    config: EngineConfig
    model: SizedModel
    plan: KVPlan
    runner: EngineRunner
    drafter_memory: DrafterMemory = NO_DRAFTER
    drafter: ModelDrafter | None = None
    tiers: Tiers | None = None
    transfers: Transfers | None = None
    of_torch: Model | None = None


def _with_torch(
    config: EngineConfig,
    model_config: Config,
    device: torch.device,
    group: RankGroup | None,
    tokenizer: Tokenizer | None,
    eos_ids: frozenset[int],
) -> _Ready:
    model = load(config, model_config, device, None if group is None else group.ranks)
    drafts = load_drafts(config, model_config, model, tokenizer)
    drafter_memory = NO_DRAFTER if drafts is None else drafts.drafter_memory
    config, plan = plan_memory(config, model, model_config, drafter_memory)
    plan = plan_transfers(config, model_config, model, plan_host(config, model, plan))
    config, attention = choose_attention(config, plan.attention_shape(config, model))
    drafter = None if drafts is None else drafts.drafter(config, plan.num_pages, eos_ids)
    runner: ModelRunner | LeadingRunner
    if group is None:
        runner = build_runner(config, model, attention, plan, eos_ids, drafter)
    else:
        path = group.file("rows")
        shared = shared_host(config, model_config, model, plan, path, 0)
        group.send(Build(asdict(config), asdict(plan), sorted(eos_ids), path))
        with group.failing():
            own = build_runner(config, model, attention, plan, eos_ids, drafter, shared)
            runner = LeadingRunner(own, group, device)
    num_tokens, tiers = most_tokens(config, plan.num_pages), None
    if platform_of(config.device).is_gpu:
        runner.warm_up(num_tokens)
    if plan.num_host_pages:
        tiers = open_tiers(config, model, runner, plan, num_tokens)
    transfers = open_transfers(config, model_config, model, runner.host, plan)
    return _Ready(config, model, plan, runner, drafter_memory, drafter, tiers, transfers, model)


def _kv_events(config: EngineConfig, scheduler: Scheduler) -> KvEvents | None:
    if config.kv_events is None:
        return None
    recorded = PageEvents(scheduler.memory.cache)
    page_size = scheduler.memory.page_size
    return KvEvents(recorded, page_size, config.kv_events, config.kv_events_replay, config.dp_rank or 0)


def freeze(started: Started) -> bool:
    """Exclude a GPU engine's objects from garbage collections, which would stop all threads for 100 to 300 ms.
    Returns whether it did."""
    if not platform_of(started.config.device).is_gpu:
        return False
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return True
