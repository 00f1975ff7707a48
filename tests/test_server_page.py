"""The page in a real headless Chromium, which $SGL_TEST_CHROMIUM names; skipped without it or without playwright."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import sgl
from sgl.cli import main
from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-zygote", "--single-process", "--use-angle=swiftshader")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, served_model_name="tiny") as server:
        yield server


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page on which no script may fail and whose console stays empty: there the browser tells what a policy
    forbade. Waiting for selectors asks for no `eval`, which the page's policy forbids to tests as well."""
    path = os.environ.get("SGL_TEST_CHROMIUM")
    if path is None:
        pytest.skip("SGL_TEST_CHROMIUM names no browser")
    playwright = pytest.importorskip("playwright.sync_api")
    errors: list[str] = []
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        page = browser.new_page(viewport={"width": 1000, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(f"{message.type}: {message.text}"))
        page.set_default_timeout(1000 * PATIENCE)
        yield page
        browser.close()
    assert errors == []


@sgl.function
def story(s: Any, topic: str) -> None:
    s += topic + sgl.gen("first", max_tokens=12, return_logprob=True, return_text_in_logprobs=True)
    branches = s.fork(2)
    for branch in branches:
        branch += sgl.gen("part", max_tokens=20)
    s += branches[0]["part"] + sgl.select("end", ["yes", "no"])


@pytest.mark.usefixtures("slowly")  # the page asks once a second
def test_numbers_follow_what_happens(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/")
    page.wait_for_selector("#state:text-is('serves')")
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    thread = threading.Thread(target=server.post, args=("/generate", body))
    thread.start()
    page.wait_for_selector("section:has(small:text-is('running requests')) b:text-is('1')")
    thread.join()
    page.wait_for_selector("#responses td:text-is('/generate')")


def test_timelines_show_what_programs_did(page: Any, server: LiveServer, tmp_path: Any) -> None:
    story.run("hello ", backend=sgl.RuntimeEndpoint(server.url), seed=1).text()
    page.goto(server.url + "/")
    page.wait_for_selector("#programs option:nth-child(2)", state="attached")
    page.select_option("#programs", index=1)
    page.wait_for_selector("#chart .compute", state="attached")
    identity = page.input_value("#programs")
    timeline = server.get(f"/v1/programs/{identity}/timeline").json()
    done = [event for event in timeline["events"] if event["type"] == "node_done"]
    assert page.locator("#chart .compute").count() == len(done) >= 4
    assert page.locator("#chart .branch").count() == 2
    assert page.locator("#chart .lane").count() == 3
    page.locator("#chart g").first.dispatch_event("click")
    assert page.text_content("#node").endswith(done[0]["text"])
    page.screenshot(path=tmp_path / "timeline.png")


def test_traces_are_pages_of_their_own(page: Any, server: LiveServer, tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import sgl\n\n\n@sgl.function\ndef program(s):\n    s += 'a ' + sgl.gen('x', max_tokens=4)\n\n\n"
        "program.run().text()\n"
    )
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "--url", server.url, "--output", str(tmp_path / "trace.html"), str(file)])
    assert stopped.value.code == 0
    page.goto((tmp_path / "trace.html").as_uri())
    page.wait_for_selector("#chart .compute", state="attached")
    assert page.locator("#chart .compute").count() == 1
    assert page.text_content("#model") == "1 program"


def test_the_page_of_endpoints_describes_and_sends_them(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/docs#post_generate")
    page.wait_for_selector("#post_generate[open]")
    described = server.get("/openapi.json").json()
    assert page.locator("main details").count() == sum(map(len, described["paths"].values())) + len(
        described["components"]["schemas"]
    )
    page.locator("#post_generate button").click()
    page.wait_for_selector("#post_generate pre:has-text('meta_info')")
    page.locator("#get_v1_models_model summary").click()
    page.locator("#get_v1_models_model input").fill("tiny")
    page.locator("#get_v1_models_model button").click()
    page.wait_for_selector("#get_v1_models_model pre:has-text('max_model_len')")
