"""Ports for processes that are told which: none that a system hands out, which might be another test's by then."""

import random
import socket
from contextlib import ExitStack, suppress

_NEITHER_FIXED_NOR_HANDED_OUT = range(11_000, 29_000)


def free_port(number: int = 1) -> int:
    """The first of so many neighbours that are free on 127.0.0.1."""
    while True:
        first = random.SystemRandom().choice(_NEITHER_FIXED_NOR_HANDED_OUT)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
