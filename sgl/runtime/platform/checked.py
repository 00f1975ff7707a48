"""What platforms say when they are asked: another package's may raise anything, and give anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from sgl.errors import ConfigError, SglError
from sgl.runtime.platform.base import Platform

_T = TypeVar("_T")


def checked(platform: Platform, method: Callable[..., _T], *arguments: Any, fits: Callable[[Any], bool]) -> _T:
    """What a platform's method says. fits: whether that is of the kind that it must be. Raises ConfigError, which
    names the method."""
    name = f"{type(platform).__name__}.{method.__name__}"
    try:
        found: object = method(*arguments)
        if fits(found):
            return cast(_T, found)
        wrong = f"{name} gave {found!r:.200}"
    except (SglError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise fault(platform, f"{name} raised {type(error).__name__}: {error}") from error
    raise fault(platform, f"{wrong}, which is not what sgl.platforms.Platform asks for")


def fault(platform: Platform, what: str) -> ConfigError:
    """The error that names a platform."""
    return ConfigError(f"device={platform.name!r}: {what}", option="device")


def is_memory(found: Any) -> bool:
    """Whether these are bytes, and what has them."""
    match found:
        case (int() as number, str()):
            return number > 0
    return False
