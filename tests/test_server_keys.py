"""Keys: who may do what, and that neither programs nor requests of one key are another's to see or to end."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import sgl
from sgl.cli import main
from sgl.cli.options import configs
from sgl.errors import ConfigError, SglError
from sgl.lang.ir import interpreter
from sgl.lang.ir.pool import Pool
from sgl.runtime.config import ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server import programs
from sgl.runtime.server.probe import PROBE
from tests.live_server import LiveServer, slow_steps, state_of
from tests.patience import PATIENCE, wait_until

SHORT = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
LONG = {"max_new_tokens": 450, "temperature": 0, "ignore_eos": True}
ALICE, BOB, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("alices-key", "bobs-key", "admins-key"))
KEYS = {"api_key": ["alice=alices-key", "bob=bobs-key"]}
OPEN_ENDED = {
    "program": {"v": 1, "name": "p", "seed": 1},
    "segment": {"nodes": [{"st": 0, "op": "text", "text": "a"}]},
}


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    """After every test no request runs."""
    yield
    wait_until_running(engine, 0)
    assert not engine._calls.rids


def wait_until_running(engine: Engine, count: int) -> None:
    wait_until(lambda: state_of(engine)["num_running_reqs"] == count)


def opened(server: LiveServer, headers: dict[str, str], body: Any = OPEN_ENDED) -> tuple[str, Iterator[bytes]]:
    """A program's id, and the lines of its events."""
    answer = server.post("/v1/programs", body, headers=headers, stream=True)
    assert answer.status_code == 200, answer.text
    lines = answer.iter_lines()
    line = next(line for line in lines if line.startswith(b"data: "))
    return str(json.loads(line[6:])["id"]), lines


@pytest.mark.parametrize("admin", [None, "admins-key"])
def test_programs_belong_to_the_key_that_made_them(another: Callable[..., LiveServer], admin: str | None) -> None:
    """Another key can neither list, read, extend nor delete them, nor tell them from programs that never were."""
    server = another(**KEYS, admin_api_key=admin)
    program, events = opened(server, ALICE)
    path = f"/v1/programs/{program}"
    segment = {"segment": {"nodes": [], "final": True}, "number": 1}

    def tries(headers: dict[str, str], path: str) -> list[tuple[int, str]]:
        answers = [
            server.get(path + "/timeline", headers=headers),
            server.get(path + "/events", headers=headers),
            server.post(path + "/segments", segment, headers=headers),
            requests.delete(server.url + path, headers=headers, timeout=PATIENCE),
        ]
        return [(answer.status_code, answer.text) for answer in answers]

    nowhere = "/v1/programs/" + "0" * 32
    assert tries(BOB, path) == tries(BOB, nowhere)
    assert {status for status, _ in tries(BOB, path)} == {404}
    assert {status for status, _ in tries({}, path)} == {401}
    assert server.get("/v1/programs", headers=BOB).json() == []
    assert [each["id"] for each in server.get("/v1/programs", headers=ALICE).json()] == [program]
    if admin is not None:
        assert [each["id"] for each in server.get("/v1/programs", headers=ADMIN).json()] == [program]
    assert server.get(path + "/timeline", headers=ALICE if admin is None else ADMIN).status_code == 200
    assert server.post(path + "/segments", segment, headers=ALICE).status_code == 200
    assert b'"type":"done"' in b"".join(events)


def test_ids_of_programs_and_requests_cannot_be_guessed(another: Callable[..., LiveServer], engine: Engine) -> None:
    server = another()
    for _ in range(2):
        program, _events = opened(server, {})
        assert re.fullmatch("[0-9a-f]{24,}", program)
        requests.delete(f"{server.url}/v1/programs/{program}", timeout=PATIENCE)
    bodies = [{"text": "a"}, {"text": ["a", "b"]}, {"input_ids": [[3], [4]]}, {"text": "a", "stream": True}]
    for keyed in (False, True):
        server = another(**KEYS) if keyed else server
        ids = []
        for body in bodies:
            for n in (1, 2):
                params = {**SHORT, "n": n, "temperature": 0.5}
                answer = server.post("/generate", {**body, "sampling_params": params}, headers=ALICE)
                ids += set(re.findall(r'"id":"([^"]+)"', answer.text))
        assert len(ids) == len(set(ids)) == (1 + 2 + 2 + 1) * 3 - 6 + 6
        for each in ids:
            assert re.fullmatch("sgl-[0-9a-f]{24,}(-[01])?", each), each
    assert engine.generate("a", SHORT)["meta_info"]["id"] != engine.generate("a", SHORT)["meta_info"]["id"]


