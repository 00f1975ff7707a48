"""`sgl serve` as an operator runs it: a process of its own, signals, a killed engine, and options that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

import sgl
from sgl.cli import main
from sgl.cli.logs import configure_logging
from sgl.cli.options import configs, option_docs
from sgl.errors import ConfigError, ContextTooLong, EngineDead, QueueFull, SglError
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.server.channel import LoopChannel
from sgl.runtime.server.engine_process import EngineProcess
from sgl.runtime.server.serve import listen, serve_until_stopped
from sgl.runtime.server.service import Service
from sgl.runtime.server.worker import HEADERS
from tests.live_server import chat_checkpoint
from tests.patience import PATIENCE, wait_until

LONGEST = 1500
LONG = {"text": "hello", "sampling_params": {"max_new_tokens": LONGEST, "temperature": 0, "ignore_eos": True}}


class Served:
    """An `sgl serve` process; `url` is where."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "sgl", "serve", str(model), "--port", "0", "--log-format", "json", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill up and block
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+) \(ready in [\d.]+ s\)", line)
        assert found, line + self.log()
        self.url = found[1]

    def generate(self, body: dict[str, Any], **options: Any) -> requests.Response:
        return requests.post(self.url + "/generate", json=body, timeout=PATIENCE, **options)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=PATIENCE)

    def engine_pids(self) -> list[int]:
        """Those of its engines, which a child has forked."""
        forked = [pid for child in children(self.process.pid) for pid in children(child)]
        return [pid for pid in forked if name_of(pid) == "sgl engine\n"]

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Its log."""
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        return self.log()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def ranks_of(engine: int) -> list[int]:
    """Of the process with this id: children of the one that forks them."""
    return [rank for child in children(engine) for rank in children(child) if "sgl rank" in name_of(rank)]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("model"), context=2048)


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*flags: str) -> Served:
        started.append(Served(model, *flags))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """`sgl serve` in this process sets up handlers that write to what pytest captures, and closes."""
    loggers = {logger: (logger.level, logger.handlers[:]) for logger in map(logging.getLogger, ("", "sgl"))}
    yield
    for logger, (level, logger.handlers[:]) in loggers.items():
        logger.setLevel(level)


@sgl.function
def program(s: Any) -> None:
    s += "a b " + sgl.gen("x", max_tokens=4, temperature=0, ignore_eos=True)
    for branch in s.fork(2):
        branch += sgl.gen("z", max_tokens=3)
    s += sgl.select("y", ["one", "two"]) + sgl.gen("last", max_tokens=5)


def test_an_engine_process_answers_what_an_engine_answers(serve: Callable[..., Served], model: Path) -> None:
    """Texts, logprobs, streams, programs, errors, aborts; 500 streams at once, some of which are left."""
    server = serve("--random-seed", "1", "--max-total-tokens", "8192", "--check-ledger")
    body: dict[str, Any] = {"text": ["hello", "a"], "return_logprob": True, "logprob_start_len": 0}
    body |= {"top_logprobs_num": 2, "token_ids_logprob": [4, 5], "return_text_in_logprobs": True}
    params = {"max_new_tokens": 6, "temperature": 0.8, "seed": 3, "n": 2}
    results = server.generate({**body, "sampling_params": params}).json()
    with sgl.Engine(str(model), random_seed=1, max_total_tokens=8192) as engine:
        expected = engine.generate(body.pop("text"), params, **body)
        text = program.run(backend=engine, seed=5).text()
    assert [strip(result) for result in results] == [strip(result) for result in json.loads(json.dumps(expected))]
    assert program.run(backend=sgl.RuntimeEndpoint(server.url), seed=5).text() == text
    bare = {**body, "text": "hello", "return_text_in_logprobs": None, "sampling_params": {"max_new_tokens": 2}}
    meta = server.generate(bare).json()["meta_info"]
    assert {entry[2] for entry in meta["input_token_logprobs"] + meta["output_top_logprobs"][0]} == {None}
    much = {"text": ["hello"] * 20, "return_logprob": True, "token_ids_logprob": [5] * 200}
    answer = server.generate({**much, "sampling_params": {"max_new_tokens": 400}})
    assert answer.status_code == 400
    assert "up to 1600000 log-probabilities, and an answer holds 524288" in answer.json()["error"]["message"]
    answer = server.generate({"text": "x" * 3000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")

    prompts = [f"{number:03d}" for number in range(500)]
    short = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    texts = [result["text"] for result in server.generate({"text": prompts, "sampling_params": short}).json()]
    streamed = asyncio.run(streams(server.url, prompts, short, leave=7))
    assert [text for i, text in enumerate(streamed) if i % 7] == [text for i, text in enumerate(texts) if i % 7]
    deadline = time.monotonic() + PATIENCE
    while requests.get(server.url + "/server_info", timeout=PATIENCE).json()["internal_states"][0][
        "num_running_reqs"
    ]:
        assert time.monotonic() < deadline, "a request goes on for nobody"
    assert server.stop() is not None
    assert server.process.returncode == 0


def strip(result: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run."""
    for name in ("id", "e2e_latency", "queue_time", "prefill_time", "cached_tokens"):
        del result["meta_info"][name]
    return result


