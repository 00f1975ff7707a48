"""A process with so many open files that the next ones' descriptors are above select's 1,023."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def many_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("a process may not open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, limits[0]), limits[1]))
    opened = [os.dup(2) for _ in range(1100)]
    try:
        yield
    finally:
        for each in opened:
            os.close(each)
