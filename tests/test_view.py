"""What people see of a program: its text in spans, as HTML and in a terminal, while it runs and after it failed."""

from __future__ import annotations

import html
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import sgl
from sgl.lang.record import shown
from sgl.lang.view import spans
from sgl.lang.view.html import page_part
from sgl.lang.view.spans import Span, View, view_of
from tests.every_draft import every_draft
from tests.lang_mocks import ENDLESS, MockBackend
from tests.patience import wait_until
from tests.tiny_models import tiny_checkpoint

SCHEMA = {"type": "object", "properties": {"number": {"type": "integer", "maximum": 99}}, "required": ["number"]}
HOSTILE = '<script>alert("1")</script>&amp;<!-- \' {{data}}'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)
    with sgl.Engine(str(folder), device="cpu", max_total_tokens=8192) as engine:
        yield engine


@sgl.function
def order(s: Any, mail: str) -> None:
    s += "Mail: " + mail + "\nMood: " + sgl.select("mood", ["good", "bad"])
    s += "\nOrder: " + sgl.gen("order", json_schema=SCHEMA)
    for i, branch in enumerate(s.fork(2)):
        branch += f"\n{i}: " + sgl.gen("idea", max_tokens=3, return_logprob=True, return_text_in_logprobs=True)


def texts_of(markup: str) -> str:
    """What a reader sees of markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<style>.*?</style>", "", markup, flags=re.DOTALL)))


def span_named(view: View, name: str) -> Span:
    return next(span for span in view.spans() if span.name == name)


def test_spans_tell_how_text_came_about(engine: sgl.Engine) -> None:
    state = order.run("3 lamps", backend=engine, seed=1, max_new_tokens=40)
    assert state.error() is None
    view = view_of(state.timeline())
    assert view.root.spans[0].text == "Mail: 3 lamps\nMood: "
    mood, written = span_named(view, "mood"), span_named(view, "order")
    assert mood.text == state["mood"]
    assert {choice for choice, _ in mood.choices} == {"good", "bad"}
    assert [probability for _, probability in mood.choices] == sorted(
        state.get_meta_info("mood")["probabilities"], reverse=True
    )
    assert written.text == state["order"]
    assert '"number":' in "".join(piece.text for piece in written.pieces if piece.is_forced).replace("{", "")
    assert not all(piece.is_forced for piece in written.pieces)
    [fork] = [span for span in view.spans() if span.op == "fork"]
    assert [branch.path for branch in fork.branches] == [f"{fork.path}.0/", f"{fork.path}.1/"]
    for branch in fork.branches:
        logprobs = [piece.logprob for piece in branch.spans[1].pieces if piece.logprob is not None]
        assert logprobs
        assert max(logprobs) <= 0
    assert {"tokens", "forced", "in all"} <= dict(written.facts).keys()


def test_spans_tell_what_was_drafted(engine: sgl.Engine) -> None:
    with every_draft(engine):
        for _ in range(2):  # the second looks up the first
            state = order.run("4 lamps", backend=engine, seed=2, max_new_tokens=40)
            assert state.error() is None
    facts = dict(span_named(view_of(state.timeline()), "order").facts)
    usage = state.get_meta_info("order")["usage"]
    assert int(facts["drafted"]) == usage["drafted_tokens"]
    assert int(facts["of them accepted"]) == usage["accepted_tokens"] > 0


def test_a_notebook_shows_text_and_nothing_runs(engine: sgl.Engine) -> None:
    state = order.run(HOSTILE, backend=engine, seed=1, max_new_tokens=40)
    state.sync()
    markup = state._repr_html_()
    assert "<script" not in markup
    assert HOSTILE in texts_of(markup)
    assert state["order"] in texts_of(markup)
    for name in ("sgl-generated", "sgl-forced", "sgl-chosen", "sgl-bar ", "sgl-branches", "sgl-token"):
        assert f'class="{name}' in markup or f" {name}" in markup, name
    assert re.search(r'title="logprob -?\d+\.\d+, \d+\.\d %"', markup)
    assert not re.search(r"\s(style|on\w+)=|(src|href)=", markup)


def test_every_text_of_a_client_is_escaped() -> None:
    """Names, choices, errors, tokens and arguments too."""
    logprobs = [[-0.5, 1, HOSTILE]]
    nodes: list[dict[str, Any]] = [
        {"st": 0, "op": "arg", "name": "x"},
        {"st": 0, "op": "gen", "name": HOSTILE},
        {"st": 0, "op": "select", "name": "y", "choices": [HOSTILE, "b"]},
        {"st": 0, "op": "role_begin", "role": HOSTILE},
        {"st": 0, "op": "gen", "name": "z"},
    ]
    meta = {"output_token_logprobs": logprobs, "finish_reason": {"type": HOSTILE}}
    events = [
        {"type": "node_done", "stream": 0, "index": 1, "text": HOSTILE, "value": HOSTILE, "meta": meta},
        {"type": "node_done", "stream": 0, "index": 2, "text": HOSTILE, "meta": {"probabilities": [0.5, 0.5]}},
        {"type": "node_done", "stream": 0, "index": 3, "text": HOSTILE, "meta": {}},
        {"type": "node_failed", "stream": 0, "index": 4, "error": {"message": HOSTILE}},
        {"type": "node_failed", "stream": None, "index": None, "error": {"message": HOSTILE}},
    ]
    markup = page_part({"name": HOSTILE, "args": {"x": HOSTILE}, "nodes": nodes, "events": events})
    assert "<script" not in markup
    assert "<!--" not in markup
    assert texts_of(markup).count(HOSTILE) == 8
    assert len(re.findall(r'title="[^"]*"', markup)) == len(re.findall("title=", markup))


def test_programs_that_run_and_fail_are_shown_as_far_as_they_are() -> None:
    backend = MockBackend(together=ENDLESS, fail_on=["second"])

    @sgl.function
    def program(s: Any) -> None:
        s += "a " + sgl.gen("first") + " b " + sgl.gen("second") + " c " + sgl.gen("third")

    state = program.run(backend=backend)
    wait_until(lambda: backend.running == 1)
    assert view_of(state.timeline()).is_running
    assert [span.state for span in view_of(state.timeline()).spans() if span.name] == ["pending"] * 3
    assert "sgl-cursor" in state._repr_html_()
    backend.release()
    assert state.error() is not None
    markup = state._repr_html_()
    assert "the mock was told to fail" in texts_of(markup)
    assert [span.state for span in view_of(state.timeline()).spans() if span.name] == ["done", "failed", "failed"]


def test_a_branch_is_shown_with_what_came_before() -> None:
    branches: list[Any] = []

    @sgl.function
    def program(s: Any) -> None:
        s += "start "
        for branch in s.fork(2):
            branch += "own " + sgl.gen("x")
            branches.append(branch)

    program.run(backend=MockBackend()).sync()
    assert texts_of(branches[1]._repr_html_()).endswith("start own x" + branches[1]["x"])


def test_a_view_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_SPANS", 50)
    monkeypatch.setattr(spans, "MAX_CHARACTERS", 1000)
    nodes: list[dict[str, Any]] = [{"st": 0, "op": "fork", "children": list(range(1, 4001))}]
    nodes += [{"st": i, "op": "text", "text": "x" * 100} for i in range(4001)]
    markup = page_part({"name": "p", "nodes": nodes, "events": []})
    assert len(markup) < 20_000
    assert f"{4000 - spans.MAX_BRANCHES} more branches" in markup
    assert re.search(r"\d+ more characters", markup)
    nested: list[dict[str, Any]] = [{"st": i, "op": "fork", "children": [i + 1]} for i in range(4000)]
    assert "1 more branches" in page_part({"name": "p", "nodes": nested, "events": []})


def test_odd_answers_are_shown_too() -> None:
    """A backend of somebody's own says what it likes."""
    metas: list[dict[str, Any]] = [
        {"output_token_logprobs": [[None, 1, None]]},
        {"output_token_logprobs": [[float("nan"), 1, "x"]], "e2e_latency": "soon"},
        {"forced_bytes": [[3, 1], [0, 99]], "usage": None},
        {"probabilities": []},
        {"samples": []},
    ]
    nodes = [{"st": 0, "op": "gen", "name": "x"} for _ in metas]
    events = [
        {"type": "node_done", "stream": 0, "index": i, "text": "xé", "value": "xé", "meta": meta}
        for i, meta in enumerate(metas)
    ]
    assert texts_of(page_part({"name": "p", "nodes": nodes, "events": events})).count("xé") == len(metas)