async def streams(url: str, prompts: list[str], params: dict[str, Any], *, leave: int) -> list[str]:
    """The text of each prompt's stream, all at once; every so-manieth client leaves after the first event."""

    async def one(client: aiohttp.ClientSession, index: int, prompt: str) -> str:
        text = ""
        body = {"text": prompt, "sampling_params": params, "stream": True}
        async with client.post(url + "/generate", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text = json.loads(line[6:])["text"]
                    if index % leave == 0:
                        return text
        return text

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return await asyncio.gather(*(one(client, i, prompt) for i, prompt in enumerate(prompts)))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine's process in /proc")
def test_a_killed_engine_fails_its_requests_and_is_replaced(serve: Callable[..., Served]) -> None:
    server = serve()
    expected = server.generate({**LONG, "return_logprob": True, "return_text_in_logprobs": True})
    assert expected.status_code == 200
    [engine] = server.engine_pids()
    answers: list[requests.Response] = []
    bodies = [LONG, LONG, {**LONG, "stream": True}]
    threads = [threading.Thread(target=lambda body=body: answers.append(server.generate(body))) for body in bodies]
    for thread in threads:
        thread.start()
    while (
        requests.get(server.url + "/server_info", timeout=PATIENCE).json()["internal_states"][0]["num_running_reqs"]
        < 3
    ):
        pass
    os.kill(engine, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    for answer in answers:
        if answer.status_code == 200:
            assert '"code":"engine_unavailable"' in answer.text, "the stream says that it ended early"
        else:
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
    assert len(answers) == 3
    assert requests.get(server.url + "/health", timeout=PATIENCE).status_code == 503
    assert server.generate(LONG).status_code == 503
    wait_until(
        lambda: requests.get(server.url + "/health_generate", timeout=PATIENCE).status_code == 200,
        "it never came back",
    )
    again = server.generate({**LONG, "return_logprob": True, "return_text_in_logprobs": True})
    assert (
        again.json()["meta_info"]["output_token_logprobs"] == expected.json()["meta_info"]["output_token_logprobs"]
    )
    assert server.engine_pids() != [engine]
    log = server.stop()
    assert server.process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    [ended] = [line for line in lines if "3 requests failed" in line["message"]]
    assert "request" not in ended, "it is about all of them"


def test_sigterm_lets_requests_finish_and_takes_no_more(serve: Callable[..., Served]) -> None:
    server = serve("--drain-timeout", "600")  # a machine under load takes longer than the usual 30 s
    answers: list[requests.Response] = []
    stream = server.generate({**LONG, "stream": True}, stream=True)
    lines: list[bytes] = []
    arriving = stream.iter_lines()
    next(arriving)
    reader = threading.Thread(target=lambda: lines.extend(arriving))  # unread for long, it would be given up
    reader.start()
    thread = threading.Thread(target=lambda: answers.append(server.generate(LONG)))
    thread.start()
    while (
        requests.get(server.url + "/server_info", timeout=PATIENCE).json()["internal_states"][0]["num_running_reqs"]
        < 2
    ):
        pass
    server.process.send_signal(signal.SIGTERM)
    late = []
    while server.process.poll() is None:
        try:
            late.append(requests.post(server.url + "/generate", json=LONG, timeout=PATIENCE).status_code)
        except requests.ConnectionError:
            break
        time.sleep(0.05)
    thread.join(PATIENCE)
    reader.join(PATIENCE)
    assert answers[0].json()["meta_info"]["completion_tokens"] == LONGEST
    assert lines[-2] == b"data: [DONE]"
    assert set(late) <= {200, 503}
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_signal_to_all_its_processes_lets_requests_finish_too(serve: Callable[..., Served]) -> None:
    """So systemd stops a service."""
    server = serve("--tp", "2", "--drain-timeout", "600")
    stream = server.generate({**LONG, "stream": True}, stream=True)
    arriving = stream.iter_lines()
    next(arriving)
    for pid in (*descendants(server.process.pid), server.process.pid):
        os.kill(pid, signal.SIGTERM)
    lines = list(arriving)
    assert lines[-2] == b"data: [DONE]"
    assert json.loads(lines[-4].removeprefix(b"data: "))["meta_info"]["completion_tokens"] == LONGEST
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_programs_come_with_a_key_and_an_interrupt_ends_the_server(serve: Callable[..., Served]) -> None:
    server = serve("--api-key", "secret", "--served-model-name", "tiny")
    backend = sgl.RuntimeEndpoint(server.url, api_key="secret")

    state = program.run(backend=backend)
    whole = server.generate(
        {"text": "a b ", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}},
        headers={"Authorization": "Bearer secret"},
    )
    assert state["x"] == whole.json()["text"]
    assert state["y"] in ("one", "two")
    assert server.stop(signal.SIGINT) is not None
    assert server.process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "x", "--max-runing-requests", "3"], "did you mean '--max-running-requests'"),
        (["serve", "x", "--max-running", "3"], "unknown option"),
        (["serve", "x", "--prot", "1"], "sgl serve: unknown option --prot (did you mean '--port'?)"),
        (["serve", "x", "--port", "many"], "port='many'"),
        (["serve", "x", "--schedule-policy", "magic"], "lpm"),
        (["serve", "x", "--config", "/nowhere.yaml"], "nowhere"),
        (["serve", "x", "--chat-template", "/nowhere.jinja"], "nowhere"),
        (["sreve"], "serve"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_at_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as stopped:
            main(["serve", str(model), "--port", port])
    assert stopped.value.code == 2
    assert "cannot listen" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_said_by_the_engine_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "x"}))
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(tmp_path), "--port", "0"])
    assert stopped.value.code == 1
    assert "NoSuchModel" in capsys.readouterr().err


