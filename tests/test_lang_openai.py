"""The OpenAI backend against a server: what it sends, retries, deadlines, connection reuse, streaming."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import sgl
from sgl.errors import BackendError, ConfigError, InvalidRequest, ProgramError, RequestTimeout
from tests.fake_servers import FakeServer
from tests.test_lang_errors import wait_until
from tests.test_lang_tools import add


def answer(path: str, body: Any) -> Any:
    """`n` choices that say what was asked, whole or in events."""
    if body.get("stream"):
        return events(path, body)
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    texts = [f"<{reply(body)}{i}>" for i in range(body.get("n", 1))]
    if path.endswith("/chat/completions"):
        choices = [
            {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for i, text in enumerate(texts)
        ]
    else:
        choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(texts)]
    return {"choices": choices[::-1], "usage": usage}


def events(path: str, body: Any) -> Iterator[Any]:
    """The same as a stream of letters."""
    for letter in f"<{reply(body)}0>":
        delta = {"delta": {"content": letter}} if path.endswith("/chat/completions") else {"text": letter}
        yield {"choices": [{"index": 0, **delta, "finish_reason": None}]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def reply(body: Any) -> str:
    """The last words of the prompt."""
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])[-3:]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(answer) as running:
        yield running


def chat_model(server: FakeServer, **options: Any) -> sgl.OpenAI:
    """A chat model served there."""
    return sgl.OpenAI("some-chat-model", base_url=server.url + "/v1", api_key="k", **options)


def completion_model(server: FakeServer, **options: Any) -> sgl.OpenAI:
    """A completion model served there."""
    return sgl.OpenAI("gpt-3.5-turbo-instruct", base_url=server.url + "/v1", **options)


@sgl.function
def chat(s, question):
    """A short conversation."""
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a", max_tokens=9, stop="\n", temperature=0.5))
    s += sgl.user("Really?")
    s += sgl.assistant(sgl.gen("b"))


@sgl.function
def completion(s, text):
    """Plain text."""
    s += text + sgl.gen("a", max_tokens=9) + "|" + sgl.gen("b")


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_sent_as_messages(server: FakeServer, stream: bool) -> None:
    state = chat.run("why", backend=chat_model(server), seed=1, stream=stream)
    assert (state["a"], state["b"]) == ("<why0>", "<ly?0>")
    path, body = server.requests[1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "<why0>"},
        {"role": "user", "content": "Really?"},
    ]
    first = server.requests[0][1]
    assert (first["max_tokens"], first["stop"], first["temperature"]) == (9, ["\n"], 0.5)
    assert "temperature" not in body  # the server's default is that of the language
    assert first["seed"] != body["seed"]
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert state.get_meta_info("a")["completion_tokens"] == 3
    assert state.usage["requests"] == 2
    if stream:
        assert "".join(state.text_iter("b")) == state["b"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_sent_as_text(server: FakeServer, stream: bool) -> None:
    state = completion.run("abc", backend=completion_model(server), stream=stream)
    assert state.text() == "abc<abc0>|<0>|0>"
    assert server.requests[1] == ("/v1/completions", {**server.requests[1][1], "prompt": "abc<abc0>|"})


def test_parameters_of_the_language_that_the_protocol_has_are_sent(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen(
            "a", n=2, top_k=5, min_p=0.1, frequency_penalty=1.0, logit_bias={3: -1.0}, extra={"user": "me"},
            return_logprob=True, top_logprobs_num=2,
        )  # fmt: skip

    backend = completion_model(server, extra_body={"service_tier": "flex"})
    state = program.run(backend=backend)
    assert state["a"] == ["<x0>", "<x1>"]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("a")] == [3, 0]
    body = server.requests[0][1]
    expected = {
        "n": 2,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 1.0,
        "logit_bias": {"3": -1.0},
        "logprobs": 2,
    }
    assert body == {**body, **expected, "user": "me", "service_tier": "flex"}


def test_json_schemas_are_sent_and_other_constraints_refused(server: FakeServer) -> None:
    @sgl.function
    def typed(s):
        s += sgl.user("q") + sgl.assistant(sgl.gen("x", schema=dict[str, int]))

    @sgl.function
    def regex(s):
        s += sgl.user("q") + sgl.assistant(sgl.gen("x", regex="a+"))

    typed.run(backend=chat_model(server)).sync()
    sent = server.requests[0][1]["response_format"]["json_schema"]
    assert sent["strict"] is True
    assert sent["schema"]["type"] == "object"
    with pytest.raises(ProgramError, match="cannot enforce a regex"):
        regex.run(backend=chat_model(server)).sync()


@pytest.mark.parametrize("stream", [False, True])
def test_dtypes_take_the_beginning_that_fits_or_fail(stream: bool) -> None:
    answers = {"hours": " 24.\nAnd", "days": "365", "name": '"Ada L"\nand', "is_it": "True.", "wrong": "about 7"}

    def answer(path: str, body: Any) -> Any:
        text = answers[body["prompt"].rsplit(" ", 1)[1]]
        return {"choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}

    @sgl.function
    def program(s, name, dtype):
        s += f"what is {name}" + sgl.gen("x", dtype=dtype)

    with FakeServer(answer) as server:
        backend = completion_model(server)
        run = lambda *args: program.run(*args, backend=backend, stream=stream)  # noqa: E731
        assert run("hours", int)["x"] == "24"
        assert run("days", int).value("x") == 365
        assert run("name", str)["x"] == '"Ada L"'
        assert run("is_it", bool).value("x") is True
        with pytest.raises(ProgramError, match="which is no int"):
            run("wrong", int).sync()
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (10, 5)
        backend.token_usage.reset()
        assert backend.token_usage.prompt_tokens == 0


def test_a_chat_model_foresees_a_whole_turn() -> None:
    """Its gens are cut out of a turn that keeps to the program's constants; one that does not is asked for again."""
    turns = ["I cannot.", "Name: Ada.\nBorn: 1815\nJob: writer\n", "Sorry"]

    def answer(path: str, body: Any) -> Any:
        return {"choices": [{"index": 0, "message": {"content": turns.pop(0)}}], "usage": {}}

    @sgl.function(num_api_spec_tokens=64)
    def character(s):
        s += sgl.user("Make up a character.")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n") + "\nBorn:" + sgl.gen("born", stop="\n") + "\nJob:"
            + sgl.gen("job", stop="\n")
        )  # fmt: skip
        s += sgl.user("Thanks.")

    with FakeServer(answer) as server:
        state = character.run(backend=chat_model(server))
        assert [state[name] for name in ("name", "born", "job")] == [" Ada.", " 1815", " writer"]
        assert state.messages()[1]["content"] == "Name: Ada.\nBorn: 1815\nJob: writer"
        assert state.usage["requests"] == len(server.requests) == 2
        assert server.requests[0][1]["seed"] != server.requests[1][1]["seed"]
        turns += ["no", "no"]
        with pytest.raises(ProgramError, match="no turn that begins with 'Name:'"):
            character.run(backend=chat_model(server)).sync()


