"""Log-probabilities and token texts by the hundred thousand: what may be asked for, and who works on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from sgl.runtime.engine import Engine
from sgl.runtime.requests import threads
from sgl.runtime.requests.arguments import GenerateRequest
from sgl.runtime.requests.builder import MAX_TOKEN_IDS_LOGPROB, MAX_TOP_LOGPROBS
from sgl.runtime.requests.results import NativeResult
from sgl.runtime.server import conversations, encoding
from sgl.runtime.server.texts import MAX_DETOKENIZED, MAX_TOKENIZED
from sgl.runtime.text.tokenizer import Tokenizer
from tests.live_server import LiveServer
from tests.patience import PATIENCE

HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
GIVEN = list(range(200))


SERVED = {"served_model_name": "tiny"}


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a stream."""
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and not line.endswith("[DONE]")]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"token_ids_logprob": [5] * (MAX_TOKEN_IDS_LOGPROB + 1)}, "token_ids_logprob may hold 1024"),
        ("/generate", {"token_ids_logprob": [10**6]}, "token id 1000000 is out of range"),
        ("/generate", {"token_ids_logprob": [-1]}, "token id -1 is out of range"),
        ("/generate", {"top_logprobs_num": MAX_TOP_LOGPROBS + 1}, "top_logprobs_num must be an integer from 0 to"),
        ("/generate", {"top_logprobs_num": -1}, "top_logprobs_num"),
        (
            "/generate",
            {"token_ids_logprob": GIVEN, "sampling_params": {**LONG, "n": 16}},
            "an answer holds 524288",
        ),
        (
            "/generate",
            {
                "token_ids_logprob": GIVEN,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 1, "n": 1024},
            },
            "an answer holds 524288",
        ),
        (
            "/generate",
            {"token_ids_logprob": GIVEN * 5, "logprob_start_len": 0, "stream": True, "sampling_params": {"n": 210}},
            "an answer holds 524288",
        ),
        ("/v1/completions", {"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs must be from 0 to 1024"),
        ("/v1/completions", {"logprobs": -1}, "logprobs must be"),
        ("/v1/completions", {"logprobs": 200, "max_tokens": 400, "n": 16}, "an answer holds 524288"),
        ("/v1/completions", {"logprobs": 200, "echo": True, "max_tokens": 0, "n": 1024}, "an answer holds 524288"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs must be from 0 to 20"),
        (
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 480},
            "an answer holds 524288",
        ),
    ],
)
def test_more_logprobs_than_an_answer_holds_are_refused(
    server: LiveServer, path: str, body: dict[str, Any], words: str
) -> None:
    ask: dict[str, Any] = {"text": "hello", "return_logprob": True} if path == "/generate" else {"prompt": "hello"}
    if "chat" in path:
        ask = {"messages": HELLO}
    answer = server.post(path, {**ask, **body})
    assert answer.status_code == 400, answer.text[:200]
    assert words in answer.json()["error"]["message"]


def test_engines_refuse_them_too_and_score_any_number_of_candidates(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="an answer holds"):
        engine.generate("hello", {**LONG, "n": 16}, return_logprob=True, token_ids_logprob=GIVEN)
    with pytest.raises(InvalidRequest, match="may hold 1024"):
        engine.generate("hello", LONG, return_logprob=True, token_ids_logprob=[1] * 1025)
    plain = engine.generate("hello", LONG, return_logprob=False, token_ids_logprob=[1] * 1025)
    assert "output_token_ids_logprobs" not in plain["meta_info"], "nothing was asked for"
    many = {"return_logprob": True, "token_ids_logprob": [1] * 3000, "sampling_params": {"max_new_tokens": 0}}
    assert engine._builder.submissions(GenerateRequest(prompt="hello", limits_logprobs=False, **many))


def test_a_list_of_prompts_counts_as_one_answer_of_a_server(engine: Engine) -> None:
    """In process, lists may be as long as memory lasts."""
    from sgl.runtime.requests.builder import check_num_logprobs, num_logprobs

    arguments = {"prompt": ["hello"] * 20, "sampling_params": LONG, "return_logprob": True}
    prepared = engine.prepare(**arguments, token_ids_logprob=GIVEN)
    number = sum(num_logprobs(submission.request) for submission in prepared.submissions)
    assert number == 20 * 400 * len(GIVEN)
    with pytest.raises(InvalidRequest, match=f"up to {number} log-probabilities"):
        check_num_logprobs(number)
    streamed = sum(num_logprobs(submission.request, streams=True) for submission in prepared.submissions)
    assert streamed == 0


