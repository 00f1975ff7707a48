"""Over HTTP, too, speculation changes nothing: careless clients at a server with drafts, against one without."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import requests
from urllib3.exceptions import ReadTimeoutError

from sgl import Engine
from tests.every_draft import every_draft
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE
from tests.tiny_heads import tiny_head
from tests.tiny_models import calling_checkpoint

CONTEXT = 2048
DRAFTERS: dict[str, dict[str, Any]] = {
    "auto": {"speculative_algorithm": "auto"},
    "lookup": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    "grammar": {"speculative_algorithm": "GRAMMAR"},
    "model": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "target"},
    "head": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"},
}
TIGHT = {"max_total_tokens": 320, "page_size": 4, "chunked_prefill_size": 9, "schedule_conservativeness": 0.01}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["alpha", "beta"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
CALLED = {"type": "object", "properties": {"k": {"enum": ["one", "two"]}}, "required": ["k"]}
TOOL = {"name": "f", "parameters": {**CALLED, "additionalProperties": False}, "strict": True}
TEXTS = ["one and two and one and two and", "the the the the", "a,b,c,a,b,c,a,b,", '{"name": "x"} {"name":', "zz"]
OFTEN: dict[str, list[Any]] = {
    "ignore_eos": [True],
    "n": [1, 2, 3],
    "stop": ["e", "the", ["o", "t", "q"], ["and", "an"]],
}
SELDOM: dict[str, list[Any]] = {
    "top_p": [0.9, 0.5],
    "top_k": [1, 5, 20],
    "min_p": [0.05, 0.3],
    "frequency_penalty": [0.7, -0.5, 2],
    "presence_penalty": [0.5],
    "repetition_penalty": [1.3, 0.8],
    "logit_bias": [{"70": 4.0}, {"7": -100}],
    "no_stop_trim": [True],
    "skip_special_tokens": [False],
    "stop_token_ids": [[70], [100, 101, 102, 103]],
    "stop_regex": ["[aeiou]{2}", r"\d", "t.e"],
}
CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {},
    {"regex": "(ab|cd){2,9}[0-9]+"},
    {"regex": "certainly forced: [a-z]{3}, and then (one|two|three)"},
    {"json_schema": SCHEMA},
]
OF_TIME = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "call_id",
    "item_id",
    "prefill_time",
    "e2e_latency",
    "queue_time",
}
COUNTED = {
    "sgl:spec_drafted_tokens_total": "drafted_tokens",
    "sgl:spec_accepted_tokens_total": "accepted_tokens",
}
OF_DRAFTS = {"drafted_tokens", "accepted_tokens", "completion_tokens_details", "output_tokens_details"}
OF_THE_CACHE = {
    "cached_tokens",
    "prompt_tokens_details",
    "input_tokens_details",
    "num_retractions",
    "forced_tokens",
}
Body = tuple[str, dict[str, Any]]


def drawn(rng: random.Random) -> Body:
    """A request."""
    params: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.8, 1.3]), "seed": rng.randrange(1000)}
    for chance, options in ((0.4, OFTEN), (0.12, SELDOM)):
        params |= {name: rng.choice(values) for name, values in options.items() if rng.random() < chance}
    params["max_tokens"] = rng.choice([1, 2, 5, 12, 25, 40])
    params["min_tokens"] = 0 if "stop_token_ids" in params else rng.randrange(2)
    more = {"stream": rng.random() < 0.4, "priority": rng.choice([-3, 0, 5])}
    text, constraint = rng.choice(TEXTS), rng.choice(CONSTRAINTS)
    path = rng.choice(["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
    if path == "/generate":
        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
        params = {names.get(name, name): value for name, value in params.items()}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if rng.random() < 0.4 else {}
        return path, {"text": text, "sampling_params": params | constraint, **logprobs, **more}
    if path == "/v1/completions":
        more |= rng.choice([{}, {"echo": True}, {"logprobs": 3}, {"echo": True, "logprobs": 0}])
        return path, {"prompt": rng.choice([text, [text, TEXTS[0]]]), **params, **constraint, **more}
    if path == "/v1/responses":
        asked = {name: params[name] for name in ("temperature", "seed")} | {
            "stream": more["stream"],
            "store": False,
        }
        how = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        asked |= rng.choice(
            [{}, {"text": how}, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}]
        )
        return path, {"input": text, "max_output_tokens": params["max_tokens"], **asked}
    more |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.4 else {}
    more |= rng.choice(
        [
            constraint,
            {"response_format": {"type": "json_object"}},
            {"tools": [{"type": "function", "function": TOOL}], "tool_choice": rng.choice(["auto", "required"])},
        ]
    )
    return path, {"messages": [{"role": "user", "content": text}], **params, **more}


def ask(server: LiveServer, body: Body, events: float = math.inf) -> Any:
    """The answer, or what a stream says in all; the client leaves after so many events."""
    path, asked = body
    with requests.post(server.url + path, json=asked, timeout=PATIENCE, stream=True) as answer:
        if answer.status_code != 200 or not asked["stream"]:
            return answer.status_code, kept(answer.json())
        found: list[Any] = []
        for line in answer.iter_lines():
            if line.startswith(b"data:") and line != b"data: [DONE]":
                found.append(kept(json.loads(line[5:])))
                if len(found) >= events:
                    return None
    return 200, joined(path, found)


def joined(path: str, events: list[Any]) -> Any:
    """What a stream says, however it was cut."""
    if path == "/generate":
        return {event.get("index", 0): event for event in events}
    if path == "/v1/responses":
        return events[-1]
    if failed := [event for event in events if "error" in event]:
        return failed
    texts: dict[Any, Any] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        for place, value in leaves(choice):
            if place[-1] != "index":
                texts.setdefault((choice["index"], *place), []).append(value)
    said = {place: "".join(its) for place, its in texts.items() if all(isinstance(each, str) for each in its)}
    numbers = [
        value for place, its in texts.items() if place[1] == "logprobs" for value in its if type(value) is float
    ]
    return said, sorted(numbers)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Texts and numbers with where they are; elements of lists are not told apart."""
    if isinstance(value, dict):
        for name, its in value.items():
            yield from leaves(its, (*place, name))
    elif isinstance(value, list):
        for its in value:
            yield from leaves(its, place)
    elif value is not None:
        yield place, value


