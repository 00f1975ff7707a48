"""What a model's authors recommend to sample with, in place of OpenAI's defaults."""

from __future__ import annotations

import json
import logging
from typing import Any

from sgl.errors import ConfigError, InvalidRequest
from sgl.runtime.config import ServerConfig
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILE = "generation_config.json"


def sampling_defaults(config: ServerConfig, model_path: str) -> dict[str, Any]:
    """Of a checkpoint's generation_config.json, if they are wanted; a GGUF file has none. Raises ConfigError for values
    that cannot be sampled with."""
    path = find_checkpoint(model_path) / _FILE
    if config.sampling_defaults == "openai" or not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = {name: given[name] for name in _FIELDS if given.get(name) is not None}
        if found.get("top_k") == 0:  # transformers' way to leave it out
            found["top_k"] = -1
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError, RecursionError, InvalidRequest) as error:
        message = f"{path} cannot be sampled with: {error} (sampling_defaults='openai' does without it)"
        raise ConfigError(message, option="sampling_defaults") from error
    if found:
        logger.info("unless a request says otherwise, by %s: %s", _FILE, found)
    return found