def test_a_chat_without_a_limit_ends_where_its_answer_is_full(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_LOGPROBS", 240)
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 10, "n": 2, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"]["completion_tokens"] == 24
    free = server.post("/v1/chat/completions", {**body, "top_logprobs": 0}).json()
    assert free["choices"][0]["finish_reason"] == "length"
    assert free["usage"]["completion_tokens"] > 240


BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/generate",
        {
            "text": "hello",
            "sampling_params": LONG,
            "return_logprob": True,
            "token_ids_logprob": GIVEN,
            "return_text_in_logprobs": True,
        },
    ),
    (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 200},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "max_tokens": 400,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
        },
    ),
]


def test_the_alternatives_of_a_completions_token_have_itself(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 2.0, "seed": 1, "logprobs": 2, "echo": True}
    found = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    sizes = set()
    for token, logprob, top in list(
        zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    )[1:]:
        sizes.add(len(top))
        if "\ufffd" not in token and token:  # whole characters
            assert top[token] == logprob
    assert sizes == {3}
    likeliest = server.post("/v1/completions", {**body, "temperature": 0, "echo": False}).json()["choices"][0]
    assert {len(top) for top in likeliest["logprobs"]["top_logprobs"]} == {2}


@pytest.mark.costly
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_large_answers_are_made_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: dict[str, set[str]] = {"result": set(), "json": set()}
    result, encoded = NativeResult.result, encoding.json_bytes

    def watched_result(self: NativeResult) -> Any:
        threads["result"].add(threading.current_thread().name)
        return result(self)

    def watched_encoded(body: Any) -> bytes:
        threads["json"].add(threading.current_thread().name)
        return encoded(body)

    monkeypatch.setattr(NativeResult, "result", watched_result)
    monkeypatch.setattr(encoding, "json_bytes", watched_encoded)
    answer = server.post(path, body)
    assert answer.status_code == 200
    assert len(answer.content) > 300_000
    assert answer.json()
    for names in threads.values():
        assert names
        assert all(name.startswith("sgl-results") for name in names), names


