"""The original language's own client drives our server. Its package is large, so only its `lang` part is loaded, from
an installed `sglang` or from the folder that $SGL_TEST_SGLANG names (an unpacked wheel); without either, skipped."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def folder_of_sglang() -> Path:
    named = os.environ.get("SGL_TEST_SGLANG")
    if named:
        return Path(named) / "sglang"
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed, and SGL_TEST_SGLANG names no folder with it")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def original() -> Iterator[Any]:
    """The namespace of the original's `lang.api`, with RuntimeEndpoint."""
    folder = folder_of_sglang()
    stubs = {name: types.ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.environ")}
    stubs["sglang"].__path__ = [str(folder)]
    stubs["sglang.srt"].__path__ = []
    stubs["sglang.srt.environ"].envs = types.SimpleNamespace()  # type: ignore[attr-defined]
    for name in ("msgspec", "msgspec.structs", "pybase64", "IPython", "IPython.display"):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            stubs[name] = types.ModuleType(name)
            vars(stubs[name]).update(HTML=None, display=None, b64encode=base64.b64encode)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        api = importlib.import_module("sglang.lang.api")
        endpoint = importlib.import_module("sglang.lang.backend.runtime_endpoint")
        choices = importlib.import_module("sglang.lang.choices")
        yield types.SimpleNamespace(**{**vars(choices), **vars(api), "RuntimeEndpoint": endpoint.RuntimeEndpoint})
    for name in set(sys.modules) - before:
        if name.startswith("sglang"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(model, **OPTIONS) as engine, served(engine, api_key="key") as server:
        yield server


@pytest.fixture(scope="module", params=["original", "ours"])
def dialect(request: pytest.FixtureRequest, server: LiveServer) -> tuple[Any, Any]:
    """A language and its backend: every test holds for the original's client and for our own."""
    namespace = request.getfixturevalue("original") if request.param == "original" else sgl
    return namespace, namespace.RuntimeEndpoint(server.url, api_key="key")


def test_gens_follow_the_text(dialect: tuple[Any, Any], server: LiveServer) -> None:
    lang, backend = dialect

    @lang.function
    def program(s: Any, word: str) -> None:
        s += "the " + word + lang.gen("first", max_tokens=5)
        s += " and " + lang.gen("second", max_tokens=7, stop="e")

    state = program.run(word="cat", backend=backend, **GREEDY)
    expected = server.engine.generate("the cat", {**GREEDY, "max_new_tokens": 5})["text"]
    assert state["first"] == expected
    assert state.text() == f"the cat{expected} and {state['second']}"
    if lang is not sgl:  # it goes on from the text, a program of ours from the tokens
        params = {**GREEDY, "max_new_tokens": 7, "stop": "e"}
        assert state["second"] == server.engine.generate(f"the cat{expected} and ", params)["text"]


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_selects_take_the_likeliest(dialect: tuple[Any, Any], server: LiveServer, method: str) -> None:
    """By mean log-probability of the tokens that follow the prompt, as the engine computes it."""
    lang, backend = dialect
    prompt, choices = "the word is ", ["table", "of", "x y z"]

    @lang.function
    def program(s: Any) -> None:
        s += prompt + lang.select("word", choices=choices, choices_method=getattr(lang, method))

    chosen = program.run(backend=backend)["word"]
    assert chosen in choices
    if method == "token_length_normalized":
        means = [sum(score.logprobs) / len(score.logprobs) for score in server.engine.score(prompt, choices)]
        assert chosen == choices[means.index(max(means))]


def test_forks_join_and_batches_keep_order(dialect: tuple[Any, Any]) -> None:
    lang, backend = dialect

    @lang.function
    def program(s: Any, topic: str) -> None:
        s += topic
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            branch += f" {i} " + lang.gen("part", max_tokens=3)
        s += "".join(branch["part"] for branch in branches) + lang.gen("end", max_tokens=2)

    states = program.run_batch([{"topic": topic} for topic in ("one", "two", "one")], backend=backend, **GREEDY)
    texts = [state.text() for state in states]
    assert texts[0] == texts[2] != texts[1]
    assert [text[:3] for text in texts] == ["one", "two", "one"]


def test_streams_bring_the_whole_text(dialect: tuple[Any, Any], server: LiveServer) -> None:
    lang, backend = dialect

    @lang.function
    def program(s: Any) -> None:
        s += "hello" + lang.gen("text", max_tokens=20)

    state = program.run(backend=backend, stream=True, **GREEDY)
    pieces = list(state.text_iter())
    assert "".join(pieces) == "hello" + server.engine.generate("hello", {**GREEDY, "max_new_tokens": 20})["text"]
    assert len(pieces) > 5


def test_logprobs_arrive(dialect: tuple[Any, Any]) -> None:
    lang, backend = dialect

    @lang.function
    def program(s: Any) -> None:
        s += "hello" + lang.gen("text", max_tokens=4, return_logprob=True, top_logprobs_num=2)

    meta = program.run(backend=backend, **GREEDY).get_meta_info("text")
    assert len(meta["output_token_logprobs"]) == 4
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4


def test_constraints_hold(dialect: tuple[Any, Any]) -> None:
    lang, backend = dialect

    @lang.function
    def program(s: Any) -> None:
        s += (
            "It is "
            + lang.gen("digits", max_tokens=8, regex=r"[0-9]{3}")
            + "; "
            + lang.gen("one", choices=["left", "right"])
        )
        s += lang.gen("number", dtype=int, max_tokens=6) + lang.gen("flag", dtype=bool, max_tokens=8)
        s += lang.gen("object", max_tokens=40, json_schema='{"type": "object", "properties": {"a": {"enum": [1]}}}')

    state = program.run(backend=backend, temperature=0)
    assert len(state["digits"]) == 3
    assert state["digits"].isdigit()
    assert state["one"] in ("left", "right")
    assert int(state["number"]) == int(state["number"].strip())
    assert state["flag"] in ("True", "False")
    assert set(json.loads(state["object"])) <= {"a"}


def test_controls_answer(dialect: tuple[Any, Any], server: LiveServer) -> None:
    _, backend = dialect
    assert backend.get_model_name() == server.engine.config.model_path
    assert backend.get_server_info()["internal_states"]
    backend.flush_cache()
    backend.cache_prefix("a prefix")
