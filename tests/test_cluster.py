"""A cluster without Ray: what its file may say, where processes go, which workers take requests, how many there are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import requests
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from sgl.child import command
from sgl.cli import cluster as cli_cluster
from sgl.cli import main
from sgl.cli.cluster import down, scale, status, update
from sgl.cli.options import options_of_file
from sgl.errors import ConfigError, EngineDead
from sgl.runtime.cluster import spares
from sgl.runtime.cluster.cluster import Cluster
from sgl.runtime.cluster.config import ClusterConfig, Options
from sgl.runtime.cluster.control import Control
from sgl.runtime.cluster.link import Link
from sgl.runtime.cluster.member import Member
from sgl.runtime.cluster.placement import Host, placed
from sgl.runtime.cluster.registry import Capabilities, Registry, Report
from sgl.runtime.cluster.router import RouterProcess, route
from sgl.runtime.cluster.running import MARK, Running, began, found, starting, sweep
from sgl.runtime.cluster.scaling import Scaler
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.gateway.reports import Load
from sgl.runtime.server.serve import cannot_listen, listen
from tests.house import REPOSITORY
from tests.patience import PATIENCE, wait_until

EXAMPLE = REPOSITORY / "examples" / "cluster.yaml"
CAPABILITIES = Capabilities("m", 1024, 8192, (), "sgl", False, "cpu", 1, "1")


def options(**given: Any) -> Options:
    return Options.of(given, "f.yaml")


def test_the_example_has_the_keys_that_every_cluster_needs() -> None:
    given = options_of_file(EXAMPLE)
    assert {"model_path", "replicas", "tp_size", "pp_size", "host", "port"} <= given.keys()
    assert options(**given).cluster.replicas == 2


def test_the_example_with_prefill_replicas_has_both_kinds() -> None:
    given = options(**options_of_file(EXAMPLE.parent / "disaggregation" / "cluster.yaml"))
    assert given.counts == {"worker": 2, "prefill": 1}
    assert given.prefill is not None
    assert (given.engine.max_running_requests, given.prefill.max_running_requests) == (None, 8)


def test_no_default_port_is_one_of_ray_serve() -> None:
    ports = [value for name, value in options_of_file(EXAMPLE).items() if name.endswith("port")]
    assert len(set(ports)) == len(ports)
    assert not {8000, 8265, 9000, 10001, 6379} & {*ports, ServerConfig().port}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("replcas", 2, "there is no option 'replcas' (did you mean 'replicas'?)"),
        ("tp", 2, "there is no option 'tp'"),
        ("node_rank", 1, "node_rank is the cluster's to say"),
        ("replicas", 0, "replicas=0: input should be greater than or equal to 1"),
        ("replicas", "two", "replicas='two'"),
        ("max_replicas", 1, "max_replicas=1: replicas=2 must lie between"),
        ("min_replicas", 3, "min_replicas=3: replicas=2 must lie between"),
        ("target_queue", 2.0, "target_queue=2.0 needs max_replicas, which is not given"),
        ("target_kv_usage", 0.5, "target_kv_usage=0.5 needs max_replicas"),
        ("key_burst", 5, "key_burst=5 needs key_rate"),
        ("control_port", 30000, "control_port=30000 is port=30000 as well"),
        ("device", "cuda:1", "device='cuda:1': Ray gives each replica its GPUs"),
        ("grpc_port", 30001, "grpc_port=30001: several replicas may share a host"),
        ("nnodes", 3, "nnodes=3: tp_size=2 times pp_size=1 is no multiple"),
        ("disaggregation_mode", "prefill", "disaggregation_mode is the cluster's to say"),
        ("prefill_engine", {"page_size": 8}, "prefill_engine needs prefill_replicas"),
        ("prefill_replicas", -1, "prefill_replicas=-1"),
        ("hicache_size", 4, "is part of enable_hierarchical_cache, which is off"),
        ("hicache_storage_dir", "/tmp", "is part of enable_hierarchical_cache, which is off"),
        ("kv_events_replay", "tcp://127.0.0.1:5558", "with no kv_events"),
        ("max_loras_per_batch", 0, "max_loras_per_batch=0"),
        ("tool_call_parser", "nobodys", "--tool-call-parser: "),
        ("reasoning_parser", "nobodys", "--reasoning-parser: "),
        ("chat_template", "/nowhere.jinja", "the chat template cannot be read"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options(**{"replicas": 2, "tp_size": 2, name: value})
    assert said in str(refused.value)
    assert refused.value.option == name


def refusal(file: Path, text: str, capsys: Any) -> str:
    """What `sgl cluster up` says of a file with such a text."""
    file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["cluster", "up", str(file)])
    assert stopped.value.code == 2
    said: str = capsys.readouterr().err
    return said


def test_options_of_engines_that_clash_are_refused_before_ray_starts(tmp_path: Path, capsys: Any) -> None:
    """In the words of `sgl serve`, where the engine says them."""
    text = "model_path: embedded\nenable_hierarchical_cache: true\ndisable_radix_cache: true\n"
    said = refusal(tmp_path / "cluster.yaml", text, capsys)
    assert "leaves nothing for enable_hierarchical_cache to keep" in said, said
    with pytest.raises(ConfigError) as refused:
        Engine(enable_hierarchical_cache=True, disable_radix_cache=True)
    assert str(refused.value) in said


def test_files_and_packages_of_replicas_on_another_ray_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for option in ({"chat_template": "/nowhere/it.jinja"}, {"grammar_backend": "llguidance"}):
        with pytest.raises(ConfigError):
            options(**option)
        assert options(**option, ray_address="ray:1").cluster.ray_address == "ray:1"
        Options.of(option, "f.yaml", is_on_own_ray=False)
    clash = {"enable_hierarchical_cache": True, "disable_radix_cache": True}
    with pytest.raises(ConfigError):
        options(**clash, ray_address="ray:1")


def test_up_looks_for_no_files_here_where_the_environment_names_a_ray(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model_path: embedded\nport: 0\nchat_template: /nowhere/it.jinja\n")
    command = [sys.executable, "-m", "sgl", "cluster", "up", str(file)]
    for address, said in (("127.0.0.1:1", "ray_address='127.0.0.1:1': no Ray answers there"), ("", "it.jinja")):
        environment = {**os.environ, "TMPDIR": str(tmp_path), "RAY_ADDRESS": address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode
        assert said in done.stderr


def test_options_of_scaling_and_of_limits_go_with_what_they_are_for() -> None:
    scaled = options(min_replicas=1, replicas=2, target_queue=2.0, key_rate=3.0, key_burst=5, max_waiting=10_000)
    assert (scaled.cluster.target_queue, scaled.gateway.key_burst) == (2.0, 5)


def test_the_command_names_an_unknown_key_and_starts_nothing(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "cluster.yaml"
    said = refusal(file, "model_path: embedded\nreplica: 2\n", capsys)
    assert f"{file}: there is no option 'replica' (did you mean 'replicas'?)" in said


@pytest.mark.parametrize("text", ["breaker_seconds: .nan", "start_timeout: 2026-01-01", "api_key: !!binary eHg="])
def test_a_value_that_json_does_not_have_is_refused_by_its_name_also_by_an_update(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"model_path: embedded\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        update(SimpleNamespace(file=str(file), port=None))
    assert refused.value.option == text.partition(":")[0]


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="the options in /dev/zero cannot be read: it has more than 1048576 char"):
        options_of_file(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text", ["port: 1\nport: 2\n", "page-size: 1\npage_size: 1\n", "prefill_engine: {x: 1, x: 1}\n"]
)
def test_an_option_that_a_file_gives_twice_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster.yaml gives (port|page_size|x) 2 times: give it once"):
        options_of_file(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!map x", "expected a mapping node"),
        ("a: !!map [1]", "expected a mapping node"),
        ("port: 2024-99-99", "this is no timestamp: month must be in 1..12"),
        ("a: !!timestamp q", "this is no timestamp"),
        ("a: !!int x", "this is no int"),
        ("a: !!int ''", "this is no int"),
        ("a: !!float y", "this is no float"),
        ("a: !!bool z", "this is no bool"),
        ("a: 1" + ":0" * 200 + ".0", "this is no float"),
    ],
)
def test_a_value_that_is_none_of_yaml_is_refused_by_its_place(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        options_of_file(file)
    assert said in str(refused.value)
    assert "line 1, column" in str(refused.value)


def test_lists_within_lists_without_end_are_refused(tmp_path: Path) -> None:
    file, limit = tmp_path / "cluster.yaml", sys.getrecursionlimit()
    file.write_text("a: " + "[" * 2000)
    sys.setrecursionlimit(1000)
    try:
        with pytest.raises(ConfigError, match="cannot be read: maximum recursion depth"):
            options_of_file(file)
    finally:
        sys.setrecursionlimit(limit)


def test_a_name_that_overrides_a_merged_one_is_given_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("base: &b {a: 1, c: 1}\nmid: &m {<<: *b, a: 2}\n<<: *m\na: 3\n")
    assert options_of_file(file) == {"base": {"a": 1, "c": 1}, "mid": {"a": 2, "c": 1}, "a": 3, "c": 1}


def test_without_ray_a_cluster_says_what_to_install(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['ray'] = None; from sgl.cli import main; main(['cluster', 'up', {str(EXAMPLE)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a cluster needs ray, which is not installed: pip install 'sgl[dist]'" in done.stderr


def test_neither_the_package_nor_a_server_imports_ray() -> None:
    code = "import sys, sgl, sgl.cli.serve, sgl.cli.cluster; print([name for name in sys.modules if name == 'ray'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_replicas_get_what_differs_from_the_defaults() -> None:
    given = options(port=1, tp_size=2, api_key=["me=a", "b"], lora_paths=["x=/y"], enable_lora=True).for_replicas()
    assert given["server"] == {"api_key": ["me=a", "b"]}
    assert list(given["engines"]) == ["worker"]
    engine, server = (
        EngineConfig.from_options(given["engines"]["worker"]),
        ServerConfig.from_options(given["server"]),
    )
    assert (engine.tp_size, engine.model_name) == (2, "embedded")
    assert [(path.lora_name, path.lora_path) for path in engine.lora_paths or ()] == [("x", "/y")]
    assert [key.key for key in server.api_key or ()] == ["a", "b"]


def test_prefill_replicas_have_options_of_their_own() -> None:
    given = options(replicas=2, prefill_replicas=3, page_size=8, prefill_engine={"max_running_requests": 4})
    assert given.counts == {"worker": 2, "prefill": 3}
    engines = given.for_replicas()["engines"]
    shared = {"model_path": "embedded", "page_size": 8}
    assert engines["worker"] == {**shared, "disaggregation_mode": "decode"}
    assert engines["prefill"] == {**shared, "disaggregation_mode": "prefill", "max_running_requests": 4}


@pytest.mark.parametrize(
    ("given", "option", "said"),
    [
        (
            {"tp_size": 2, "nnodes": 2},
            "nnodes",
            "nnodes=2: with prefill_replicas, each replica's processes are on one",
        ),
        ({"tp_size": 2, "prefill_engine": {"nnodes": 2}}, "nnodes", "nnodes=2: with prefill_replicas"),
        (
            {"deterministic": True, "page_size": 16, "prefill_engine": {"tp_size": 2}},
            "tp_size",
            "tp_size=1, and 2 in prefill_engine: in deterministic mode it is the same",
        ),
        ({"prefill_engine": {"port": 1}}, "prefill_engine", "prefill_engine has options of an engine, and 'port'"),
        ({"prefill_engine": {"max_running_requests": 0}}, "max_running_requests", "max_running_requests=0"),
        (
            {"prefill_engine": {"disaggregation_port": 1}},
            "prefill_engine",
            "disaggregation_port, which is the cluster's",
        ),
        ({"prefill_engine": {"page_size": 32}}, "prefill_engine", "page_size, which is the same for all replicas"),
        ({"prefill_engine": {"device": "tpu"}}, "prefill_engine", "device, which is the same for all replicas"),
        (
            {"prefill_engine": {"disaggregation_transport": "nixl"}},
            "prefill_engine",
            "transport, which is the same",
        ),
    ],
)
def test_wrong_options_of_prefill_replicas_are_refused_by_name(given: Any, option: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options(prefill_replicas=1, **given)
    assert (said in str(refused.value), refused.value.option) == (True, option), refused.value


@pytest.mark.slow
def test_a_server_that_cannot_start_tells_why() -> None:
    member = Member({"engine": {"model_path": "/nowhere"}, "server": {"port": 0}})
    with pytest.raises(EngineDead, match="/nowhere"):
        member.ready()


@pytest.fixture
def control() -> Iterator[tuple[str, int]]:
    """The address of a cluster's process, which says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        yield bound.getsockname()


