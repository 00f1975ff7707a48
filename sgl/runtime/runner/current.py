"""The device that streams, events, captures and Triton's launches are of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device current. Reusable, not reentrant."""
    if device.type == "cpu":
        return nullcontext()
    return cast(AbstractContextManager[Any], torch.get_device_module(device).device(device))
