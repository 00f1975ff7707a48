"""Every iterator over text yields pieces of text and nothing else, with or without meta info, blocking or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

import sgl
from sgl.errors import ProgramError
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.ir.choices import Scores
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint


class TellsApart(TextBackend):
    """Says with events of their own how far it is and why it ended, as APIs of OpenAI's protocol do."""

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        return [Completion("ab" if params.sampling["max_tokens"] else "") for _ in params.seeds]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        yield Completion("", {"finish_reason": {"type": "begun"}, "output_token_logprobs": [[-1.0, 0, ""]]})
        if params.sampling["max_tokens"]:
            yield Completion("a", {"finish_reason": None, "output_token_logprobs": [[-1.0, 1, "a"]]})
            yield Completion("b", {"finish_reason": None, "output_token_logprobs": [[-1.0, 2, "b"]]})
        ended = {"finish_reason": {"type": "stop"}, "completion_tokens": 2}
        yield Completion("", {**ended, "output_token_logprobs": [[-1.0, 3, ""]]})

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        return [Scores([-1.0]) for _ in choices]


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with sgl.Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        server = LiveServer(engine)
        yield {
            "calls": MockBackend(),
            "programs": ProgramBackend(MockBackend()),
            "tells apart": TellsApart(),
            "engine": engine,
            "server": sgl.RuntimeEndpoint(server.url),
        }
        server.close()


NAMES = ("calls", "programs", "tells apart", "engine", "server")


@sgl.function
def everything(s: Any) -> None:
    """Gens of some text and of none, a choice, a fork, a scope, values of Python's, and the same again in a branch."""
    s += "" + sgl.gen("word", max_tokens=4) + ""
    s += sgl.gen("nothing", max_tokens=0)
    s += sgl.gen("stopped", max_tokens=4, stop=["a", "b", " ", "<"])
    s += sgl.select("choice", ["yes", "no"])
    with s.var_scope("scope"):
        s += "in " + sgl.gen("inner", max_tokens=2)
    s["empty"], s["set"], s["number"] = "", "text", 3
    forks = s.fork(2)
    forks += lambda i: sgl.gen("part", max_tokens=3 * i)
    forks[1] += sgl.gen("alone", max_tokens=2)
    forks.join()
    s += "end" + sgl.gen("last", max_tokens=0)


TEXTS = ("word", "nothing", "stopped", "choice", "scope", "inner", "empty", "set", "part", "alone", "last", None)


def read(state: Any, name: str | None, *, is_async: bool, with_meta: bool) -> list[Any]:
    if not is_async:
        return list(state.text_iter(name, return_meta_data=with_meta))

    async def pieces() -> list[Any]:
        return [piece async for piece in state.text_async_iter(name, return_meta_data=with_meta)]

    return asyncio.run(pieces())


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_pieces_are_text_and_join_to_the_value(
    backends: dict[str, Any], kind: str, stream: bool, is_async: bool
) -> None:
    state = everything.run(backend=backends[kind], stream=stream, seed=5)
    for name in TEXTS:
        pieces = read(state, name, is_async=is_async, with_meta=False)
        assert all(isinstance(piece, str) and piece for piece in pieces), (name, pieces)
        pairs = read(state, name, is_async=is_async, with_meta=True)
        assert [text for text, _ in pairs] == pieces, name
        assert all(isinstance(meta, dict) for _, meta in pairs)
        value = state.text() if name is None else state[name]
        whole = "".join(text for text in value if text is not None) if isinstance(value, list) else value
        assert "".join(pieces) == whole, name


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_has_no_text_is_an_error(backends: dict[str, Any], kind: str, is_async: bool) -> None:
    for stream in (False, True):
        state = everything.run(backend=backends[kind], stream=stream)
        with pytest.raises(ProgramError, match="'number' is 3, which has no text"):
            read(state, "number", is_async=is_async, with_meta=True)
        with pytest.raises(ProgramError, match="never set a variable 'wrod'"):
            read(state, "wrod", is_async=is_async, with_meta=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_said_without_text_is_said_with_the_piece_beside_it(is_async: bool) -> None:
    state = everything.run(backend=TellsApart(), stream=True)
    pairs = read(state, "word", is_async=is_async, with_meta=True)
    assert [text for text, _ in pairs] == ["a", "b"]
    logprobs = [entry for _, meta in pairs for entry in meta["output_token_logprobs"]]
    assert [token for _, token, _ in logprobs] == [0, 1, 2, 3], "each once, in order"
    assert pairs[0][1]["finish_reason"] is None
    assert pairs[-1][1]["finish_reason"] == {"type": "stop"}
    assert pairs[-1][1]["completion_tokens"] == 2
    assert read(state, "nothing", is_async=is_async, with_meta=True) == []
    assert state.get_meta_info("nothing")["finish_reason"] == {"type": "stop"}


def test_states_in_async_bodies_and_branches_iterate_alike() -> None:
    @sgl.function
    async def program(s: Any) -> list[Any]:
        s += "x" + sgl.gen("a", max_tokens=1)
        forks = s.fork(2)
        forks += sgl.gen("b", max_tokens=1)
        inside = [pair async for pair in s.text_iter("a", return_meta_data=True)]
        branch = [pair async for pair in forks[1].text_iter(return_meta_data=True)]
        forks.join()
        return [inside, branch, [piece async for piece in s.text_async_iter("b")]]

    for stream in (False, True):
        state = program.run(backend=TellsApart(), stream=stream)
        state.sync()
        inside, branch, gathered = state.ret_value
        assert "".join(text for text, _ in inside) == "ab"
        assert "".join(text for text, _ in branch) == "xabab"
        assert "".join(gathered) == "abab"
        assert all(text for text, _ in [*inside, *branch])