OPTIONS = {"engine": {"model_path": "embedded", "device": "cpu"}, "server": {"port": 0}}


@pytest.mark.slow
def test_a_spare_server_serves_when_it_is_told_to_and_ends_with_its_parent() -> None:
    member = Member()
    try:
        assert member.ready(5.0) is None
        member.begin(OPTIONS)
        facts = member.ready(PATIENCE)
        assert facts is not None
        assert requests.get(f"{facts['url']}/health", timeout=PATIENCE).status_code == 200
    finally:
        member.stop(PATIENCE)
    orphan = Member()
    assert orphan._process.stdin is not None
    orphan._process.stdin.close()
    wait_until(lambda: orphan.ended() is not None)


@pytest.mark.slow
def test_a_spare_server_is_taken_on_by_the_next_replica(control: tuple[str, int]) -> None:
    """Also while it still imports; once; and it ends with the new parent, too."""
    name = spares.name_of("token", 1)
    orphan = Member(spare_address=spares.SpareAddress(name, control))
    assert orphan._process.stdin is not None
    orphan._process.stdin.close()
    wait_until(lambda: f"@{name}-{orphan.pid}" in Path("/proc/net/unix").read_text())
    assert spares.adopted(spares.name_of("token", 2)) is None
    member = Member(OPTIONS, process=spares.adopted(name))
    assert spares.adopted(name) is None
    assert member.pid == orphan.pid
    facts = member.ready(PATIENCE)
    assert facts is not None
    assert requests.get(f"{facts['url']}/health", timeout=PATIENCE).status_code == 200
    assert member.ended() is None
    for its in (member._process.stdin, member._process.stdout):
        assert its is not None
        its.close()
    wait_until(lambda: orphan.ended() is not None)
    assert member.ended() == -1
    member.stop(PATIENCE)