def test_a_rid_is_each_keys_own(another: Callable[..., LiveServer], engine: Engine) -> None:
    """Two keys use the same one at a time; each aborts its own, the admin any."""
    server = another(**KEYS, admin_api_key="admins-key")
    answers: dict[str, Any] = {}

    def ask(name: str, headers: dict[str, str], rid: Any, **more: Any) -> threading.Thread:
        body = {"text": name, "sampling_params": LONG, "rid": rid, **more}

        def run() -> None:
            answers[name] = server.post("/generate", body, headers=headers).json()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with slow_steps(engine):
        threads = [ask("alice", ALICE, "same"), ask("bob", BOB, "same")]
        wait_until_running(engine, 2)
        again = server.post("/generate", {"text": "a", "sampling_params": SHORT, "rid": "same"}, headers=BOB)
        assert again.status_code == 400
        assert again.json()["error"]["message"] == "rid 'same' is in use by another unfinished request"
        assert server.post("/abort_request", {"rid": "same"}, headers=BOB).status_code == 200
        threads[1].join(PATIENCE)
        wait_until_running(engine, 1)
        for rid in ("alice:same", "#admin:same", ":same"):
            assert server.post("/abort_request", {"rid": rid}, headers=BOB).status_code == 200
        assert state_of(engine)["num_running_reqs"] == 1
        assert server.post("/abort_request", {"rid": "same"}, headers=ADMIN).status_code == 200
        threads[0].join(PATIENCE)
    for name in ("alice", "bob"):
        assert answers[name]["meta_info"]["id"] == "same"
        assert answers[name]["meta_info"]["finish_reason"]["type"] == "abort"
    listed = {"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": SHORT}
    results = server.post("/generate", listed, headers=ALICE).json()
    assert [result["meta_info"]["id"] for result in results] == ["one", "two"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "rid": "mine"}
    assert server.post("/v1/chat/completions", chat, headers=ALICE).status_code == 200


def test_abort_all_reaches_what_is_the_callers(another: Callable[..., LiveServer], engine: Engine) -> None:
    """Its programs too; with an admin's key it is for that one alone, and reaches everybody's."""
    gen = {"st": 0, "op": "gen", "name": "x", "params": {"max_tokens": 450, "ignore_eos": True}}
    program = {**OPEN_ENDED, "segment": {"nodes": [{"st": 0, "op": "text", "text": "a"}, gen], "final": True}}
    everything = {"abort_all": True}
    for keys in (KEYS, {**KEYS, "admin_api_key": "admins-key"}):
        server = another(**keys)
        done: list[Any] = []
        with slow_steps(engine):
            body = {"text": ["a", "b"], "sampling_params": LONG}
            run = lambda: done.append(server.post("/generate", body, headers=ALICE).json())  # noqa: B023, E731
            thread = threading.Thread(target=run)
            thread.start()
            _, events = opened(server, ALICE, program)
            wait_until_running(engine, 3)
            answer = server.post("/abort_request", everything, headers=BOB)
            assert answer.status_code == (403 if "admin_api_key" in keys else 200)
            assert state_of(engine)["num_running_reqs"] == 3
            who = ADMIN if "admin_api_key" in keys else ALICE
            assert server.post("/abort_request", everything, headers=who).status_code == 200
            thread.join(PATIENCE)
            assert [each["meta_info"]["finish_reason"]["type"] for each in done[0]] == ["abort", "abort"]
            rest = b"".join(events)
            assert b"RequestAborted" in rest
            assert b'"type":"done"' in rest


def test_the_admins_key_alone_flushes_and_profiles(another: Callable[..., LiveServer]) -> None:
    for_admin = ("/flush_cache", "/start_profile", "/stop_profile")
    server = another(**KEYS, admin_api_key="admins-key")
    for path in for_admin:
        answer = server.post(path, None, headers=BOB)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert server.post(path, None).status_code == 401
    for path in for_admin:
        assert server.post(path, None, headers=ADMIN).status_code == 200
    assert server.post("/generate", {"text": "a", "sampling_params": SHORT}, headers=ADMIN).status_code == 200
    server = another(admin_api_key="admins-key")
    assert server.post("/generate", {"text": "a", "sampling_params": SHORT}).status_code == 200
    unused = {"Authorization": "Bearer none"}  # what clients send that have to send something
    assert server.post("/generate", {"text": "a", "sampling_params": SHORT}, headers=unused).status_code == 200
    assert server.post("/flush_cache", None).status_code == 403
    assert server.post("/flush_cache", None, headers=ADMIN).status_code == 200
    server = another(**KEYS)
    assert server.post("/flush_cache", None, headers=BOB).status_code == 200


