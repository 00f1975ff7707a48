"""Programs on an engine against three oracles: the same program call by call, one plain prompt, and transformers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

import sgl
import sgl.errors
import sgl.lang.ir.choices
from sgl.errors import InvalidRequest, ProgramError, RequestTimeout
from sgl.lang.backends.engine import EngineBackend, engine_backend
from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from tests.engine_calls import CallByCall
from tests.program_client import PRINTABLE, SECONDS, Client, assert_idle, gen
from tests.tiny_models import byte_tokenizer, tiny_checkpoint

PAGE = 4


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", page_size=PAGE, max_total_tokens=4096, check_ledger=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose tokenizer has tokens of two letters."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("merging"), with_tokenizer=True, seed=5)
    with Engine(str(folder), device="cpu", page_size=PAGE, max_total_tokens=4096, check_ledger=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test no request runs, no lease is held and each page has one owner."""
    yield
    if "engine" in request.fixturenames:
        assert_idle(request.getfixturevalue("engine"))


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
@settings(max_examples=40)
def test_a_program_writes_what_it_writes_call_by_call(
    engine: Engine, plan: list[Any], is_chat: bool, seed: int, stream: bool
) -> None:
    """Texts, values, messages, and the number of tokens of each prompt and output."""
    states = []
    for backend in (CallByCall(engine), EngineBackend(engine)):
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


# ── what reaches the engine ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompt of every request from now on."""
    return spy(engine, monkeypatch)


def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []
    submissions = engine._builder.submissions

    def record(ask: Any, **options: Any) -> Any:
        pairs = submissions(ask, **options)
        seen.extend(submission.request.prompt_ids.tolist() for submission, _ in pairs)
        return pairs

    monkeypatch.setattr(engine._builder, "submissions", record)
    return seen


def encoded(engine: Engine, text: str) -> list[int]:
    """As the continuation of something."""
    return engine.tokenizer.encode(text, add_special_tokens=False).tolist()


def test_a_gen_is_one_request_and_constants_are_none(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine)
    first, second = client.finish(
        ir.Text("Hello"), gen(), ir.Text(" and "), ir.Text("so on"), gen(), ir.Text("x" * 5000)
    )
    head = [1, *encoded(engine, "Hello")]
    between = encoded(engine, f"{first.text} and so on")
    assert prompts == [head, [*head, *between]]
    assert len(second.text) == 6


def test_programs_without_a_gen_reach_no_model(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine)
    fork = ir.Fork((1, 2))
    assert client.finish(ir.Text("a"), fork, (1, ir.Text("b")), ir.Join((1, 2), "append")) == []
    assert prompts == []


