"""`pip install sgl` alone is enough for programs on a server; what it is not enough for names the extra in a line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

import sgl
from sgl.errors import ConfigError, MissingExtra, needs_extra
from sgl.lang.backends.launch import Runtime
from tests.lean_site import REPOSITORY, lean_site
from tests.patience import PATIENCE

Lean = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Lean:
    """lean("-c", code): this interpreter with nothing but the core's dependencies and the package."""
    folder = tmp_path_factory.mktemp("lean")
    site = lean_site(folder / "site")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SGL_")}
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=folder,
            env=kept | {"PYTHONPATH": f"{REPOSITORY}:{site}"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    return run


USES = """
import importlib
import sys

import sgl
from sgl.errors import MissingExtra, SglError

for name in sgl.__all__:
    if name != "Engine":
        getattr(sgl, name)
for module in ("sgl.cli.programs", "sgl.cli.chat", "sgl.cli.bench", "sgl.bench.client", "sgl.bench.plot", "sgl.utils",
               "sgl.lang.backends.openai", "sgl.lang.typed.schema", "sgl.test.test_utils"):
    importlib.import_module(module)


@sgl.function
def program(s):
    s += "Hello" + sgl.gen("name", schema=int) + sgl.select("word", choices=["a", "b"])


for use in (lambda: sgl.Engine, lambda: sgl.grammar, sgl.Runtime, program.run):
    try:
        use()
    except MissingExtra as error:
        assert error.extra == "engine" and isinstance(error, (SglError, ImportError))
        print(error)
assert not {"torch", "numpy", "transformers", "regex", "yaml"} & set(sys.modules)
"""


def test_the_core_is_enough_for_programs_and_says_what_an_engine_needs(lean: Lean) -> None:
    done = lean("-c", USES)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4
    assert all("which is not installed: pip install 'sgl[engine]'" in line for line in said)
    assert "sgl.Engine needs " in said[0]
    assert "RuntimeEndpoint" in said[3] or "--url" in said[3]  # the other way out


COMMANDS = {
    "serve": "sgl: sgl serve needs ",
    "bench offline": "sgl: sgl bench offline needs ",
    "run --model somewhere own.py": "sgl: --model needs ",
    "trace --model somewhere own.py": "sgl: sgl.Runtime needs ",
}
RUN_COMMANDS = """
import contextlib
import io
import json
import sys

from sgl.cli import main

open("own.py", "w").write("import numpy")
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(command.split())
        except (SystemExit, ModuleNotFoundError) as error:
            ended = getattr(error, "code", repr(error))
    print(json.dumps([ended, out.getvalue(), err.getvalue()]))
"""


def test_a_command_that_needs_the_engine_says_so_in_one_line(lean: Lean) -> None:
    done = lean("-c", RUN_COMMANDS, *COMMANDS, "serve --help", "run own.py")
    assert done.returncode == 0, done.stderr
    *needy, helped, own = map(json.loads, done.stdout.splitlines())
    for start, (code, _, said) in zip(COMMANDS.values(), needy, strict=True):
        assert code == 2
        assert said.startswith(start)
        assert said.endswith("which is not installed: pip install 'sgl[engine]'\n")
        assert said.count("\n") == 1
    assert helped[0] == 0
    assert "--max-running-requests" in helped[1]
    assert "No module named 'numpy'" in own[0], "what a user's own file lacks is no extra of sgl's"


def test_missing_extra_is_typed_and_travels() -> None:
    with pytest.raises(MissingExtra) as caught, needs_extra("plot", "a picture", option="plot"):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == "a picture needs no_such_module, which is not installed: pip install 'sgl[plot]'"
    assert (error.extra, error.option) == ("plot", "plot")
    assert isinstance(error, ConfigError)
    assert isinstance(error, ImportError)
    with pytest.raises(ModuleNotFoundError), needs_extra("plot", "a picture"):
        import sgl.no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_a_runtime_of_another_command_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Runtime):
        command = (sys.executable, "-c", "raise SystemExit(3)")

    monkeypatch.setattr("sgl.lang.backends.launch.is_installed", lambda package: False)
    with pytest.raises(MissingExtra):
        sgl.Runtime()
    with pytest.raises(sgl.errors.BackendError, match="ended with code 3"):
        Other()
