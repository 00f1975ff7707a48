"""The OpenAI backend against a server: what it sends, retries, deadlines, connection reuse, streaming."""

from __future__ import annotations

import itertools
import json
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
    assert "temperature" not in body  # nobody set it: it is the server's to choose
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


SELECTS = {
    "no logprobs": {"text": "x"},
    "null": {"text": "x", "logprobs": None},
    "of the chat API": {"text": "x", "logprobs": {"content": [{"token": "x", "logprob": -1.0}]}},
    "no echo": {"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [-1.0], "text_offset": [0]}},
    "no offsets": {"text": "x", "logprobs": {"tokens": ["Ok? yes"], "token_logprobs": [None], "text_offset": None}},
    "nulls": {
        "text": "x",
        "logprobs": {"tokens": ["Ok? ", "yes"], "token_logprobs": [None, None], "text_offset": [0, 4]},
    },
    "one choice": [{"text": "x"}],
    "404": (404, {"detail": "Not Found"}),
    "405": (405, {"detail": "Method Not Allowed"}),
    "400": (400, {"error": {"message": "Setting 'echo' and 'logprobs' at the same time is not supported"}}),
}


@pytest.mark.parametrize("kind", SELECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_select_on_a_server_without_logprobs_says_what_to_do(kind: str, stream: bool) -> None:
    given = SELECTS[kind]

    def answer(path: str, body: Any) -> Any:
        if isinstance(given, tuple):
            return given
        return {"choices": given if isinstance(given, list) else [given for _ in body["prompt"]]}

    @sgl.function
    def program(s):
        s += "Ok? " + sgl.select("x", ["no", "yes"])

    with FakeServer(answer) as server:
        state = program.run(backend=completion_model(server), stream=stream)
        with pytest.raises(ProgramError, match=r"select 'x' .*needs the log-probabilities") as caught:
            state.sync()
        assert isinstance(caught.value.__cause__, BackendError)
        for words in (server.url, "is_chat_model=True", "vLLM", "test_lang_openai.py:"):
            assert words in str(caught.value)
        native = program.run(backend=sgl.RuntimeEndpoint(server.url), stream=stream)
        with pytest.raises(ProgramError, match="select 'x' ") as caught:
            native.sync()
        assert not isinstance(caught.value.__cause__.__cause__, KeyError | TypeError | AttributeError)


@pytest.mark.parametrize("meta", [{}, {"input_token_logprobs": None}, {"input_token_logprobs": []}, None])
def test_a_select_on_a_native_server_without_logprobs_says_what_to_do(meta: Any) -> None:
    @sgl.function
    def program(s):
        s += "Ok? " + sgl.select("x", ["no", "yes"])

    def answer(path: str, body: Any) -> Any:
        return [{"text": "", "meta_info": meta} for _ in body["text"]]

    with FakeServer(answer) as server, pytest.raises(ProgramError, match="needs the log-probabilities") as caught:
        program.run(backend=sgl.RuntimeEndpoint(server.url)).sync()
    assert isinstance(caught.value.__cause__, BackendError)
    assert server.url in str(caught.value)


@pytest.mark.parametrize("text", ["yes", '{"choice": "maybe"}', "[]", ""])
def test_a_chat_model_that_is_held_to_no_schema_says_so(text: str) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("pick") + sgl.assistant(sgl.select("x", ["no", "yes"]))

    found = r"select 'x'.*(did not choose|which is none of)"
    given = {"choices": [{"index": 0, "message": {"content": text}}]}
    with FakeServer(lambda path, body: given) as server, pytest.raises(ProgramError, match=found):
        program.run(backend=chat_model(server)).sync()


def test_a_chat_api_that_refuses_schemas_cannot_select() -> None:
    @sgl.function
    def program(s):
        s += sgl.user("pick") + sgl.assistant(sgl.select("x", ["no", "yes"]))

    with FakeServer(Refusing("response_format")) as server:
        with pytest.raises(ProgramError, match=r"select 'x' .*enforces JSON Schemas.*sgl serve") as caught:
            program.run(backend=chat_model(server)).sync()
        assert isinstance(caught.value.__cause__, BackendError)
        assert server.url in str(caught.value)


# What models refuse


class Refusing:
    """A server whose model takes some parameters only, and says of the others what OpenAI's says."""

    def __init__(self, *refused: str, hint: str = "") -> None:
        self.refused = refused
        self.hint = hint

    def __call__(self, path: str, body: Any) -> Any:
        for name in self.refused:
            if name in body:
                text = f"Unsupported parameter: '{name}' is not supported with this model.{self.hint}"
                return 400, {"error": {"message": text, "param": name, "code": "unsupported_parameter"}}
        return answer(path, body)


@sgl.function
def short(s, question):
    s += sgl.user(question) + sgl.assistant(sgl.gen("a", max_tokens=9))


NEW, OLD = "max_completion_tokens", "max_tokens"
MODELS = {
    **dict.fromkeys(
        ("o1", "o1-mini", "o3-2025-04-16", "o4-mini", "gpt-5", "gpt-5.1", "gpt-5-mini", "openai/o3"), NEW
    ),
    **dict.fromkeys(("ft:gpt-5-mini:me", "azure/gpt-5.2-codex"), NEW),
    **dict.fromkeys(
        ("gpt-4o", "gpt-4.1", "gpt-3.5-turbo", "gpt-oss-120b", "olmo-3", "phi-o3", "llama-o1", "o1b"), OLD
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_limit_of_tokens_is_called_as_the_model_wants_it(server: FakeServer, model: str, stream: bool) -> None:
    state = short.run("why", backend=sgl.OpenAI(model, base_url=server.url, api_key="k"), stream=stream)
    assert state["a"] == "<why0>"
    [(_, body)] = server.requests
    assert body[MODELS[model]] == 9
    assert not {NEW, OLD} - {MODELS[model]} & body.keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "refused", "hint", "taken"),
    [
        ("some-new-model", OLD, " Use 'max_completion_tokens' instead.", NEW),
        ("o3-served-by-others", NEW, "", OLD),
    ],
)
def test_the_name_of_the_limit_is_learnt_from_a_refusal(
    model: str, refused: str, hint: str, taken: str, stream: bool
) -> None:
    with FakeServer(Refusing(refused, hint=hint)) as server:
        backend = sgl.OpenAI(model, base_url=server.url, api_key="k")
        for _ in range(3):
            assert short.run("why", backend=backend, stream=stream)["a"] == "<why0>"
        assert [refused in body for _, body in server.requests] == [True, False, False, False], "once"
        assert all(body[taken] == 9 for _, body in server.requests[1:])
        states = short.run_batch([("a b c",)] * 8, backend=sgl.OpenAI(model, base_url=server.url, api_key="k"))
        assert [state["a"] for state in states] == ["<b c0>"] * 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_is_wrong_under_either_name_is_the_apis_error(stream: bool) -> None:
    texts = ["max_tokens is too large: 9. This model supports at most 4 completion tokens", ""]
    with FakeServer(lambda path, body: (400, {"error": {"message": texts[0]}})) as server:
        backend = chat_model(server)
        for _ in range(2):
            with pytest.raises(ProgramError, match="too large"):
                short.run("why", backend=backend, stream=stream).sync()
        assert [OLD in body for _, body in server.requests] == [True, True]
    with FakeServer(Refusing(OLD, NEW)) as server:
        with pytest.raises(ProgramError, match="is not supported with this model"):
            short.run("why", backend=chat_model(server), stream=stream).sync()
        assert len(server.requests) == 2


def test_a_limit_in_the_protocols_own_name_is_sent_as_it_is(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("why") + sgl.assistant(sgl.gen("a", extra={NEW: 77}))

    program.run(backend=chat_model(server)).sync()
    program.run(backend=chat_model(server, extra_body={OLD: 5})).sync()
    short.run("why", backend=chat_model(server, extra_body={NEW: 5})).sync()
    assert [(body.get(OLD), body.get(NEW)) for _, body in server.requests] == [(None, 77), (5, 77), (None, 5)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "sent", "asked"),
    [
        ({"temperature": 0}, "temperature", "temperature"),
        ({"top_p": 0.5}, "top_p", "top_p"),
        ({"stop": "x"}, "stop", "stop"),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "frequency_penalty"),
        ({"return_logprob": True}, "logprobs", "return_logprob"),
        ({"n": 2}, "n", "n"),
        ({"schema": dict[str, int]}, "response_format", "schema"),
    ],
)
def test_what_a_model_refuses_and_was_asked_for_is_named(
    params: dict[str, Any], sent: str, asked: str, stream: bool
) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("why") + sgl.assistant(sgl.gen("a", **params))

    with FakeServer(Refusing(sent)) as server:
        with pytest.raises(ProgramError, match=f"some-chat-model takes no {asked}=.*leave {asked} out") as caught:
            program.run(backend=chat_model(server), stream=stream).sync()
        assert isinstance(caught.value.__cause__, InvalidRequest)
        assert caught.value.__cause__.param == asked
        assert len(server.requests) == 1
    only = (
        f"Unsupported value: '{sent}' does not support 0 with this model. Only the default (1) value is supported."
    )
    extra = f"[{{'loc': ('body', '{sent}'), 'msg': 'Extra inputs are not permitted'}}]"
    for refusal in ((400, only), (400, extra), (403, f"You are not allowed to request '{sent}' from this model")):
        given = refusal[0], {"error": {"message": refusal[1]}}
        with FakeServer(lambda path, body, given=given: given) as server:
            state = program.run(backend=chat_model(server), stream=stream)
            with pytest.raises(ProgramError, match=f"takes no {asked}="):
                state.sync()


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_asked_for_is_left_out_where_it_is_refused(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(Refusing("seed", "stream_options", OLD)) as server:
        backend = chat_model(server)
        for _ in range(2):
            assert short.run("why", backend=backend, stream=stream)["a"] == "<why0>"
        assert len(server.requests) == (5 if stream else 4)
        assert server.requests[-1][1].keys() >= {NEW, "messages"}
        assert "seed" not in server.requests[-1][1]
    assert sum("takes no seed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_program_sets_is_sent_though_it_is_the_default(server: FakeServer, stream: bool) -> None:
    """A server may have other defaults: its model's."""
    given: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}

    @sgl.function
    def program(s):
        s += sgl.user("why") + sgl.assistant(sgl.gen("a", temperature=1.0, top_k=-1))

    program.run(backend=chat_model(server), stream=stream, top_p=1.0, repetition_penalty=1.0).sync()
    body = server.requests[0][1]
    assert {name: body.get(name) for name in given} == given
    assert "min_p" not in body
    with FakeServer(Refusing("top_k")) as strict:
        backend = chat_model(strict)
        for _ in range(2):
            assert program.run(backend=backend, stream=stream)["a"] == "<why0>"
        assert len(strict.requests) == 3
        assert strict.requests[-1][1]["temperature"] == 1.0


def test_a_select_needs_no_temperature() -> None:
    def refuses(path: str, body: Any) -> Any:
        if "temperature" in body:
            return 400, {
                "error": {"message": "Unsupported value: 'temperature' does not support 0.0 with this model."}
            }
        return {"choices": [{"index": 0, "message": {"content": '{"choice": "b"}'}}]}

    @sgl.function
    def program(s):
        s += sgl.user("pick") + sgl.assistant(sgl.select("x", ["a", "b"]))

    with FakeServer(refuses) as server:
        backend = sgl.OpenAI("o3", base_url=server.url, api_key="k")
        assert [program.run(backend=backend)["x"] for _ in range(2)] == ["b", "b"]
        assert len(server.requests) == 3
        with pytest.raises(ProgramError, match="takes no temperature"):
            short.run("why", backend=backend, temperature=0.5).sync()


def test_answers_with_nulls_are_read() -> None:
    choice = {"index": 0, "message": None, "delta": None, "text": None, "finish_reason": None, "logprobs": None}
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}

    def nulls(path: str, body: Any) -> Any:
        event = {"choices": [choice], "usage": usage}
        return iter([event]) if body.get("stream") else event

    with FakeServer(nulls) as server:
        for stream in (False, True):
            for backend in (chat_model(server), completion_model(server)):
                assert completion.run("a", backend=completion_model(server), stream=stream).text() == "a|"
                assert short.run("why", backend=backend, stream=stream)["a"] == ""


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
    with pytest.raises(ProgramError, match="did not answer within") as caught:
        completion.run("abc", backend=completion_model(server, timeout=0.1)).sync()
    assert isinstance(caught.value.__cause__, RequestTimeout)
    assert len(server.requests) <= 1, "it is not repeated; on a slow machine it is late before it is sent"


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
