"""Which drafters an engine has, by its options."""

from __future__ import annotations

from collections.abc import Sequence

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.drafter import DeviceDrafter, Drafter
from sgl.runtime.speculate.grammar import GrammarDrafter
from sgl.runtime.speculate.lookup import Lookup
from sgl.runtime.speculate.pools import Pools
from sgl.runtime.speculate.speculator import Speculator

ROW_TOKENS = 8
"""Of a row in a step that verifies, unless options say otherwise."""
MODEL_ALGORITHMS = "DRAFT", "STANDALONE", "EAGLE3"


def is_on(config: EngineConfig) -> bool:
    """Whether any drafter is wanted."""
    return config.speculative_algorithm not in (None, "off")


def check(config: EngineConfig, architecture: str, *, is_recurrent: bool) -> None:
    """Raise ConfigError for drafts that the model or the other options cannot have."""
    algorithm, option = config.speculative_algorithm, "speculative_algorithm"
    _check_needed(config)
    if not is_on(config):
        return
    if config.pp_size > 1:
        raise ConfigError(
            f"{option}={algorithm!r}: with pp_size={config.pp_size}, the next step starts before the last one's tokens "
            "are known, and nothing can be drafted behind them; tp_size and dp_size work",
            option=option,
        )
    if is_recurrent:
        raise ConfigError(
            f"{option}={algorithm!r}: {architecture} has recurrent layers, whose states cannot go back behind a draft "
            "that fell; leave it out",
            option=option,
        )
    if algorithm in MODEL_ALGORITHMS and config.speculative_draft_model_path is None:
        raise ConfigError(f"{option}={algorithm!r} needs a speculative_draft_model_path", option=option)
    row_tokens, steps = config.speculative_num_draft_tokens, config.speculative_num_steps
    if steps is not None and steps >= (row_tokens or ROW_TOKENS):
        raise ConfigError(
            f"speculative_num_steps={steps} drafts do not fit behind a row's last token into "
            f"speculative_num_draft_tokens={row_tokens or ROW_TOKENS}",
            option="speculative_num_steps",
        )


def _check_needed(config: EngineConfig) -> None:
    """Raise ConfigError for options that would do nothing."""
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    asks_model = algorithm in MODEL_ALGORITHMS or (algorithm == "auto" and path is not None)
    for option, is_read, needs in (
        (
            "speculative_draft_model_path",
            asks_model,
            f"a speculative_algorithm that asks a model, not {algorithm!r}: DRAFT, EAGLE3 (a head), auto (with others)",
        ),
        ("speculative_num_draft_tokens", is_on(config), "a speculative_algorithm, such as NGRAM"),
        (
            "speculative_num_steps",
            asks_model,
            "a draft model or head, of speculative_algorithm DRAFT or EAGLE3; speculative_num_draft_tokens bounds what "
            "others draft",
        ),
    ):
        if not is_read and (given := getattr(config, option)) is not None:
            raise ConfigError(f"{option}={given!r} needs {needs}", option=option)


def speculator(config: EngineConfig, scheduler: Scheduler, models: Sequence[DeviceDrafter] = ()) -> Speculator:
    """The drafters that the options name. models: those that compute on the device."""
    drafters: list[Drafter] = []
    if config.speculative_algorithm in ("auto", "NGRAM"):
        pools = Pools()
        scheduler.memory.on_flush.append(pools.clear)
        drafters.append(Lookup(pools))
    if config.speculative_algorithm in ("auto", "GRAMMAR"):
        drafters.append(GrammarDrafter())
    row_tokens = config.speculative_num_draft_tokens or ROW_TOKENS
    return Speculator(
        scheduler,
        drafters,
        models,
        most=row_tokens - 1,
        jumps=not config.disable_jump_forward,
        pins=config.deterministic,
        budget=Budget(is_padded=bool(config.cuda_graph_max_bs), compiles=config.device != "cpu"),
        is_on_host=config.device == "cpu",
    )
