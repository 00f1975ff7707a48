"""How long tests wait for what must come."""

import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds. Only a test that fails waits for so long; a machine with ten times the load needs some of it."""


def wait_until(is_so: Callable[[], object], what: str = "it did not come to that") -> None:
    """Poll until something is so; after PATIENCE the test fails and says what did not happen."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
