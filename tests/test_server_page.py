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
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE, wait_until

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-zygote", "--single-process", "--use-angle=swiftshader")


SERVED = {"served_model_name": "tiny"}


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
    refused = "Failed to load resource: the server responded with a status of 40"  # mistakes that tests make
    assert [error for error in errors if refused not in error] == []


@sgl.function
def story(s: Any, topic: str) -> None:
    s += topic + sgl.gen("first", max_tokens=12, return_logprob=True, return_text_in_logprobs=True)
    branches = s.fork(2)
    for branch in branches:
        branch += sgl.gen("part", max_tokens=20)
    s += branches[0]["part"] + sgl.select("end", ["yes", "no"])


@pytest.mark.usefixtures("slowly")  # the page asks every two seconds
def test_numbers_follow_what_happens(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/#now")
    page.reload()
    page.wait_for_selector("#state:text-is('serves')")
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    thread = threading.Thread(target=server.post, args=("/generate", body))
    thread.start()
    page.wait_for_selector("section:has(small:text-is('running requests')) b:text-is('1')")
    page.click("nav button:text-is('Requests')")
    page.wait_for_selector("#asked tr:has(td:text-is('running')) td:text-is('/generate')")
    thread.join()
    page.wait_for_selector("#asked tr:has(td:text-is('400')) td:text-is('200')")
    page.click("nav button:text-is('Now')")
    page.wait_for_selector("#responses td:text-is('/generate')")
    wait_until(lambda: len(server.get("/v1/history").json()["samples"]) >= 3, "there is a history")
    page.reload()  # what the page did not see, the server did
    page.wait_for_selector("#state:text-is('serves')")
    points = page.get_attribute("#cards polyline >> nth=0", "points")
    assert len(points.split()) >= 2


def test_programs_are_shown_in_spans_beside_lanes(page: Any, server: LiveServer) -> None:
    story.run("hello <b>", backend=sgl.RuntimeEndpoint(server.url), seed=1).text()
    page.goto(server.url + "/#programs")
    page.reload()
    page.click("#programs button >> nth=0")
    page.wait_for_selector("#view .sgl-lanes g", state="attached")
    identity = server.get("/v1/programs").json()[0]["id"]
    timeline = server.get(f"/v1/programs/{identity}/timeline").json()
    done = [event for event in timeline["events"] if event["type"] == "node_done"]
    assert page.locator("#view .sgl-lane").count() == 3
    assert page.locator("#view .sgl-branch").count() == 2
    assert page.text_content("#view .sgl-text .sgl-generated >> nth=0").endswith(done[0]["text"])
    assert page.text_content("#view .sgl-text").startswith("hello <b>")
    page.locator("#view .sgl-lanes g").first.dispatch_event("click")
    assert "first" in page.text_content("#view .sgl-facts")
    assert page.locator("#view .sgl-text .sgl-on").count() == 1, "a lane's bar marks its text"


def test_marks_of_direction_turn_only_their_own_text(page: Any, server: LiveServer) -> None:
    @sgl.function
    def reversing(s: Any) -> None:
        s += "\u202e abc " + sgl.gen("one", regex="uvw") + " and " + sgl.gen("two", regex="xyz")

    reversing.run(backend=sgl.RuntimeEndpoint(server.url)).text()
    page.goto(server.url + "/#programs")
    page.reload()
    page.click("#programs button:has-text('reversing') >> nth=0")
    page.wait_for_selector("#view .sgl-text .sgl-generated >> nth=1")
    one, two = (page.locator("#view .sgl-text .sgl-generated").nth(i).bounding_box() for i in range(2))
    assert one["x"] + one["width"] < two["x"], "what follows is read from left to right"


def test_a_long_text_leaves_its_lanes_in_reach(page: Any, server: LiveServer) -> None:
    @sgl.function
    def lengthy(s: Any) -> None:
        s += sgl.gen("x", regex="abc")
        s += "word\n" * 5000

    lengthy.run(backend=sgl.RuntimeEndpoint(server.url)).text()
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(server.url + "/#programs")
    page.reload()
    page.click("#programs button:has-text('lengthy') >> nth=0")
    page.wait_for_selector("#view .sgl-lanes g", state="attached")
    text, lanes = (page.locator(f"#view .sgl-{part}").bounding_box() for part in ("text", "lanes"))
    assert text["height"] <= 844
    assert lanes["y"] - text["y"] <= 844
    page.set_viewport_size(size)


def test_the_playground_streams_constrains_and_shows_probabilities(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/#playground")
    page.reload()
    page.fill("#prompt", "hello")
    page.select_option("#constraint", "regex")
    page.fill("#pattern", "(yes|no) indeed")
    page.click("#run")
    page.wait_for_selector("#facts:has-text('ended by stop')")
    assert page.text_content("#output") in ("yes indeed", "no indeed")
    page.click("#output span >> nth=0")
    assert page.locator("#bars code").count() >= 5
    page.select_option("#mode", "text")
    page.select_option("#constraint", "json_schema")
    page.fill("#pattern", '{"type": "intege"}')
    page.click("#run")
    page.wait_for_selector("#facts.bad:has-text('intege')")
    page.fill("#pattern", "{")
    page.click("#run")
    page.wait_for_selector("#facts.bad:has-text('JSON')")


@pytest.mark.usefixtures("slowly")
def test_the_playground_stops(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/#playground")
    page.reload()
    page.fill("#prompt", "hello")
    page.fill("#tokens", "400")
    page.click("#run")
    page.wait_for_selector("#output span >> nth=2")
    page.click("#stop")
    page.wait_for_selector("#facts:text-is('stopped')")
    ended = lambda: [each["status"] for each in server.get("/v1/requests").json()][:1] == [499]  # noqa: E731
    wait_until(ended, "the server has ended the request")


def test_the_model_and_its_options_are_listed(page: Any, server: LiveServer) -> None:
    page.goto(server.url + "/#about")
    page.reload()
    page.wait_for_selector("#options tr:has(td:text-is('served_model_name')) td:text-is('tiny')")


def test_nothing_is_wider_than_a_phone(page: Any, server: LiveServer) -> None:
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("now", "requests", "programs", "playground", "about"):
        page.goto(f"{server.url}/#{tab}")
        page.reload()
        page.wait_for_selector("#state:text-is('serves')")
        box = page.locator("body").bounding_box()
        assert box["width"] <= 390, tab
        for button in page.locator("nav button").all():
            place = button.bounding_box()
            assert place["x"] + place["width"] <= 391
    page.set_viewport_size(size)


def test_a_key_is_asked_for_and_kept(page: Any, engine: Engine) -> None:
    with served(engine, served_model_name="tiny", api_key=("mine=k-secret",)) as server:
        page.goto(server.url + "/#now")
        page.wait_for_selector("#state.bad:has-text('API key')")
        page.fill("#key", "k-secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#state:text-is('serves')")
        assert not page.is_visible("#key")


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
    page.wait_for_selector(".sgl-lanes g", state="attached")
    assert page.locator(".sgl-lanes g").count() == 1
    assert page.text_content("h1 small") == "1 program"
    page.locator(".sgl-text .sgl-generated").hover()
    assert page.locator(".sgl-lanes .sgl-on").count() == 1, "text marks its lane's bar"


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