OURS = f"sgl-test-{os.getpid()}"  # names are the whole machine's
WAITS = "import sys; from sgl.runtime.cluster.spares import SpareAddress, wait; c = wait({address!r}, {seconds}); "
ECHO = "sys.exit(3) if c is None else c.sendall(c.recv(9)) or c.recv(9)"


def waiting(name: str, control: tuple[str, int], seconds: float = PATIENCE) -> subprocess.Popen[bytes]:
    code = WAITS.format(address=spares.SpareAddress(name, control), seconds=seconds) + ECHO
    return subprocess.Popen(command(code))


def test_who_waits_is_taken_on_once_and_by_its_own_name(control: tuple[str, int]) -> None:
    process = waiting(f"{OURS}-spare", control)
    other = waiting(f"{OURS}-spare-of-others", control)
    try:
        found: list[spares.AdoptedProcess] = []

        def has_found() -> bool:
            found.extend(each for each in [spares.adopted(f"{OURS}-spare")] if each is not None)
            return bool(found)

        wait_until(has_found)
        [its] = found
        assert its.pid == process.pid
        its.stdin.write(b"hello\n")
        its.stdin.flush()
        assert its.stdout.readline() == b"hello\n"
        assert spares.adopted(f"{OURS}-spare") is None
        assert its.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            its.wait(0.0)
        its.terminate()
        assert its.wait(PATIENCE) == its.poll() == -1
        its.kill()  # of what has ended: nothing
    finally:
        for each in (process, other):
            each.kill()
            each.wait()


def test_who_is_taken_on_by_nobody_ends_and_a_strangers_socket_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, control: tuple[str, int]
) -> None:
    process = waiting(f"{OURS}-nobody", control, 0.2)
    assert process.wait(PATIENCE) == 3
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{OURS}-stranger-1")
        stranger.listen()
        monkeypatch.setattr(spares, "_TURN_SECONDS", 0.1)
        assert spares.adopted(f"{OURS}-stranger") is None, "it says nothing"
        monkeypatch.setattr(spares.os, "getuid", lambda: -1)
        assert spares.adopted(f"{OURS}-stranger") is None, "it is another user's"


CLUSTER = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    "c = s.accept(); print('connected', flush=True); time.sleep(600)"
)


def test_who_waits_ends_at_once_when_the_clusters_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdout=subprocess.PIPE) as cluster:
        assert cluster.stdout is not None
        control = "127.0.0.1", int(cluster.stdout.readline())
        left = waiting(f"{OURS}-left", control, 2 * PATIENCE)
        assert cluster.stdout.readline() == b"connected\n"
        assert left.poll() is None
        cluster.kill()
        assert left.wait(PATIENCE) == 3
    assert waiting(f"{OURS}-late", control).wait(PATIENCE) == 3, "there is no cluster any more"


