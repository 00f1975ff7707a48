"""Programs as they are written for the original language, but for the import line, on a small engine and as requests.

They are the shapes of its own tests and benchmarks, written anew: few-shot, multi-turn, JSON by regexes, ReAct, trees,
parallel decoding, chain-of-thought decoding, judging by branches, long documents in parallel.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.lang.backends.http import HttpClient
from sgl.lang.ir.choices import greedy_token_selection
from sgl.lang.ir.nodes import REGEX_FLOAT, REGEX_INT, REGEX_STR
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.live_server import LiveServer
from tests.patience import PATIENCE
from tests.test_lang_engine import folder as folder
from tests.test_lang_requests import tree_of_thought

pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture(scope="module", params=["in process", "over HTTP"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """What programs run on, as the default backend too: an engine, or a server of it."""
    with sgl.Engine(model_path=str(folder), device="cpu", max_total_tokens=16384) as engine:
        if request.param == "in process":
            sgl.set_default_backend(engine)
            yield engine
        else:
            server = LiveServer(engine)
            sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
            yield sgl.global_config.default_backend
            server.close()
        sgl.set_default_backend(None)


@sgl.function
def few_shot_qa(s, question):
    s += "The following are questions with answers.\n\n"
    s += "Q: What is the capital of France?\n"
    s += "A: Paris\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


def test_few_shot(engine: Any) -> None:
    state = few_shot_qa.run(question="What is the capital of Italy?", max_new_tokens=8)
    assert "\n" not in state["answer"]
    rets = few_shot_qa.run_batch([{"question": "a?"}, {"question": "b?"}], temperature=0.1, max_new_tokens=8)
    for ret, question in zip(rets, "ab", strict=True):
        assert ret.text().endswith(f"Q: {question}?\nA:" + ret["answer"])
    stream = few_shot_qa.run(question="c?", stream=True, max_new_tokens=8)
    out = ""
    for chunk in stream.text_iter("answer"):
        out += chunk
    assert out == stream["answer"]


@sgl.function
def mt_bench(s, question_1, question_2):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1"))
    with s.user():
        s += question_2
    with s.assistant():
        s += sgl.gen("answer_2")


def test_multi_turn(engine: Any) -> None:
    states = mt_bench.run_batch(
        [{"question_1": f"one {i}", "question_2": "two"} for i in range(4)], max_new_tokens=6, num_threads=2
    )
    for i, state in enumerate(states):
        assert state.messages()[1]["content"] == f"one {i}"
        assert state.messages()[4]["content"] == state["answer_2"].lstrip()


@sgl.function
def decode_json(s):
    s += "Generate a JSON object to describe a city.\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen(regex=REGEX_STR, max_tokens=8) + ",\n"
        s += '  "population": ' + sgl.gen(regex=REGEX_INT, stop=[" ", "\n"], max_tokens=6) + ",\n"
        s += '  "area": ' + sgl.gen(regex=REGEX_FLOAT, stop=[" ", "\n"], max_tokens=6) + "\n"
        s += "}"


def test_json_by_regexes_in_a_scope(engine: Any) -> None:
    state = decode_json.run(temperature=0.8, seed=2)
    text = state["json_output"]
    assert text.endswith("}")
    pattern = r'\{\n  "name": "[\w\s]*"?,\n  "population": [-+]?\d*[ \n]*,\n  "area": [-+]?[\d.]*[ \n]*\n\}'
    assert re.fullmatch(pattern, text)


@sgl.function
def dtype_gen(s):
    s += "q: 1 + 1 a: " + sgl.gen("int_result", dtype=int, max_tokens=4)
    s += "\nis it? " + sgl.gen("bool_result", dtype=bool)
    s += "\nhow much? " + sgl.gen("float_result", dtype=float, max_tokens=4)
    s += "\nsay: " + sgl.gen_string("str_result", max_tokens=40)
    s += sgl.gen_int("another", max_tokens=4)


def test_dtypes(engine: Any) -> None:
    state = dtype_gen.run(seed=4)
    int(state["int_result"])
    float(state["float_result"])
    assert state["bool_result"] in ("True", "False")
    assert state["str_result"].startswith('"')


@sgl.function
def tool_use(s, question):
    s += "To answer this question: " + question + ", "
    s += "I need to use a " + sgl.gen("tool", choices=["calculator", "web browser"]) + ". "
    if s["tool"] == "calculator":
        s += "The math expression is: " + sgl.gen("expression", regex=r"[0-9] \+ [0-9]")
        s += f" = {eval(s['expression'])}"
    elif s["tool"] == "web browser":
        s += "The website url is: " + sgl.gen("url", max_tokens=6)


def test_control_flow_on_choices(engine: Any) -> None:
    state = tool_use.run(question="What is 5 + 5?")
    assert state["tool"] in ("calculator", "web browser")
    assert ("expression" in state) == (state["tool"] == "calculator")
    assert len(state.get_meta_info("tool")["normalized_prompt_logprobs"]) == 2


@sgl.function
def webthink(s, question, search_results):
    s += "Question: " + question + "\n"
    for i in range(1, len(search_results) + 1):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", stop="\n", max_tokens=6)
        s += f"\nAction {i}:" + sgl.gen(f"action_{i}", stop="\n", max_tokens=4)
        s += f"\nObservation {i}:" + search_results[i - 1] + "\n"


def test_react_without_looking_is_one_request(engine: Any) -> None:
    arguments = [{"question": f"q{i}", "search_results": ["found x", "found y", "end"]} for i in range(5)]
    states = webthink.run_batch(arguments, temperature=0, num_threads=64, progress_bar=False)
    assert [state.text()[: len("Question: q0")] for state in states] == [f"Question: q{i}" for i in range(5)]
    backend = ProgramBackend(MockBackend(lambda *_: "x"))
    webthink.run(**arguments[0], backend=backend).sync()
    assert backend.requests == 1


def propose_plan(s: Any, question: str, num_branches: int) -> Any:
    s += sgl.user("Propose a plan for: " + question)
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=6, temperature=0.5))
    return forks


def execute_plan(s: Any, num_branches: int) -> Any:
    s += sgl.user("Execute the plan.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=6, temperature=0.5))
    return forks


@sgl.function
def tree_search(s, question, num_branches):
    forks_to_join = []
    plan_forks = propose_plan(s, question, num_branches)
    forks_to_join.append(plan_forks)
    solutions = []
    for plan_fork in plan_forks:
        for solution in execute_plan(plan_fork, num_branches):
            solution += sgl.user("Reflect.") + sgl.assistant(sgl.gen("score", max_tokens=4))
            solutions.append(solution)
    solutions = [s.text() for s in solutions]
    for forks in reversed(forks_to_join):
        forks.join()
    return solutions


def test_tree_of_thought_with_helpers_that_fork(engine: Any) -> None:
    state = tree_search.run("24", 2, backend=engine, seed=9)
    assert len(state.ret_value) == 4
    assert all(text.startswith("<s>user\nPropose a plan for: 24") for text in state.ret_value)
    assert len(state["plan"]) == 2
    backend = ProgramBackend(MockBackend(lambda *_: "x"))
    tree_search.run("24", 2, backend=backend).sync()
    assert backend.requests <= 2  # the texts of the leaves are looked at once


@sgl.function
def tip_suggestion(s, topic):
    s += "Here are 2 tips for " + topic + ".\n1. " + sgl.gen("tip_1", stop=[".", "\n"], max_tokens=5)
    s += ".\n2. " + sgl.gen("tip_2", stop=[".", "\n"], max_tokens=5) + ".\n"
    forks = s.fork(2)
    for i in range(2):
        forks[i] += f"Now, expand tip {i + 1} into a paragraph:\n"
        forks[i] += sgl.gen("detailed_tip", max_tokens=8, stop=["\n\n"])
    s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
    s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
    s += "In summary" + sgl.gen("summary", max_tokens=6)


def test_parallel_decoding(engine: Any) -> None:
    state = tip_suggestion.run(topic="learning", temperature=0.3)
    assert state.text().count("Tip ") == 2
    assert state["summary"] in state.text()
    assert state.usage["requests"] <= 3


@sgl.function
def parallel_encoding(s, question, documents):
    s += "Answer from these documents.\n"
    forks = s.fork(len(documents))
    forks += lambda i: f"Document {i}: {documents[i]}\n"
    forks.join(mode="concate_and_append")
    s += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=6)


def test_parallel_encoding(engine: Any) -> None:
    documents = ["alpha", "beta", "gamma"]
    state = parallel_encoding.run("which?", documents)
    shown = "".join(f"Document {i}: {text}\n" for i, text in enumerate(documents))
    assert state.text().startswith("Answer from these documents.\n" + shown + "Q: which?\nA:")


DIMENSIONS = ["clarity", "rigour", "style"]


@sgl.function
def multi_dimensional_judge(s, article):
    s += "\n```\n" + article + "\n```\n\n"
    forks = s.fork(len(DIMENSIONS))
    for i in range(len(DIMENSIONS)):
        forks[i] += "Judge by " + DIMENSIONS[i] + ": " + sgl.gen("judgment", max_tokens=6, stop="END")
    forks.join()
    s += "Judgments: "
    for i in range(len(DIMENSIONS)):
        s += DIMENSIONS[i] + ": " + forks[i]["judgment"].strip() + "\n"
    s += "Grade:" + sgl.select("grade", ["A", "B", "C"], choices_method=greedy_token_selection)


def test_judging_by_branches(engine: Any) -> None:
    states = multi_dimensional_judge.run_batch([{"article": "x" * 40}, {"article": "y" * 40}], temperature=0)
    for state in states:
        assert len(state["judgment"]) == 3
        assert state["grade"] in "ABC"


@sgl.function
def hellaswag(s, prefix, choices):
    s += prefix + sgl.select("answer", choices=choices)


def test_a_batch_of_selects_keeps_its_order(engine: Any) -> None:
    rows = [{"prefix": f"The {i}th ", "choices": [f"ending {i}", f"another {i}"]} for i in range(12)]
    states = hellaswag.run_batch(rows, temperature=0, num_threads=64, generator_style=True)
    assert [state["answer"][-len(str(i)) :] for i, state in enumerate(states)] == [str(i) for i in range(12)]


@sgl.function
def cot_decoding(s, question, k):
    s += "Question: " + question + "\nAnswer:"
    step_0 = s.fork(1)[0]
    step_0 += sgl.gen(
        "get_top_k", max_tokens=0, return_logprob=True, top_logprobs_num=k, return_text_in_logprobs=True
    )
    logprobs = step_0.get_meta_info("get_top_k")["output_top_logprobs"][0]
    forks = s.fork(k)
    for fork, (_, _, text) in zip(forks, logprobs, strict=True):
        fork += text + sgl.gen(
            "answer",
            temperature=0,
            max_tokens=6,
            return_logprob=True,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
        )
    answers = []
    for fork in forks:
        gaps = [exp(x[0][0]) - exp(x[1][0]) for x in fork.get_meta_info("answer")["output_top_logprobs"]]
        answers.append((str(fork), sum(gaps) / len(gaps)))
    return answers


def test_chain_of_thought_decoding_over_logprobs(engine: Any) -> None:
    state = cot_decoding.run("how many?", 3, backend=engine)
    texts = [text for text, _ in state.ret_value]
    assert len(set(texts)) == 3
    assert all(text.startswith("ProgramState(Question: how many?\nAnswer:") for text in texts)
    assert all(0 <= gap <= 1 for _, gap in state.ret_value)


@sgl.function
def min_tokens(s):
    s += "x" + sgl.gen("long", min_tokens=12, max_tokens=20) + sgl.gen("short", max_tokens=3)


def test_token_counts(engine: Any) -> None:
    state = min_tokens.run()
    assert 12 <= state.get_meta_info("long")["completion_tokens"] <= 20
    assert state.get_meta_info("short")["completion_tokens"] <= 3


@sgl.function
def stop_kinds(s):
    s += "a" + sgl.gen("by_regex", stop_regex="[a-z]{2}", max_tokens=30, seed=1)
    s += "b" + sgl.gen("by_id", stop_token_ids=[5, 6, 7, 8], max_tokens=30, ignore_eos=True)


def test_stops(engine: Any) -> None:
    state = stop_kinds.run()
    assert not re.search("[a-z]{2}", state["by_regex"])


@sgl.function
def self_consistency(s, question):
    s += question
    forks = s.fork(5)
    forks += sgl.gen("answer", max_tokens=4, temperature=0.9)
    forks.join()
    return max(set(s["answer"]), key=s["answer"].count)


def test_votes_over_branches(engine: Any) -> None:
    state = self_consistency.run("1 + 1 = ", backend=engine)
    assert state.ret_value in state["answer"]


@sgl.function
def expert_answer(s, question):
    s += (
        "Question: "
        + question
        + "\nA good person to answer this is"
        + sgl.gen("expert", stop=[".", "\n"], max_tokens=4)
    )
    s += ".\nFor instance, " + s["expert"] + " would answer" + sgl.gen("answer", stop=".", max_tokens=6)


def test_values_are_appended_again(engine: Any) -> None:
    state = expert_answer.run(question="Why?", temperature=0)
    assert state.text().count(state["expert"]) >= 2


@sgl.function
def json_schema_gen(s):
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    )
    s += "As JSON:" + sgl.gen("json_output", temperature=0, json_schema=schema, max_tokens=30)


def test_json_schema_as_a_string(engine: Any) -> None:
    assert json.loads(json_schema_gen.run()["json_output"])["a"] in (1, 2)


@sgl.function
def sub_program(s, topic):
    s += "On " + topic + ":" + sgl.gen("words", max_tokens=4)


@sgl.function
def caller(s, topics):
    parts = [sub_program(topic) for topic in topics]
    s += "All: " + ", ".join(part["words"] for part in parts) + sgl.gen("end", max_tokens=3)


def test_programs_call_programs(engine: Any) -> None:
    state = caller.run(["rain", "snow"], backend=engine, seed=1)
    assert state.text().startswith("All: ")


def test_bind_and_default_arguments(engine: Any) -> None:
    @sgl.function
    def program(s, a, b=" world"):
        s += a + b + sgl.gen("x", max_tokens=2)

    bound = program.bind(a="hello")
    assert bound.run(backend=engine).text().startswith("hello world")
    assert [state.text()[:6] for state in bound.run_batch([{"b": "1"}, {"b": "2"}])] == ["hello1", "hello2"]


def test_requests_on_the_wire(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(engine, sgl.RuntimeEndpoint):
        pytest.skip("nothing goes over a wire")
    sent: list[str] = []
    send = HttpClient._try

    async def counted(self: HttpClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(f"{method} {path}")
        return await send(self, method, path, *args, **kwargs)

    monkeypatch.setattr(HttpClient, "_try", counted)
    for program, arguments, num_observed in (
        (few_shot_qa, {"question": "why?"}, 0),
        (mt_bench, {"question_1": "a", "question_2": "b"}, 0),
        (decode_json, {}, 0),
        (parallel_encoding, {"question": "q", "documents": ["a", "b", "c"]}, 0),
        (webthink, {"question": "q", "search_results": ["x", "y"]}, 0),
        (hellaswag, {"prefix": "a", "choices": ["b", "c"]}, 0),
        (tree_of_thought, {"question": "24"}, 0),
        (expert_answer, {"question": "q"}, 1),
        (self_consistency, {"question": "q"}, 1),
        (cot_decoding, {"question": "q", "k": 2}, 3),
    ):
        sent.clear()
        state = program.run(**arguments, backend=engine, max_new_tokens=4)
        done = threading.Event()
        state.when_done(done.set)
        assert done.wait(PATIENCE)
        assert state.error() is None
        assert 1 <= len(sent) <= 1 + num_observed, (program, sent)
        assert state.usage["requests"] == len(sent)