def test_terminals_get_colours() -> None:
    state = order.run("3 lamps", backend=MockBackend(lambda prompt, params: '{"number":3}'))
    state.sync()
    console = Console(width=100, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(state)
    assert f"Mood: \x1b[35m{state['mood']}" in console.export_text(styles=True)
    explained = order.explain(HOSTILE)
    console.print(explained)
    said = console.export_text()
    assert "select" in said
    assert "1 request" in said
    preview = order.preview("x")
    assert preview == explained.text.replace(HOSTILE, "x")
    console.print(preview)
    assert "{order}" in console.export_text()
    console.print(order.trace())
    assert re.search(r"arg +mail", console.export_text())


def test_notebooks_show_what_a_program_would_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.lang.view.nodes.MAX_ROWS", 3)

    @sgl.function
    def program(s: sgl.ProgramState, name: str) -> None:
        s += "<script>alert(1)</script>" + "x" * 3000
        s += name + sgl.gen("answer", max_tokens=4)
        s += sgl.select("word", ["<b>", "no"])

    explained = program.explain("<i>")
    for shown_here in (explained, program.trace()):
        page = shown_here._repr_html_()
        assert "<script" not in page
        assert "<b>&" not in page
        assert "<i>" not in page
        assert page.count("<tr>") == 4, "a head and three nodes"
        assert "… 1 more nodes" in page
        assert "max_tokens" in html.unescape(page)
        assert "&lt;script&gt;" in page
        assert " more characters</code>" in page
    assert "1 request" in explained._repr_html_()
    preview = program.preview("<i>")._repr_html_()
    assert "sgl-generated" in preview
    assert "&lt;i&gt;" in preview
    assert "<table" not in preview


def test_a_notebook_follows_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shell has a kernel, displays can be updated; in a terminal they would repeat the text."""
    updates: list[str] = []
    displays: list[bool] = []

    class Handle:
        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            updates.append(bundle["text/html"])

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool = False) -> Handle:
        assert raw
        assert bundle["text/plain"].startswith("ProgramState(")
        displays.append(display_id)
        return Handle()

    shell = types.SimpleNamespace()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setattr(shown, "REFRESH_SECONDS", 0.01)
    backend = MockBackend(together=ENDLESS)

    @sgl.function
    def program(s: Any) -> None:
        s += "a " + sgl.gen("x")

    state = program.run(backend=backend)
    state._ipython_display_()
    assert displays == [False]
    shell.kernel = object()
    state._ipython_display_()
    wait_until(lambda: len(updates) >= 1)
    assert "sgl-cursor" in updates[0]
    backend.release()
    state.sync()
    wait_until(lambda: state["x"] in texts_of(updates[-1]))
    state._ipython_display_()
    assert displays == [False, True, False]
