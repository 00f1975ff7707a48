"""The native API over real sockets: result shapes, streams, limits, bad input, and clients that go away."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, slow_steps, state_of
from tests.patience import PATIENCE, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    """After every test no request runs and each page has its owner."""
    yield
    wait_until_idle(engine)
    assert engine.check_ledger() == []
    assert not engine._calls.rids
    assert not engine._router._sinks


def wait_until_idle(engine: Engine) -> None:
    wait_until(
        lambda: not (state := state_of(engine))["num_running_reqs"] and not state["num_queue_reqs"],
        "a request goes on for nobody",
    )


def wait_until_running(engine: Engine, number: int = 1) -> None:
    wait_until(lambda: state_of(engine)["num_running_reqs"] >= number)


def generate(server: LiveServer, **body: Any) -> Any:
    answer = server.post("/generate", {"sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(answer: requests.Response) -> list[Any]:
    """The events of a stream, which must end with [DONE]."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Transfer-Encoding"] == "chunked"
    *data, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def test_generate_answers_what_the_engine_answers(server: LiveServer, engine: Engine) -> None:
    result = generate(server, text="hello", return_logprob=True, top_logprobs_num=2)
    expected = engine.generate("hello", GREEDY, return_logprob=True, top_logprobs_num=2)
    for varying in ("id", "e2e_latency", "queue_time", "prefill_time", "cached_tokens"):
        del result["meta_info"][varying], expected["meta_info"][varying]
    assert result == json.loads(json.dumps(expected))


def test_lists_and_samples_come_in_order_of_prompts(server: LiveServer) -> None:
    params = [{**GREEDY, "max_new_tokens": 3, "n": 2}, {**GREEDY, "max_new_tokens": 5, "n": 2}]
    results = generate(server, text=["a", "bcd"], sampling_params=params, rid=["x", "y"])
    assert [r["meta_info"]["completion_tokens"] for r in results] == [3, 3, 5, 5]
    assert [r["meta_info"]["id"] for r in results] == ["x-0", "x-1", "y-0", "y-1"]


