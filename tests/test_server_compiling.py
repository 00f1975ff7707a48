"""While hostile constraints are compiled, nobody else waits for them: not the routes that say how the server is, not
those that end requests, and no plain request, free or constrained."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sgl.runtime.constraints.process import GrammarProcess
from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE
from tests.test_grammar_hostile import HOSTILE, tags

SHORT = {"max_new_tokens": 4, "temperature": 0}
LARGE_TAGS = tags(10_000, is_one=False)
LARGE_EBNF = "root ::= r0\n" + "\n".join(f'r{i} ::= "x{i}" [a-z]* r{i}?' for i in range(30_000))
MUCH_TEXT = HOSTILE["minLength and pattern"]["json_schema"]
HELD = [
    {"structural_tag": json.dumps(LARGE_TAGS)},
    {"ebnf": LARGE_EBNF},
    {"regex": HOSTILE["look-ahead"]["regex"]},
    {"json_schema": json.dumps(HOSTILE["oneOf"]["json_schema"])},
]
"""What takes long to compile, and more of it than is compiled at once."""
REFUSED = [{"regex": "(a{1000}){1000}"}, {"json_schema": json.dumps(MUCH_TEXT)}]
"""What is refused as soon as it is looked at."""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    checkpoint = chat_checkpoint(tmp_path_factory.mktemp("model"))
    with Engine(str(checkpoint), constraint_timeout=3.0, **OPTIONS) as engine, served(engine) as server:
        yield server


class Gate:
    """Trials of constraints that do their work, and do not end before the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.has_begun = threading.Event()
        run = GrammarProcess.run

        def run_and_wait(process: GrammarProcess, *arguments: Any) -> Any:
            self.has_begun.set()
            try:
                return run(process, *arguments)
            finally:
                assert self.is_open.wait(PATIENCE)

        monkeypatch.setattr(GrammarProcess, "run", run_and_wait)


def body(constraint: dict[str, Any], number: int) -> dict[str, Any]:
    """A request for what nobody else asks for."""
    [(kind, source)] = constraint.items()
    if kind == "regex":
        source += f"x{number}"
    return {"text": f"hello {number}", "sampling_params": {**SHORT, kind: source}, "rid": f"hostile {number}"}


@pytest.mark.slow
def test_nobody_waits_while_hostile_constraints_are_compiled(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls and plain requests are answered before what is being compiled may end at all."""
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(len(HELD) + len(REFUSED)) as clients:
        held = [clients.submit(server.post, "/generate", body(given, i)) for i, given in enumerate(HELD)]
        try:
            assert gate.has_begun.wait(PATIENCE)
            refused = [
                clients.submit(server.post, "/generate", body(given, 50 + i)) for i, given in enumerate(REFUSED)
            ]
            for path in ("/metrics", "/v1/status", "/server_info", "/health", "/v1/models"):
                assert server.get(path).status_code == 200
            assert server.post("/abort_request", {"rid": "nobody's"}).status_code == 200
            for number in range(5):
                name = f"name {number}"
                schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
                for given in ({}, {"json_schema": json.dumps(schema)}, {"regex": f"[a-c]{{2}}{number}"}):
                    plain = {"text": "a", "sampling_params": {**SHORT, "max_new_tokens": 32, **given}}
                    assert server.post("/generate", plain).status_code == 200
            for answer in refused:
                assert answer.result(PATIENCE).status_code == 400
            assert not any(answer.done() for answer in held)
        finally:
            gate.is_open.set()
        assert {answer.result(PATIENCE).status_code for answer in held} <= {200, 400}
