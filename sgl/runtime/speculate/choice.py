"""Which drafters an engine has, by its options."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.drafter import DeviceDrafter, Drafter
from sgl.runtime.speculate.grammar import GrammarDrafter
from sgl.runtime.speculate.lookup import Lookup
from sgl.runtime.speculate.pools import Pools
from sgl.runtime.speculate.speculator import Speculator

_ROW_TOKENS = 8  # of a row in a step that verifies, unless options say otherwise


def check(config: EngineConfig, architecture: str, *, is_recurrent: bool) -> None:
    """Raise ConfigError for drafts that the model or the other options cannot have, and options that do nothing."""
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    row_tokens, steps = config.speculative_num_draft_tokens, config.speculative_num_steps
    is_on, needs_model = algorithm not in (None, "off"), algorithm in ("DRAFT", "STANDALONE", "EAGLE3")
    asks_model = needs_model or (algorithm == "auto" and path is not None)
    said = f"speculative_algorithm={algorithm!r}"
    for is_wrong, option, message in (
        (
            path is not None and not asks_model,
            "speculative_draft_model_path",
            f"speculative_draft_model_path={path!r} needs a speculative_algorithm that asks a model, not {algorithm!r}:"
            " DRAFT, EAGLE3 (a head), auto (with others)",
        ),
        (
            row_tokens is not None and not is_on,
            "speculative_num_draft_tokens",
            f"speculative_num_draft_tokens={row_tokens} needs a speculative_algorithm that is named, such as auto",
        ),
        (
            steps is not None and not asks_model,
            "speculative_num_steps",
            f"speculative_num_steps={steps} needs a draft model or head, of speculative_algorithm DRAFT or EAGLE3; "
            "speculative_num_draft_tokens bounds what others draft",
        ),
        (
            is_on and config.pp_size > 1,
            "speculative_algorithm",
            f"{said}: with pp_size={config.pp_size}, the next step starts before the last one's tokens are known, and "
            "nothing can be drafted behind them; tp_size and dp_size work",
        ),
        (
            is_on and is_recurrent,
            "speculative_algorithm",
            f"{said}: {architecture} has recurrent layers, whose states cannot go back behind a draft that fell; leave "
            "it out",
        ),
        (needs_model and path is None, "speculative_algorithm", f"{said} needs a speculative_draft_model_path"),
        (
            steps is not None and row_tokens is not None and steps >= row_tokens,
            "speculative_num_steps",
            f"speculative_num_steps={steps} drafts do not fit behind a row's last token into "
            f"speculative_num_draft_tokens={row_tokens}: give {steps + 1 if steps else None}, or leave it out",
        ),
    ):
        if is_wrong:
            raise ConfigError(message, option=option)


def is_default(config: EngineConfig, dtype: torch.dtype, *, is_recurrent: bool) -> bool:
    """Whether `auto` drafts where no option says so: where it was measured to pay and outputs stay the same, token for
    token, however long steps take."""
    is_exact = config.device == "cpu" and dtype == torch.float32
    return config.speculative_algorithm is None and is_exact and config.num_ranks == 1 and not is_recurrent


def speculator(
    config: EngineConfig,
    scheduler: Scheduler,
    models: Sequence[DeviceDrafter] = (),
    *,
    by_default: bool = False,
) -> Speculator:
    """The drafters that the options name. models: those that compute on the device. by_default: see `is_default`."""
    drafters: list[Drafter] = []
    algorithm = "auto" if by_default else config.speculative_algorithm
    if algorithm in ("auto", "NGRAM"):
        pools = None if by_default and config.disable_radix_cache else Pools()  # who shares nothing asked for none
        if pools is not None:
            scheduler.memory.on_flush.append(pools.clear)
        drafters.append(Lookup(pools))
    if algorithm in ("auto", "GRAMMAR"):
        drafters.append(GrammarDrafter())
    scheduler.memory.on_flush.extend(model.outdate for model in models)
    return Speculator(
        scheduler,
        drafters,
        models,
        most=(config.speculative_num_draft_tokens or max(_ROW_TOKENS, 1 + (config.speculative_num_steps or 0))) - 1,
        budget=Budget(is_padded=bool(config.cuda_graph_max_bs), compiles=config.device != "cpu"),
        is_on_host=config.device == "cpu",
        spares_logprobs=by_default,
    )
