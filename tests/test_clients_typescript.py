"""The TypeScript client: its checks, its generated types, and the twelve programs with the texts that Python gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from examples import (
    async_agent,
    batch,
    chat,
    choose,
    extract,
    few_shot,
    grammar,
    parallel_decoding,
    quickstart,
    react,
    streaming,
    tree_of_thought,
)
from sgl.runtime.engine import Engine
from tests.house import REPOSITORY
from tests.live_server import LiveServer, served
from tests.page_blocks import blocks
from tests.patience import PATIENCE
from tests.test_examples import OWN

FOLDER = REPOSITORY / "clients" / "typescript"
ELSEWHERE = {"image", *OWN}
"""Examples that need a model that sees, or an engine in their own process."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]


def npm(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["npm", *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, set up as a newcomer would, in a copy of the repository's parts that it needs."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(FOLDER, root / "clients" / "typescript", ignore=shutil.ignore_patterns("node_modules", "dist"))
    (root / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / "ir.schema.json", root / "docs")
    folder = root / "clients" / "typescript"
    npm(folder, "ci", "--ignore-scripts")
    npm(folder, "run", "build")
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with Engine() as engine, served(engine) as server:
        yield server


def test_its_own_tests_pass_and_planted_mistakes_are_found(built: Path) -> None:
    assert re.search(r"# fail 0$", npm(built, "test"), re.MULTILINE)


def test_its_types_are_those_of_the_schema_and_the_server(built: Path, server: LiveServer, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(server.get("/openapi.json").text)
    subprocess.run(
        ["node", "scripts/generate.mjs", str(document), str(tmp_path)], cwd=built, check=True, timeout=PATIENCE
    )
    for name in ("ir.ts", "api.ts"):
        how = "sgl serve, then npm run generate -- with a file of /openapi.json"
        assert (tmp_path / name).read_text() == (FOLDER / "src" / name).read_text(), how


def test_a_browser_can_load_it(built: Path) -> None:
    command = ["node", "node_modules/esbuild/bin/esbuild", "src/index.ts", "--bundle", "--format=esm"]
    command += ["--platform=browser", "--outfile=dist/browser.js"]
    subprocess.run(command, cwd=built, check=True, timeout=PATIENCE)
    assert not re.search(r"""(from|require\()\s*["']node:""", (built / "dist" / "browser.js").read_text())


@pytest.mark.parametrize("page", ["docs/guide/typescript.md", "clients/typescript/README.md"])
def test_the_blocks_of_its_pages_are_checked_and_run(built: Path, server: LiveServer, page: str) -> None:
    found = [block.text for block in blocks((REPOSITORY / page).read_text()) if block.kind == "typescript"]
    assert found
    for i, text in enumerate(found):
        source = built / "examples" / f"block_{i}.ts"
        source.write_text(text.replace("http://127.0.0.1:30000", server.url))
        npm(built, "run", "check")
        command = ["node", "node_modules/esbuild/bin/esbuild", str(source), "--bundle", "--format=esm"]
        command += ["--platform=node", f"--outfile={built}/block.mjs"]
        subprocess.run(command, cwd=built, check=True, timeout=PATIENCE)
        ran = subprocess.run(["node", "block.mjs"], cwd=built, capture_output=True, text=True, timeout=PATIENCE)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()
        source.unlink()


def test_nothing_names_where_packages_come_from() -> None:
    assert "resolved" not in (FOLDER / "package-lock.json").read_text()


def of_python(backend: sgl.RuntimeEndpoint) -> dict[str, list[str]]:
    """What examples/ writes under the seeds of test/programs.mjs."""
    text = next(iter(quickstart.SENTENCES))
    order = quickstart.extract.run(text, backend=backend, seed=1)
    mood = quickstart.judge.run("The soup was cold and the waiter rude.", backend=backend, seed=2)
    told = quickstart.stories.run(backend=backend, seed=3)
    asked = quickstart.ask.run("How much is 17 * 24?", backend=backend, seed=4)
    found: dict[str, list[str]] = {"quickstart": [order.text(), mood.text(), *told["next"], asked.text()]}
    found["async_agent"] = []
    for i, city in enumerate(async_agent.WEATHER):
        advice: Any = async_agent.advise.run(f"What shall I pack for {city}?", backend=backend, seed=10 + i)
        [call], answer = advice.ret_value
        found["async_agent"] += [advice.text(), answer, call.content()]
    questions = "Where do penguins live?", "And what do they eat?"
    found["chat"] = [chat.interview.run(*questions, backend=backend, seed=5, temperature=0.5).text()]
    letter = "The soup was cold and so was the waiter."
    found["choose"] = choose.classify.run(letter, backend=backend, seed=6)["label"]
    message = "Hi, this is Ada. We are four, one of us eats no meat, and we would like to come for dinner."
    booked = extract.extract.run(message, backend=backend, seed=7, temperature=0)
    booking = booked.value("booking")
    fields = [booking.name, booking.people, booking.meal, booking.vegetarian]
    found["extract"] = [booked.text(), json.dumps(fields, separators=(",", ":"))]
    found["few_shot"] = [
        few_shot.answer.run(question, backend=backend, seed=8, temperature=0.9).text()
        for question in ("How many days has a week?", "Who wrote Hamlet?")
    ]
    found["grammar"] = [grammar.task.run("apples", backend=backend, seed=1, temperature=0.8).text()]
    found["parallel_decoding"] = [
        parallel_decoding.article.run("otter", backend=backend, seed=9, temperature=0.7).text()
    ]
    found["batch"] = [
        batch.describe.run(city, backend=backend, seed=70 + i, temperature=0.8)["sentence"]
        for i, city in enumerate(("Lima", "Oslo", "Kyoto"))
    ]
    found["react"] = [
        react.react.run("How much is 6 times 7, and 8 more?", backend=backend, seed=11, temperature=0.3).text()
    ]
    found["streaming"] = [streaming.story.run("fox", backend=backend, seed=12).text()]
    tree = tree_of_thought.solve.run(
        "How many squares has a chess board?", backend=backend, seed=13, temperature=0.8
    )
    found["tree_of_thought"] = [leaf.text() for leaf in tree.ret_value]
    return found


def test_the_twelve_programs_write_what_they_write_in_python(built: Path, server: LiveServer) -> None:
    command = ["node", "test/programs.mjs", server.url]
    done = subprocess.run(command, cwd=built, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs, ours = json.loads(done.stdout), of_python(sgl.RuntimeEndpoint(server.url))
    assert theirs.keys() == {path.stem for path in (REPOSITORY / "examples").glob("*.py")} - ELSEWHERE
    for name, texts in ours.items():
        assert theirs[name] == texts, name
