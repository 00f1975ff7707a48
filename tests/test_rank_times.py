"""What ranks tell of their time, and where a slow rank shows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import sgl
from sgl.kernels.collectives import Folder
from sgl.runtime.engine import Engine
from sgl.runtime.metrics import Scrape, ServerMetrics
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel.ring import Ring
from sgl.runtime.parallel.tcp import TcpReceiver, TcpSender
from sgl.runtime.parallel.times import NUMBERS, Times, since, told
from sgl.runtime.server.replicas import added
from tests.live_server import LiveServer
from tests.patience import PATIENCE, wait_until

RANKS = Ranks(Shard.of(0, 1, 1), None, None)
LONG = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=[{"tp_size": 2}, {"pp_size": 2}], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(device="cpu", disable_radix_cache=True, **request.param) as engine:
        engine.generate("a", LONG)
        yield engine


def ranks_of(engine: Engine) -> list[dict[str, Any]]:
    [state] = engine.get_server_info()["internal_states"]
    ranks: list[dict[str, Any]] = state["ranks"]
    assert [(its["engine"], its["rank"]) for its in ranks] == [(0, 0), (0, 1)]
    return ranks


def test_times_add_up_and_idleness_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    numbers = [0] * NUMBERS
    times = Times(numbers, RANKS, torch.device("cpu"))
    for waits, works, steps in ((5, 70, 1), (11, 13, 0), (4_000_000_000, 2, 1)):
        now += waits
        times.begin()
        now += works
        times.end(steps)
    found = told(numbers)
    assert found["steps"] == 2
    assert found["busy_seconds"] == pytest.approx(85e-9)
    assert found["waiting_seconds"] == pytest.approx(16e-9)
    assert found["memory_bytes"] > 10_000_000
    assert since([1, 20, 6, 0, 99, 0], numbers) == {
        "steps": 1,
        "busy_seconds": pytest.approx(65e-9),
        "waiting_seconds": pytest.approx(10e-9),
        "exchange_seconds": 0,
    }


def test_rank_0_reads_what_each_rank_wrote(tmp_path: Path) -> None:
    line = Ring(tmp_path / "ring", 3)
    for reader in range(3):
        end = Ring(tmp_path / "ring", 3, reader)
        end.beat()
        for number in range(NUMBERS):
            end.own_numbers[number] = (10**15 + reader) * (number + 1)
    assert [line.beats(reader) for reader in range(3)] == [1, 1, 1]
    for reader in range(3):
        assert line.numbers(reader)[:NUMBERS] == [(10**15 + reader) * (n + 1) for n in range(NUMBERS)]
    line.put(b"unharmed", lambda: None)
    assert Ring(tmp_path / "ring", 3, 1).get() == b"unharmed"


def test_beats_carry_numbers_between_hosts() -> None:
    secret = b"a secret of some bytes"
    sender = TcpSender("127.0.0.1", 0, secret, num_ranks=3, num_nodes=2)
    ends = [TcpReceiver("127.0.0.1", sender.port, secret, rank, 0.0) for rank in (1, 2)]
    assert sender.numbers(0)[:NUMBERS] == [0] * NUMBERS
    for which, end in enumerate(ends):
        for number in range(NUMBERS):
            end.numbers[number] = 10**15 * which + number
        end.beat()
    wait_until(lambda: [sender.beats(reader) for reader in range(2)] == [1, 1])
    assert [sender.numbers(which) for which in range(2)] == [
        [10**15 * w + n for n in range(NUMBERS)] for w in range(2)
    ]
    sender.close()


@pytest.mark.costly
def test_all_ranks_count_the_same_steps(engine: Engine) -> None:
    before = ranks_of(engine)
    result = engine.generate("Once upon a time", LONG)
    wait_until(lambda: len({its["steps"] for its in ranks_of(engine)}) == 1)
    for one, other, meanwhile in zip(before, ranks_of(engine), result["meta_info"]["ranks"], strict=True):
        assert other["steps"] - one["steps"] >= 40
        assert other["rank"] == meanwhile["rank"]
        assert meanwhile.keys() == one.keys() - {"engine", "memory_bytes"}
        for name in ("busy_seconds", "exchange_seconds"):
            assert 0 < meanwhile[name] < other[name] - one[name] + 1e-6
        assert 0 <= meanwhile["exchange_seconds"] < meanwhile["busy_seconds"]
        assert 10_000_000 < other["memory_bytes"] < 1 << 40


@pytest.mark.parametrize("kind", ["stage", "links"])
def test_the_rank_that_others_wait_for_does_not_wait(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, device = Folder(str(tmp_path)), torch.device("cpu")
    together, waited, now, looks = threading.Barrier(2), [0, 0], 0, Counter[str]()

    def clock() -> int:
        looks[threading.current_thread().name] += 1
        return now

    monkeypatch.setattr(time, "perf_counter_ns", clock)

    def run(rank: int) -> None:
        nonlocal now
        shard = Shard.of(rank, 2, 1) if kind == "stage" else Shard.of(rank, 1, 2)
        ranks = Ranks.join(rendezvous, shard, device)
        for _ in range(4):
            together.wait(PATIENCE)
            x, before = torch.ones(3), looks["0"]
            together.wait(PATIENCE)
            if rank:
                wait_until(lambda before=before: looks["0"] > before, "the other waits")  # type: ignore[misc]
                now += 300
            if ranks.stage is not None:
                assert ranks.stage.sum(x).tolist() == [2, 2, 2]
            elif ranks.links is not None:
                ranks.links.send(x)
                ranks.links.receive(x.clone())
        waited[rank] = ranks.waited_ns
        together.wait(PATIENCE)
        ranks.close()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert waited == [1200, 0]


def test_programs_tell_what_ranks_did(engine: Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Hello " + sgl.gen("x", max_tokens=9, temperature=0, ignore_eos=True)

    state = program.run(backend=engine)
    ranks = state.get_meta_info("x")["usage"]["ranks"]
    assert [its["rank"] for its in ranks] == [0, 1]
    assert all(its["steps"] >= 8 for its in ranks)


def test_spans_of_ranks_lie_in_the_clients_trace(engine: Engine) -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from sgl.runtime.server.tracing import Tracer

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server = LiveServer(engine)
    server.service.tracer = Tracer(provider)
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    assert server.post("/generate", body, headers=headers).status_code == 200
    wait_until(lambda: any(span.name == "POST /generate" for span in spans.get_finished_spans()))
    server.close()
    found = {span.name: span for span in spans.get_finished_spans()}
    for rank in (0, 1):
        span, counted = found[f"rank {rank}"], dict(found[f"rank {rank}"].attributes or {})
        assert f"{span.context.trace_id:032x}" == trace
        assert span.parent is not None
        assert span.parent.span_id == found["generate"].context.span_id
        assert span.start_time == found["prefill"].start_time
        assert span.end_time == found["decode"].end_time
        assert counted["sgl.rank"] == rank
        assert counted["sgl.rank.steps"] >= 7  # type: ignore[operator]
        assert counted["sgl.rank.busy_seconds"] > counted["sgl.rank.exchange_seconds"] > 0  # type: ignore[operator]


def test_metrics_have_a_line_for_each_rank_of_each_engine(engine: Engine) -> None:
    [state] = engine.get_server_info()["internal_states"]
    other = {**state, "ranks": [{**its, "engine": 1, "steps": its["steps"] + 7} for its in state["ranks"]]}
    both = {name: added([state[name], other[name]]) for name in state}
    text = generate_latest(Scrape(ServerMetrics(), "model", 1, both)).decode()
    found = {
        (family.name, sample.labels["engine"], sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "rank" in sample.labels
    }
    assert len(found) == 5 * 4
    for its in [*state["ranks"], *other["ranks"]]:
        place = str(its["engine"]), str(its["rank"])
        assert found["sgl:rank_steps", *place] == its["steps"]
        assert found["sgl:rank_memory_bytes", *place] == its["memory_bytes"]
        for name in ("busy", "waiting", "exchange"):
            assert found[f"sgl:rank_{name}_seconds", *place] == pytest.approx(its[f"{name}_seconds"])


def test_one_process_has_no_ranks() -> None:
    with Engine(device="cpu") as engine:
        [state] = engine.get_server_info()["internal_states"]
        assert state["ranks"] == []
        assert "ranks" not in engine.generate("a", {"max_new_tokens": 2})["meta_info"]
        text = generate_latest(Scrape(ServerMetrics(), "model", 1, state)).decode()
        assert not [line for line in text.splitlines() if line.startswith("sgl:rank_")]