def test_a_spare_servers_name_tells_clusters_generations_and_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = {spares.name_of("a", 1), spares.name_of("b", 1), spares.name_of("a", 2)}
    for devices in ("", "0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        names.add(spares.name_of("a", 1))
    assert len(names) == 6


SIGNALS = """
import os, signal, subprocess, sys, threading
from sgl.runtime.cluster.running import Signals

number, times = int(sys.argv[1]), int(sys.argv[2])
signals, stops = Signals(), []
threading.Thread(target=signal.sigwait, args=({signal.SIGUSR1},), daemon=True).start()
signal.signal(number, signal.SIG_DFL)  # as Ray's C++ code has handlers of its own
for _ in range(times):
    os.kill(os.getpid(), number)
print("goes on", flush=True)
command = [sys.executable, "-c", "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)"]
subprocess.run(command, preexec_fn=lambda: None, check=True)
signals.take()
signals.tell(lambda: stops.append(1))
os.kill(os.getpid(), number)
assert len(stops) == (2 if times else 1), stops
signals.check()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_signals_wait_until_ray_has_started_but_not_its_processes(times: int, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SIGNALS, str(int(number)), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "goes on\n0\n"
    assert done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


def test_a_signal_that_a_shell_has_its_background_jobs_ignore_stays_ignored() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from sgl.runtime.cluster.running import Signals; signals = Signals(); signals.take()\n"
        "signal.raise_signal(signal.SIGINT); signals.check(); print('goes on', flush=True)\n"
        "signal.raise_signal(signal.SIGTERM); signals.check()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "goes on\n"
    assert done.stderr.endswith("KeyboardInterrupt\n")


# ── where processes go ──────────────────────────────────────────────────────────────────────────────────────────────


def plan(hosts: list[tuple[int, int]], replicas: int = 1, **given: Any) -> tuple[int, int, bool]:
    found = placed({"worker": EngineConfig(**given)}, [Host(*each) for each in hosts], {"worker": replicas})[
        "worker"
    ]
    return found.hosts, found.share, found.uses_gpus


def test_a_replica_takes_as_few_hosts_as_hold_it() -> None:
    assert plan([(8, 4)], tp_size=4) == (1, 4, True)
    assert plan([(8, 2), (8, 2)], tp_size=4) == (2, 2, True)
    assert plan([(1, 0), (1, 0)], tp_size=2) == (2, 1, False)
    assert plan([(8, 4)], device="cpu", tp_size=4) == (1, 4, False)
    assert plan([(8, 4)], tp_size=4, nnodes=2) == (2, 2, True)
    assert plan([(8, 2), (8, 2)], replicas=2, dp_size=2) == (1, 2, True)


def both(hosts: list[tuple[int, int]], counts: tuple[int, int], worker: Any, prefill: Any) -> list[tuple[int, int]]:
    engines = {"worker": EngineConfig(**worker), "prefill": EngineConfig(**prefill)}
    found = placed(engines, [Host(*each) for each in hosts], dict(zip(engines, counts, strict=True)))
    return [(each.hosts, each.share) for each in found.values()]


def test_replicas_of_both_kinds_share_the_hosts_and_each_is_on_one() -> None:
    assert both([(8, 4)], (1, 1), {"tp_size": 2}, {"tp_size": 2}) == [(1, 2), (1, 2)]
    assert both([(8, 2), (8, 4)], (1, 1), {"tp_size": 2}, {"tp_size": 4}) == [(1, 2), (1, 4)]
    assert both([(8, 2), (8, 3)], (3, 1), {}, {"dp_size": 2}) == [(1, 1), (1, 2)]
    with pytest.raises(
        ConfigError, match=r"1 prefill replicas of 2 .* have 0, 1 GPUs beside those of the others"
    ) as no:
        both([(8, 2), (8, 1)], (1, 1), {"tp_size": 2}, {"tp_size": 2})
    assert no.value.option == "tp_size"
    with pytest.raises(ConfigError, match="2 prefill replicas of 1") as no:
        both([(8, 2)], (1, 2), {}, {})
    assert no.value.option == "prefill_replicas"
    with pytest.raises(ConfigError, match=r"1 replicas of 4 processes do not fit: .* have 2, 2 GPUs$"):
        both([(8, 2), (8, 2)], (1, 1), {"tp_size": 4}, {})


@pytest.mark.parametrize(
    ("hosts", "replicas", "given", "option"),
    [
        ([(8, 2)], 1, {"tp_size": 4}, "tp_size"),
        ([(8, 2)], 3, {}, "replicas"),
        ([(8, 1), (8, 1)], 1, {"dp_size": 2}, "dp_size"),
        ([(8, 0)], 1, {"device": "cuda"}, "device"),
    ],
)
def test_what_does_not_fit_is_refused(
    hosts: list[tuple[int, int]], replicas: int, given: dict[str, Any], option: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(hosts, replicas, **given)
    assert refused.value.option == option


# ── which workers take requests ─────────────────────────────────────────────────────────────────────────────────────


def report(name: str, state: Any = "ready", **about: Any) -> Report:
    return Report(name, 1, state, url=f"http://{name}", **{"capabilities": CAPABILITIES, **about})


def test_why_a_replica_did_not_start_is_known_after_it_has_gone_until_one_serves(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    registry.hear(report("a"), 0.0)
    for _ in range(2):
        registry.hear(report("b", "failed", reason="/m is no model"), 0.0)
    assert caplog.text.count("worker b does not start: /m is no model") == 1
    for _ in range(10):
        registry.compare({"a": "RUNNING"}, 0.0)
    assert (list(registry.workers), registry.last_failure) == (["a"], "/m is no model")
    facts: dict[str, Any] = {
        **dict.fromkeys(("model", "url", "logs"), "x"),
        "serving": 1,
        "replicas": 2,
        "pids": {},
        "undone": None,
        "workers": registry.table(0.0),
    }
    link = SimpleNamespace(get=lambda path: facts)
    monkeypatch.setattr(cli_cluster, "_alive", lambda port: SimpleNamespace(link=lambda: link))
    for last, serving in (("/m is no model", 1), (None, 1), ("/m is no model", 2)):
        facts |= {"last_failure": last, "serving": serving}
        assert status(SimpleNamespace(port=None, json=False)) == 0
        said = "the last replica that did not start: /m is no model" in capsys.readouterr().out
        assert said == (last is not None and serving == 1)
    del facts["last_failure"]  # a cluster of an older version
    assert status(SimpleNamespace(port=None, json=False)) == 0
    registry.hear(report("c"), 0.0)
    assert registry.last_failure is None


def test_a_beat_brings_all_that_is_known_of_a_load() -> None:
    load = Load(3, 2, 0.25, 0.5)
    sent = msgspec.json.encode(msgspec.to_builtins(report("a", load=load)))
    registry = Registry()
    registry.hear(msgspec.json.decode(sent, type=Report), 0.0)
    assert registry.loads(0.0) == [load]
    [row] = registry.table(0.0)
    assert [row[name] for name in ("running", "waiting", "kv_usage", "hit_rate")] == [3, 2, 0.25, 0.5]


def test_a_worker_serves_from_its_first_beat_until_it_drains() -> None:
    registry = Registry()
    registry.hear(report("a", "starting"), 0.0)
    assert not registry.serving(0.0)
    registry.hear(report("a"), 1.0)
    assert registry.serving(1.0) == {"a": "http://a"}
    version = registry.version
    registry.hear(report("a"), 2.0)
    assert registry.version == version  # no news
    registry.hear(report("a", "draining"), 3.0)
    registry.hear(report("a"), 3.1)  # a beat that was overtaken
    assert not registry.serving(3.1)
    assert registry.draining() == ["a"]
    assert registry.version == version + 1


def test_a_worker_knows_whether_another_on_its_host_starts_or_will_come_back() -> None:
    """Or the spare server that it starts would slow that one down."""
    registry, one = Registry(), report("a", host="x")

    def is_calm(now: float) -> bool:
        return registry.is_calm(one, now)

    registry.hear(one, 0.0)
    assert is_calm(0.0)
    for state in ("starting", "restarting"):
        registry.hear(report("b", state, host="y"), 0.0)
        assert is_calm(0.0), "on another host"
        registry.hear(report("b", state, host="x"), 0.0)
        assert not is_calm(0.0)
    registry.hear(report("b", host="x"), 0.0)
    assert is_calm(0.0)
    for now in (1.0, 2.0):
        registry.compare({"a": "RUNNING"}, now)
    assert not is_calm(3.0)
    assert registry.is_calm(report("c", host="y"), 3.0)
    assert is_calm(22.0)
    for number in range(100):  # machines come and go
        registry.hear(report(f"c{number}", host=f"host{number}"), 100.0 + 30.0 * number)
        for _ in range(2):
            registry.compare({"a": "RUNNING"}, 100.0 + 30.0 * number)
        assert len(registry._left) == 1


def test_options_of_generations_that_nobody_serves_again_are_not_kept() -> None:
    control = Control("token", Registry())
    for number in range(1, 100):
        control.offer(number, {"number": number}, number - 2)
    assert list(control._options) == [97, 98, 99]


def test_a_router_that_can_follow_the_workers_no_more_ends() -> None:
    """It is started again then, where it would go on with workers that are gone."""

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/workers", lambda request: web.json_response({"version": 1}))  # type: ignore[arg-type]
        async with TestServer(app) as server:
            options = {"fd": socket.create_server(("127.0.0.1", 0)).detach(), "control": str(server.make_url("/"))}
            with pytest.raises(ExceptionGroup) as ended:
                await route({**options, "token": "token", "gateway": {}, "drain_timeout": 0.1})
            assert isinstance(ended.value.exceptions[0], KeyError)

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_a_beats_answer_says_whether_the_host_is_calm() -> None:
    async def test() -> None:
        control = Control("token", Registry())
        async with (
            TestServer(control.app) as server,
            ClientSession(headers={"Authorization": "Bearer token"}) as client,
        ):
            for state, calm in (("ready", True), ("starting", True), ("ready", False)):
                name = "a" if state == "ready" else "b"
                beat = msgspec.to_builtins(report(name, state, host="x"))
                async with client.post(server.make_url("/beat"), json=beat) as answer:
                    assert await answer.json() == {"is_calm": calm}

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_a_silent_worker_and_one_that_ray_serve_stops_take_no_requests() -> None:
    registry = Registry()
    registry.hear(report("a"), 0.0)
    registry.hear(report("b"), 0.0)
    registry.compare({"a": "RUNNING", "b": "STOPPING"}, 1.0)
    assert registry.serving(1.0) == {"a": "http://a"}
    assert registry.draining() == ["b"]
    registry.tick(60.0)
    assert not registry.serving(60.0)
    for _ in range(2):  # one list may be older than the worker
        registry.compare({"a": "RUNNING"}, 61.0)
    assert [row["id"] for row in registry.table(61.0)] == ["a"]


def test_the_load_of_prefill_workers_starts_no_others() -> None:
    registry = Registry()
    computing = msgspec.structs.replace(CAPABILITIES, mode="prefill")
    registry.hear(report("a", load=Load(1, 2, 0.5)), 0.0)
    registry.hear(report("b", load=Load(9, 9, 1.0), capabilities=computing), 0.0)
    assert registry.loads(0.0) == [Load(1, 2, 0.5)]
    assert registry.serving(0.0).keys() == {"a", "b"}


def test_a_worker_that_serves_something_else_is_refused() -> None:
    registry = Registry()
    registry.hear(report("a"), 0.0)
    registry.hear(report("b", capabilities=Capabilities("m", 512, 8192, (), "sgl", False, "cpu", 1, "1")), 0.0)
    registry.hear(report("c", capabilities=None), 0.0)
    assert registry.serving(0.0) == {"a": "http://a"}
    assert registry.failure(1) == "context_length is 512, and the others' 1024"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ready", "draining", "restarting", "gone"]))))
def test_the_version_grows_whenever_the_serving_workers_change(steps: list[tuple[str, str]]) -> None:
    registry, told = Registry(), (0, dict[str, str]())
    for now, (name, what) in enumerate(steps):
        if what == "gone":
            for _ in range(2):
                registry.compare(dict.fromkeys(registry.workers.keys() - {name}, "RUNNING"), now)
        else:
            registry.hear(report(name, what), now)
        serving = registry.serving(now)
        assert (registry.version == told[0]) == (serving == told[1])
        told = registry.version, serving


# ── how many replicas there are ─────────────────────────────────────────────────────────────────────────────────────


def scaled(loads: dict[int, list[Load]], seconds: int, **given: Any) -> list[int]:
    """The number of replicas after each second; loads: from this second on, of each replica."""
    scaler, current, found = Scaler(ClusterConfig(**given)), given["replicas"], []
    for second in range(seconds):
        load = loads[max(start for start in loads if start <= second)]
        current = scaler.wanted(current, load * current if len(load) == 1 else load, float(second))
        found.append(current)
    return found


def test_waiting_requests_and_full_pages_start_replicas_up_to_the_limit() -> None:
    limits = {"replicas": 1, "max_replicas": 3}
    assert scaled({0: [Load(8, 9, 0.1)]}, 60, **limits)[-1] == 3
    assert scaled({0: [Load(8, 0, 0.95)]}, 60, **limits)[-1] == 3
    assert scaled({0: [Load(8, 0, 0.5)]}, 60, **limits)[-1] == 1


def test_a_short_peak_starts_none_and_a_short_pause_stops_none() -> None:
    busy, idle = [Load(8, 40, 0.5)], [Load(0, 0, 0.0)]
    assert max(scaled({0: idle, 10: busy, 13: idle}, 30, replicas=1, max_replicas=4)) == 1
    assert min(scaled({0: [Load(8, 3, 0.5)], 5: idle, 60: [Load(8, 3, 0.5)]}, 90, replicas=2, min_replicas=1)) == 2
    assert scaled({0: idle}, 300, replicas=3, min_replicas=1)[-1] == 1


def test_nothing_is_decided_while_replicas_start() -> None:
    assert set(scaled({0: [Load(8, 40, 1.0), Load(8, 40, 1.0)]}, 60, replicas=3, max_replicas=9)) == {3}


# ── finding it ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_killed_ray_left_behind_is_swept_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, others = tmp_path / "ray1", tmp_path / "ray10"
    mine.mkdir(), others.mkdir()
    code = "import sys, time; file = open(sys.argv[1], 'a'); print(flush=True); time.sleep(600)"

    def started(name: str, folder: Path) -> subprocess.Popen[bytes]:
        command = [name, "-c", code, str(folder / "log")]
        process = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    reads, titled = started("tail", mine), started("ray::IDLE", mine)
    monkeypatch.setenv(MARK, str(mine))
    left, stays = started("python", mine), started("python", others)
    sweep(str(mine))
    assert (left.wait(PATIENCE), titled.wait(PATIENCE)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert (mine.exists(), others.exists(), stays.poll(), reads.poll()) == (False, True, None, None)
    for process in (stays, reads):
        process.kill()
        process.wait()


def test_a_process_that_got_a_killed_clusters_number_is_not_taken_for_it() -> None:
    mine = began(os.getpid())
    facts = (os.getpid(), 30000, "http://x", "http://y", "secret", None, "sgl", None)
    assert Running(*facts, began=mine).is_alive()
    assert not Running(*facts, began=(mine or 0) + 1).is_alive(), "or `sgl cluster down` would kill it"


def test_a_port_that_another_socket_listens_on_by_now_is_refused() -> None:
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", one.getsockname()[1]) as other:
        one.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .*: give another port, or 0"):
            RouterProcess(other, {})


def test_a_killed_cluster_is_not_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Running(2**30, 30000, "http://x", "http://127.0.0.1:1", "secret", None, "sgl", None).write()
    for each in (scale, status):
        with pytest.raises(EngineDead, match="port 30000 was killed: `sgl cluster down` clears up"):
            each(SimpleNamespace(port=None, replicas=2, prefill=False, json=False))


def test_a_running_cluster_is_found_by_its_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="no cluster runs on this machine"):
        found(None)
    one, other = (Running(1, port, "http://x", "http://y", "secret", None, "sgl", None) for port in (30000, 30001))
    one.write()
    assert found(None) == one
    other.write()
    assert found(30001) == other
    with pytest.raises(ConfigError, match="several clusters run here: give --port, one of 30000, 30001"):
        found(None)
    files = list(tmp_path.rglob("*.json"))
    assert {file.stat().st_mode & 0o777 for file in [*files, files[0].parent]} == {0o600, 0o700}
    one.forget()
    assert found(None) == other


def test_a_cluster_that_is_starting_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with starting(30000):
        for port in (None, 30000):
            with pytest.raises(EngineDead, match=f"port 30000 is starting, in process {os.getpid()}: ask again"):
                status(SimpleNamespace(port=port, json=False))
        with pytest.raises(ConfigError, match="no cluster runs on this machine on port 30001"):
            found(30001)
        known = Running(os.getpid(), 30000, "http://x", "http://y", "secret", None, "sgl", None)
        known.write()
        assert found(None) == known
        known.forget()
    [file] = tmp_path.iterdir()
    assert not list(file.iterdir())
    (file / "30000.starting").write_text(f"{2**30} 5")  # it was killed
    with pytest.raises(ConfigError, match="no cluster runs on this machine"):
        found(None)


def test_down_ends_a_cluster_that_only_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import signal, sys, tempfile; from sgl.runtime.cluster.running import starting; "
        f"tempfile.tempdir = {str(tmp_path)!r}; signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))\n"
        "with starting(30000): print('it starts', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"it starts\n"
        with pytest.raises(ConfigError, match="no cluster runs on this machine on port 30001"):
            down(SimpleNamespace(port=30001))
        with starting(30002), pytest.raises(ConfigError, match=r"several clusters start here: .*30000, 30002"):
            down(SimpleNamespace(port=None))
        assert process.poll() is None
        assert down(SimpleNamespace(port=None)) == 0
        assert process.wait(PATIENCE) == 15
    with pytest.raises(ConfigError, match="no cluster runs on this machine"):
        down(SimpleNamespace(port=None))


def test_down_clears_up_a_start_that_it_had_to_kill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody asks how the killed process ended before `down` is done, as in a container without an init."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sgl.cli.cluster._ENDING_SECONDS", 0.2)
    code = (
        "import signal, tempfile; from sgl.runtime.cluster.running import new_folder, starting; "
        f"tempfile.tempdir = {str(tmp_path)!r}; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with starting(30000): print(new_folder(), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().decode().strip())
        assert folder.is_dir()
        assert down(SimpleNamespace(port=30000)) == 0
        assert not folder.exists()
        assert not list(tmp_path.glob("*/*"))
        assert not Running(process.pid, 30000, "", "", "", None, "", None).is_alive()
        assert process.wait(PATIENCE) == -signal.SIGKILL


def test_down_bears_that_a_start_ends_before_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sgl.cli.cluster.starting_processes", lambda: {30000: 2**30})
    with starting(30000):
        assert down(SimpleNamespace(port=30000)) == 0


def test_down_does_not_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENDING_SECONDS", "_KILLED_SECONDS"):
        monkeypatch.setattr(f"sgl.cli.cluster.{name}", 0.1)
    with pytest.raises(EngineDead, match="was killed and does not end"):
        cli_cluster._ended(2**30, lambda: True)


UP = """
import asyncio, signal, sys, tempfile, types

class RayCluster:
    def __init__(self, address, check):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's C++ code has a handler of its own
        self.say("starts", "started")
    def say(self, before, after):
        print(before, flush=True)
        sys.stdin.readline()
        print(after, flush=True)
    def close(self): self.say("closes", "closed")

class Cluster:
    def __init__(self, given, bound, ray): self.stopped = asyncio.Event()
    def stop(self): self.stopped.set()
    async def run(self, on_ready):
        print("runs", flush=True)
        await self.stopped.wait()
        if len(sys.argv) > 3:
            raise getattr(sgl.errors, sys.argv[3])("it failed")

for name, cls in (("serve_app", RayCluster), ("cluster", Cluster)):
    module = sys.modules[f"sgl.runtime.cluster.{name}"] = types.ModuleType(name)
    setattr(module, cls.__name__, cls)
import sgl.errors
from sgl.cli.cluster import up
tempfile.tempdir = sys.argv[1]
up(types.SimpleNamespace(file=sys.argv[2]))
print("is never reached: Python's end would have Ray do things")
"""


@contextlib.contextmanager
def going_up(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """A cluster's process without Ray; and a way to wait until it says these lines."""
    file = folder / "cluster.yaml"
    file.write_text("model_path: embedded\nport: 0\n")
    command = [sys.executable, "-c", UP, str(folder), str(file), *more]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:

        def says(*lines: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in lines:
                if line in ("started", "closed"):  # not before it may
                    process.stdin.write(b"\n")
                    process.stdin.flush()
                assert process.stdout.readline().decode().strip() == line

        yield process, says
        says("")
    assert not list(folder.glob("sgl-clusters-*/*"))


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_no_cluster_within_its_end(second: signal.Signals, tmp_path: Path) -> None:
    with going_up(tmp_path) as (process, says):
        says("starts", "started", "runs")
        process.send_signal(signal.SIGTERM)
        says("closes")
        process.send_signal(second)
        says("closed")
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_no_number_of_signals_ends_a_ray_that_still_starts(second: signal.Signals, tmp_path: Path) -> None:
    with going_up(tmp_path) as (process, says):
        says("starts")
        for each in (signal.SIGTERM, second):
            process.send_signal(each)
        says("started", "closes")
        process.send_signal(second)
        says("closed")
        assert process.wait(PATIENCE) == 130


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("EngineDead", 1)])
def test_a_cluster_that_fails_says_why_and_ends_with_the_code_of_that(
    error: str, code: int, tmp_path: Path
) -> None:
    with going_up(tmp_path, error) as (process, says):
        says("starts", "started", "runs")
        process.send_signal(signal.SIGINT)
        says("closes", "closed")
        assert process.stderr is not None
        assert process.stderr.read() == b"sgl: it failed\n"
        assert process.wait(PATIENCE) == code


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own
@pytest.mark.parametrize("is_own", [True, False])
def test_what_runs_on_anothers_ray_that_cannot_be_reached_is_not_forgotten(
    is_own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    from sgl.runtime.cluster.cluster import Cluster

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ray: Any = SimpleNamespace(
        is_own=is_own, address="127.0.0.1:1", host="127.0.0.1", folder=None, hosts=list, is_there=lambda: False
    )
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        cluster = Cluster(options(control_port=0), bound, ray)
        with pytest.raises(ConfigError):  # there is no host
            asyncio.run(asyncio.wait_for(cluster.run(print), PATIENCE))
    if is_own:
        with pytest.raises(ConfigError, match="no cluster runs"):
            found(port)
    else:
        assert found(port).ray_address == "127.0.0.1:1"


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_no_port_is_taken_for_another(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port={port}: a port is a number from 0, any free one, to 65535"):
        listen("127.0.0.1", port)


def test_a_control_port_that_is_taken_is_said_by_its_name() -> None:
    refused = cannot_listen(("127.0.0.1", 30010), OSError(errno.EADDRINUSE, "taken"), option="control_port")
    assert str(refused) == (
        "cannot listen on 127.0.0.1:30010 (control_port): [Errno 98] taken: give another port, or 0 for any free one"
    )
    assert refused.option == "control_port"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nohost.invalid", ": host is a name or address of this machine, 127.0.0.1 for it alone, 0.0.0.0 for all"),
        ("203.0.113.7", ": host is a name or address of this machine, 127.0.0.1 for it alone, 0.0.0.0 for all"),
    ],
)
def test_a_host_that_is_not_this_machine_is_said_by_its_name(host: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listen(host, 0)
    assert str(refused.value).endswith(said)
    assert refused.value.option == "host"


def test_a_port_that_only_root_may_take_is_said() -> None:
    refused = cannot_listen(("127.0.0.1", 80), OSError(errno.EACCES, "Permission denied"))
    assert str(refused).endswith(": ports below 1024 are root's: give another port")


def test_a_ray_cluster_that_is_not_there_is_said_at_once() -> None:
    code = "import sys; from sgl.runtime.cluster.serve_app import RayCluster; RayCluster(sys.argv[1])"
    for address in ("127.0.0.1:1", "127.0.0.1", "127.0.0.1:99999"):
        done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, check=False)
        said = f"ConfigError: ray_address='{address}': no Ray answers there"
        assert said in done.stderr
        assert "give HOST:PORT of one that runs, or auto" in done.stderr


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_mute_ray_address_keeps_no_signal_waiting(mute: socket.socket, tmp_path: Path) -> None:
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model_path: embedded\nport: 0\nray_address: {address}\n")
    command = [sys.executable, "-m", "sgl", "cluster", "up", str(file)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        with mute.accept()[0] as reached:
            assert reached.recv(1) == b"", "Ray itself is asked next"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
    assert not list(tmp_path.glob("sgl-clusters-*/*"))


def test_a_mute_ray_address_is_given_up_and_said(mute: socket.socket) -> None:
    code = "import sys; from sgl.runtime.cluster import serve_app; serve_app._STARTING_SECONDS = 0.1\n"
    code += "serve_app.RayCluster(sys.argv[1])"
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    command = [sys.executable, "-c", code, address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    said = (
        f"ConfigError: ray_address='{address}': no Ray has answered within 0.1 s; give HOST:PORT of one that runs, "
    )
    assert f"{said}or auto, and set RAY_AUTH_MODE=token if it asks for a token" in done.stderr
    assert done.returncode == 1, "the end does not wait for Ray, either"


def test_down_of_a_killed_cluster_shows_its_ray_the_token_that_the_cluster_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself shows one where it is asked for at "auto", and not at the address that it had there."""
    pytest.importorskip("ray")
    from sgl.runtime.cluster import serve_app
    from sgl.runtime.cluster.cluster import Cluster

    modes = []

    def join(address: str, **about: Any) -> None:
        modes.append(os.environ.get("RAY_AUTH_MODE"))
        raise ConfigError("gone", option="ray_address") from ConnectionRefusedError()

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(serve_app, "RayCluster", join)
    ray: Any = SimpleNamespace(is_own=False, address="10.0.0.1:6379", folder=None)
    with listen("127.0.0.1", 0) as bound:
        for mode in ("token", "disabled"):
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
            known = Cluster(options(), bound, ray)._known()
            dataclasses.replace(known, pid=2**30).write()
            monkeypatch.delenv("RAY_AUTH_MODE")
            down(SimpleNamespace(port=None))
    assert modes == ["token", "disabled"]


def test_down_of_a_killed_cluster_gives_a_mute_ray_up_and_forgets_nothing(
    mute: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    Running(2**30, 30000, "", "http://127.0.0.1:1", "", address, "sgl-30000", None).write()
    code = "import sgl.cli.cluster as it; from sgl.cli.entry import main; it._JOINING_SECONDS = 0.1; "
    code += "main(['cluster', 'down'])"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    said = f"sgl: the Ray at {address} cannot be asked: no Ray has answered within 0.1 s. "
    said += "Replicas may run there yet: `sgl cluster down` ends them once it answers; if it never will, remove "
    assert (done.returncode, done.stderr) == (1, f"{said}{found(30000).path}\n")
    mute.close()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, f"the Ray at {address} is gone, and what ran there\n")
    assert not list(tmp_path.glob("sgl-clusters-*/*"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own
@pytest.mark.parametrize("is_done", [True, False])
def test_down_of_a_killed_cluster_forgets_it_once_ray_serve_has_answered(
    is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_app = pytest.importorskip("sgl.runtime.cluster.serve_app")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(serve_app, "RayCluster", lambda address, seconds: SimpleNamespace(close=bool))
    monkeypatch.setattr(serve_app.ServeApp, "delete", lambda app: is_done)
    Running(2**30, 30000, "", "http://127.0.0.1:1", "", "10.0.0.1:6379", "sgl-30000", None).write()
    if is_done:
        assert down(SimpleNamespace(port=None)) == 0
        assert not list(tmp_path.glob("sgl-clusters-*/*"))
    else:
        with pytest.raises(EngineDead, match=r"the Ray at 10\.0\.0\.1:6379 has a Ray Serve that does not answer"):
            down(SimpleNamespace(port=None))
        assert found(30000)


OWN = """
import os, subprocess, sys, time, types
from sgl.runtime.cluster import serve_app

way, folders, children = sys.argv[1], [], []

def start(folder):
    os.makedirs(folder)
    folders.append(os.path.dirname(folder))
    with open(f"{folder}/log", "w") as file:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=file))

