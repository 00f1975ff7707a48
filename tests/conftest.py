"""What every test may ask for: data folders, devices, reproducible randomness, one thread per worker.

Data that is not part of the repository (checkpoints, tokenizers, suites) is looked for in `$SGL_TEST_DATA`; a test that
asks for it skips, with the reason, where it is absent. Tests marked `gpu` skip where there is no CUDA device.
`pytest --hypothesis-profile=soak` runs the property tests for longer.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # torch and transformers are imported below
    from sgl.runtime.engine import Engine
    from tests.live_server import LiveServer

# Read when torch and transformers are imported, which no plugin does: one thread per worker (the workers are the
# parallelism, and sums come out alike on every machine), and no test reaches out to a model hub.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",  # it would take most of a GPU that other tests need
}.items():
    os.environ.setdefault(name, value)
if not Path("/dev/nvidiactl").exists():  # without a GPU, Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so in a shell's background, and inherited by what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared machines are slow at times: no deadline per example, and slow generation is no failure.
settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("fast"), derandomize=True, print_blob=True, database=None)
settings.register_profile("soak", settings.get_profile("fast"), max_examples=2000)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "fast")


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none; torch is imported only when something asks. Kernels are
    compiled first: each takes minutes on one core, and the last one would run alone."""
    items.sort(key=lambda item: item.path.name != "test_compiled_kernels.py")
    _leave_one_of_each(items)
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _leave_one_of_each(items: list[pytest.Item]) -> None:
    """All but the first case of a costly test that runs here are slow."""
    seen = set()
    for item in items:
        if item.get_closest_marker("costly") is None or any(map(item.get_closest_marker, ("slow", "gpu"))):
            continue
        if (test := item.nodeid.partition("[")[0]) in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collections of garbage took a quarter of the time: what is imported for the tests stays, so none looks at it
    (some tests ask for many), and those that come by themselves come less often."""
    gc.set_threshold(20_000, 10, 10)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton's extension warns of what is left when the interpreter ends


@pytest.fixture(autouse=True)
def same_default_backend() -> Iterator[None]:
    """No test leaves a default backend to the next, which may come from another module and outlive its server."""
    from sgl.lang.config import global_config

    before = global_config.default_backend
    yield
    global_config.default_backend = before


@pytest.fixture(scope="module")
def own_garbage() -> None:
    """The module's tests ask for many collections of garbage: those pass by what tests before them have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that the test is to hold on: "cpu", and "cuda" where there is one."""
    return str(request.param)


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU runs the plain torch references, as it does where its kernels cannot be compiled."""
    from sgl.kernels import cpu

    monkeypatch.setattr(cpu, "why_not", lambda: "the test says so")


@pytest.fixture
def slowly(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test's engine takes a hundredth of a second more a step: a long request runs for seconds, on any machine."""
    from tests.live_server import slow_steps

    with slow_steps(request.getfixturevalue("engine")):
        yield


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a body records is sent before it must be: on a slow machine it may look busy with something else.
    For tests that count requests."""
    from sgl.lang.record import run

    monkeypatch.setattr(run.idle_watch, "add", lambda _: None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokens are bytes, unless the module has its own. Not to be written to."""
    from tests.tiny_models import tiny_checkpoint

    path = tmp_path_factory.mktemp("tiny")
    return tiny_checkpoint(path, vocab_size=259, max_position_embeddings=1024, with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of a tiny chat model, unless the module has its own."""
    from sgl.runtime.engine import Engine
    from tests.live_server import OPTIONS, chat_checkpoint

    with Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, engine: Engine) -> Iterator[LiveServer]:
    """Serves the module's engine, with the options that the module names SERVED."""
    from tests.live_server import served

    with served(engine, **getattr(request.module, "SERVED", {})) as server:
        yield server


@pytest.fixture
def another(engine: Engine) -> Iterator[Callable[..., LiveServer]]:
    """Servers with other options over the same engine."""
    from tests.live_server import LiveServer

    started: list[LiveServer] = []

    def start(**options: Any) -> LiveServer:
        started.append(LiveServer(engine, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data that is not part of the repository."""
    named = os.environ.get("SGL_TEST_DATA")
    if not named:
        pytest.skip("no test data: SGL_TEST_DATA names no folder")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"no test data: SGL_TEST_DATA names {folder}, which is no folder")
    return folder


@pytest.fixture(scope="session")
def checkpoint(shared_data: Path) -> Callable[[str], Path]:
    """checkpoint("stories260K") is the Hugging Face folder of that trained model."""

    def find(name: str) -> Path:
        folder = shared_data / "models" / name
        if not folder.is_dir():
            pytest.skip(f"no checkpoint at {folder}")
        return folder

    return find


@pytest.fixture(scope="session")
def unpacked(shared_data: Path) -> Callable[[str], Path]:
    """unpacked("tokenizers") is the folder that tokenizers.tar.xz unpacks to. It is kept between sessions."""

    def unpack(name: str) -> Path:
        archive = shared_data / f"{name}.tar.xz"
        if not archive.is_file():
            pytest.skip(f"no test data at {archive}")
        return _unpack_once(archive, name)

    return unpack


def _unpack_once(archive: Path, name: str) -> Path:
    """Workers may race: each unpacks into a folder of its own, and the first to rename it into place wins."""
    cache = Path(tempfile.gettempdir()) / f"sgl-test-data-{os.getuid()}"
    done = cache / f"{name}-{archive.stat().st_mtime_ns}"
    if not done.is_dir():
        cache.mkdir(mode=0o700, exist_ok=True)
        private = Path(tempfile.mkdtemp(dir=cache))
        with tarfile.open(archive) as tar:
            # Python 3.11 before 3.11.4 has no filters.
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            tar.extractall(private)
        try:
            private.rename(done)
        except OSError:
            if not done.is_dir():
                raise
            shutil.rmtree(private)
    return done / name
