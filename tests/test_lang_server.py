"""The backend of servers that speak the native protocol: generation, both ways to stream, exact choice scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

import sgl
from sgl.errors import BackendError, ProgramError
from sgl.lang.backends.legacy import BaseBackend
from sgl.lang.ir.choices import ChoicesDecision
from tests.fake_servers import FakeServer
from tests.lang_mocks import text_hash
from tests.test_lang_defects import SOON, within

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokens_of(text: str) -> list[str]:
    """Letters, except that "th" and a doubled blank line are one token: they merge across a prompt's end."""
    tokens = []
    while text:
        length = 2 if text.startswith(("th", "\n\n")) else 1
        tokens.append(text[:length])
        text = text[length:]
    return tokens


def logprob(before: str, token: str) -> float:
    """Of a token given all text before it."""
    return -0.01 - (text_hash(before + "|" + token) % 1000) / 300


class Native:
    """Answers as a native server does: the first prompt logprob is null, and the log-probabilities are those above.
    `is_incremental`: events have only what is new."""

    def __init__(self, is_incremental: bool = False) -> None:
        self.is_incremental = is_incremental
        self.ids: list[str] = []

    def __call__(self, path: str, body: Any) -> Any:
        if path == "/flush_cache":
            return {"ok": True}
        assert path == "/generate"
        sampling = body["sampling_params"]
        if body.get("stream"):
            return self.events(body)
        prompts = body.get("text", body.get("input_ids"))
        if not isinstance(prompts, list):
            return self.result(prompts, sampling, body)
        several = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        return [self.result(prompt, one, body) for prompt, one in zip(prompts, several, strict=True)]

    def result(self, prompt: Any, sampling: Any, body: Any) -> Any:
        tokens = tokens_of(prompt) if isinstance(prompt, str) else [self.ids[i] for i in prompt]
        meta: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 2}
        meta["finish_reason"] = {"type": "stop", "matched": None}
        if body.get("return_logprob"):
            start = max(body.get("logprob_start_len", -1), 0)
            entries = []
            for i in range(start, len(tokens)):
                given = None if i == start else logprob("".join(tokens[:i]), tokens[i])
                entries.append([given, self.id_of(tokens[i]), None])
            meta["input_token_logprobs"] = entries
        text = (
            "" if sampling["max_new_tokens"] == 0 else f"<{prompt[-2:]}:{sampling.get('sampling_seed', 0) % 100}>"
        )
        return {"text": text, "output_ids": [], "meta_info": meta}

    def events(self, body: Any) -> Iterator[Any]:
        whole = "alpha beta gamma"
        for end in range(2, len(whole) + 2, 2):
            text = whole[end - 2 : end] if self.is_incremental else whole[:end]
            yield {"text": text, "meta_info": {"completion_tokens": end // 2, "finish_reason": None}}
        text = "" if self.is_incremental else whole
        yield {"text": text, "meta_info": {"completion_tokens": 9, "finish_reason": {"type": "stop"}}}

    def id_of(self, token: str) -> int:
        if token not in self.ids:
            self.ids.append(token)
        return self.ids.index(token)


@sgl.function
def program(s, prompt):
    """Plain text with several samples."""
    s += prompt + sgl.gen("a", max_tokens=4, stop="\n") + sgl.gen("many", n=3)


def test_who_gives_no_key_or_a_wrong_one_is_told_where() -> None:
    wrong = {"error": {"message": "the API key is missing or wrong"}}
    said = r"wrong \(api_key of a backend, --api-key of a command\)"
    with FakeServer(lambda path, body: (401, wrong)) as server, pytest.raises(BackendError, match=said):
        sgl.flush_cache(sgl.RuntimeEndpoint(server.url))


def test_generation_with_a_seed_for_each_sample() -> None:
    with FakeServer(Native()) as server:
        backend = sgl.RuntimeEndpoint(server.url, api_key="secret")
        assert backend.get_model_name() == "fake"
        assert backend.base_url == server.url
        state = program.run("abc", backend=backend, seed=1)
        assert state["a"].startswith("<bc:")
        assert len(set(state["many"])) == 3
        sampling = server.requests[0][1]["sampling_params"]
        assert (sampling["max_new_tokens"], sampling["stop"], sampling["min_new_tokens"]) == (4, ["\n"], 0)
        assert not {"n", "seed", "timeout", "extra", "priority"} & set(sampling)
        assert len(server.requests) == 2
        assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
        assert sgl.flush_cache(backend) is True
        assert sgl.get_server_info(backend) == {"model_path": "fake"}
        backend.cache_prefix("a long prefix")
        assert server.requests[-1][1]["text"] == "a long prefix"
        backend.shutdown()


@pytest.mark.parametrize("is_incremental", [False, True])
def test_both_ways_to_stream_give_the_whole_text(is_incremental: bool) -> None:
    info = {"model_path": "fake", "incremental_streaming_output": is_incremental}
    with FakeServer(Native(is_incremental), model_info=info) as server:

        @sgl.function
        def one(s):
            s += sgl.gen("x")

        state = one.run(backend=sgl.RuntimeEndpoint(server.url), stream=True)
        pieces = list(state.text_iter("x"))
        assert "".join(pieces) == "alpha beta gamma" == state["x"]
        assert len(pieces) > 2
        assert state.get_meta_info("x")["completion_tokens"] == 9


PROMPTS = ["Is it\n", "tt", "a", "Answer:\n\n", "été "]
CHOICES = ["\nyes", "h", "the", "their", "é", "yes", "yes!"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "name", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_choices_are_scored_by_their_own_tokens_alone(prompt: str, name: str) -> None:
    """Also where a choice's beginning merges with the prompt's end into one token."""

    @sgl.function
    def choose(s):
        s += prompt + sgl.select("x", CHOICES, choices_method=name)

    with FakeServer(Native()) as server:
        state = choose.run(backend=sgl.RuntimeEndpoint(server.url))
        meta = state.get_meta_info("x")
        assert len(server.requests) == (2 if name.startswith("uncond") else 1)
    alone = tokens_of(prompt)
    wholes = [tokens_of(prompt + choice) for choice in CHOICES]
    whole_pairs = [list(itertools.zip_longest(alone, tokens)) for tokens in wholes]
    start = min(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) for pairs in whole_pairs)
    for tokens, entries in zip(wholes, meta["input_token_logprobs"], strict=True):
        expected = [logprob("".join(tokens[:i]), tokens[i]) for i in range(start, len(tokens))]
        if start == 0:
            expected[0] = 0.0
        assert [entry[0] for entry in entries] == pytest.approx(expected)


def test_the_servers_own_chat_template_is_used() -> None:
    @sgl.function
    def chat(s):
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x"))

    with FakeServer(Native(), model_info={"model_path": "fake", "chat_template": TEMPLATE}) as server:
        chat.run(backend=sgl.RuntimeEndpoint(server.url)).sync()
        assert server.requests[0][1]["text"] == "[user]hi[assistant]"
        named = sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
        chat.run(backend=named).sync()
        assert server.requests[1][1]["text"].startswith("<|im_start|>user")
    with FakeServer(Native()) as server, pytest.raises(ProgramError, match="chat_template="):
        chat.run(backend=sgl.RuntimeEndpoint(server.url)).sync()


def test_failures_at_construction_and_in_answers() -> None:
    with pytest.raises(BackendError, match="cannot be reached"):
        sgl.RuntimeEndpoint("http://127.0.0.1:9", max_retries=0)
    with FakeServer(lambda path, body: {"nonsense": 1}) as server, pytest.raises(ProgramError, match="has no text"):
        program.run("x", backend=sgl.RuntimeEndpoint(server.url)).sync()
    with FakeServer(Native()) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        server.failures = [503, "drop"]
        assert program.run("abc", backend=backend)["a"]
        assert sgl.RuntimeEndpoint(server.url.removeprefix("http://")).base_url == server.url


def test_a_program_that_finds_no_server_is_tried_as_often_as_other_requests() -> None:
    with FakeServer(Native(), model_info={"model_path": "fake", "programs": True}) as server:
        server.failures = [503, "drop"] * 5
        with pytest.raises(ProgramError, match="program 'program' failed"):
            program.run("abc", backend=sgl.RuntimeEndpoint(server.url, max_retries=2)).sync()
        assert len(server.requests) == 3


class Odd(FakeServer):
    """Answers programs with events that no server sends."""

    text = ""

    async def _post(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.text, content_type="text/event-stream")


@pytest.mark.parametrize(
    "text",
    [
        'id: 1\ndata: {"type": "mystery"}\n\n',
        'id: one\ndata: {"type": "done"}\n\n',
        "id: 1\ndata: [3]\n\n",
        "data: {\n",
    ],
)
def test_odd_answers_to_programs_fail_them(text: str) -> None:
    with Odd(lambda path, body: None, model_info={"model_path": "odd", "programs": True}) as server:
        server.text = text
        state = program.run("x", backend=sgl.RuntimeEndpoint(server.url, max_retries=0))
        with pytest.raises(ProgramError, match="program 'program' failed"):
            within(SOON, state.sync)


@pytest.mark.parametrize("knows_programs", [True, False])
def test_what_json_cannot_hold_is_refused(knows_programs: bool) -> None:
    @sgl.function
    def odd(s):
        s += "a" + sgl.gen("x", extra={"key": object()})

    with FakeServer(Native(), model_info={"model_path": "fake", "programs": knows_programs}) as server:
        with pytest.raises(ProgramError, match="takes JSON, which cannot hold"):
            within(SOON, odd.run(backend=sgl.RuntimeEndpoint(server.url)).sync)
        assert server.requests == []


def test_hundreds_of_programs_share_a_pool_of_connections() -> None:
    with FakeServer(Native()) as server:
        states = program.run_batch([(f"row {i}",) for i in range(300)], backend=sgl.RuntimeEndpoint(server.url))
        assert all(state["a"].startswith("<") for state in states)
        assert len(server.connections) <= 256
        assert len(server.requests) == 600


# Backends written against the original's base class


class Blocking(BaseBackend):
    """Such a backend: blocking methods that read the executor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def generate(self, s: Any, sampling_params: Any) -> Any:
        self.seen.append((s.text(), s.messages(), sampling_params))
        return f"<{sampling_params.max_new_tokens}>", {"completion_tokens": 1}

    def generate_stream(self, s: Any, sampling_params: Any) -> Any:
        for letter in "abc":
            yield letter, {"letter": letter}

    def select(self, s: Any, choices: Any, temperature: float, choices_method: Any) -> Any:
        assert choices_method is sgl.token_length_normalized
        return ChoicesDecision(choices[-1], {"normalized_prompt_logprobs": [0.0] * len(choices)})


def test_a_subclass_of_the_originals_base_class_works_as_a_backend() -> None:
    @sgl.function
    def mixed(s):
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x", max_tokens=5, stop="!", regex="a"))
        forks = s.fork(3)
        forks += sgl.select("y", ["p", "q"])
        forks.join()

    backend = Blocking()
    state = mixed.run(backend=backend)
    assert state["x"] == "<5>"
    assert state["y"] == ["q", "q", "q"]
    assert state.text() == "USER:hi\nASSISTANT:<5>\n"
    text, messages, sampling = backend.seen[0]
    assert text == "USER:hi\nASSISTANT:"
    assert messages == [{"role": "user", "content": "hi"}]
    assert (sampling.stop, sampling.regex, sampling.json_schema) == (["!"], "a", None)
    streamed = mixed.run(backend=backend, stream=True)
    assert list(streamed.text_iter("x")) == ["a", "b", "c"]
    with pytest.raises(ProgramError, match="does not generate"):
        mixed.run(backend=BaseBackend()).sync()
