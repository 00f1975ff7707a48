"""Which backend answers where a program names none, that a forgotten one is heard of, and what a state says of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.cli import main
from sgl.errors import ConfigError
from sgl.lang import config
from sgl.lang.backends import engine as engines
from sgl.lang.backends.base import Backend
from tests.fake_servers import FakeServer
from tests.lang_mocks import MockBackend
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served


@sgl.function
def program(s: Any) -> None:
    s += "text " + sgl.gen("x")


@sgl.function
def outer(s: Any) -> Any:
    return program()["x"]


@sgl.function
async def asynchronous(s: Any) -> None:
    s += "text " + sgl.gen("x")


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The models that were started because nobody chose a backend; none is really started."""
    sgl.set_default_backend(None)  # others may have left one
    asked: list[str] = []

    def backend_of_model(model: str) -> Backend:
        asked.append(model)
        return MockBackend(lambda *_: model)

    monkeypatch.setattr(config, "backend_of_model", backend_of_model)
    monkeypatch.setattr(config, "_has_warned", False)
    monkeypatch.delenv("SGL_MODEL_PATH", raising=False)
    monkeypatch.delenv("SGL_REQUIRE_BACKEND", raising=False)
    yield asked
    sgl.set_default_backend(None)


DOORS: dict[str, Callable[[], object]] = {
    "run": lambda: program.run().text(),
    "called": lambda: program().text(),
    "streamed": lambda: list(program.run(stream=True).text_iter()),
    "awaited": lambda: asyncio.run(program.arun()),
    "asynchronous": lambda: asynchronous.run().text(),
    "batch": lambda: program.run_batch([(), ()]),
    "asynchronous batch": lambda: asyncio.run(_await(program.arun_batch([{}, {}]))),
    "compiled": lambda: program.compile().run().text(),
    "nested": lambda: outer.run().text(),
}


async def _await(awaitable: Any) -> Any:
    return await awaitable