def test_a_chat_api_cannot_continue_a_begun_turn(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("q") + sgl.assistant_begin() + "Sure," + sgl.gen("x")

    with pytest.raises(ProgramError, match="whole assistant turns") as caught:
        program.run(backend=chat_model(server)).sync()
    assert isinstance(caught.value.__cause__, InvalidRequest)


def test_tools_and_their_results_travel_in_the_protocols_form() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}]

    def answer(path: str, body: Any) -> Any:
        is_second = body["messages"][-1]["role"] == "tool"
        message = {"content": "it is 5"} if is_second else {"content": None, "tool_calls": calls}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {}}

    @sgl.function
    def program(s):
        s += sgl.user("3 + 2?")
        return sgl.agent(s, [add])

    with FakeServer(answer) as server:
        state = program.run(backend=chat_model(server))
        assert state.ret_value == "it is 5"
        first, second = (body for _, body in server.requests)
        assert first["tools"][0]["function"]["name"] == "add"
        assert second["messages"][1:] == [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "5", "name": "add", "tool_call_id": "c1"},
        ]


def test_streamed_tool_calls_are_put_together() -> None:
    def answer(path: str, body: Any) -> Any:
        if body["messages"][-1]["role"] == "tool":
            yield {"choices": [{"index": 0, "delta": {"content": "done"}}]}
            return
        pieces = [
            {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}},
            {"index": 1, "id": "c2", "function": {"name": "add", "arguments": '{"a"'}},
            {"index": 0, "function": {"arguments": '{"a": 1}'}},
            {"index": 1, "function": {"arguments": ": 2}"}},
        ]
        for piece in pieces:
            yield {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]}

    @sgl.function
    def program(s):
        s += sgl.user("go")
        s += sgl.assistant(sgl.gen("x", tools=[add]))
        s += sgl.assistant(sgl.gen("y"))

    with FakeServer(answer) as server:
        state = program.run(backend=chat_model(server), stream=True)
        assert state["y"] == "done"
        assert [call.result for call in state.value("x")] == [3, 4]


def test_images_are_sent_as_content_parts(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user(sgl.image(b"png") + "what?") + sgl.assistant(sgl.gen("x"))

    program.run(backend=chat_model(server)).sync()
    content = server.requests[0][1]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]


# select


def test_a_chat_model_selects_by_an_enumerated_answer() -> None:
    def answer(path: str, body: Any) -> Any:
        options = body["response_format"]["json_schema"]["schema"]["properties"]["choice"]["enum"]
        text = json.dumps({"choice": options[-1]})
        return {"choices": [{"index": 0, "message": {"content": text}}], "usage": {}}

    @sgl.function
    def program(s):
        s += sgl.user("pick") + sgl.assistant(sgl.select("x", ["a", "b"]))

    with FakeServer(answer) as server:
        assert program.run(backend=chat_model(server))["x"] == "b"


