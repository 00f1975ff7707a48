"""Checks what a request asks of pages on their way between engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.requests.arguments import GenerateRequest, is_list
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.transfer.params import PARAM, TransferParams

_RETURN = "return_kv_transfer_params"
MOST_ENDED = 4096
"""Leases ended by one call, each signature of which is checked: tenths of a second."""


def offers(wanted: GenerateRequest, params: SamplingParams, transfers: Transfers | None) -> bool:
    """Whether the request's pages are to be offered. Raises InvalidRequest if they cannot be."""
    if not isinstance(wanted.return_kv_transfer_params, bool):
        raise InvalidRequest(f"{_RETURN} must be true or false", param=_RETURN)
    if not wanted.return_kv_transfer_params:
        return False
    if transfers is None or transfers.exports is None:
        raise InvalidRequest(f"{_RETURN} is not supported without disaggregation_mode='prefill'", param=_RETURN)
    if params.max_new_tokens or params.n != 1:
        raise InvalidRequest(
            f"{_RETURN} goes with max_new_tokens: 0 and n: 1: the decode engine generates", param=_RETURN
        )
    _check_prompt(wanted, _RETURN)
    return True


def pulls(
    wanted: GenerateRequest, transfers: Transfers | None, namespace: Namespace, key: bytes
) -> TransferParams | None:
    """The pages of the request's prompt that another engine has. Raises InvalidRequest if they are not its own, or not
    for this engine."""
    given = wanted.kv_transfer_params
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if transfers is None or transfers.imports is None:
        raise InvalidRequest(f"{PARAM} are not supported without disaggregation_mode='decode'", param=PARAM)
    params = TransferParams.read(given, transfers.secret)
    _check_prompt(wanted, PARAM)
    params.check(transfers.layout, namespace, key)
    return params


def end(given: Any, transfers: Transfers | None) -> int:
    """End the leases that these `kv_transfer_params`, or a list of them, name; how many went on. Raises
    InvalidRequest."""
    if transfers is None or transfers.exports is None:
        raise InvalidRequest(
            f"no pages are offered without disaggregation_mode='prefill' (by {PARAM})", param=PARAM
        )
    listed = given if is_list(given) else [given]
    if len(listed) > MOST_ENDED:
        raise InvalidRequest(f"{PARAM} may have {MOST_ENDED} entries at most, not {len(listed)}", param=PARAM)
    read = [TransferParams.read(each, transfers.secret) for each in listed]
    return sum(transfers.exports.offers.end(bytes.fromhex(each.lease)) for each in read)


def _check_prompt(wanted: GenerateRequest, param: str) -> None:
    if wanted.lora_path is not None:
        raise InvalidRequest(f"{param} is not for LoRA adapters yet", param=param)
    if wanted.layout is not None or wanted.image_data is not None or wanted.video_data is not None:
        raise InvalidRequest(f"{param} is not for prompts with images yet", param=param)