def test_every_door_but_the_open_ones_asks_for_a_key(another: Callable[..., LiveServer]) -> None:
    server = another(**KEYS)
    described = server.get("/openapi.json").json()["paths"]
    is_open = {
        "/health",
        "/health_generate",
        "/ready",
        "/ping",
        "/version",
        "/api/version",
        "/openapi.json",
        "/docs",
        "/",
    }
    for path, methods in described.items():
        for method in methods:
            answer = requests.request(method, server.url + path.replace("{", "").replace("}", ""), timeout=PATIENCE)
            assert (answer.status_code == 401) == (path not in is_open), path
    assert server.get("/nowhere").status_code == 401
    assert server.get("/flush%5Fcache").status_code in (401, 405)


def test_keys_are_read_from_flags_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(options: Any) -> list[tuple[str, str]]:
        return [(key.name, key.key) for key in ServerConfig.from_options({"api_key": options}).api_key or ()]

    assert found("k") == [("#1", "k")]
    assert found("c2VjcmV0==") == [("#1", "c2VjcmV0==")]
    assert found(["a=k1", "a=k2", "k3"]) == [("a", "k1"), ("a", "k2"), ("#3", "k3")]
    assert found("a=x==, b=sëcret") == [("a", "x=="), ("b", "sëcret")]
    for wrong in ("", "a,", "a b", ["a=k", "b=k"], [], [3], "k\nk"):
        with pytest.raises(ConfigError, match="api_key") as refused:
            found(wrong)
        assert not wrong or "k" not in str(refused.value).replace("key", "").replace("blank", "")
    with pytest.raises(ConfigError, match="admin_api_key"):
        ServerConfig.from_options({"api_key": "k", "admin_api_key": "k"})
    monkeypatch.setenv("SGL_API_KEY", "a=k1,k2")
    keys = ServerConfig.from_options({}).api_key
    assert keys is not None
    assert [key.name for key in keys] == ["a", "#2"]
    assert "k3" not in repr(ServerConfig.from_options({"admin_api_key": "k3"}))
    file = tmp_path / "options.yaml"
    file.write_text("api-key: [a=one, two]\n")

    def given(*flags: str) -> list[tuple[str, str]]:
        called = []
        with monkeypatch.context() as patch:
            patch.setattr("sgl.cli.serve.serve", lambda options: called.append(options) or 0)
            with pytest.raises(SystemExit):
                main(["serve", *flags])
        [config] = configs(called[0], (ServerConfig,))
        return [(key.name, key.key) for key in config.api_key]

    assert given("--config", str(file)) == [("a", "one"), ("#2", "two")]
    assert given("--api-key", "x=1", "--api-key", "2", "--config", str(file)) == [("x", "1"), ("#2", "2")]


def test_a_key_is_told_to_nobody(
    another: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by /server_info, the page, the log or a traceback; the log says its name."""
    server = another(**KEYS, admin_api_key="admins-key")
    with caplog.at_level(logging.DEBUG):
        told = [
            server.get(path, headers=ALICE).text for path in ("/server_info", "/get_model_info", "/v1/status", "/")
        ]
        told += [
            server.get("/metrics", headers=ALICE).text,
            server.get("/server_info", headers=BOB | {"X": "y"}).text,
        ]
        told.append(server.post("/generate", {"text": 5}, headers={"Authorization": "Bearer alices-keyx"}).text)

        def fail(*_arguments: Any, **_options: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(server.service.engine, "generate", fail)
        assert server.post("/generate", {"text": "a"}, headers=ALICE).status_code == 500
    told += [
        record.getMessage() + str(record.__dict__) + (caplog.handler.format(record)) for record in caplog.records
    ]
    assert "broken" in "".join(told)
    assert not re.search("alices-key|bobs-key|admins-key", "".join(told) + repr(server.service.config))
    assert any(record.__dict__.get("fields", {}).get("key") == "alice" for record in caplog.records)


def test_nobody_stays_out_of_the_log(another: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture) -> None:
    server = another()
    with caplog.at_level(logging.INFO):
        for path in ("/health", "/v1/models"):  # a cluster's looks at its workers are the former
            assert server.get(path, headers={"User-Agent": PROBE}).status_code == 200
    told = [record.getMessage().split()[:2] for record in caplog.records]
    assert [each for each in told if each[0] == "GET"] == [["GET", "/v1/models"]]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_keys_are_no_part_of_the_processs_title() -> None:
    code = (
        "import sys\nimport sgl.cli.serve\n"
        "sgl.cli.serve.serve = lambda options: print(open('/proc/self/cmdline').read()) or 0\n"
        "from sgl.cli import main\nmain()"
    )
    flags = ["serve", "--api-key", "alice=s3cret", "--api-key=0ther", "--admin-api-key", "4dmin", "--port", "0"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "--admin-api-key" in done.stdout
    assert not re.search("s3cret|0ther|4dmin", done.stdout)


def test_the_language_runs_with_a_key_of_several(another: Callable[..., LiveServer]) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a " + sgl.gen("x", max_tokens=3)
        s += sgl.select("y", ["one", "two"])

    server = another(**KEYS)
    state = program.run(backend=sgl.RuntimeEndpoint(server.url, api_key="bobs-key"))
    assert state["y"] in ("one", "two")
    assert len(server.get("/v1/programs", headers=BOB).json()) == 1
    with pytest.raises(SglError, match="API key"):
        sgl.RuntimeEndpoint(server.url, api_key="nobodys")


# ── what programs share ─────────────────────────────────────────────────────────────────────────────────────────


def tried(server: LiveServer, key: Any, size: int = 0) -> tuple[int, str]:
    """The status of an answer to a program of so many characters, and its id or the error."""
    texts = {"nodes": [{"st": 0, "op": "text", "text": "x" * size}]}
    answer = server.post("/v1/programs", {**OPEN_ENDED, "segment": texts}, headers=key, stream=True)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    line = next(line for line in answer.iter_lines() if b"opened" in line)
    return 200, json.loads(line.partition(b"data: ")[2])["id"]


def ended(server: LiveServer, key: Any, programs: list[str]) -> None:
    for program in programs:
        assert requests.delete(f"{server.url}/v1/programs/{program}", headers=key, timeout=PATIENCE).ok


def fill(server: LiveServer, key: Any, size: int = 0) -> list[str]:
    """Programs of a key, until one is refused."""
    mine = []
    while (answer := tried(server, key, size))[0] == 200:
        mine.append(answer[1])
    assert answer[0] == 429
    assert "this key" in answer[1]
    return mine


def test_no_key_opens_all_the_programs_that_there_may_be(
    another: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as many as it leaves; what one gives back is everybody's."""
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 12)
    server = another(**KEYS, admin_api_key="admins-key")
    alices = fill(server, ALICE)
    assert len(alices) == 6
    bobs = fill(server, BOB)
    assert len(bobs) == 3
    assert tried(server, ADMIN)[0] == 200
    ended(server, ALICE, alices)
    assert len(bobs + fill(server, BOB)) == 5


