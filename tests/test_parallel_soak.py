"""What benchmarks/parallel_soak.py complains of, and how its clients end; `make soak-ranks` runs it on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.parallel_soak import soak
from sgl import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("embedded", max_total_tokens=8192) as its:
        yield its


def test_what_is_wrong_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "check_ledger", lambda: ["page 7 is nobody's"])
    done = soak(engine, clients=4, seed=3, seconds=1.0)
    assert done.wrong == ["page 7 is nobody's"]
    assert sum(done.ended.values()) >= 4