def kept(value: Any) -> Any:
    """Of an answer what neither time nor drafts may change."""
    if isinstance(value, dict):
        left_out = OF_TIME | OF_DRAFTS | OF_THE_CACHE
        return {name: kept(its) for name, its in value.items() if name not in left_out}
    return [kept(its) for its in value] if isinstance(value, list) else value


def is_same(found: Any, expected: Any) -> bool:
    """Logprobs nearly."""
    if isinstance(found, float) and isinstance(expected, float):
        return found == pytest.approx(expected, abs=2e-3)
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(is_same(its, expected[name]) for name, its in found.items())
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return bool(found == expected)


def with_stops_of(body: Body, answer: Any, rng: random.Random) -> Body:
    """It may end within its output, so that drafts go on behind the end."""
    path, asked = body
    texts = [its for place, its in leaves(answer) if place and place[-1] in ("text", "content") and len(its) > 3]
    if path == "/v1/responses" or not texts or rng.random() < 0.5:
        return body
    text = max(texts, key=len)
    at = rng.randrange(len(text) - 1)
    stop = {"stop": [text[at : at + rng.randint(1, 4)], "qq"]}
    return path, asked | ({"sampling_params": asked["sampling_params"] | stop} if path == "/generate" else stop)


class Watched(threading.Thread):
    """What fails in it is raised where it is joined."""

    failure: BaseException | None = None

    def __init__(self, do: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self._do = do, arguments
        self.start()

    def run(self) -> None:
        do, arguments = self._do
        try:
            do(*arguments)
        except BaseException as error:
            self.failure = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.failure is not None:
            raise self.failure


def disturb(server: LiveServer, rng: random.Random, is_over: threading.Event) -> None:
    """Leave streams, abort requests and let others run out of time."""
    while not is_over.is_set():
        path, body = drawn(rng)
        how = rng.choice(["leave", "abort", "time"])
        if how == "leave":
            ask(server, (path, {**body, "stream": True}), events=rng.randint(1, 4))
        elif how == "time":
            ask(server, (path, {**body, "timeout": 0.02}))
        elif path == "/generate":
            body["rid"] = uuid.uuid4().hex
            body["sampling_params"].pop("n", None)
            asking = Watched(ask, server, (path, body))
            is_over.wait(rng.uniform(0, 0.05))
            server.post("/abort_request", {"rid": body["rid"]})
            asking.join()
        else:
            give_up(server.url + path, {**body, "stream": False}, 0.03)


def give_up(url: str, body: dict[str, Any], seconds: float) -> None:
    """Ask, and leave after so long a silence; within the body, requests tells of one as of a lost connection."""
    try:
        requests.post(url, json=body, timeout=(PATIENCE, seconds))
    except requests.Timeout:
        pass
    except requests.ConnectionError as error:
        if not any(isinstance(its, ReadTimeoutError) for its in error.args):
            raise


def test_who_gives_up_sees_no_other_error() -> None:
    """A silence within the headers or the body is the client's own; a connection that is cut is told."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        is_left = threading.Event()

        def answer(said: bytes, is_silent: bool) -> None:
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(said)
                if is_silent:
                    assert is_left.wait(PATIENCE)

        begun = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"
        for said, is_silent in ((b"", True), (begun, True), (b"", False), (begun, False)):
            is_left.clear()
            answering = Watched(answer, said, is_silent)
            with nullcontext() if is_silent else pytest.raises(requests.RequestException):
                give_up(url, {}, 0.03 if is_silent else PATIENCE)
            is_left.set()
            answering.join()


def test_what_fails_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Watched(lambda: 1 // 0).join()


def is_error(answer: Any) -> bool:
    """Whether an answer, or anything that its stream said, is one, or tells of an end that nobody asked for."""
    status, said = answer
    found = leaves([*said] if isinstance(said, tuple) else said)
    return status != 200 or any("error" in place or its in ("abort", "cancelled", "failed") for place, its in found)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_errors_of_streams_are_seen(path: str) -> None:
    good = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "text": "x"}
    assert not is_error((200, joined(path, [good])))
    assert is_error((200, joined(path, [good, {"error": {"message": "x"}}])))
    assert is_error((500, good))


def test_an_aborted_stream_is_an_error() -> None:
    assert is_error((200, joined("/v1/completions", [{"choices": [{"index": 0, "finish_reason": "abort"}]}])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("http")
    calling_checkpoint(path / "target")
    tiny_head(path / "head", vocab_size=400, max_position_embeddings=CONTEXT)
    return path


def compare(folder: Path, drafters: list[str], options: dict[str, Any], seed: int, count: int) -> None:
    """Ask servers with these drafters, and one without."""
    rng = random.Random(seed)
    base: dict[str, Any] = {"model_path": folder / "target", "dtype": "float32", "device": "cpu", "random_seed": 0}
    base |= {"check_ledger": True, "max_total_tokens": 4096}
    bodies = [drawn(rng) for _ in range(count)]

    def every(server: LiveServer) -> list[Any]:
        with ThreadPoolExecutor(5) as pool:
            return list(pool.map(lambda body: ask(server, body), bodies))

    with Engine(**base, speculative_algorithm="off") as plain, served(plain) as server:
        bodies = [with_stops_of(*pair, rng) for pair in zip(bodies, every(server), strict=True)]
        expected = every(server)
    assert not any(map(is_error, expected))
    for name in drafters:
        chosen = dict(DRAFTERS[name])
        if path := chosen.get("speculative_draft_model_path"):
            chosen["speculative_draft_model_path"] = str(folder / path)
        with Engine(**{**base, **options, **chosen}) as its, served(its) as server, every_draft(its):
            is_over = threading.Event()
            careless = Watched(disturb, server, random.Random(seed), is_over)
            try:
                found = every(server)
            finally:
                is_over.set()
                careless.join()
            for body, one, other in zip(bodies, found, expected, strict=True):
                assert is_same(one, other), f"{name}: {body} gave {one}, not {other}"
            assert its._loop.scheduler.counters.verified_tokens


@pytest.mark.parametrize(("drafters", "options"), [(["auto"], TIGHT), (["model", "head"], {})])
def test_careless_clients_get_what_a_server_without_drafts_says(
    folder: Path, drafters: list[str], options: dict[str, Any]
) -> None:
    compare(folder, drafters, options, 1, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, TIGHT, {**TIGHT, "page_size": 1, "schedule_policy": "priority"}])
def test_many_careless_clients(folder: Path, options: dict[str, Any], seed: int) -> None:
    compare(folder, list(DRAFTERS), options, 100 + seed, 120)


def test_metrics_count_what_was_drafted_and_what_stood(tmp_path: Path) -> None:
    folder = calling_checkpoint(tmp_path)
    body = {"text": TEXTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    with Engine(folder, device="cpu") as engine, served(engine) as server, every_draft(engine):
        told = [server.post("/generate", body).json()["meta_info"] for _ in range(2)]
        lines = server.get("/metrics").text.splitlines()
    counted = {name: float(line.split()[-1]) for line in lines for name in COUNTED if line.startswith(name)}
    assert list(counted.values()) == [sum(meta[name] for meta in told) for name in COUNTED.values()]
    assert min(counted.values()) > 10
