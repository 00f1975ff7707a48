"""Clusters on Ray: one on this machine, whose processes are killed, and one whose ranks lie on two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.cluster_faults import RunningCluster, Tally, cluster, killed, scaled, updated
from sgl.runtime.engine import Engine
from tests.house import REPOSITORY
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

RATE = 4.0  # requests a second: a fraction of what two replicas sustain on one core
OPTIONS = {"device": "cpu", "max_total_tokens": 4096}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two replicas on this machine."""
    with cluster({**OPTIONS, "replicas": 2}, tmp_path_factory.mktemp("cluster"), ENVIRONMENT) as running:
        yield running
    assert running.process.returncode == 0
    assert b"graceful_shutdown" not in running.process.stdout.read()  # of which Ray would tell that it failed


@pytest.fixture(scope="module")
def texts() -> dict[int, str]:
    """Answers by prompt, of all tests."""
    return {}


def answer(url: str, text: str = "Once upon a time") -> str:
    body = {"text": text, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    found = requests.post(f"{url}/generate", json=body, timeout=PATIENCE)
    assert found.status_code == 200, found.text
    return str(found.json()["text"])


def test_what_a_server_answers_a_cluster_answers(here: RunningCluster) -> None:
    assert requests.get(f"{here.url}/health", timeout=PATIENCE).status_code == 200
    assert requests.get(f"{here.url}/metrics", timeout=PATIENCE).status_code == 200
    models = requests.get(f"{here.url}/v1/models", timeout=PATIENCE).json()
    assert [model["id"] for model in models["data"]] == ["embedded"]
    status = here.status()
    assert (status["serving"], status["replicas"]) == (2, 2)
    assert len({worker["url"] for worker in status["workers"]}) == 2
    assert all(worker["capabilities"]["context_length"] == 1024 for worker in status["workers"])


def test_a_ray_of_its_own_is_this_users_alone_on_this_machine(here: RunningCluster) -> None:
    status = here.status()
    assert status["ray_address"].startswith("127.0.0.1:")
    folder = Path(status["logs"]).parents[2]
    assert folder.name.startswith(f"sgl-ray-{here.process.pid}-")
    assert folder.stat().st_mode & 0o077 == 0
    assert Path(status["logs"]).is_dir()
    environment = Path(f"/proc/{status['pids']['controller']}/environ").read_bytes().split(b"\0")
    assert len({each for each in environment if each.startswith((b"RAY_AUTH_TOKEN=", b"RAY_AUTH_MODE=token"))}) == 2


def listening(root: int) -> dict[str, str]:
    """Where a process and its descendants listen on TCP, with a process each."""
    sockets, parents, found = dict[str, str](), dict[str, str](), dict[str, str]()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, address, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A":
                sockets[f"socket:[{inode}]"] = address
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
    for pid in parents:
        above = pid
        while above in parents and above != str(root):
            above = parents[above]
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir() if above == str(root) else ():
                with contextlib.suppress(OSError):
                    if (name := os.readlink(file)) in sockets:
                        found[sockets[name]] = Path(f"/proc/{pid}/cmdline").read_text()[:100]
    return found


def test_a_cluster_on_the_loopback_address_listens_on_no_other(here: RunningCluster) -> None:
    """Ray's processes neither: Ray Serve's replicas take calls of other applications on all addresses."""
    found = listening(here.process.pid)
    assert f"0100007F:{int(here.url.rpartition(':')[2]):04X}" in found
    assert len(found) > 10
    local = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
    assert {where: who for where, who in found.items() if not where.startswith(local)} == {}


def test_an_update_that_cannot_start_costs_no_request_and_is_undone(
    here: RunningCluster, texts: dict[int, str]
) -> None:
    """The tests below find that the replicas come back as before."""
    before = {worker["id"] for worker in here.status()["workers"]}
    tally, _ = updated(here, RATE, {**OPTIONS, "replicas": 3, "model_path": "/nowhere"}, texts)
    assert (tally.again, tally.cut, tally.lost, tally.wrong) == (0, 0, 0, 0), tally
    status = here.status()
    assert {worker["id"] for worker in status["workers"]} == before
    assert (status["generation"], status["replicas"]) == (1, 2)
    assert "/nowhere" in status["undone"]["reason"]


@pytest.mark.parametrize("role", ["engine", "replica", "router", "controller"])
def test_a_process_that_is_killed_costs_no_answer(here: RunningCluster, texts: dict[int, str], role: str) -> None:
    found = killed(here, role, RATE, texts)
    assert found is not None
    tally, _ = found
    assert (tally.lost, tally.wrong) == (0, 0)
    assert tally.answered > 0
    assert tally.cut <= RATE * 2  # those that were streaming


def test_an_update_goes_on_when_a_replica_is_killed_in_its_middle(
    here: RunningCluster, texts: dict[int, str]
) -> None:
    tally, _ = updated(here, RATE, {**OPTIONS, "replicas": 2}, texts, "replica")
    assert (tally.lost, tally.wrong) == (0, 0), tally
    assert tally.cut <= RATE * 2
    status = here.status()
    assert ([worker["generation"] for worker in status["workers"]], status["undone"]["generation"]) == ([3, 3], 2)


def test_a_replica_that_goes_finishes_the_stream_that_it_has(here: RunningCluster) -> None:
    params = {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True}
    streams: dict[str, Any] = {}  # by worker
    while len(streams) < 2:
        body = {"text": f"{len(streams)}: once upon a time", "sampling_params": params, "stream": True}
        stream = requests.post(f"{here.url}/generate", json=body, stream=True, timeout=PATIENCE)
        if streams.setdefault(stream.headers["X-Sgl-Worker"], stream) is not stream:
            stream.close()
    here.scale(1)
    here.until(lambda status: status["serving"] == 1)
    for stream in streams.values():
        events = [line for line in stream.iter_lines() if line]
        assert events[-1] == b"data: [DONE]"
        assert json.loads(events[-2][6:])["meta_info"]["completion_tokens"] == 500
    here.until(lambda status: len(status["workers"]) == 1)


def test_an_update_costs_no_request(here: RunningCluster, texts: dict[int, str]) -> None:
    tally, _ = updated(here, RATE, {**OPTIONS, "replicas": 1, "context_length": 512}, texts)
    assert (tally.again, tally.cut, tally.lost, tally.wrong) == (0, 0, 0, 0), tally
    [worker] = here.status()["workers"]
    assert (worker["generation"], worker["capabilities"]["context_length"]) == (4, 512)


def test_scaling_costs_no_request(here: RunningCluster, texts: dict[int, str]) -> None:
    tally = scaled(here, RATE, 100, texts)
    assert (tally.answered, tally.again, tally.cut, tally.lost, tally.wrong) == (100, 0, 0, 0, 0), tally


def test_a_signal_to_all_processes_at_once_ends_them_all(tmp_path: Path) -> None:
    """As of systemd, or of timeout(1): Ray's head is gone before anyone can tell it to end."""
    with cluster({**OPTIONS, "replicas": 1}, tmp_path, ENVIRONMENT) as running:
        pids = [pid for worker in running.status()["workers"] for pid in worker["pids"]]
        os.killpg(running.process.pid, signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0, "Ray itself looks for its head for a minute, and aborts"
        assert_nothing_is_left(running.process.pid, pids, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_without_end_end_a_cluster_whole(number: signal.Signals, tmp_path: Path) -> None:
    with cluster({**OPTIONS, "replicas": 1}, tmp_path, ENVIRONMENT) as running:
        pids = [pid for worker in running.status()["workers"] for pid in worker["pids"]]
        while running.process.poll() is None:
            running.process.send_signal(number)
            time.sleep(0.01)
    assert running.process.returncode == 0
    assert_nothing_is_left(running.process.pid, pids, tmp_path)


@pytest.mark.parametrize("after", [0.0, 4.0, 6.0, 8.0])
def test_signals_without_end_end_a_cluster_that_starts(after: float, tmp_path: Path) -> None:
    """Whatever it does after so many seconds."""
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"model_path": "embedded", "port": 0, **OPTIONS}))
    command = [sys.executable, "-m", "sgl", "cluster", "up", str(file)]
    with subprocess.Popen(command, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE) as process:
        wait_until(lambda: any(tmp_path.glob("sgl-clusters-*/*.starting")))
        time.sleep(after)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert process.stdout is not None
        assert process.returncode in (0, 130)
        assert process.stdout.read().count(b"\n") <= 1  # "ready" at most, of a machine that was quick
    assert_nothing_is_left(process.pid, [], tmp_path)


