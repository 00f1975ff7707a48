"""benchmarks/parallel_soak.py for a moment: two ranks under random finishes and aborts, and what it complains of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.parallel_soak import soak
from sgl import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("embedded", tp_size=2, dtype="float32", max_total_tokens=8192) as its:
        yield its


@pytest.mark.slow
def test_two_ranks_lose_nothing(engine: Engine) -> None:
    done = soak(engine, clients=8, seed=3, seconds=4.0)
    assert done.wrong == []
    assert {"known", "cancelled", "close", "stream"} <= set(done.ended)


def test_what_is_wrong_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "check_ledger", lambda: ["page 7 is nobody's"])
    assert soak(engine, clients=1, seed=0, seconds=0.0).wrong == ["page 7 is nobody's"]
