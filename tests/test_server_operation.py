"""Metrics, the description of the API against the API itself, the page, and a thousand malformed requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sgl.cli.options import option_docs
from sgl.runtime.config import ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.metrics import Histogram
from sgl.runtime.parallel.times import NUMBERS
from sgl.runtime.parallel.times import told as told_of_rank
from tests.house import REPOSITORY
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE

SHORT = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {**OPTIONS, "context_length": 32, "check_ledger": False}  # answers that fill it are short
    with Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **options) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine) as server:
        yield server
    assert not engine._calls.rids


def families_of(server: LiveServer) -> dict[str, Metric]:
    """By name, as Prometheus reads them; each is explained, and each sample says which model it is of."""
    answer = server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    for family in families:
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert all(sample.labels["model_name"] == server.service.model_name for sample in family.samples)
    by_name = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    assert len(by_name) == len(families)
    return by_name


def metrics_of(server: LiveServer) -> dict[str, float]:
    """Samples by name and by labels without the model."""
    found = {}
    for sample in itertools.chain.from_iterable(family.samples for family in families_of(server).values()):
        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name != "model_name")
        found[sample.name + (labels and f"{{{labels}}}")] = sample.value
    return found


def test_metrics_count_what_happened(server: LiveServer) -> None:
    before = metrics_of(server)
    server.post("/generate", {"text": ["a", "b"], "sampling_params": SHORT, "stream": True})
    server.post("/generate", {"text": "a", "sampling_params": SHORT})
    server.post("/generate", {})
    after = metrics_of(server)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert rise("sgl:num_requests_total") == 3
    assert rise("sgl:generation_tokens_total") == 12
    assert rise("sgl:time_to_first_token_seconds_count") == 2
    assert rise("sgl:inter_token_latency_seconds_count") == 6
    assert rise("sgl:e2e_request_latency_seconds_count") == rise("sgl:queue_time_seconds_count") == 3
    assert rise('sgl:http_requests_total{path="/generate",status="200"}') == 2
    assert rise('sgl:http_requests_total{path="/generate",status="400"}') == 1
    assert after["sgl:http_requests_active"] == 1, "the one that asks"
    assert rise('sgl:per_stage_req_latency_seconds_count{stage="prefill"}') == 3
    assert after["sgl:num_used_tokens"] == 0
    assert after["sgl:gen_throughput"] > 0
    assert (
        after['sgl:e2e_request_latency_seconds_bucket{le="+Inf"}'] == after["sgl:e2e_request_latency_seconds_count"]
    )


# What the dashboards in SGLang's repository ask for, and what routers read of its servers.
SGLANG_NAMES = """e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum
e2e_request_latency_seconds_count time_to_first_token_seconds_bucket time_to_first_token_seconds_sum
time_to_first_token_seconds_count inter_token_latency_seconds_bucket num_running_reqs num_queue_reqs gen_throughput
cache_hit_rate token_usage num_used_tokens max_total_num_tokens prompt_tokens_total generation_tokens_total
cached_tokens_total num_requests_total"""


def test_dashboards_of_sglang_find_their_names(server: LiveServer) -> None:
    metrics_of(server)
    server.post("/generate", {"text": ["a", "b"], "sampling_params": SHORT, "stream": True})
    found = metrics_of(server)
    names = {name.partition("{")[0] for name in found}
    for name in SGLANG_NAMES.split():
        assert f"sglang:{name}" in names
    theirs = {name: value for name, value in found.items() if name.startswith("sglang:")}
    assert theirs == {name: found[name.replace("sglang:", "sgl:")] for name in theirs}
    assert found["sgl:gen_throughput"] > 0


def test_names_keep_their_colons_whatever_a_scraper_accepts(server: LiveServer) -> None:
    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.8, text/plain;version=0.0.4;q=0.5"}
    answer = server.get("/metrics", headers=accept)
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"sgl:num_running_reqs", "sglang:num_running_reqs"} <= names


def test_the_model_may_have_any_name(engine: Engine) -> None:
    server = LiveServer(engine, served_model_name='a "b"\\c\nd é')
    try:
        families_of(server)
    finally:
        server.close()


def test_every_metric_is_documented(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.get("/metrics")  # so that there is a response to count
    state = server.service.engine_state

    async def of_ranks() -> dict[str, Any]:
        return {**await state(), "ranks": [{"engine": 0, "rank": 0, **told_of_rank([0] * NUMBERS)}]}

    monkeypatch.setattr(server.service, "engine_state", of_ranks)
    text = (REPOSITORY / "docs" / "server.md").read_text()
    listed = re.findall(r"^\| `sgl:(\w+)`(?: `([\w ]+)`)? \| (\w+) \| (yes)? ?\| (.*) \|$", text, re.MULTILINE)
    families = families_of(server)
    told = []
    for name, family in families.items():
        prefix, _, name = name.partition(":")
        if prefix == "sgl":
            labels = [label for label in family.samples[0].labels if label not in ("model_name", "le")]
            is_sglangs = "yes" if f"sglang:{name}" in families else ""
            told.append((name, " ".join(labels), family.type, is_sglangs, family.documentation))
    assert listed == told


def test_paths_that_do_not_exist_share_one_label(server: LiveServer) -> None:
    for path in ("/a", "/b", '/c"d'):
        server.get(path)
    assert metrics_of(server)['sgl:http_requests_total{path="unknown",status="404"}'] == 3


def test_quantiles_lie_between_the_bounds_around_them() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 2.0, 4.0]
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("4.0", 3), ("+Inf", 4)]


def test_the_page_needs_nothing_from_outside_and_its_numbers_are_there(server: LiveServer) -> None:
    page = server.get("/")
    assert page.headers["Content-Type"].startswith("text/html")
    text = page.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    status: dict[str, Any] = server.get("/v1/status").json()
    for used in re.findall(r"s\.engine\.(\w+)", page.text) + re.findall(r'rate\(s, "(\w+)"\)', page.text):
        assert used in status["engine"]
    for used in set(re.findall(r"\bs\.(\w+)", page.text)):
        assert used in status


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/genrate", "did you mean '/generate'"),
        ("/v1/chat/completion", "did you mean '/v1/chat/completions'"),
        ("/nothing/like/it", "/openapi.json"),
        ("/v1/images/generations", "there is no endpoint '/v1/images/generations'; /openapi.json"),
    ],
)
def test_endpoints_that_do_not_exist_are_named_with_what_does(server: LiveServer, path: str, words: str) -> None:
    answer = server.post(path, {"text": "a"})
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


def test_every_route_is_described(server: LiveServer) -> None:
    described = server.get("/openapi.json").json()
    for path in ("/generate", "/v1/chat/completions", "/v1/programs", "/v1/models/{model}", "/metrics"):
        assert path in described["paths"]
    references = set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', server.get("/openapi.json").text))
    schemas = described["components"]["schemas"]
    assert references <= set(schemas)
    for body in ("ProgramBody", "SegmentBody"):
        assert set(re.findall(r"`(ir_\w+)`", schemas[body]["description"])) <= set(schemas)


def test_the_documentation_names_every_endpoint_and_option(server: LiveServer) -> None:
    text = (REPOSITORY / "docs" / "server.md").read_text()
    for path in server.get("/openapi.json").json()["paths"]:
        assert f"`{path}`" in text
    for field in dataclasses.fields(ServerConfig):
        default = {None: "", True: "`true`", False: "`false`"}.get(field.default, f"`{field.default}`")
        meaning = option_docs(ServerConfig)[field.name]
        assert f"| `--{field.name.replace('_', '-')}` | {'' if default == '``' else default} | {meaning} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("paths", ["^/v1/c", "^/v1/[abd-m]", "^/v1/[^a-m]", "^/(?!v1/)"])
def test_what_is_described_is_what_happens(server: LiveServer, tmp_path: Path, paths: str) -> None:
    """schemathesis makes requests up from the description: no 5xx, no answer that is not described, nothing accepted
    that it forbids. (What is refused for other reasons, such as a token id that the model does not have, no schema can
    say.)"""
    pytest.importorskip("schemathesis")
    settings = tmp_path / "schemathesis.toml"  # one more item than may come can make a body too long
    statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
    settings.write_text(f"[checks]\nnegative_data_rejection.expected-statuses = {statuses}\n")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [server.url + "/openapi.json", "--seed", "1", "--include-path-regex", paths]
    # After these, others wait for what ends it.
    for path in ("/pause_generation", "/release_memory_occupation", "/init_weights_update_group"):
        command += ["--exclude-path", path]
    command += ["--suppress-health-check", "all"]  # of how hard it is to make examples up
    command += [
        "--exclude-checks",
        "positive_data_acceptance",
        "--max-examples",
        "4",
        "--phases",
        "coverage,fuzzing",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_malformed_requests_are_answered_and_leave_nothing(server: LiveServer) -> None:
    """Damaged bytes of a good request: whatever is sent, the server answers or hangs up, and serves the next."""
    rng = random.Random(1)
    body = b'{"text": "hello", "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "stream": true}'
    good = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    requests = [damaged(good, rng) for _ in range(1000)]
    statuses = Counter(asyncio.run(answers(server.url, requests)))
    assert not [status for status in statuses if status.startswith("5")], statuses
    assert statuses["400"] > 300
    assert server.post("/generate", {"text": "hello", "sampling_params": SHORT}).status_code == 200


def damaged(good: bytes, rng: random.Random) -> bytes:
    """With bytes changed, left out or put in, or cut off."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 5))):
        where = rng.randrange(max(1, len(data)))
        match rng.randrange(4):
            case 0:
                data[where : where + 1] = rng.randbytes(1)
            case 1:
                del data[where : where + rng.randrange(20)]
            case 2:
                data[where:where] = rng.randbytes(rng.randrange(20))
            case 3:
                del data[where:]
    return bytes(data)


async def answers(url: str, requests: list[bytes]) -> list[str]:
    """The status that each gets, or "none" where the server hangs up. Those that it waits for more of are closed on
    one side after a moment, so that each connection ends, however slow the machine is."""
    host, port = url.removeprefix("http://").split(":")
    slots = asyncio.Semaphore(100)

    async def one(data: bytes) -> str:
        async with slots:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                answer = asyncio.ensure_future(reader.read(12))
                if not (await asyncio.wait([answer], timeout=0.5))[0]:
                    writer.write_eof()
                head = await answer
            except ConnectionError:
                head = b""
            finally:
                writer.close()
        return head[9:12].decode() if head.startswith(b"HTTP/1.") else "none"

    return await asyncio.gather(*map(one, requests))
