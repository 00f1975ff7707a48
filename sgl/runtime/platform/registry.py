"""Finds platforms by name: ours, and those that other packages register."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from sgl.errors import ConfigError, MissingExtra
from sgl.numerals import whole
from sgl.runtime.platform.base import Platform
from sgl.runtime.platform.cpu import Cpu
from sgl.runtime.platform.cuda import Cuda

GROUP = "sgl.platforms"
"""Entry points whose names are those of platforms, and whose values their classes."""
_OURS: dict[str, type[Platform]] = {"cuda": Cuda, "cpu": Cpu}
_EXTRAS = {"jax": EntryPoint("jax", "sgl.runtime.jax.platform:Jax", GROUP)}
"""Ours that need a package of their own, in the extra of the same name."""


def platform_of(device: str | None) -> Platform:
    """Of an option `device`; None: the first of ours that this machine has. Raises ConfigError."""
    return parsed(device)[0]


def parsed(device: str | None) -> tuple[Platform, int | None]:
    """`platform_of`, and the number of the device, if it has one. Raises ConfigError."""
    if device is None:
        return next(its for its in map(platform_of, _OURS) if its.is_available()), None
    name, colon, number = device.partition(":")
    its = _named(name, device)
    index = whole(number, 9_999) if colon else None
    if colon and index is None:
        raise ConfigError(f"device must be {name} or {name}:N, not {device!r}", option="device")
    return its, index


def registered() -> list[str]:
    """Every name that option `device` may begin with."""
    ours = [*_OURS, *_EXTRAS]
    return [*ours, *sorted({each.name for each in entry_points(group=GROUP)}.difference(ours))]


@cache
def _made(kind: type[Platform]) -> Platform:
    return kind()


def _named(name: str, option: str) -> Platform:
    if name in _OURS:
        return _made(_OURS[name])
    if name in _EXTRAS and find_spec(name) is None:
        raise MissingExtra.of(name, f"device={option!r}", name, "device")
    found = (
        [_EXTRAS[name]] if name in _EXTRAS else [each for each in entry_points(group=GROUP) if each.name == name]
    )
    if not found:
        others = "".join(f", {each} or {each}:N" for each in registered() if each not in _OURS)
        message = (
            f"device must be cpu, cuda or cuda:N{others}, not {option!r}; others come with packages of their own"
        )
        raise ConfigError(message, option="device")
    if len({each.value for each in found}) > 1:
        both = " and ".join(sorted(f"{each.value} of {each.dist.name if each.dist else '?'}" for each in found))
        raise _wrong(option, f"{both} are registered for it; uninstall all of these packages but one")
    value = found[0].value
    try:
        kind = found[0].load()
    except ImportError as error:
        raise _wrong(option, f"{value}, which is registered for it, cannot be imported ({error})") from error
    except Exception as error:  # another package's code, which may raise anything
        what = f"{type(error).__name__}: {error}"
        raise _wrong(option, f"{value}, which is registered for it, cannot be loaded ({what})") from error
    if not (isinstance(kind, type) and issubclass(kind, Platform)):
        raise _wrong(option, f"{value} is no class of Platform")
    if (own := getattr(kind, "name", None)) != name:  # messages and options are made of it
        raise _wrong(option, f"{value} has name={own!r}, and must have name={name!r}, by which it is registered")
    try:
        return _made(kind)
    except Exception as error:  # as above
        raise _wrong(option, f"{value} cannot be made ({type(error).__name__}: {error})") from error


def _wrong(option: str, why: str) -> ConfigError:
    return ConfigError(f"device={option!r}: {why}", option="device")
