"""How bodies treat fields: those that mean something, those that other servers know, and those that nobody does.

A field that is not known is refused by its name, unless it is null: clients spell out what they leave to the server.
Fields of OpenAI's own service, SGLang's and vLLM's that mean nothing here are taken with the values that change
nothing, and refused with others, so that nobody believes to have got what is not done.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema
from pydantic_core import PydanticCustomError

from sgl.runtime.server.bodies import Bounded


def _only(*harmless: Any, hint: str = "leave it out") -> AfterValidator:
    """Takes null and the values that change nothing."""

    def check(value: Any) -> Any:
        if value is None or any(value == other and type(value) is type(other) for other in harmless):
            return value
        instead = f" or send {json.dumps(harmless[0])}" if harmless and harmless[0] not in ("", []) else ""
        raise PydanticCustomError("not_supported", "this is not supported here: " + hint + instead)

    return AfterValidator(check)


# /openapi.json leaves out what makes no difference. (To mypy the marker is an alias that takes a type.)
_UNTOLD = SkipJsonSchema()  # type: ignore[type-arg]
Anything: TypeAlias = Annotated[Any, _UNTOLD]
"""Taken as it is: it says how to serve, not what to answer."""
Off: TypeAlias = Annotated[Any, _only(False), _UNTOLD]
On: TypeAlias = Annotated[Any, _only(True), _UNTOLD]
Zero: TypeAlias = Annotated[Any, _only(0), _UNTOLD]
One: TypeAlias = Annotated[Any, _only(1, 1.0), _UNTOLD]
Empty: TypeAlias = Annotated[Any, _only("", [], {}), _UNTOLD]
NoFunctions: TypeAlias = Annotated[Any, _only([], hint="tools have replaced it"), _UNTOLD]
NoCall: TypeAlias = Annotated[Any, _only("none", "auto", hint="tool_choice has replaced it; leave it out"), _UNTOLD]
Nothing: TypeAlias = Annotated[Any, _only(), _UNTOLD]
Unlimited: TypeAlias = Annotated[Any, _only(-1), _UNTOLD]


_NULL = WithJsonSchema({"type": "null"})


def _refuse(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "there is no such field")
    return value


class Strict(Bounded):
    """A body or a part of one: fields that are not known are refused, unless they are null."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_refuse), _NULL]] = Field(init=False)


class Lenient(Bounded):
    """The same, but what is not known is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ForeignFields(Strict):
    """What other servers take for both endpoints and this one has no use for."""

    # OpenAI's service
    user: Anything = None
    metadata: Anything = None
    store: Anything = None
    service_tier: Anything = None
    safety_identifier: Anything = None
    prompt_cache_key: Anything = None
    prompt_cache_retention: Anything = None
    prompt_cache_options: Anything = None

    # SGLang
    session_id: Anything = None
    session_params: Empty = None
    lora_path: Empty = None
    custom_params: Empty = None
    custom_logit_processor: Empty = None
    custom_labels: Empty = None
    images_config: Empty = None
    return_hidden_states: Off = None
    return_routed_experts: Off = None
    return_cached_tokens_details: Off = None
    routed_experts_start_len: Zero = None

    # vLLM
    guided_decoding_backend: Anything = None
    return_token_offsets: Anything = None
    """Only its render endpoints look at these two."""
    return_mm_kwargs: Anything = None
    use_beam_search: Off = None
    watermarking: Off = None
    detokenize: On = None
    length_penalty: One = None
    stream_interval: One = None
    routed_experts_prompt_start: Zero = None
    thinking_token_budget: Unlimited = None
    bad_words: Empty = None
    logits_processors: Empty = None
    mm_processor_kwargs: Empty = None
    media_io_kwargs: Empty = None
    kv_transfer_params: Empty = None
    ec_transfer_params: Empty = None
    vllm_xargs: Empty = None