@pytest.mark.parametrize("door", DOORS)
def test_a_forgotten_backend_is_answered_by_the_embedded_model_and_heard_of(
    door: str, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    DOORS[door]()
    assert set(models) == {"embedded"}
    said = capsys.readouterr()
    words = " ".join(said.err.split())
    assert words.count("WARNING: no backend was chosen") == 1
    for word in ("embedded model", "toy", "backend=", "set_default_backend", "SGL_MODEL_PATH", "--model", "--url"):
        assert word in words
    assert "SGL_REQUIRE_BACKEND=1" in words
    assert "WARNING" not in said.out


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    threads = [threading.Thread(target=door) for door in DOORS.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    program.run().sync()
    assert capsys.readouterr().err.count("WARNING") == 1


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_a_choice_can_be_required(
    door: str, value: str, models: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGL_REQUIRE_BACKEND", value)
    with pytest.raises(ConfigError, match="no backend was chosen") as caught:
        DOORS[door]()
    assert caught.value.option == "backend"
    assert "set_default_backend" in str(caught.value)
    assert models == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [None, "", "0", "false", "no"])
def test_what_is_chosen_is_taken_in_silence(
    door: str,
    value: str | None,
    models: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if value is not None:
        monkeypatch.setenv("SGL_REQUIRE_BACKEND", value)
    sgl.set_default_backend(MockBackend())
    DOORS[door]()
    assert models == []
    sgl.set_default_backend(None)
    monkeypatch.setenv("SGL_MODEL_PATH", "some/model")
    DOORS[door]()
    assert set(models) == {"some/model"}
    assert capsys.readouterr().err == ""


def test_a_model_of_the_environment_satisfies_who_requires_a_choice(
    models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGL_REQUIRE_BACKEND", "1")
    program.run(backend=MockBackend()).sync()
    monkeypatch.setenv("SGL_MODEL_PATH", "some/model")
    assert program.run()["x"] == "some/model"


# What a state says


def test_a_state_shows_its_model(tmp_path: Path) -> None:
    folder = str(chat_checkpoint(tmp_path / "model"))
    with sgl.Engine(folder, **OPTIONS) as engine:
        server = LiveServer(engine)
        for backend in (engine, sgl.RuntimeEndpoint(server.url)):
            state = program.run(backend=backend, max_new_tokens=2)
            state.sync()
            assert f"model: {folder}" in repr(state)
            assert repr(state).startswith("ProgramState(text ")
        server.close()
    answer = {"choices": [{"index": 0, "message": {"content": "hi"}, "text": "hi"}], "usage": {}}
    with FakeServer(lambda path, body: answer) as fake:
        state = program.run(backend=sgl.OpenAI("gpt-x", base_url=fake.url, api_key="k"))
        assert state.text() == "text hi"
        assert "model: gpt-x" in repr(state)
    state = program.run(backend=MockBackend(lambda *_: "y"))
    state.sync()
    assert repr(state) == "ProgramState(text y)"


def test_the_embedded_model_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "backend_of_model", engines.backend_of_model)
    with sgl.Engine("embedded", max_total_tokens=512) as engine:
        assert engines.engine_backend(engine).model_name == "embedded"


# The command


FILES = {
    "default": "program.run(max_new_tokens=2).sync()\n",
    "own backend": "program.run(backend=Own()).sync()\n",
    "own default": "sgl.set_default_backend(Own())\nprogram.run().sync()\n",
    "no program": "print('hello')\n",
}
PREFIX = """
import sys
import sgl
from sgl.lang.backends.steps import Completion, TextBackend


class Own(TextBackend):
    async def generate(self, prompt, params):
        return [Completion("mine") for _ in params.seeds]


@sgl.function
def program(s):
    s += "text " + sgl.gen("x")


"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with sgl.Engine(model, **OPTIONS) as engine, served(engine) as server:
        yield server


@pytest.fixture
def sgl_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command on a file of these lines; returns its exit code and what it said on standard error."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(lines: str, *arguments: str) -> tuple[int, str]:
        file = tmp_path / "file.py"
        file.write_text(PREFIX + lines)
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, str(file)])
        code = stopped.value.code
        assert isinstance(code, int)
        return code, capsys.readouterr().err

    return run


NOT_THERE = {name: FILES[name] for name in ("own backend", "own default", "no program")}


@pytest.mark.parametrize("name", NOT_THERE)
@pytest.mark.parametrize("ending", ["", "sys.exit(0)\n", "sys.exit()\n"])
def test_a_trace_of_no_program_is_an_error_with_a_reason(
    name: str, ending: str, server: LiveServer, sgl_command: Any, tmp_path: Path
) -> None:
    page = tmp_path / "trace.html"
    code, said = sgl_command(NOT_THERE[name] + ending, "trace", "--url", server.url, "--output", str(page))
    assert code == 1
    assert "no program of" in said
    assert server.url in said
    assert "backend=" in said
    assert not page.exists()


@pytest.mark.parametrize("name", NOT_THERE)
def test_a_run_whose_programs_go_elsewhere_says_so(name: str, server: LiveServer, sgl_command: Any) -> None:
    code, said = sgl_command(NOT_THERE[name], "run", "--url", server.url)
    assert code == 0
    assert "no program of" in said
    assert sgl_command(FILES["default"], "run", "--url", server.url) == (0, "")


def test_a_trace_shows_the_programs_of_its_file_only(server: LiveServer, sgl_command: Any, tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    lines = (
        f"program.run(max_new_tokens=2, backend=sgl.RuntimeEndpoint({server.url!r})).sync()\n" + FILES["default"]
    )
    code, said = sgl_command(lines + "sys.exit(0)\n", "trace", "--url", server.url, "--output", str(page))
    assert (code, "1 program in" in said) == (0, True)
    code, said = sgl_command(
        FILES["default"] + "sys.exit(5)\n", "trace", "--url", server.url, "--output", str(page)
    )
    assert (code, "1 program in" in said) == (5, True)


def test_programs_that_a_server_gets_as_single_calls_are_named_as_the_reason(
    server: LiveServer, sgl_command: Any, tmp_path: Path
) -> None:
    lines = (
        "from sgl.lang.ir.chat_template import ChatTemplate, jinja_template\n"
        "program.run(max_new_tokens=2, chat_template=jinja_template('{{ messages }}')).sync()\n"
    )
    code, said = sgl_command(lines, "trace", "--url", server.url, "--output", str(tmp_path / "t.html"))
    assert code == 1
    assert "chat template" in said


def test_a_server_that_executes_no_programs_is_refused(sgl_command: Any, tmp_path: Path) -> None:
    with FakeServer(lambda path, body: {}) as fake:
        code, said = sgl_command(FILES["default"], "trace", "--url", fake.url, "--output", str(tmp_path / "t.html"))
    assert code == 2
    assert "sgl serve" in said


@pytest.mark.parametrize("kind", ["run", "trace"])
def test_the_command_requires_a_choice_too(
    kind: str, sgl_command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGL_REQUIRE_BACKEND", "1")
    monkeypatch.chdir(tmp_path)
    code, said = sgl_command(FILES["default"], kind)
    assert code == 2
    assert "--url URL" in said


def test_without_a_target_a_file_runs_as_it_would_without_the_command(sgl_command: Any, models: list[str]) -> None:
    code, said = sgl_command(FILES["own backend"], "run")
    assert (code, said, models) == (0, "", [])
    code, said = sgl_command(FILES["default"], "run")
    assert (code, models) == (0, ["embedded"])
    assert "WARNING: no backend was chosen" in said