def test_a_completion_model_selects_by_the_logprobs_of_echoed_texts() -> None:
    """Letters are tokens; `yes` is likelier than `no` after the prompt."""

    def answer(path: str, body: Any) -> Any:
        assert body["echo"] is True
        assert body["max_tokens"] == 0
        choices = []
        for i, text in enumerate(body["prompt"]):
            logprobs = [None, *[-0.1 if letter in "yes" else -2.0 for letter in text[1:]]]
            entries = {"tokens": list(text), "text_offset": list(range(len(text))), "token_logprobs": logprobs}
            choices.append({"index": i, "text": text, "logprobs": entries})
        return {"choices": choices[::-1]}

    @sgl.function
    def program(s, method):
        s += "Ok? " + sgl.select("x", ["no", "yes"], choices_method=method)

    with FakeServer(answer) as server:
        for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
            state = program.run(method, backend=completion_model(server))
            assert state["x"] == "yes"
            assert state.get_meta_info("x")["normalized_prompt_logprobs"] == pytest.approx([-2.0, -0.1])
        state = program.run(sgl.unconditional_likelihood_normalized, backend=completion_model(server))
        assert state.get_meta_info("x")["unconditional_token_logprobs"] == [[None, -2.0], [None, -0.1, -0.1]]


# Failures and connections


@pytest.mark.parametrize("failures", [[500], [429, 503], ["drop"], ["drop", 502, 408]])
@pytest.mark.parametrize("stream", [False, True])
def test_what_may_help_is_tried_again(server: FakeServer, failures: list[Any], stream: bool) -> None:
    server.failures = list(failures)
    state = completion.run("abc", backend=completion_model(server), stream=stream, seed=3)
    assert state["a"] == "<abc0>"
    bodies = [body for _, body in server.requests[: len(failures) + 1]]
    assert all(body == bodies[0] for body in bodies)  # with the seed it had


@pytest.mark.parametrize("status", [400, 404, 401])
def test_what_cannot_help_is_not_tried_again(server: FakeServer, status: int) -> None:
    server.failures = [status]
    with pytest.raises(ProgramError, match="scripted") as caught:
        completion.run("abc", backend=completion_model(server)).sync()
    assert len(server.requests) == 1
    assert isinstance(caught.value.__cause__, BackendError if status == 401 else InvalidRequest)


def test_tries_end(server: FakeServer) -> None:
    server.failures = [500] * 9
    with pytest.raises(ProgramError, match="scripted") as caught:
        completion.run("abc", backend=completion_model(server, max_retries=1)).sync()
    assert len(server.requests) == 2
    assert caught.value.__cause__.status == 500


def test_a_stream_that_breaks_off_is_an_error_and_not_repeated(server: FakeServer) -> None:
    server.failures = [3]
    state = completion.run("abc", backend=completion_model(server), stream=True)
    pieces = state.text_iter("a")
    assert "".join(itertools.islice(pieces, 3)) == "<ab"
    with pytest.raises(ProgramError, match="broke off"):
        next(pieces)
    assert len(server.requests) == 1


def test_a_server_that_hangs_times_out(server: FakeServer) -> None:
    server.failures = ["hang"]
    start = time.monotonic()
    with pytest.raises(ProgramError, match="did not answer within") as caught:
        completion.run("abc", backend=completion_model(server, timeout=0.1)).sync()
    assert isinstance(caught.value.__cause__, RequestTimeout)
    assert time.monotonic() - start < 5
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_an_error() -> None:
    backend = sgl.OpenAI("m", base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=1)
    with pytest.raises(ProgramError, match="cannot be reached"):
        completion.run("abc", backend=backend).sync()


def test_connections_are_kept(server: FakeServer) -> None:
    backend = completion_model(server, max_connections=4)
    completion.run_batch([(str(i),) for i in range(40)], backend=backend)
    assert len(server.requests) == 80
    assert len(server.connections) <= 4


def test_cancelling_closes_the_stream() -> None:
    def answer(path: str, body: Any) -> Any:
        yield {"choices": [{"index": 0, "text": "x"}]}
        yield "hang"

    with FakeServer(answer) as server:
        state = completion.run("abc", backend=completion_model(server), stream=True)
        assert next(iter(state.text_iter("a"))) == "x"
        state.cancel()
        wait_until(lambda: server.disconnects == 1)


def test_a_server_that_talks_nonsense_is_an_error() -> None:
    for nonsense in ({"object": "list"}, {"choices": []}, [], {"choices": [{}], "usage": None}):
        with FakeServer(lambda path, body, nonsense=nonsense: nonsense) as server:
            state = completion.run("abc", backend=completion_model(server))
            if nonsense == {"choices": [{}], "usage": None}:
                assert state["a"] == ""
            else:
                with pytest.raises(ProgramError):
                    state.sync()


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, variable in ((sgl.OpenAI, "OPENAI_API_KEY"), (sgl.Anthropic, "ANTHROPIC_API_KEY")):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConfigError, match=variable):
            backend("model")
        monkeypatch.setenv(variable, "from the environment")
        assert backend("model").model_name == "model"
    for other in (sgl.Crusoe, sgl.LiteLLM, sgl.VertexAI):
        assert other("model", api_key="k").is_chat_model