def test_flags_win_over_the_file_and_the_file_over_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model-path: from-file\nport: 1\nmax_running_requests: 2\ndisable-radix-cache: true\n")
    monkeypatch.setenv("SGL_PORT", "3")
    monkeypatch.setenv("SGL_HOST", "::1")
    monkeypatch.setenv("SGL_API_KEY", "")  # counts as unset
    engine, server = parsed(["serve", "--config", str(file), "--port", "4", "--no-check-ledger"])
    assert (engine.model_path, engine.max_running_requests, engine.disable_radix_cache) == ("from-file", 2, True)
    assert (server.port, server.host, server.api_key) == (4, "::1", None)
    with monkeypatch.context() as patch:
        patch.setenv("SGL_MAX_QUEUED_REQEUSTS", "3")
        patch.setenv("SGL_TEST_DATA", "/somewhere")
        with pytest.raises(ConfigError, match="did you mean SGL_MAX_QUEUED_REQUESTS"):
            parsed(["serve"])
    file.write_text("prot: 1")
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        parsed(["serve", "x", "--config", str(file)])
    file.write_text("- 1")
    with pytest.raises(ConfigError, match="names and values"):
        parsed(["serve", "x", "--config", str(file)])


def parsed(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """The configs that a command line amounts to."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl.cli.serve.serve", lambda options: found.append(options) or 0)
        with pytest.raises(SystemExit):
            main(arguments)
    engine, server = configs(found[0], (EngineConfig, ServerConfig))
    return engine, server


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_every_option_is_explained(cls: type) -> None:
    import dataclasses

    assert set(option_docs(cls)) >= {field.name for field in dataclasses.fields(cls)} - {"host_"}


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    for error in (
        QueueFull("full", limit=3),
        ContextTooLong("long", tokens=9, limit=8),
        ConfigError("bad", option="port"),
        SglError("plain"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.__dict__) == (type(error), str(error), error.__dict__)


def test_the_server_itself_loads_no_torch() -> None:
    modules = "sgl.cli, sgl.runtime.server.app, sgl.runtime.server.engine_process"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.strip() == "False"


class _NoEngine:
    config = EngineConfig(model_path="none")
    tokenizer = None

    async def call(self, *_: Any) -> Any:
        raise EngineDead("there is none")

    async def close(self) -> None:
        pass


def test_a_collection_of_garbage_passes_by_what_a_server_has_imported() -> None:
    """Else one look through all modules, half a second in which nobody is answered, comes with every long body."""
    service = Service(ServerConfig(), _NoEngine())  # type: ignore[arg-type]
    frozen = [gc.get_freeze_count()]

    def on_ready(url: str) -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve_until_stopped(service, listen("127.0.0.1", 0), on_ready))
    assert frozen[0] < frozen[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine's process in /proc")
def test_a_stopped_engine_shows_in_health_and_may_come_back(serve: Callable[..., Served]) -> None:
    server = serve()
    [engine] = server.engine_pids()
    answers: list[requests.Response] = []
    os.kill(engine, signal.SIGSTOP)
    thread = threading.Thread(target=lambda: answers.append(server.generate(LONG)))
    thread.start()
    health = partial(requests.get, server.url + "/health", timeout=PATIENCE)
    wait_until(lambda: health().status_code != 200)
    assert "nothing was heard" in health().json()["error"]["message"]
    os.kill(engine, signal.SIGCONT)
    thread.join(PATIENCE)
    assert answers[0].status_code == 200, "it was not given up: the watchdog allows minutes"
    assert requests.get(server.url + "/health", timeout=PATIENCE).status_code == 200
    assert server.engine_pids() == [engine]


def test_the_server_looks_for_the_tokenizer_where_the_engine_does(model: Path) -> None:
    config = EngineConfig.from_options({"model_path": str(model / "config.json"), "max_total_tokens": 4096})

    async def scenario() -> None:
        engine = EngineProcess(config, configure=partial(configure_logging, "error", "text"))
        await engine.start()
        try:
            assert engine.tokenizer is not None
            asked = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
            result = await engine.generate(prompt="hello", **asked, return_text_in_logprobs=True)
            assert all(isinstance(text, str) for _, _, text in result["meta_info"]["output_token_logprobs"])
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_a_call_of_many_prompts_is_accepted_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop makes results of each part, and serves others in between."""
    config = EngineConfig.from_options({"model_path": str(model), "max_total_tokens": 4096})
    taken: list[list[int]] = []  # by turn of the loop, the requests that each message accepted
    receive = EngineProcess._receive

    def noted(self: EngineProcess, channel: LoopChannel, messages: list[Any]) -> None:
        taken.append([len(message[3]) for message in messages if message[0] == "accepted"])
        receive(self, channel, messages)

    monkeypatch.setattr(EngineProcess, "_receive", noted)
    count = 40 * HEADERS + 3

    async def scenario() -> None:
        engine = EngineProcess(config, configure=partial(configure_logging, "error", "text"))
        await engine.start(with_tokenizer=False)
        try:
            results = await engine.generate(input_ids=[[3]] * count, sampling_params={"max_new_tokens": 0})
            assert len(results) == count
            assert len({result["meta_info"]["id"] for result in results}) == count
        finally:
            await engine.close()

    asyncio.run(scenario())
    assert sum(map(sum, taken)) == count
    assert max(map(max, filter(None, taken))) == HEADERS
    assert max(map(sum, taken)) <= 16 * HEADERS


def hang_where_told(flag: Path) -> None:
    """Sets up an engine process whose every step hangs while the file exists."""
    configure_logging("error", "text")
    step = EngineLoop.step

    def slow(self: EngineLoop) -> None:
        if flag.exists():
            time.sleep(3600)
        step(self)

    EngineLoop.step = slow  # type: ignore[method-assign]


def test_a_step_that_never_ends_is_ended_by_the_watchdog(model: Path, tmp_path: Path) -> None:
    flag = tmp_path / "hang"
    config = EngineConfig.from_options({"model_path": str(model), "max_total_tokens": 4096})
    arguments = {"prompt": "hello", "sampling_params": LONG["sampling_params"]}

    async def scenario() -> None:
        engine = EngineProcess(config, configure=partial(hang_where_told, flag), watchdog_timeout=PATIENCE)
        await engine.start()
        try:
            service = Service(ServerConfig(), engine)
            expected = await engine.generate(**arguments)
            events = engine.stream(**arguments)
            await anext(events)
            flag.touch()
            while engine.heartbeat_age() < 1.0:
                await asyncio.sleep(0.02)
            with pytest.raises(EngineDead, match="at one step"):
                service.check_is_up(within=1.0)
            waiting = asyncio.create_task(engine.generate(**arguments))
            engine._watchdog_timeout = 1.5  # while nothing else may take so long
            with pytest.raises(EngineDead):
                async for _ in events:
                    pass
            with pytest.raises(EngineDead):
                await waiting
            with pytest.raises(EngineDead, match="not running"):
                service.check_is_up()
            flag.unlink()
            engine._watchdog_timeout = PATIENCE
            while engine.heartbeat_age() > 0:
                await asyncio.sleep(0.05)
            assert (await engine.generate(**arguments))["output_ids"] == expected["output_ids"]
            assert await engine.call("check_ledger") == []
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


@pytest.mark.slow
def test_request_ids_stand_in_the_lines_of_both_processes(serve: Callable[..., Served]) -> None:
    server = serve("--log-level", "debug")
    for identity, stream in (("first-of-two", False), ("second-of-two", True)):
        server.generate({"text": "hello", "stream": stream}, headers={"X-Request-Id": identity})
    lines = [json.loads(line) for line in server.stop().splitlines()]
    for identity in ("first-of-two", "second-of-two"):
        its = [line for line in lines if line.get("request") == identity]
        assert {line["logger"] for line in its} == {"sgl.runtime.server.answering", "sgl.runtime.server.worker"}
        assert {"accepted", "finished", "POST"} <= {line["message"].split()[0] for line in its}
        [answered] = [line for line in its if line["message"].startswith("POST")]
        assert (answered["path"], answered["status"]) == ("/generate", 200)
