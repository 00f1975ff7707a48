"""The command line itself: help, completion, mistakes, and what each command is called with."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl.cli import main
from sgl.runtime.config import EngineConfig, ServerConfig
from tests.house import REPOSITORY
from tests.patience import PATIENCE

COMMANDS = ["serve", "run", "trace", "chat", "bench serving", "bench offline", "bench latency"]
COMMANDS += ["cluster up", "cluster status", "cluster scale", "cluster update", "cluster down"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command line shows: its exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(line.split())
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command is called with, without what it was not given."""
    found: list[SimpleNamespace] = []
    for command in ("serve.serve", "programs.run", "programs.trace", "chat.chat", "bench.bench"):
        monkeypatch.setattr(f"sgl.cli.{command}", lambda options: found.append(options) or 0)

    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stopped:
            main([*arguments])
        assert stopped.value.code == 0
        given = vars(found.pop())
        return {name: value for name, value in given.items() if name not in ("does", "kind") and value is not None}

    return run


def groups(text: str) -> dict[str, list[str]]:
    """The titles of a help text, and the flags below each."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.fullmatch(r"(\S.*):\s*", line):
            found[title[1]] = []
        elif found and (flag := re.match(r"  (?:-\w, | {4})?(--[\w-]+|\w+)", line)):
            list(found.values())[-1].append(flag[1])
    return found


def test_help_lists_the_commands_in_the_order_of_a_newcomer(shown: Any) -> None:
    code, out, err = shown("--help")
    assert (code, err) == (0, "")
    assert groups(out)["Commands"] == ["serve", "run", "trace", "chat", "gateway", "bench", "cluster"]
    assert "_SGL_COMPLETE=bash_source" in out
    for line in ("", "bench"):
        code, out, _ = shown(line)
        assert code == 2, "nothing was done"
        assert "Commands:" in out


def test_the_options_of_a_server_are_shown_in_groups(shown: Any) -> None:
    code, out, _ = shown("serve -h")
    assert code == 0
    found = groups(out)
    assert list(found)[:3] == ["Arguments", "Options", "Where the server listens"]
    memory = ["page-size", "mem-fraction-static", "max-total-tokens", "state-checkpoints", "swa-full-tokens-ratio"]
    assert found["Memory"] == [f"--{name}" for name in memory]
    listed = [flag for flags in found.values() for flag in flags]
    for cls in (ServerConfig, EngineConfig):
        for field in dataclasses.fields(cls):
            assert listed.count("--" + field.name.replace("_", "-")) == 1
    assert max(map(len, found.values())) <= 10, "a group is read at a glance"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(shown: Any, command: str) -> None:
    _, out, _ = shown(f"{command} --help")
    for line in out.splitlines():
        assert not re.fullmatch(r"  (?:-\w +)? *--\S+(?: <\S+>)?\s*", line), line


def test_the_version_is_told(shown: Any) -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert shown("--version") == (0, f"sgl {version}\n", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "serv",
            "sgl: there is no 'serv' (did you mean 'serve'?); there are serve, run, trace, chat, gateway, bench, "
            "cluster",
        ),
        ("bench servng", "sgl bench: there is no 'servng' (did you mean 'serving'?)"),
        ("--verson", "unknown option --verson (did you mean '--version'?)"),
        ("serve --prot 3", "sgl serve: unknown option --prot (did you mean '--port'?) (see sgl serve --help)"),
        ("serve --no-chek-ledger", "did you mean '--no-check-ledger'"),
        ("serve --speculative-algorithm ngram", "there is no 'ngram' (did you mean 'NGRAM'?); there are auto, off"),
        ("serve --log-level wrning", "there is no 'wrning' (did you mean 'warning'?); there are debug, info"),
        ("serve --host --port 3", "sgl serve: --host needs a value, not --port"),
        ("serve --host", "sgl serve: Option '--host' requires an argument"),
        ("serve --api-key --api-key", "--api-key needs a value"),
        ("serve one two", "extra argument (two)"),
        ("chat --max-tokens many", "'--max-tokens': 'many' is not a valid integer"),
        ("run --url http://localhost", "sgl run: one thing more is required: FILE (see sgl run --help)"),
    ],
)
def test_mistakes_are_explained_in_a_line(shown: Any, line: str, words: str) -> None:
    code, out, err = shown(line)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_what_follows_the_file_is_its_own(called: Any) -> None:
    given = called("run", "--url", "u", "file.py", "--url", "v", "-h", "--", "--nowhere")
    assert given == {
        "url": "u", "file": "file.py", "arguments": ("--url", "v", "-h", "--", "--nowhere"), "replay": False,
    }  # fmt: skip
    assert called("trace", "file.py") == {"output": "trace.html", "file": "file.py", "arguments": ()}


def test_flags_are_what_was_given_and_nothing_else(called: Any) -> None:
    given = {"api_key": (), "lora_paths": (), "lora_target_modules": ()}
    assert called("serve") == given
    assert called("serve", "m", "--port=4", "--port", "5") == given | {"model": "m", "port": "5"}
    assert called("serve", "--attention-backend", "none") == given | {"attention_backend": "none"}
    for name in ("disable_radix_cache", "disable_overlap_schedule"):
        flag = name.replace("_", "-")
        assert called("serve", f"--{flag}") == given | {name: True}
        assert called("serve", f"--no-{flag}") == given | {name: False}
        assert called("serve", f"--no-{flag}", f"--{flag}") == given | {name: True}
        assert called("serve", f"--{flag}", f"--no-{flag}") == given | {name: False}
    assert called("bench", "serving", "--slo", "a=1", "--slo", "b=2", "--request-rate", "-1", "--no-ignore-eos") == {
        "json": False, "slo": ("a=1", "b=2"), "request_rate": "-1", "ignore_eos": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("input()", "EOFError"),
        ("import click; raise click.UsageError('mine')", "click.exceptions.UsageError"),
        ("import click; raise click.Abort", "click.exceptions.Abort"),
    ],
)
def test_what_a_file_raises_is_its_own(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(line)
    done = subprocess.run(
        [sys.executable, "-m", "sgl", "run", str(file)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("nonsense", 2), ("serve --port abc", 2)])
def test_closed_and_full_streams_change_no_exit_code(words: str, code: int, closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m sgl {words} {closed}"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["--version", "--help", "serve --help"])
def test_output_that_finds_no_room_is_an_error_that_says_so(words: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m sgl {words} >/dev/full"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert done.stderr == "sgl: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["print('x' * 100)\nwhile True: print('x' * 10_000)", "print('x' * 2_000_000)"])
def test_output_that_nobody_reads_further_ends_a_command_quietly(
    tmp_path: Path, line: str, unbuffered: str
) -> None:
    file = tmp_path / "file.py"
    file.write_text(line)
    with subprocess.Popen(
        [sys.executable, "-m", "sgl", "run", str(file)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["se"], {"serve"}),
        (["serve", "--por"], {"--port"}),
        (["serve", "--log-level", "w"], {"warning"}),
        (["bench", "l"], {"latency"}),
        (["bench", "offline", "--schedule-p"], {"--schedule-policy"}),
    ],
)
def test_shells_complete_commands_options_and_words(words: list[str], expected: set[str]) -> None:
    line = {
        "COMP_WORDS": " ".join(["sgl", *words]),
        "COMP_CWORD": str(len(words)),
        "_SGL_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-m", "sgl"], env={**os.environ, **line}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert {answer.partition(",")[2] for answer in done.stdout.split()} == expected


def test_help_and_completion_load_neither_torch_nor_configurations() -> None:
    code = "import sys\nfrom sgl.cli import main\ntry:\n    main(['--help'])\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    loaded = done.stdout.splitlines()[-1].split()
    assert "rich_click" in loaded
    assert not {"torch", "transformers", "numpy", "pydantic", "aiohttp", "sgl.runtime.config"} & set(loaded)
