"""How many replicas there should be, by what waits at them and how full their KV pages are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgl.runtime.cluster.config import ClusterConfig
from sgl.runtime.gateway.reports import Load

_UP_SECONDS = 5.0  # of load before a replica is started
_DOWN_SECONDS = 120.0  # without load before one is stopped
_LOW = 0.5  # of what is bearable: less is no load


class Scaler:
    """Decides, with the seconds of a clock that it is given. A peak shorter than `_UP_SECONDS` starts nothing, a
    pause shorter than `_DOWN_SECONDS` stops nothing."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._high: float | None = None  # since when
        self._low: float | None = None

    def wanted(self, current: int, loads: Sequence[Load], now: float) -> int:
        """Replicas there should be, of which `current` were asked for and these serve. now: seconds."""
        config = self._config
        least, most = config.least, config.most
        if len(loads) < current or not loads:  # some start yet, and will take their part
            self._high = self._low = None
            return max(least, min(current, most))
        pressure = max(
            sum(load.waiting for load in loads) / (config.target_queue * current),
            sum(load.kv_usage for load in loads) / (config.target_kv_usage * current),
        )
        without_one = pressure * current / (current - 1) if current > 1 else math.inf
        is_high = pressure > 1
        self._high = (self._high if self._high is not None else now) if is_high else None
        self._low = (self._low if self._low is not None else now) if without_one < _LOW else None
        wanted = current
        if self._high is not None and now - self._high >= _UP_SECONDS:
            wanted, self._high = math.ceil(current * min(pressure, 2.0)), None
        elif self._low is not None and now - self._low >= _DOWN_SECONDS:
            wanted, self._low = current - 1, None
        return max(least, min(wanted, most))
