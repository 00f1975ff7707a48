"""How a cluster's own looks at its workers are told from other requests."""

PROBE = "sgl-probe"
"""Their user agent. They come twice a second: they are no news."""