def test_answers_of_many_results_are_made_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does counting them hold up the loop: others have turns between."""
    threads, turns = set[str](), list[int]()
    result, counted = NativeResult.result, server.service.finished

    def watched_result(self: NativeResult) -> Any:
        threads.add(threading.current_thread().name)
        return result(self)

    def watched_counted(*arguments: Any, **options: Any) -> None:
        if not turns:
            asyncio.get_running_loop().call_soon(lambda: turns.append(turns[0]))
        turns[:1] = [turns[0] + 1 if turns else 1]
        counted(*arguments, **options)

    monkeypatch.setattr(NativeResult, "result", watched_result)
    monkeypatch.setattr(server.service, "finished", watched_counted)
    body = {"text": ["a"] * 50, "sampling_params": {"max_new_tokens": 1, "n": 10, "temperature": 0}}
    assert len(server.post("/generate", body).json()) == 500
    assert threads
    assert all(name.startswith("sgl-results") for name in threads)
    number, noticed = turns
    assert number == 500
    assert noticed < 100, "what came up after the first waited for all of them"


@pytest.mark.costly
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_large_answers_are_what_small_ones_would_be(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def comparable(answer: dict[str, Any]) -> Any:
        return answer["meta_info"]["output_token_ids_logprobs"] if path == "/generate" else answer["choices"]

    server.post(path, body)  # what is cached then, is cached for both
    large = comparable(server.post(path, body).json())
    monkeypatch.setattr(encoding, "FEW", 10**9)
    monkeypatch.setattr(threads, "FEW", 10**9)
    assert comparable(server.post(path, body).json()) == large


@pytest.mark.parametrize(
    "value",
    [
        {"a": [[-0.5, i, None] for i in range(20_000)], "b": "x" * 100_000, "c": {}, "d": [], "é\ud800": "é\ud800"},
        [[None, *[[float(j), j, "\n"] for j in range(500)]] for _ in range(60)],
        [{"index": i, "text": "", "top": [{"t": "a", "bytes": [1, 2]}] * 20} for i in range(2000)],
        list(range(100_000)),
        [None, [], [1] * 50_000],
        {},
        [],
        "x",
        None,
    ],
)
def test_large_answers_are_written_in_small_pieces(value: Any) -> None:
    pieces = list(encoding._pieces(value))
    assert "".join(pieces) == json.dumps(value, separators=(",", ":"))
    assert max(map(len, pieces)) <= 200_000


def test_a_text_of_a_token_is_decoded_once(
    server: LiveServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[int] = Counter()
    decode = Tokenizer.decode

    def counted(self: Tokenizer, token_ids: Any, **options: Any) -> str:
        ids = list(token_ids)
        decoded.update(ids)
        return decode(self, ids, **options)

    assert engine.tokenizer is not None
    monkeypatch.setattr(engine.tokenizer, "_token_texts", {})
    monkeypatch.setattr(Tokenizer, "decode", counted)
    path, body = BODIES[0]
    meta = server.post(path, body).json()["meta_info"]
    assert sum(map(len, meta["output_token_ids_logprobs"])) == 400 * len(GIVEN)
    assert set(GIVEN) <= decoded.keys()
    assert max(decoded.values()) == 1
    text = decode(engine.tokenizer, [GIVEN[70]], skip_special_tokens=False)
    assert meta["output_token_ids_logprobs"][3][70][2] == text


def test_a_stream_tells_the_prompts_logprobs_once(server: LiveServer) -> None:
    body = {"text": "hello you", "sampling_params": {**LONG, "max_new_tokens": 5}, "return_logprob": True}
    body |= {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 5]}
    whole = server.post("/generate", body).json()["meta_info"]
    first, *others = [event["meta_info"] for event in events(server, "/generate", body)]
    assert others
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert first[name] == whole[name]
        assert [other[name] for other in others] == [[] for _ in others]
    told = [entry for meta in (first, *others) for entry in meta["output_token_ids_logprobs"]]
    assert len(told) == len(whole["output_token_ids_logprobs"]) == 5


def test_logprobs_of_gens_in_programs_are_limited(engine: Engine) -> None:
    @sgl.function
    def program(s: Any, **options: Any) -> None:
        s += "hello" + sgl.gen("x", max_tokens=4, return_logprob=True, **options)

    state = program.run(backend=engine, extra={"token_ids_logprob": GIVEN})
    assert len(state.get_meta_info("x")["output_token_ids_logprobs"][0]) == len(GIVEN)
    with pytest.raises(ProgramError, match="may hold 1024"):
        program.run(backend=engine, extra={"token_ids_logprob": [1] * 1025})["x"]
    with pytest.raises(ProgramError, match="an answer holds 65536"):
        program.run(backend=engine, n=200, extra={"token_ids_logprob": GIVEN})["x"]


# ── /tokenize and /detokenize ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"text": "x" * MAX_TOKENIZED}, f"{MAX_TOKENIZED} may be"),
        ("/v1/tokenize", {"prompt": [""] * (MAX_TOKENIZED // 16 + 1)}, f"{MAX_TOKENIZED} may be"),
        ("/detokenize", {"tokens": [5] * MAX_DETOKENIZED}, f"{MAX_DETOKENIZED} may be"),
        ("/v1/detokenize", {"tokens": [[]] * (MAX_DETOKENIZED // 16 + 1)}, f"{MAX_DETOKENIZED} may be"),
        ("/detokenize", {"tokens": [*[5] * 10_000, 10**6]}, "token id 1000000 is out of range"),
        ("/detokenize", {"tokens": [[5], [-1]]}, "token id -1 is out of range"),
    ],
)
def test_more_text_than_is_tokenized_at_once_is_refused(
    server: LiveServer, path: str, body: Any, words: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


_TOKENIZES = """
import sys
from sgl.runtime.config import EMBEDDED
from sgl.runtime.text.tokenizer import Tokenizer

def most_resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

tokenizer = Tokenizer.load(EMBEDDED)
tokenizer.encode_all(["a b"])
before = most_resident()
tokenizer.encode_all(["a b " * (int(sys.argv[1]) // 4)])
print(most_resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_most_that_is_tokenized_at_once_takes_half_a_gigabyte_at_most() -> None:
    """KiB of a process of its own: what was resident here before would hide it."""
    command = [sys.executable, "-c", _TOKENIZES, str(MAX_TOKENIZED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 512 << 10


@pytest.mark.parametrize("skip", [False, True])
def test_long_texts_and_lists_are_read_as_short_ones(server: LiveServer, engine: Engine, skip: bool) -> None:
    assert engine.tokenizer is not None
    text = "the cät sat on the mat " * 2000
    ids = engine.tokenizer.encode(text).tolist()
    answer = server.post("/tokenize", {"text": [text, "", *["a b"] * 700]}).json()
    assert answer["tokens"][0] == ids
    assert answer["count"][0] == len(ids) > threads.FEW
    assert answer["tokens"][2:] == [engine.tokenizer.encode("a b").tolist()] * 700
    text = engine.tokenizer.decode(ids, skip_special_tokens=skip)
    answer = server.post("/detokenize", {"tokens": ids, "skip_special_tokens": skip}).json()
    assert answer["text"] == text
    answer = server.post("/detokenize", {"tokens": [ids, [5], []], "skip_special_tokens": skip}).json()
    assert answer["text"] == [text, engine.tokenizer.decode([5]), ""]
