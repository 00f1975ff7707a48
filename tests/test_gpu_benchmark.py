"""The GPU benchmark's table, picture and reading of the peers' rows, without a GPU."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.gpu import peers, throughput
from benchmarks.gpu.workloads import Figure


def test_the_peers_rows_become_medians_by_our_names() -> None:
    rows = [
        {"w": "start", "s": 57.6},
        *({"w": "W2", "cache": "cold", "req_s": value} for value in (183.1, 210.7, 210.6)),
        {"w": "W2", "cache": "warm", "req_s": 244.2},
        {"w": "W4", "batch": 64, "step_ms": 6.8},
        {"w": "W3", "ttft_ms": 14.9, "tpot_ms": 4.9},
    ]
    assert peers.of_rows(rows) == {
        "W2 cold cache": 210.6,
        "W2 warm cache": 244.2,
        "W4 step of 64": 6.8,
        "W3 TTFT": 14.9,
        "W3 TPOT": 4.9,
    }


def test_ratios_say_how_many_times_better_than_the_better_peer() -> None:
    faster = Figure("W4 step of 64", 5.0, "ms", 4.0, (5.0,))
    slower = Figure("W2 warm cache", 100.0, "req/s", None, (100.0,))
    assert " 80% " in throughput._line(faster, (7.5, 6.0))
    assert " 1.20 ms" in throughput._line(faster, (7.5, 6.0))
    assert " 0.50 req/s" in throughput._line(slower, (150.0, 200.0))
    assert throughput._line(slower, None).endswith("req/s")
    picture = throughput._picture([faster, slower], {"W4 step of 64": (7.5, 6.0)}, "recorded")
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"80% of the floor", "1.20x the better"} <= set(texts)