def init(address, _temp_dir, **_):
    start(_temp_dir)
    if way == "hangs":
        serve_app._STARTING_SECONDS = 0
        while os.path.exists(os.path.dirname(_temp_dir)):  # all of the first sweep is done
            time.sleep(0.01)
        start(_temp_dir)
    os.setpgrp()

def setpgid(pid, group):
    raise PermissionError(1, "Operation not permitted")

def context():
    if way == "fails":
        raise RuntimeError("no context")
    return types.SimpleNamespace(gcs_address="127.0.0.1:1")

serve_app.ray.init, serve_app.ray.get_runtime_context, os.setpgid = init, context, setpgid
serve_app._GIVING_UP_SECONDS = 0.1, 600.0
try:
    ray = serve_app.RayCluster(None)
    print(ray.address)
    ray.close()
except Exception as error:
    print(type(error).__name__, error)
print([os.path.exists(folder) for folder in folders], [child.poll() for child in children])
for child in children:
    child.kill()
"""


@pytest.mark.parametrize(
    ("way", "said", "starts"),
    [
        ("hangs", "ConfigError ray_address=None: Ray has not started on this machine within 0 s; give", 2),
        ("fails", "ConfigError ray_address=None: no context", 1),
        ("is in another group", "127.0.0.1:1", 1),
    ],
)
def test_however_the_start_of_an_own_ray_ends_nothing_is_left(way: str, said: str, starts: int) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-c", OWN, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    first, last = done.stdout.splitlines()
    assert first.startswith(said)
    assert last == f"{[False] * starts} {[-signal.SIGKILL.value] * starts}"


def test_a_full_disk_is_said_and_leaves_no_cluster_that_nobody_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    known = Running(1, 30000, "http://x", "http://y", "secret", None, "sgl", None)
    known.write()
    with monkeypatch.context() as full:

        def write(handle: int, mode: str) -> Any:
            os.close(handle)
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("os.fdopen", write)
        with pytest.raises(ConfigError, match=r"30000\.json, by which .* cannot be written: .*No space left"):
            known.write()
    assert found(None) == known, "the file of before is whole"
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_a_command_that_nothing_comes_of_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [{"id": "w", "state": "ready", "generation": 1}]
    facts = {"serving": 1, "replicas": 2, "workers": workers, "generation": 1, "patience": 0.3, "logs": "/logs"}
    facts["is_updating"] = False
    known = SimpleNamespace(link=lambda: SimpleNamespace(get=lambda path: facts, post=lambda *_, **__: None))
    monkeypatch.setattr("sgl.cli.cluster._alive", lambda port: known)
    with pytest.raises(EngineDead, match=r"1 of 2 replicas serve, and nothing has changed for 0\.3 s.*/logs"):
        scale(SimpleNamespace(port=None, replicas=2, prefill=False))


def test_a_token_that_is_no_text_is_a_wrong_one() -> None:
    async def test() -> None:
        control = Control("token", Registry())
        async with TestServer(control.app) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
            )
            assert b" 401 " in await reader.readline()
            writer.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@pytest.mark.parametrize("text", ["1_0", " 1", "\uff11", "nan", "inf", "-2", "", "x", "9" * 5000])
@pytest.mark.parametrize(("path", "name"), [("/options", "generation"), ("/workers", "version")])
def test_a_query_that_is_no_number_is_told(path: str, name: str, text: str) -> None:
    async def test() -> None:
        control = Control("token", Registry())
        for generation in (0, 10):
            control.offer(generation, {})
        async with TestServer(control.app) as server:
            link = Link(str(server.make_url("")), "token")
            with pytest.raises(ConfigError, match=name) as refused:
                await asyncio.to_thread(link.get, path, **{name: text})
            assert refused.value.option == name
            assert await asyncio.to_thread(link.get, "/options", generation=10) == {}

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/scale", {"replicas": each}) for each in ("2", 1.5, True, None, [], 10**400)),
        ("/scale", {}),
        ("/scale", []),
        ("/scale", {"replicas": 1, "kind": 1}),
        ("/update", {"options": [], "source": ""}),
        ("/update", {"options": {}}),
        ("/beat", {"id": 1}),
    ],
)
def test_a_body_that_is_none_is_told(path: str, body: Any) -> None:
    async def test() -> None:
        cluster = cast(Any, SimpleNamespace())
        more = [
            web.post("/scale", partial(Cluster._scale, cluster)),
            web.post("/update", partial(Cluster._update, cluster)),
        ]
        async with TestServer(Control("token", Registry(), more).app) as server:
            link = Link(str(server.make_url("")), "token")
            with pytest.raises(ConfigError, match=f"the body of {path}"):
                await asyncio.to_thread(link.post, path, body)

    asyncio.run(asyncio.wait_for(test(), PATIENCE))
