"""Fields without effect. Unknown ones are refused unless null, but for /generate, which ignores them. Fields of OpenAI,
SGLang and vLLM that do nothing here are accepted with harmless values only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, create_model
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema
from pydantic_core import PydanticCustomError

from sgl.runtime.sampling_params import PARAMETERS
from sgl.runtime.server.bodies import Bounded


def _only(*harmless: Any, hint: str = "leave it out") -> AfterValidator:
    """Accept null and these harmless values."""

    def check(value: Any) -> Any:
        if value is None or any(value == other and type(value) is type(other) for other in harmless):
            return value
        instead = f" or send {json.dumps(harmless[0])}" if harmless and harmless[0] not in ("", []) else ""
        raise PydanticCustomError("not_supported", "this is not supported here: " + hint + instead)

    return AfterValidator(check)


# /openapi.json omits them. (Mypy takes the marker for an alias that needs a type.)
_UNTOLD = SkipJsonSchema()  # type: ignore[type-arg]
Anything: TypeAlias = Annotated[Any, _UNTOLD]
"""Accepted with any value: it affects serving, not the answer."""
Off: TypeAlias = Annotated[Any, _only(False), _UNTOLD]
On: TypeAlias = Annotated[Any, _only(True), _UNTOLD]
Zero: TypeAlias = Annotated[Any, _only(0, 0.0), _UNTOLD]
One: TypeAlias = Annotated[Any, _only(1, 1.0), _UNTOLD]
Empty: TypeAlias = Annotated[Any, _only("", [], {}), _UNTOLD]
NoContext: TypeAlias = Annotated[Any, _only([], hint="send the turns to /api/chat, or leave it out"), _UNTOLD]
UntilStopped: TypeAlias = Annotated[Any, _only(hint="a profile ends with /stop_profile: leave it out"), _UNTOLD]
OneGroup: TypeAlias = Annotated[
    Any, _only(hint="all ranks of an engine are in one group, which counts them: leave it out"), _UNTOLD
]
Nothing: TypeAlias = Annotated[Any, _only(), _UNTOLD]
Wrapper: TypeAlias = Annotated[Any, _only(hint="its fields stand beside the others"), _UNTOLD]
SystemTurn: TypeAlias = Annotated[Any, _only(hint="it is a message of the role system"), _UNTOLD]
Unlimited: TypeAlias = Annotated[Any, _only(-1), _UNTOLD]


def called(name: str) -> Any:
    """A field that goes by another name here."""
    return Annotated[Any, _only(hint=f"it is called {name}"), _UNTOLD]


def _inside(name: str) -> Any:
    """A field that belongs into another one."""
    return Annotated[Any, _only(hint=f"it belongs into {name}"), _UNTOLD]


def by_type(default: str | None = None) -> Discriminator:
    """Tells the members of a union, each marked by `kind`, by the `type` of what is given."""

    def type_of(value: Any) -> str | None:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        given = default if given is None else given
        return None if given is None else f"[{given}]"

    return Discriminator(type_of)


def kind(name: str) -> Tag:
    """Marks a union's member. In brackets it is no part of an error's place."""
    return Tag(f"[{name}]")


_NULL = WithJsonSchema({"type": "null"})


def _refuse(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "there is no such field")
    return value


class Strict(Bounded):
    """A body or part of one that refuses unknown fields unless null."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_refuse), _NULL]] = Field(init=False)


class Lenient(Bounded):
    """A body or part of one that ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", strict=True)


Model = TypeVar("Model", bound=Bounded)


def also_takes(*kinds: tuple[Any, str]) -> Callable[[type[Model]], type[Model]]:
    """Adds fields without effect: (kind, names) pairs."""
    fields: dict[str, Any] = {name: (kind, None) for kind, names in kinds for name in names.split()}

    def extended(model: type[Model]) -> type[Model]:
        more: dict[str, Any] = {"__module__": model.__module__, "__doc__": model.__doc__, **fields}
        return create_model(model.__name__, __base__=model, **more)

    return extended


@also_takes(
    # OpenAI
    (Anything, "user metadata store service_tier safety_identifier"),
    (Anything, "prompt_cache_key prompt_cache_retention prompt_cache_options"),
    # SGLang
    (Anything, "session_id"),
    (Empty, "session_params custom_params custom_logit_processor custom_labels images_config"),
    (Off, "return_hidden_states return_routed_experts return_cached_tokens_details"),
    (Zero, "routed_experts_start_len"),
    # vLLM; only its render endpoints read the first line's last two
    (Anything, "guided_decoding_backend return_token_offsets return_mm_kwargs"),
    (Off, "use_beam_search watermarking"),
    (On, "detokenize"),
    (One, "length_penalty stream_interval"),
    (Zero, "routed_experts_prompt_start"),
    (Unlimited, "thinking_token_budget"),
    (Empty, "bad_words logits_processors mm_processor_kwargs media_io_kwargs"),
    (Empty, "ec_transfer_params vllm_xargs"),
    (Wrapper, "extra_body"),  # which OpenAI's package opens
)
class ForeignFields(Strict):
    """Fields of other servers that both endpoints accept."""


@also_takes(
    (Anything, "session_id conversation_id routing_key log_metrics no_logs custom_labels modalities"),
    (Anything, "mm_hashes mm_content_hashes received_time external_trace_header http_worker_ipc kv_router_hint"),
    (Off, "return_hidden_states return_routed_experts return_indexer_topk return_sampling_mask return_entropy"),
    (Off, "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_bytes return_prompt_token_ids"),
    (Off, "use_audio_in_video require_reasoning background need_wait_for_mm_inputs"),
    (Zero, "routed_experts_start_len data_parallel_rank routed_dp_rank"),
    (Empty, "input_embeds audio_data custom_logit_processor session_params positional_embed_overrides"),
    (Empty, "video_config images_config multi_item_delimiter_indices num_items_assigned encoder_urls"),
    (Nothing, "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size max_thinking_tokens"),
    (Nothing, "disagg_prefill_dp_rank max_dynamic_patch min_dynamic_patch image_max_dynamic_patch"),
    (Nothing, "video_max_dynamic_patch"),
    (called("lora_path"), "lora_id"),
    (called("extra_key"), "cache_salt"),
    (called("text"), "prompt"),
    (_inside("sampling_params"), " ".join(sorted(PARAMETERS))),
)
class ForeignArguments(Lenient):
    """SGLang's further fields of /generate, and sampling parameters that lie beside `sampling_params`."""