def test_no_key_fills_what_open_programs_may_hold(
    another: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MAX_HELD", 64_000)
    server = another(**KEYS)
    alices = fill(server, ALICE, 4000)
    assert 7 <= len(alices) <= 9
    path = f"/v1/programs/{alices[0]}/segments"
    assert server.post(path, {"segment": {"nodes": []}}, headers=ALICE).status_code == 429
    status, bobs = tried(server, BOB, 4000)
    assert status == 200
    assert server.post(f"/v1/programs/{bobs}/segments", {"segment": {"nodes": []}}, headers=BOB).ok
    ended(server, ALICE, alices)
    assert tried(server, ALICE, 4000)[0] == 200


def test_no_key_fills_what_programs_hold_in_the_engine(
    another: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that asks for more fails, and others' do not."""
    monkeypatch.setitem(interpreter._MOST_TOGETHER, "characters", 64_000)
    server = another(**KEYS)

    def run(key: Any, final: bool) -> tuple[str, str]:
        nodes = [{"st": 0, "op": "text", "text": "x" * 4000}]
        body = {**OPEN_ENDED, "segment": {"nodes": nodes, "final": final}}
        program, events = opened(server, key, body)
        if final:
            return program, b"".join(events).decode()
        server.engine._loop.call(lambda: None)  # it has taken what was sent
        return program, ""

    kept = [run(ALICE, False)[0] for _ in range(8)]
    assert "programs of this key" in run(ALICE, True)[1]
    assert "node_failed" not in run(BOB, True)[1]
    ended(server, ALICE, kept)
    assert "node_failed" not in run(ALICE, True)[1]


@pytest.mark.parametrize("options", [{}, {"api_key": ["alice=alices-key", "alice=bobs-key"]}])
def test_without_several_names_all_of_it_is_everybodys(
    another: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 6)
    server = another(**options)
    answers = [tried(server, ALICE) for _ in range(7)]
    assert [status for status, _ in answers] == [200] * 6 + [429]
    assert answers[-1][1] == "6 programs are open"


def test_a_tenant_has_what_it_leaves_free() -> None:
    pool = Pool()
    pool.take(pool.room(60, "a"), "a")
    assert (pool.of("a"), pool.room(60, "a"), pool.room(60, "b"), pool.room(60, None)) == (30, 0, 15, 30)
    for _ in range(100):  # both always take all they may, and give it back one after the other
        for one in ("b", "a"):
            pool.take(-pool.of(one), one)
            pool.take(pool.room(60, one), one)
    assert abs(pool.of("a") - 20) <= 1
    assert abs(pool.of("b") - 20) <= 1
    for one in ("a", "b"):
        pool.take(-pool.of(one), one)
    assert pool.taken == 0
    assert not pool._of
