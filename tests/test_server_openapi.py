"""/openapi.json is valid, tools read it, and every answer is as it says; HEAD, probes, and the page of it."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import requests

from sgl.runtime.engine import Engine
from sgl.runtime.server.service import VERSION
from tests.house import REPOSITORY
from tests.live_server import LiveServer
from tests.patience import PATIENCE

Operation = dict[str, Any]
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 0}
SHORT = {"max_new_tokens": 3, "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": ["a", "b"], "sampling_params": SHORT}),
    ("/generate", {"text": "abc", "sampling_params": SHORT, **LOGPROBS}),
    (
        "/generate",
        {"text": "abc", "sampling_params": {**SHORT, "stop_regex": "."}, "return_text_in_logprobs": True},
    ),
    ("/tokenize", {"text": ["a", "b"]}),
    ("/detokenize", {"tokens": [[5], [6, 7]]}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 2, "n": 2}),
    ("/v1/completions", {"prompt": "a", "logprobs": 0, "max_tokens": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}),
]
"""What the examples do not show: lists, logprobs, tool calls."""


SERVED = {"served_model_name": "tiny", "reconnect_grace": 600.0}  # the program outlives a slow machine


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    described: dict[str, Any] = server.get("/openapi.json").json()
    return described


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, Operation]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def check(document: dict[str, Any], operation: Operation, answer: requests.Response) -> None:
    """Assert that an answer is as it is described."""
    content = operation["responses"][str(answer.status_code)]["content"]
    kind = answer.headers["Content-Type"].partition(";")[0]
    assert kind in content, operation["operationId"]
    if kind == "application/json":
        schema = {**content[kind]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_the_description_is_valid(document: dict[str, Any]) -> None:
    pytest.importorskip("openapi_spec_validator").validate(document)


def test_generators_of_clients_get_names_and_types(document: dict[str, Any]) -> None:
    """Function names, tags to group them, no answer of any type whatever, and no optional field that counts as
    required for its default."""
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    assert {tag["name"] for tag in document["tags"]} == {op["tags"][0] for _, _, op in operations(document)}
    for _, path, operation in operations(document):
        for status, response in operation["responses"].items():
            for kind, content in response["content"].items():
                assert kind == "text/event-stream" or content["schema"], (path, status)
    assert '"default"' not in json.dumps(document["components"]["schemas"]["ChatBody"])
    assert document["components"]["schemas"]["TokenizeBody"].get("required", []) == []


def test_every_endpoint_answers_as_it_says(server: LiveServer, document: dict[str, Any]) -> None:
    """With its example, and in the forms that an answer takes; those of a program or response with one."""
    opened = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": []}}
    with requests.post(server.url + "/v1/programs", json=opened, stream=True, timeout=PATIENCE) as events:
        first = next(line for line in events.iter_lines() if line.startswith(b"data: "))
        stored = server.post("/v1/responses", {"input": "a", "max_output_tokens": 2}).json()["id"]
        ids = {"programs": json.loads(first[6:])["id"], "responses": stored}
        bodies = {"/v1/programs/{id}/segments": {"segment": {"nodes": [], "final": True}}}
        over = {"get_v1_programs_id_events", "post_v1_responses_id_cancel", "delete_v1_programs_id"}  # it may be
        adapters = {f"post_{v}{what}_lora_adapter" for v in ("", "v1_") for what in ("load", "unload")}
        over |= {*adapters, "post_end_kv_transfer"}  # whose own tests have some
        over |= {operation["operationId"] for _, path, operation in operations(document) if "weights" in path}
        last = {"delete_v1_responses_id": 1, **dict.fromkeys(over, 2)}
        for method, path, operation in sorted(operations(document), key=lambda o: last.get(o[2]["operationId"], 0)):
            body = bodies.get(path)
            if body is None and "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["example"]
            url = server.url + path.format(id=ids.get(path.split("/")[2]) if "{id}" in path else "", model="tiny")
            answer = requests.request(method, url, json=body, timeout=PATIENCE)
            assert answer.status_code == 200 or operation["operationId"] in over, (path, answer.text)
            check(document, operation, answer)
    for path, body in MORE:
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        check(document, document["paths"][path]["post"], answer)


def test_failures_are_as_they_say(server: LiveServer, document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        if "requestBody" in operation:
            answer = requests.request(method, server.url + path, data="{", timeout=PATIENCE)
            assert answer.status_code in (400, 404), path
            check(document, operation, answer)


def test_a_head_is_a_get_without_a_body(server: LiveServer, document: dict[str, Any]) -> None:
    for method, path, _ in operations(document):
        if method != "GET":
            continue
        url = server.url + path.format(id="none", model="tiny")
        got, head = (requests.request(each, url, timeout=PATIENCE) for each in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["Content-Type"] == got.headers["Content-Type"]
    assert requests.head(server.url + "/generate", timeout=PATIENCE).headers["Allow"] == "POST, PUT"
    assert "HEAD" in server.post("/health", {}).headers["Allow"]


def test_a_head_of_events_waits_for_none_and_listens_to_none(server: LiveServer, engine: Engine) -> None:
    opened = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": []}}
    with requests.post(server.url + "/v1/programs", json=opened, stream=True, timeout=PATIENCE) as events:
        first = next(line for line in events.iter_lines() if line.startswith(b"data: "))
        url = f"{server.url}/v1/programs/{json.loads(first[6:])['id']}"
        with requests.Session() as session:
            for _ in range(2):  # the second over the same connection: no body was left in it
                head = session.head(url + "/events", headers={"Last-Event-ID": "1"}, timeout=PATIENCE)
                assert (head.status_code, head.content) == (200, b"")
                assert head.headers["Content-Type"].startswith("text/event-stream")
        assert requests.delete(url, timeout=PATIENCE).status_code == 200


def test_probes_and_the_version(server: LiveServer) -> None:
    for path in ("/ping", "/ready", "/health"):
        assert server.get(path).json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": VERSION}
    server.service.is_draining = True
    try:
        for path in ("/ping", "/ready", "/health"):
            assert server.get(path).status_code == 503
            assert requests.head(server.url + path, timeout=PATIENCE).status_code == 503
    finally:
        server.service.is_draining = False


def test_the_page_of_endpoints_needs_nothing_from_outside(server: LiveServer) -> None:
    page = server.get("/docs")
    assert page.headers["Content-Type"].startswith("text/html")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page.text)
    assert '"openapi.json"' in page.text


def test_the_typescript_client_has_types_of_all_that_is_described(document: dict[str, Any]) -> None:
    """Names alone, which needs no node: test_clients_typescript holds every character."""
    types = (REPOSITORY / "clients" / "typescript" / "src" / "api.ts").read_text()
    schemas = document["components"]["schemas"]
    names = {name for schema in schemas.values() for name in schema.get("properties", {})} | set(schemas)
    found = set(re.findall(r"""^ +"?([^\s"?:]+)"?\??:""", types, re.MULTILINE))
    told = "sgl serve, then npm run generate -- with a file of /openapi.json, in clients/typescript"
    assert not (names | set(document["paths"])) - found, told