def test_nulls_are_defaults_and_unknown_fields_ignored(server: LiveServer) -> None:
    plain = generate(server, text="hi")
    nulls = generate(
        server, text="hi", input_ids=None, rid=None, stream=None, lora_path=None, session_id="s", image_data=None
    )
    assert nulls["text"] == plain["text"]
    assert generate(server, text="hi", input_ids=[5])["text"] == plain["text"], "text wins over ids"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"return_hidden_states": True}, "not supported here"),
        ({"return_routed_experts": True}, "not supported here"),
        ({"custom_logit_processor": "x"}, "not supported here"),
        ({"session_params": {"id": "x"}}, "not supported here"),
        ({"input_embeds": [[0.5]]}, "not supported here"),
        ({"audio_data": "x"}, "not supported here"),
        ({"bootstrap_room": 1}, "not supported here"),
        ({"lora_id": "x"}, "called lora_path"),
        ({"cache_salt": "x"}, "called extra_key"),
        ({"max_new_tokens": 3}, "belongs into sampling_params"),
        ({"regex": "a"}, "belongs into sampling_params"),
    ],
)
def test_what_would_be_left_undone_is_refused_by_name(
    server: LiveServer, fields: dict[str, Any], words: str
) -> None:
    [name] = fields
    body = {"text": "hi", "sampling_params": GREEDY}
    answer = server.post("/generate", {**body, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert words in answer.json()["error"]["message"]
    assert server.post("/generate", {**body, name: None}).status_code == 200


def test_fields_that_change_no_answer_are_taken(server: LiveServer) -> None:
    taken = {"no_logs": True, "routing_key": "x", "return_hidden_states": False, "session_params": {}, "unheard": 1}
    assert generate(server, text="hi", **taken)["text"] == generate(server, text="hi")["text"]


def test_stream_is_cumulative_in_text_and_incremental_in_logprobs(server: LiveServer) -> None:
    body = {"text": "hello", "sampling_params": GREEDY, "return_logprob": True}
    whole = server.post("/generate", body).json()
    events = events_of(server.post("/generate", {**body, "stream": True}))
    assert [e["meta_info"]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["text"] == whole["text"]
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
    entries = [entry for e in events for entry in e["meta_info"]["output_token_logprobs"]]
    assert entries == whole["meta_info"]["output_token_logprobs"]
    lengths = [e["meta_info"]["output_token_logprobs_length"] for e in events]
    assert lengths == [e["meta_info"]["completion_tokens"] for e in events] == list(range(1, 9))


def test_incremental_streaming_output_sends_only_what_is_new(another: Callable[..., LiveServer]) -> None:
    server = another(incremental_streaming_output=True)
    assert server.get("/server_info").json()["incremental_streaming_output"] is True
    body = {"text": ["hello", "a"], "sampling_params": GREEDY}
    whole = server.post("/generate", body).json()
    events = events_of(server.post("/generate", {**body, "stream": True}))
    for index in (0, 1):
        mine = [e for e in events if e["index"] == index]
        assert "".join(e["text"] for e in mine) == whole[index]["text"]
        assert [token for e in mine for token in e["output_ids"]] == whole[index]["output_ids"]


def test_prompt_logprobs_are_aligned_for_the_original_client(
    server: LiveServer, another: Callable[..., LiveServer]
) -> None:
    params = {"max_new_tokens": 0, "temperature": 0}
    body = {"text": "hello", "sampling_params": params, "return_logprob": True}

    def entries(where: LiveServer, **more: Any) -> list[Any]:
        found = generate(where, **{**body, **more})["meta_info"]["input_token_logprobs"]
        assert isinstance(found, list)
        return found

    def aligned(found: list[Any], expected: list[Any]) -> None:
        """But for rounding: of what a page in the cache holds, nothing is summed again."""
        assert [entry[1:] for entry in found] == [entry[1:] for entry in expected]
        for (one, *_), (other, *_) in zip(found, expected, strict=True):
            assert one == (None if other is None else pytest.approx(other, rel=1e-5))

    full = entries(server, logprob_start_len=0)
    assert full[0][0] is None
    assert None not in [entry[0] for entry in full[1:]]
    aligned(entries(server, logprob_start_len=2), full[3:])
    assert entries(server) == []
    ids = [entry[1] for entry in full]
    assert entries(server, text=None, input_ids=ids) == full, "ids alone are scored from the first"
    parity = entries(another(parity_logprobs=True), logprob_start_len=2)
    aligned(parity, [[None, *full[2][1:]], *full[3:]])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", {}, 400, "text or input_ids"),
        ("/generate", {"text": "x", "sampling_params": {"max_tokens": 1}}, 400, "max_new_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ("/generate", {"text": 5}, 400, "text"),
        ("/generate", {"text": ""}, 400, "empty"),
        ("/generate", {"text": []}, 400, "empty"),
        ("/generate", {"text": "a\ud800"}, 400, "JSON"),
        ("/generate", {"input_ids": [1, 9999]}, 400, "9999"),
        ("/generate", {"input_ids": [1, "2"]}, 400, "input_ids"),
        ("/generate", {"text": "x" * 600}, 400, "512"),
        ("/generate", {"text": "x", "image_data": "aaaa"}, 400, "image"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "a", "json_schema": "{}"}}, 400, "at most one"),
        ("/generate", {"text": ["a", "b"], "rid": ["same", "same"]}, 400, "same"),
        ("/generate", {"text": "x", "stream": True, "sampling_params": {"n": 0}}, 400, "n must be"),
        ("/abort_request", {}, 400, "rid"),
        ("/detokenize", {"tokens": [384]}, 400, "384"),
        ("/tokenize", {}, 400, "text"),
        ("/no_such_thing", {}, 404, "no endpoint"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(
    server: LiveServer, path: str, body: Any, status: int, words: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'"x"', b"[" * 100_000, b'{"text": "\xc3"}']
)
def test_malformed_bodies_are_refused(server: LiveServer, data: bytes) -> None:
    answer = requests.post(server.url + "/generate", data=data, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_long_bodies_are_refused_compressed_or_not(another: Callable[..., LiveServer]) -> None:
    server = another(max_request_bytes=10_000)
    data = json.dumps({"text": "x" * 20_000}).encode()
    assert requests.post(server.url + "/generate", data=data, timeout=PATIENCE).status_code == 413
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(data)
    assert (
        requests.post(server.url + "/generate", data=packed, headers=headers, timeout=PATIENCE).status_code == 413
    )
    answer = requests.post(server.url + "/generate", data=b"not gzip", headers=headers, timeout=PATIENCE)
    assert answer.status_code == 400


def test_the_api_key_is_asked_for_except_for_health(
    another: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []  # by what takes the same time however much is right

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append(given)
        return given == expected

    monkeypatch.setattr("sgl.runtime.server.keys.hmac.compare_digest", compare)
    server = another(api_key="sëcret")
    assert server.get("/health").status_code == 200
    for given in (None, "Bearer wrong", "sëcret", "Bearer s\udcffx"):
        headers = {} if given is None else {b"Authorization": given.encode("utf-8", "surrogateescape")}
        answer = server.get("/get_model_info", headers=headers)
        assert answer.status_code == 401
        assert "API key" in answer.json()["error"]["message"]
    headers = {b"Authorization": "Bearer sëcret".encode()}
    answer = server.get("/server_info", headers=headers)
    assert answer.status_code == 200
    assert "cret" not in answer.text
    assert len(compared) == 5


def test_browsers_of_listed_origins_may_call(another: Callable[..., LiveServer]) -> None:
    server = another(cors_origins="https://a.example, https://b.example", api_key="k")
    preflight = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    answer = requests.options(server.url + "/generate", headers=preflight, timeout=PATIENCE)
    assert answer.status_code == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "https://b.example"
    answer = server.get("/health", headers={"Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_request_ids_come_back_unless_they_could_forge_a_log(server: LiveServer) -> None:
    assert server.get("/health", headers={"X-Request-Id": "mine-7"}).headers["X-Request-Id"] == "mine-7"
    assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"] != "a b"


def test_tokenize_and_detokenize_are_inverse(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"text": ["hällo", "</s>"], "add_special_tokens": False}).json()
    assert answer["count"] == [len(ids) for ids in answer["tokens"]]
    assert answer["tokens"][1] == [2]
    texts = server.post("/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": False}).json()["text"]
    assert texts == ["hällo", "</s>"]
    literal = server.post("/tokenize", {"prompt": "</s>", "allow_special": False}).json()["tokens"]
    assert 2 not in literal


@pytest.mark.usefixtures("slowly")
def test_abort_request_ends_by_rid_and_flush_waits_for_nobody(server: LiveServer, engine: Engine) -> None:
    answers = []
    body = {"text": "hello" * 10, "sampling_params": LONG, "rid": "long"}
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    wait_until_running(engine)
    assert server.post("/flush_cache", None).status_code == 400
    assert server.post("/abort_request", {"rid": "unknown"}).status_code == 200
    assert server.post("/abort_request", {"rid": "long"}).status_code == 200
    thread.join(PATIENCE)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/flush_cache", None).status_code == 200


def test_profiles_hold_the_steps_between_start_and_stop(server: LiveServer) -> None:
    assert server.post("/stop_profile", None).status_code == 400
    of_sglang = {
        "activities": ["CPU", "GPU"],
        "profile_by_stage": False,
        "profile_stages": None,
        "output_dir": "/tmp/1",
    }
    for name in ("num_steps", "start_step"):
        refused = server.post("/start_profile", {**of_sglang, name: 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert "ends with /stop_profile" in refused.json()["error"]["message"]
    assert server.post("/start_profile", {**of_sglang, "num_steps": None}).status_code == 200
    assert server.post("/stop_profile", {}).status_code == 200
    assert server.post("/start_profile", None).status_code == 200
    assert server.post("/start_profile", None).status_code == 400
    generate(server, text="hello")
    trace = json.loads(Path(server.post("/stop_profile", None).json()["path"]).read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.usefixtures("slowly")
def test_abort_all_ends_every_request(server: LiveServer, engine: Engine) -> None:
    answers = []
    body = {"text": ["hello", "a"], "sampling_params": LONG}
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    wait_until_running(engine, 2)
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    thread.join(PATIENCE)
    assert [r["meta_info"]["finish_reason"]["type"] for r in answers[0].json()] == ["abort", "abort"]


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_client_that_leaves_aborts_its_request(
    server: LiveServer, engine: Engine, stream: bool, how: str
) -> None:
    before = state_of(engine)
    body = json.dumps({"text": "hello", "sampling_params": LONG, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    wait_until_running(engine)
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
    wait_until_idle(engine)
    connection.close()
    after = state_of(engine)
    assert after["aborted"] == before["aborted"] + 1, "it was aborted, not served to the end"


def test_a_stalled_reader_is_given_up(another: Callable[..., LiveServer], engine: Engine) -> None:
    server = another(write_timeout=0.2)
    params = {**LONG, "n": 64}
    body = json.dumps(
        {
            "text": "hello",
            "sampling_params": params,
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": 100,
        }
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until_running(engine)
        wait_until_idle(engine)
        wait_until(lambda: not server.service.metrics.open_requests)
    assert server.service.metrics.responses["/generate", 499] == 1


def test_queue_full_is_429_with_retry_after(tmp_path: Path) -> None:
    options = {**OPTIONS, "max_running_requests": 1, "max_queued_requests": 1}
    with Engine(str(chat_checkpoint(tmp_path)), **options) as engine, slow_steps(engine):
        server = LiveServer(engine)
        try:
            body = {"text": "hello", "sampling_params": LONG}
            threads = [threading.Thread(target=server.post, args=("/generate", body)) for _ in range(2)]
            threads[0].start()
            wait_until_running(engine)
            threads[1].start()
            wait_until(lambda: state_of(engine)["num_queue_reqs"])
            for stream in (False, True):
                answer = server.post("/generate", {**body, "stream": stream})
                assert answer.status_code == 429
                assert int(answer.headers["Retry-After"]) > 0
                assert answer.json()["error"]["code"] == "queue_full"
            server.post("/abort_request", {"abort_all": True})
            for thread in threads:
                thread.join(PATIENCE)
            late = server.post("/generate", {**body, "timeout": 0.05})
            assert late.status_code == 408
        finally:
            server.close()


def test_health_says_no_soon_after_the_engine_died(tmp_path: Path) -> None:
    engine = Engine(str(chat_checkpoint(tmp_path)), **OPTIONS)
    server = LiveServer(engine)
    try:
        assert server.get("/health_generate").status_code == 200
        engine.shutdown()
        for answer in (
            server.get("/health"),
            server.get("/health_generate"),
            server.post("/generate", {"text": "x"}),
        ):
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
    finally:
        server.close()


@pytest.mark.slow
def test_500_concurrent_streams_each_get_their_own_tokens(server: LiveServer, engine: Engine) -> None:
    prompts = [f"{number:03d}" for number in range(500)]
    params = {**GREEDY, "max_new_tokens": 6}
    expected = [result["text"] for result in engine.generate(prompts, params)]

    async def one(client: aiohttp.ClientSession, prompt: str) -> str:
        text = ""
        body = {"text": prompt, "sampling_params": params, "stream": True}
        async with client.post(server.url + "/generate", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert event["text"].startswith(text)
                    text = event["text"]
            assert line == b"\n"
        return text

    async def everyone() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(everyone()) == expected
