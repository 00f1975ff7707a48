"""Programs on an engine against three oracles: the same program call by call, one plain prompt, and transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl
from sgl.errors import InvalidRequest, ProgramError, RequestTimeout
from sgl.lang import ir
from sgl.lang.backends.engine import EngineBackend, ProgramEngineBackend, engine_backend
from sgl.runtime.engine import Engine
from tests.tiny_models import tiny_checkpoint

PAGE = 4
SECONDS = 30.0
# Whatever is sampled is text that comes out alike when it is encoded again: printable ASCII, one token a letter.
PRINTABLE = {token_id: -100.0 for token_id in range(259) if not 3 + 0 <= token_id < 3 + 94}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=259, with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", page_size=PAGE, max_total_tokens=4096, check_ledger=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test no request runs, no lease is held and each page has one owner."""
    yield
    if "engine" in request.fixturenames:
        assert_idle(request.getfixturevalue("engine"))


def assert_idle(engine: Engine) -> None:
    memory = engine._scheduler.memory
    assert engine.check_ledger() == []
    assert (len(memory.running), len(memory.leases), memory.cache.locked_pages) == (0, 0, 0)
    assert not engine._outlet._sinks


class Client:
    """A program by hand: nodes in, events out."""

    def __init__(self, engine: Engine, **program: Any) -> None:
        self.events: list[ir.Event] = []
        self.is_done = threading.Event()
        self._news = threading.Condition()
        fields = {"name": "test", "seed": 1, "defaults": {"logit_bias": PRINTABLE}, **program}
        self.session = engine.open_program(ir.Program(**fields), self._sink)

    def _sink(self, event: ir.Event) -> None:
        assert not self.is_done.is_set(), "an event came after Done"
        with self._news:
            self.events.append(event)
            self._news.notify_all()
        if isinstance(event, ir.Done):
            self.is_done.set()

    def send(self, *nodes: ir.Node | tuple[int, ir.Node], final: bool = False, answers: Any = ()) -> None:
        addressed = tuple(node if isinstance(node, tuple) else (0, node) for node in nodes)
        self.session.send(ir.Segment(addressed, tuple(answers), final))

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        """The first `count` events of a kind, once they are there."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, SECONDS), self.events
            return self.of(kind)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def finish(self, *nodes: ir.Node | tuple[int, ir.Node]) -> list[Any]:
        """Send the final segment; the NodeDone events once all is done."""
        self.send(*nodes, final=True)
        assert self.is_done.wait(SECONDS), self.events
        return self.of(ir.NodeDone)

    def error(self) -> Exception:
        [failed] = self.wait(ir.NodeFailed)
        return failed.error


def gen(name: str | None = None, **params: Any) -> ir.Gen:
    return ir.Gen(name, {"max_tokens": 6, **params})


# ── against the same program call by call ───────────────────────────────────────────────────────────────────────

words = st.sampled_from(["a", " bc", "\n", "Q: ", "x" * 9, "The quick brown fox", "<s>", "</s>"])
generation = st.builds(
    lambda tokens, stop, temperature, n: (
        "gen",
        {"max_tokens": tokens, "stop": stop, "temperature": temperature, "n": n},
    ),
    st.integers(1, 7),
    st.lists(st.sampled_from(["a", "e", "Q", "bc", "\\"]), max_size=2),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1, 1, 1, 3]),
)
simple = st.one_of(
    st.tuples(st.just("text"), words),
    generation,
    st.tuples(st.just("select"), st.lists(words, min_size=1, max_size=4, unique=True)),
    st.tuples(st.sampled_from(["ref", "observe", "scope"]), st.integers(0, 5)),
)
plans = st.lists(
    st.one_of(
        simple,
        st.tuples(
            st.sampled_from(["gather_variable", "concate_and_append"]),
            st.lists(st.lists(simple, max_size=4), min_size=1, max_size=3),
        ),
    ),
    min_size=1,
    max_size=6,
)


@sgl.function
def random_program(s: Any, plan: list[Any], is_chat: bool) -> list[Any]:
    if not is_chat:
        s += "\u2022"
        return run_plan(s, plan, {})
    values = []
    for i, step in enumerate(plan):
        with s.user() if i % 2 else s.assistant():
            s += "."
            values += run_plan(s, [step], {}, prefix=str(i))
    return values


def run_plan(s: Any, plan: list[Any], known: dict[str, Any], prefix: str = "") -> list[Any]:
    """Append the steps; returns what was observed on the way."""
    seen: list[Any] = []
    names: list[str] = []
    for i, (kind, value) in enumerate(plan):
        name = f"v{prefix}_{i}"
        if kind == "text":
            s += value
        elif kind == "gen":
            s += sgl.gen(name, **value)
            names.append(name)
        elif kind == "select":
            s += sgl.select(name, value)
            names.append(name)
        elif kind == "ref" and names:
            single = names[value % len(names)]
            s += s.ref(single).upper()
        elif kind == "observe" and names:
            seen.append(s[names[value % len(names)]])
        elif kind == "scope":
            with s.var_scope(name):
                s += "("
                s += sgl.gen(f"{name}g", max_tokens=value + 1)
            seen.append(s[name])
        elif kind in ("gather_variable", "concate_and_append"):
            forks = s.fork(len(value))
            for j, (fork, steps) in enumerate(zip(forks, value, strict=True)):
                seen += run_plan(fork, steps, known, f"{prefix}_{i}_{j}")
            forks.join(kind)
    return seen


@given(plans, st.booleans(), st.integers(0, 3), st.booleans())
@settings(max_examples=80)
def test_a_program_writes_what_it_writes_call_by_call(
    engine: Engine, plan: list[Any], is_chat: bool, seed: int, stream: bool
) -> None:
    """Texts, values, messages, and the number of tokens of each prompt and output."""
    states = []
    for backend in (EngineBackend(engine), ProgramEngineBackend(engine)):
        state = random_program.run(
            plan=plan,
            is_chat=is_chat,
            backend=backend,
            chat_template="chatml",
            seed=seed,
            logit_bias=PRINTABLE,
            stream=stream,
        )
        pieces = list(state.text_iter())
        assert state.error() is None
        assert "".join(pieces) == state.text()
        states.append(state)
    one, other = states
    assert other.text() == one.text()
    assert other.ret_value == one.ret_value
    assert other.messages() == one.messages()
    assert list(other._stream.names) == list(one._stream.names)
    for name in one._stream.names:
        assert other[name] == one[name]
        for before, after in zip(*(metas_of(state, name) for state in states), strict=True):
            for key in ("prompt_tokens", "completion_tokens", "finish_reason"):
                assert after.get(key) == before.get(key)
            if "probabilities" in before:
                for key in ("probabilities", "normalized_prompt_logprobs"):
                    assert after[key] == pytest.approx(before[key], abs=1e-4)


def metas_of(state: Any, name: str) -> list[dict[str, Any]]:
    """What is known of the name's value, in one branch or one sample or several."""

    def flat(meta: Any) -> list[dict[str, Any]]:
        return [one for each in meta for one in flat(each)] if isinstance(meta, list) else [meta or {}]

    return flat(state.get_meta_info(name))
