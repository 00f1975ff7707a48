"""Every block of every page runs: Python on the embedded model, commands as far as a test can take them."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.checkpoint import PACKAGES
from tests.live_server import LiveServer, served
from tests.page_blocks import ADAPTER, MODEL, REPOSITORY, SERVER, blocks, check, commands, documents, options_file
from tests.test_requirements import requirements
from tests.tiny_adapters import tiny_adapter

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("**/*.md"))]
PYTHON_ELSEWHERE = {"language.md": "test_docs_language.py", "schema_to_mask.md": "test_docs.py"}
"""Pages whose Python has a test of its own, with an engine that suits it."""
NOT_RUN = {"text", "typescript"}
"""Output, and what needs packages of Node's registry."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapter"), Path(_EMBEDDED))


@pytest.fixture(scope="module")
def engine(adapter: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(device="cpu", max_total_tokens=16384, lora_paths={"sql": adapter}) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: sgl.Engine) -> Iterator[LiveServer]:
    """With the name that docs/server.md gives its model."""
    with served(engine, served_model_name="tiny") as server:
        yield server


class Borrowed:
    """What `sgl.Engine(…)` gives to a page: the module's engine, if the options are right, until the page ends it."""

    engine: sgl.Engine
    is_ended = False

    def __init__(self, model_path: str = "embedded", **options: Any) -> None:
        assert model_path in ("embedded", MODEL, *PACKAGES)
        EngineConfig.from_options(options)

    def __getattr__(self, name: str) -> Any:
        assert not self.is_ended, "the engine is shut down"
        return getattr(self.engine, name)

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_ended = True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_block_runs(
    page: Path, server: LiveServer, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Borrowed, "engine", server.engine, raising=False)
    monkeypatch.setattr(sgl, "Engine", Borrowed)
    for name in [name for name in os.environ if name.startswith("SGL_")]:
        monkeypatch.delenv(name)
    sgl.set_default_backend(server.engine)
    names: dict[str, Any] = {"__name__": "docs", "engine": server.engine}
    missing: list[str] = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind == "python":
            if page.name not in PYTHON_ELSEWHERE:
                with _missing_clients(missing):
                    _run_python(block.text.replace(ADAPTER, str(adapter)), block.line, page, server.url, names)
        elif block.kind in ("sh", "console"):
            for words, output in commands(block):
                check(words, output, server.url)
        elif block.kind == "yaml":
            assert options_file(block.text)
            (tmp_path / "options.yaml").write_text(block.text)  # the commands that follow name it
        elif block.kind == "json":
            assert documents(block.text)
        else:
            assert block.kind in NOT_RUN, f"{page.name}:{block.line}: nobody runs a block of {block.kind!r}"
    if missing:
        pytest.skip(f"blocks that need {', '.join(missing)}, of sgl[dev], did not run; the others did")


@contextlib.contextmanager
def _missing_clients(missing: list[str]) -> Iterator[None]:
    """Note a package of the extra dev that is not installed: an environment may be older than pyproject.toml."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in requirements("dev"):
            raise
        missing.append(str(error.name))


def _run_python(text: str, line: int, page: Path, url: str, names: dict[str, Any]) -> None:
    source = "\n" * line + SERVER.sub(url, text).replace(
        f'from_pretrained("{MODEL}")', f"from_pretrained({_EMBEDDED!r})"
    )
    assert not doctest.DocTestParser().get_examples(source)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, str(page), "exec", dont_inherit=True), names)


_EMBEDDED = str(REPOSITORY / "sgl" / "models" / "embedded")


def test_a_page_that_says_what_is_not_so_fails(server: LiveServer) -> None:
    for command in (
        "sgl serve --prot 1",
        "sgl run examples/no_such_file.py",
        "sgl bench serving --request-rate fast",
        "SGL_PROT=1 sgl serve",
        "pip install 'sgl[gpu]'",
        "make tea",
        "python -m benchmarks.gpu.peers --no-such-option",
        "python examples/no_such_file.py",
        "docker build -f docker/Dockerfile.rocm .",
        "curl -s localhost:30000/generate -d '{\"txt\": 1}'",
        "npm install",
    ):
        [(words, output)] = commands(blocks(f"```sh\n{command}\n```")[0])
        with pytest.raises((AssertionError, KeyError, sgl.errors.SglError)):
            check(words, output, server.url)