def assert_nothing_is_left(pid: int, pids: list[int], folder: Path) -> None:
    """Of a cluster that this process was."""
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in pids))
    assert not list(folder.glob("sgl-clusters-*/*"))
    assert not list(Path("/tmp").glob(f"sgl-ray-{pid}-*"))
    wait_until(lambda: not any(f"/sgl-ray-{pid}-" in line for line in command_lines()))


def command_lines() -> Iterator[str]:
    """Of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def test_ranks_of_a_replica_lie_on_two_nodes(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=small)
    try:
        nodes.add_node(**{name: small[name] for name in ("num_cpus", "object_store_memory")})
        nodes.wait_for_nodes()
        options: dict[str, Any] = {**OPTIONS, "tp_size": 2, "ray_address": nodes.address}
        with cluster(options, tmp_path, ENVIRONMENT) as running:
            [worker] = running.status()["workers"]
            assert worker["capabilities"]["ranks"] == 2
            assert len(worker["pids"]) == 4  # a replica and its server, a follower and its ranks' supervisor
            before = answer(running.url)
            found = killed(running, "rank", RATE, {})
            assert found is not None
            tally: Tally = found[0]
            assert (tally.lost, tally.wrong) == (0, 0)
            assert answer(running.url) == before
        assert running.process.returncode == 0
    finally:
        nodes.shutdown()


def test_prefill_replicas_compute_prompts_for_the_others(tmp_path: Path) -> None:
    options = {**OPTIONS, "prefill_replicas": 1, "min_prefill_tokens": 8, "prefill_engine": {"tp_size": 2}}

    def paired(url: str) -> float:
        text = requests.get(f"{url}/metrics", timeout=PATIENCE).text
        found = re.search(r'^sgl_gateway_pairs_total\{outcome="paired"\} ([\d.]+)$', text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def known(url: str) -> Any:
        return requests.get(f"{url}/cluster/status", timeout=PATIENCE).json()["workers"]

    def modes(running: RunningCluster) -> list[str]:
        return sorted(worker["capabilities"]["mode"] for worker in running.status()["workers"])

    with cluster(options, tmp_path, ENVIRONMENT) as running:
        status = running.status()
        assert (status["serving"], status["replicas"], status["prefill_replicas"]) == (2, 2, 1)
        assert modes(running) == ["decode", "prefill"]
        assert sorted(worker["capabilities"]["ranks"] for worker in status["workers"]) == [1, 2]
        texts = [f"Number {number}: once upon a time there was a king" for number in range(4)]
        wait_until(lambda: all(worker["mode"] for worker in known(running.url)))
        found = [answer(running.url, text) for text in texts]
        assert paired(running.url) == len(texts)
        with Engine("embedded", **OPTIONS) as alone:
            params = {"max_new_tokens": 8, "temperature": 0}
            assert found == [alone.generate(text, params)["text"] for text in texts]
        running.scale(2, kind="prefill")
        running.until(lambda status: status["serving"] == status["replicas"] == 3)
        assert modes(running) == ["decode", "prefill", "prefill"]
        running.update({**OPTIONS, "min_prefill_tokens": 8})
        running.until(
            lambda status: [its["generation"] for its in status["workers"]] == [2] and status["serving"] == 1
        )
        assert running.status()["workers"][0]["capabilities"]["mode"] is None
        assert [answer(running.url, text) for text in texts] == found
    assert running.process.returncode == 0