def test_a_gen_continues_the_very_tokens_that_were_generated(
    merging: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the tokenizer would make of their text."""
    prompts = spy(merging, monkeypatch)
    plain = merging.generate("the rest", {"max_new_tokens": 20, "seed": 3, "ignore_eos": True})
    kept = plain["output_ids"]
    assert merging.tokenizer.encode(plain["text"], add_special_tokens=False).tolist() != kept
    prompts.clear()
    client = Client(merging, defaults={"ignore_eos": True})
    first, second = client.finish(
        ir.Text("the rest"), gen(max_tokens=20, seed=3), ir.Text("the"), gen(temperature=0.0)
    )
    assert first.text == plain["text"]
    prompt = [*merging.tokenizer.encode("the rest").tolist(), *kept, *encoded(merging, "the")]
    assert prompts[1] == prompt
    direct = merging.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    )
    assert second.text == direct["text"]
    assert_idle(merging)


def test_a_token_that_reaches_over_a_stop_is_encoded_anew_with_what_follows(
    merging: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "th" is one token, and so is "he"; the stop ends the text between their letters."""
    prompts = spy(merging, monkeypatch)
    ids = merging.tokenizer.hf.convert_tokens_to_ids
    client = Client(merging)
    only = {token: -100.0 for token in range(384) if token != ids("th")}
    gens = [gen(max_tokens=9, stop=stop, logit_bias=only) for stop in (["h"], ["ht"], ["hth"])]
    for count, node in enumerate(gens):
        client.send(ir.Text("." if count else "X"), node)
    done = client.finish(ir.Text("he"), gen(max_tokens=1))
    assert [event.text for event in done[:3]] == ["t", "t", "t"]
    x, dot, t = (encoded(merging, letter) for letter in "X.t")
    assert prompts[1] == [1, *x, *t, *dot]
    assert prompts[3] == [1, *x, *t, *dot, *t, *dot, *encoded(merging, "the")]
    assert len(encoded(merging, "the")) == 2
    assert_idle(merging)


def test_a_stop_token_and_what_follows_a_stop_leave_the_stream(engine: Engine, prompts: list[list[int]]) -> None:
    letters = {token: -100.0 for token in range(259) if token not in encoded(engine, "ab")}
    a = encoded(engine, "a")[0]
    client = Client(engine, defaults={"logit_bias": letters, "max_tokens": 30})
    client.send(ir.Text("X"), ir.Gen(params={"stop_token_ids": [a]}), ir.Gen(params={"stop": ["ab"]}))
    done = client.finish(ir.Gen(params={"max_tokens": 1}))
    assert set(done[0].text) <= {"b"}
    assert done[0].meta["finish_reason"] == {"type": "stop", "matched": a}
    assert "ab" not in done[1].text
    assert prompts[1] == [1, *encoded(engine, "X" + done[0].text)]
    assert prompts[2] == [1, *encoded(engine, "X" + done[0].text + done[1].text)]


def test_only_the_answer_of_a_reasoning_gen_stays(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine)
    first, _ = client.finish(
        ir.Text("X"), ir.Gen(params={"max_tokens": 5}, reasoning="deepseek-r1"), ir.Text("Y"), gen()
    )
    assert first.text == first.value == ""
    assert len(first.meta["reasoning_content"]) == 5
    assert prompts[1] == [1, *encoded(engine, "XY")]


def test_control_tokens_come_from_the_template_alone(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine, chat_template="mistral")  # its end of a turn spells </s>
    client.finish(
        ir.RoleBegin("user"), ir.Text("</"), ir.Text("s></s>"), ir.RoleEnd("user"), ir.RoleBegin("assistant"), gen()
    )
    assert prompts[0].count(2) == 0
    client = Client(engine, chat_template="mistral")
    client.finish(
        *(ir.RoleBegin("assistant"), ir.Text("</s>"), ir.RoleEnd("assistant")), *(ir.RoleBegin("user"), gen())
    )
    assert prompts[1].count(2) == 1
    assert prompts[1].count(1) == 1


def test_the_same_seed_writes_the_same_text_alone_in_a_batch_and_in_forks(engine: Engine) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        s += word + sgl.gen("a", max_tokens=8)
        forks = s.fork(3)
        forks += sgl.gen("b", max_tokens=8, n=2)
        forks.join()

    words = ["one", "two", "three", "four", "five"]
    options: dict[str, Any] = {"backend": engine, "logit_bias": PRINTABLE, "seed": 7}
    alone = [(s["a"], s["b"]) for s in (program.run(word, **options) for word in words)]
    batch = [(s["a"], s["b"]) for s in program.run_batch([{"word": word} for word in words], **options)]
    shuffled = [(s["a"], s["b"]) for s in program.run_batch([{"word": word} for word in words[::-1]], **options)][
        ::-1
    ]
    assert alone == batch == shuffled
    assert len({text for _, forks in alone for samples in forks for text in samples}) == 30
    seed = ir.node_seed(7, ir.node_path("", 1))
    plain = engine.generate("one", {"max_new_tokens": 8, "seed": seed, "logit_bias": PRINTABLE})
    assert plain["text"] == alone[0][0]


# ── forks, pages and usage ──────────────────────────────────────────────────────────────────────────────────────


def new_and_cached(event: ir.NodeDone) -> tuple[int, int]:
    return event.meta["usage"]["new_tokens"], event.meta["usage"]["cached_tokens"]


@pytest.mark.parametrize("length", [20, 21, 23])
def test_branches_are_admitted_together_and_share_the_pages_of_what_is_before(
    engine: Engine, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 branches after `length` tokens, of which the last has been generated and is not computed yet: a whole page
    that this one completes is computed by the first branch, and then shared as well."""
    rows: list[int] = []
    forward = engine._loop._runner.forward

    def count(batch: Any) -> Any:
        rows.append(len(batch))
        return forward(batch)

    engine.flush_cache()
    client = Client(engine)
    client.send(ir.Text("x" * (length - 4)), gen(max_tokens=3))
    client.wait(ir.NodeDone)
    monkeypatch.setattr(engine._loop._runner, "forward", count)
    client.send(ir.Fork(tuple(range(1, 65))))
    client.send(*((i, ir.Text(chr(32 + i))) for i in range(1, 65)))
    done = client.finish(*((i, gen(max_tokens=2)) for i in range(1, 65)))[1:]
    shared = (length - 1) // PAGE * PAGE
    followers = length // PAGE * PAGE
    assert sorted(new_and_cached(event) for event in done) == sorted(
        [(length + 1 - shared, shared)] + 63 * [(length + 1 - followers, followers)]
    )
    assert rows == ([64, 64] if shared == followers else [1, 64, 63])
    assert {event.meta["usage"]["generated_tokens"] for event in done} == {2}


def test_branches_that_go_on_in_several_turns_all_write(engine: Engine) -> None:
    branches = range(1, 301)
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork(tuple(branches)), *((i, ir.Text(str(i))) for i in branches))
    done = client.finish(*((i, gen(max_tokens=1)) for i in branches), ir.Join(tuple(branches)), gen(max_tokens=1))
    assert len({event.stream for event in done}) == 301


def test_usage_counts_every_token_once(engine: Engine) -> None:
    engine.flush_cache()
    client, counters = Client(engine), engine._scheduler.counters
    before = counters.generated_tokens
    first, second, chosen, sampled = client.finish(
        *(ir.Text("x" * 9), gen(max_tokens=5), ir.Text("yz"), gen(max_tokens=4)),
        *(ir.Select(None, ("no", "maybe")), gen(max_tokens=3, n=2)),
    )
    assert [event.meta["prompt_tokens"] for event in (first, second)] == [10, 17]
    assert new_and_cached(first) == (10, 0)
    assert new_and_cached(second) == (17 - 12, 12)  # of 14 tokens computed before, the whole pages
    assert sum(new_and_cached(chosen)) == (21 + 1) + (21 + 4)  # each choice but for its last token
    assert chosen.meta["usage"]["forced_tokens"] == len(chosen.text)
    assert sum(new_and_cached(sampled)) == 2 * (21 + len(chosen.text))
    assert [event.meta["usage"]["generated_tokens"] for event in (first, second, chosen, sampled)] == [5, 4, 0, 6]
    assert counters.generated_tokens - before == 5 + 4 + 6
    for event in (first, second, chosen, sampled):
        assert event.meta["usage"]["queue_seconds"] >= 0
        assert event.meta["usage"]["compute_seconds"] > 0
    assert [event.meta["usage"]["lease"] for event in (first, second, chosen, sampled)] == [
        None,
        "held",
        "held",
        "held",
    ]


def test_constraints_hold_and_forced_tokens_are_counted(engine: Engine) -> None:
    first, number, chosen = Client(engine).finish(
        *(ir.Text("X"), ir.Gen("a", {"max_tokens": 40}, {"regex": "[ab]{3} and so on"})),
        *(
            ir.Gen("b", {"max_tokens": 8}, dtype="int"),
            ir.Gen("c", {"max_tokens": 60}, {"json": {"enum": ["yes", "no"]}}),
        ),
    )
    assert re.fullmatch("[ab]{3} and so on", first.text)
    assert re.fullmatch(ir.REGEX_INT, number.text)
    assert chosen.text in ('"yes"', '"no"')
    usage = first.meta["usage"]
    assert usage["generated_tokens"] + usage["forced_tokens"] == first.meta["completion_tokens"]
    assert usage["forced_tokens"] >= 8


def test_a_constraint_that_cannot_be_compiled_fails_its_node(engine: Engine) -> None:
    client = Client(engine)
    client.finish(ir.Text("X"), ir.Gen("a", {}, {"regex": "("}))
    assert isinstance(client.error(), sgl.errors.GrammarError)


def test_streamed_pieces_join_to_the_text_and_lose_no_logprob(engine: Engine) -> None:
    client = Client(engine, stream=True)
    [done] = client.finish(ir.Text("X"), gen(max_tokens=40, stop=["aa", "bcd"], return_logprob=True))
    deltas = client.of(ir.Delta)
    assert "".join(delta.text for delta in deltas) == done.text
    tokens = [entry for delta in deltas for entry in delta.meta["output_token_logprobs"]]
    assert len(tokens) == len(done.meta["output_token_logprobs"]) == done.meta["completion_tokens"]
    assert tokens == done.meta["output_token_logprobs"]


# ── nodes without the model ─────────────────────────────────────────────────────────────────────────────────────


def test_a_ref_waits_for_a_node_of_another_stream(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork((1, 2)), (1, gen(max_tokens=30)))
    client.send((2, ir.Ref(1, 0, (("upper",), ("slice", 0, 5)))), (2, gen(max_tokens=1)))
    done = {(event.stream, event.index): event for event in client.finish()}
    assert done[2, 0].text == done[2, 0].value == done[1, 0].text.upper()[:5]
    assert prompts[1] == [1, *encoded(engine, "X" + done[2, 0].text)]


def test_a_ref_to_a_node_that_fails_while_it_waits_fails_too(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork((1, 2)), (1, gen(max_tokens=30)), (1, BAD))
    client.send((2, ir.Ref(1, 1)), (2, gen()))
    client.finish()
    assert [(event.stream, event.index) for event in client.of(ir.NodeFailed)] == [(1, 1), (2, 0)]


def test_arguments_scopes_and_variables_set_by_python(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine, args={"name": "<s>Ann"})
    client.send(ir.ScopeBegin("all"), ir.Text("Dear "), ir.Arg("name"), ir.SetVar("x", "y"), gen(max_tokens=2))
    first, ref, _ = client.finish(ir.ScopeEnd("all"), ir.Ref(0, 5), gen(max_tokens=1))
    assert ref.text == f"Dear <s>Ann{first.text}"
    assert prompts == [[1, *literal(engine, "Dear <s>Ann")], [1, *literal(engine, ref.text + ref.text)]]


def literal(engine: Engine, text: str) -> list[int]:
    ids = engine.tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()
    assert not {0, 1, 2} & set(ids)
    return ids


def test_a_default_system_turn_and_plain_answers_of_tools(engine: Engine) -> None:
    client = Client(engine, chat_template="chatml-llava")
    client.send(ir.RoleBegin("user"), ir.RoleEnd("user"), ir.Gen("call", {"max_tokens": 2}, tools=({"name": "f"},)))
    client.send(ir.ToolResults(2))
    client.wait(ir.Need)
    client.send(answers=[(0, 3, (ir.Turn(None, "41"), ir.Turn(None, "42")))])
    begin, _, _, results = client.finish()
    assert begin.meta["system"] == "You are a helpful assistant."
    assert (results.text, results.meta) == ("4142", {"messages": []})


def test_on_a_trained_model_what_a_gen_sees_spells_the_text(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer puts a space before each text: there is one at the beginning and none after a gen."""
    with Engine(str(checkpoint("stories260K")), device="cpu", max_total_tokens=2048, check_ledger=True) as engine:
        prompts = spy(engine, monkeypatch)
        client = Client(engine, defaults={"temperature": 0.0})
        first, chosen, last = client.finish(
            *(
                ir.Text("Once upon a time"),
                gen(max_tokens=9),
                ir.Text("\nIt was a "),
                ir.Select(None, ("cat", "dog")),
            ),
            *(ir.Text(" and it"), gen(max_tokens=5)),
        )
        text = f"Once upon a time{first.text}\nIt was a {chosen.text} and it"
        assert engine.tokenizer.decode(prompts[-1]) == text
        assert first.text == ", there was a little girl named Lily"[: len(first.text)]
        direct = engine.generate(input_ids=prompts[-1], sampling_params={"temperature": 0.0, "max_new_tokens": 5})
        assert last.text == direct["text"]
        assert_idle(engine)


# ── select ──────────────────────────────────────────────────────────────────────────────────────────────────────

SELECTS = [
    ("The sky is", (" blue", " red", " blueish", " b")),
    ("\n\n\n\n", ("\n", "\n\n", "x")),
    ("So on: t", ("he", "hen", "o", "e")),  # the first token of three merges with the prompt's last
    ("Ça va", (" très", " 你好", " 😀", "…")),
    ("one of", ("a", "b", "c", "d")),
]


@pytest.mark.parametrize(("prompt", "choices"), SELECTS)
@pytest.mark.parametrize("method", sorted(sgl.lang.ir.choices.METHODS))
def test_select_scores_equal_those_of_score(
    merging: Engine, prompt: str, choices: tuple[str, ...], method: str
) -> None:
    [done] = Client(merging).finish(ir.Text(prompt), ir.Select("x", choices, method))
    expected = merging.score(prompt, choices)
    for entries, score in zip(done.meta["input_token_logprobs"], expected, strict=True):
        assert [entry[1] for entry in entries] == score.token_ids
        assert [entry[0] for entry in entries] == pytest.approx(score.logprobs, abs=1e-4)
    if method == "unconditional_likelihood_normalized":
        alone = merging.score([], [score.token_ids for score in expected])
        for given_alone, score in zip(done.meta["unconditional_token_logprobs"], alone, strict=True):
            assert given_alone[0] is None
            assert given_alone[1:] == pytest.approx(score.logprobs[1:], abs=1e-4)
    assert sum(done.meta["probabilities"]) == pytest.approx(1)
    assert done.value in choices
    assert_idle(merging)


@pytest.mark.parametrize(("prompt", "choices"), SELECTS)
def test_select_scores_equal_those_of_transformers(merging: Engine, prompt: str, choices: tuple[str, ...]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(merging.config.model_path, dtype=torch.float32)
    [done] = Client(merging).finish(ir.Text(prompt), ir.Select("x", choices))
    for choice, entries in zip(choices, done.meta["input_token_logprobs"], strict=True):
        ids = merging.tokenizer.encode(prompt + choice).tolist()
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(ids) - len(entries)
        assert [entry[1] for entry in entries] == ids[start:]
        expected = [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
        assert [entry[0] for entry in entries] == pytest.approx(expected, abs=1e-4)


def test_choices_of_one_token_take_one_row(engine: Engine, prompts: list[list[int]]) -> None:
    Client(engine).finish(ir.Text("X"), ir.Select("x", tuple("abcdefgh")))
    assert prompts == [[1, *encoded(engine, "X")]]


def test_a_select_after_a_gen_continues_its_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    first, chosen, _ = Client(engine).finish(
        ir.Text("X"), gen(), ir.Select("x", ("yes", "no")), ir.Text("."), gen()
    )
    start = [1, *encoded(engine, "X" + first.text)]
    assert prompts[1:3] == [[*start, *encoded(engine, "n")], [*start, *encoded(engine, "ye")]]
    assert prompts[3] == [*start, *encoded(engine, f"{chosen.text}.")]


def test_what_has_no_token_before_it_says_so(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=259)
    tokenizer = byte_tokenizer(259)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save_pretrained(tmp_path)
    with Engine(str(tmp_path), device="cpu", max_total_tokens=512) as without_bos:
        for node in (ir.Select("x", ("a", "b")), gen()):
            client = Client(without_bos)
            client.finish(node)
            assert isinstance(client.error(), InvalidRequest)


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────

BAD = ir.Gen("bad", {"logprob_start_len": 10_000, "return_logprob": True})


def test_a_failed_node_fails_what_depends_on_it_and_nothing_else(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork((1, 2, 3)))
    client.send((1, BAD), (1, gen("later")), (1, ir.Fork((4,))), (4, gen("forked later")))
    client.send((2, gen("good")), (2, ir.Ref(1, 1)), (2, gen("after the ref")), (3, gen("good too")))
    done = client.finish((3, ir.Ref(2, 0)), ir.Join((1, 2, 3)), gen("joined"))
    failed = client.of(ir.NodeFailed)
    assert sorted((event.stream, event.index) for event in failed) == [(1, 0), (2, 1)]
    errors = {event.stream: event.error for event in failed}
    assert isinstance(errors[1], InvalidRequest)
    assert errors[1].param == "logprob_start_len"
    assert isinstance(errors[2], ProgramError)
    assert sorted((event.stream, event.index) for event in done) == [(2, 0), (3, 0), (3, 1)]


def test_nodes_that_come_after_a_failure_fail_too(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork((1, 2)), (1, BAD))
    client.wait(ir.NodeFailed)
    client.send((1, gen()), (1, ir.Fork((3,))), (3, gen()), (2, ir.Ref(3, 0)))
    assert client.finish((2, gen())) == []
    assert [(event.stream, event.index) for event in client.of(ir.NodeFailed)] == [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("node", "param"),
    [
        (ir.Media("image", "AAAA"), "media"),
        (ir.RoleBegin("user"), None),
        (ir.Gen(params={"stop_regex": ["("]}), "stop_regex"),
        (ir.Gen(params={"temperature": -1.0}), "temperature"),
        (ir.Gen(params={"extra": {"extra_kee": "x"}}), "extra"),
        (ir.Gen(params={"max_tokens": 0, "min_tokens": 3}), "min_new_tokens"),
        (ir.Gen(params={"timeout": -1.0}), "timeout"),
    ],
)
def test_what_cannot_be_served_is_a_typed_error_at_its_node(
    engine: Engine, node: ir.Node, param: str | None
) -> None:
    client = Client(engine)
    assert client.finish(ir.Text("X"), node) == []
    [failed] = client.of(ir.NodeFailed)
    assert (failed.stream, failed.index) == (0, 1)
    assert isinstance(failed.error, InvalidRequest)
    assert failed.error.param == param


def test_a_segment_that_breaks_the_rules_is_refused_when_it_is_sent(engine: Engine) -> None:
    client = Client(engine)
    with pytest.raises(InvalidRequest, match="never forked"):
        client.send((5, gen()))
    client.session.cancel()
    client = Client(engine)
    with pytest.raises(InvalidRequest, match="limit"):
        client.send(ir.Text("X"), *(gen() for _ in range(10_001)))
    client.session.cancel()
    with pytest.raises(InvalidRequest, match="seed"):
        engine.open_program(ir.Program("x", seed="one"), print)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="template"):
        engine.open_program(ir.Program("x", 1, chat_template="no such template"), print)


def test_tools_are_answered_by_the_client(engine: Engine, prompts: list[list[int]]) -> None:
    client = Client(engine, chat_template="chatml")
    client.send(ir.RoleBegin("assistant"), ir.Gen("call", {"max_tokens": 3}, tools=({"name": "f"},)))
    client.send(ir.RoleEnd("assistant"), ir.ToolResults(1))
    [need] = client.wait(ir.Need)
    assert (need.stream, need.index) == (0, 3)
    turn = ir.Turn("tool", "42", "f", "id1")
    client.send(ir.RoleBegin("assistant"), gen(), answers=[(0, 3, (turn,))])
    done = client.finish()
    [results] = [event for event in done if event.index == 3]
    assert results.text == "<|im_start|>tool\n42<|im_end|>\n"
    assert results.meta["messages"] == [{"role": "tool", "content": "42", "name": "f", "tool_call_id": "id1"}]
    assert len(prompts) == 2


def test_a_gen_and_a_program_may_take_only_so_long(engine: Engine) -> None:
    client = Client(engine)
    client.finish(ir.Text("X"), gen(max_tokens=900, timeout=0.02), gen())
    error = client.error()
    assert isinstance(error, RequestTimeout)
    for nodes in ([ir.Text("X"), gen(max_tokens=900)], [ir.Text("waits for its client")]):
        client = Client(engine, deadline_s=0.05)
        client.send(*nodes)
        error = client.error()
        assert isinstance(error, RequestTimeout)
        assert error.seconds == 0.05
        assert client.of(ir.NodeFailed)[0].stream is None
        assert client.is_done.wait(SECONDS)
        assert_idle(engine)


def test_aborting_all_requests_fails_the_gens_that_run(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("X"), ir.Fork((1, 2)), (1, gen(max_tokens=900)), (2, ir.Text("waits")))
    deadline = time.monotonic() + SECONDS
    while not engine._scheduler.num_running and time.monotonic() < deadline:
        time.sleep(0.001)
    engine.abort(None)
    assert isinstance(client.error(), sgl.errors.RequestAborted)
    assert [event.stream for event in client.finish((2, gen()))] == [2]


def test_a_client_that_fails_ends_its_program_and_not_the_engine(engine: Engine) -> None:
    ended = threading.Event()

    def sink(event: ir.Event) -> None:
        if isinstance(event, ir.Done):
            ended.set()
        raise ValueError("the client's own")

    session = engine.open_program(ir.Program("x", 1), sink)
    session.send(ir.Segment(((0, ir.Text("X")), (0, gen()))))
    assert ended.wait(SECONDS)
    assert engine.generate("X", {"max_new_tokens": 2})["text"] is not None


def test_a_stopped_engine_ends_its_programs(folder: Path) -> None:
    engine = Engine(str(folder), device="cpu", max_total_tokens=2048)
    running, waiting, long = (Client(engine) for _ in range(3))
    running.send(ir.Text("X"), gen(max_tokens=900))
    waiting.send(ir.Text("X"), gen())
    waiting.wait(ir.NodeDone)
    long.send(ir.Text("x" * 900), gen())
    engine.shutdown()
    for client in (running, long):
        assert client.is_done.wait(SECONDS)
        assert isinstance(client.error(), sgl.errors.EngineDead)
    with pytest.raises(sgl.errors.EngineDead):
        waiting.send(gen())
    waiting.session.cancel()
    with pytest.raises(sgl.errors.EngineDead):
        Client(engine).send(gen())


def test_an_engine_without_text_runs_no_programs(folder: Path) -> None:
    with (
        Engine(str(folder), device="cpu", max_total_tokens=512, skip_tokenizer_init=True) as engine,
        pytest.raises(InvalidRequest, match="tokenizer"),
    ):
        engine.open_program(ir.Program("x", 1), print)


def test_thousands_of_programs_that_wait_need_no_thread_and_no_step(engine: Engine) -> None:
    before = threading.active_count()
    clients = [Client(engine) for _ in range(2000)]
    for client in clients:
        client.send(ir.Text("X"))
    steps = engine.get_server_info()["internal_states"][0]["steps"]
    assert threading.active_count() <= before + 2  # the tokenizer's pool, if no test has used it yet
    for client in clients[::100]:
        assert len(client.finish(gen(max_tokens=1))) == 1
    for client in clients:
        client.session.cancel()
        assert client.is_done.wait(SECONDS)
    assert engine.get_server_info()["internal_states"][0]["steps"] >= steps
    assert isinstance(engine_backend(engine), EngineBackend)
