"""The options of a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from yarl import URL

from sgl.errors import ConfigError
from sgl.runtime.config import PositiveFloat, Seconds, check_needed, checked_options
from sgl.runtime.gateway.policy import RoutingPolicy


def checked_url(url: str) -> str:
    """A worker's address. Raises ConfigError."""
    try:
        parsed = URL(url)
        is_right = bool(parsed.scheme in ("http", "https") and parsed.host and parsed.port)
    except ValueError:
        is_right = False
    if not is_right or parsed.user is not None or parsed.query_string or parsed.fragment:
        raise ConfigError(f"a worker is http://HOST:PORT, with no key in it, not {url!r}", option="worker")
    return url


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Options of a gateway; `from_options` checks them."""

    routing_policy: RoutingPolicy = "cache_aware"
    """Who gets a request: the worker that would be done with it first as far as is known, the next in turn, one by
    chance, the less busy one of two by chance, or the one that a hash of its beginning says."""
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Further tries of a request that failed before the first byte of its answer, mostly at other workers."""
    retry_pause: PositiveFloat = 0.05
    """Seconds before a further try at most; twice as many each time, and by chance."""
    worker_wait: Seconds = 30.0
    """Seconds that a request waits for a worker where none takes requests."""
    worker_timeout: Seconds | None = None
    """Seconds until the first byte of an answer, after which another worker is tried. None: no limit."""
    max_in_flight: PositiveInt | None = None
    """Requests at the workers together; others wait in the gateway. None: no limit."""
    max_waiting: PositiveInt = 10_000
    """Requests that wait in the gateway, for others or for a worker; one more is refused with 429."""
    key_rate: PositiveFloat | None = None
    """Requests a second of one API key that a worker has accepted, or of one address without one; more are refused with
    429. None: no limit."""
    key_burst: PositiveInt = 100
    """Requests that one key may send at once, where key_rate limits them."""
    breaker_failures: PositiveInt = 5
    """Failures in a row after which a worker gets no requests for a while."""
    breaker_seconds: PositiveFloat = 1.0
    """Seconds until it gets one again; twice as many if that fails, up to 30."""
    probe_seconds: PositiveFloat = 1.0
    """Seconds between two looks at each worker."""
    min_prefill_tokens: PositiveInt = 512
    """Tokens of a prompt that a decode worker has not computed, from which on a prefill worker computes them."""
    worker_api_key: str | None = None
    """The key with which workers are asked what they have to do, if they check keys."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> GatewayConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**checked_options(cls, options))
        check_needed(config, "key_burst", "key_rate")
        return config
