"""Programs of every kind, run on the default backend and checked: a test of new backends.

Checks hold for any model; `check_answer` also asks for sense."""

from __future__ import annotations

import base64
import json
import re
import time
from typing import Any

from sgl.lang import api as sgl


def test_few_shot_qa() -> None:
    """Few-shot questions, alone and as a batch; answers end at a line's end."""

    @sgl.function
    def answer(s: Any, question: str) -> None:
        s += "Q: How many legs has a spider?\nA: Eight\nQ: Which planet is the largest?\nA: Jupiter\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", max_tokens=16, temperature=0)

    alone = answer.run(question="Which city is the capital of Peru?")
    together = answer.run_batch([{"question": "Which city is the capital of Peru?"}, {"question": "And of Chad?"}])
    assert "\n" not in alone["answer"]
    assert together[0]["answer"] == alone["answer"]


def test_mt_bench() -> None:
    """Two turns, in order."""

    @sgl.function
    def converse(s: Any, first: str, second: str) -> None:
        s += sgl.system("You answer briefly.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("first", max_tokens=32))
        s += sgl.user(second)
        s += sgl.assistant(sgl.gen("second", max_tokens=32))

    state = converse.run(first="Name a river.", second="Where does it end?")
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[2]["content"] == state["first"]


def test_select(check_answer: bool) -> None:
    """A choice; with check_answer, the true one."""

    @sgl.function
    def judge(s: Any, claim: str) -> None:
        s += "Water is wet: true\nFire is cold: false\n" + claim + ": "
        s += sgl.select("verdict", choices=["true", "false"])

    verdict = judge.run(claim="Ice is cold")["verdict"]
    assert verdict in ("true", "false")
    assert not check_answer or verdict == "true"


def test_decode_int() -> None:
    """An integer by dtype."""

    @sgl.function
    def count(s: Any) -> None:
        s += "A week has " + sgl.gen_int("days", max_tokens=8) + " days."

    assert re.fullmatch(r"[-+]?[0-9]+", count.run()["days"])


def test_decode_json_regex() -> None:
    """JSON by regex."""
    pattern = r'\{"name": "[\w ]{1,12}", "year": [1-9][0-9]{3}\}'

    @sgl.function
    def describe(s: Any) -> None:
        s += "A ship in JSON: " + sgl.gen("ship", max_tokens=96, regex=pattern)

    ship = json.loads(describe.run()["ship"])
    assert list(ship) == ["name", "year"]


def test_decode_json() -> None:
    """JSON with values generated one by one."""

    @sgl.function
    def describe(s: Any) -> None:
        s += 'A ship in JSON: {"masts": ' + sgl.gen("masts", max_tokens=8, regex="[1-9]")
        s += ', "kind": "' + sgl.select("kind", ["schooner", "brig"]) + '"}'

    ship = json.loads(describe.run().text().partition(": ")[2])
    assert 1 <= ship["masts"] <= 9


def test_expert_answer(check_answer: bool = True) -> None:  # noqa: PT028 - called, not collected
    """An expert's name, then answer; with check_answer, it names the right colour."""

    @sgl.function
    def consult(s: Any, question: str) -> None:
        s += sgl.user(question + " Which expert would know?")
        s += sgl.assistant(sgl.gen("expert", max_tokens=16, stop=[".", "\n"], temperature=0))
        s += sgl.user("Answer as that expert: " + question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0))

    answer = consult.run(question="Which colour has a ripe tomato?")["answer"]
    assert isinstance(answer, str)
    assert not check_answer or "red" in answer.lower()


def test_tool_use() -> None:
    """Python branches on a selected value."""

    @sgl.function
    def decide(s: Any) -> None:
        s += "To find 12 * 12 I use the " + sgl.select("tool", ["calculator", "library"]) + "."
        if s["tool"] == "calculator":
            s += " Expression: " + sgl.gen("expression", max_tokens=8)
        else:
            s += " Book: " + sgl.gen("book", max_tokens=8)

    state = decide.run()
    assert ("expression" in state) == (state["tool"] == "calculator")


def test_react() -> None:
    """Alternating thoughts and actions until one finishes."""

    @sgl.function
    def act(s: Any) -> None:
        s += "Question: which is longer, the Nile or the Rhine?\n"
        for step in range(1, 4):
            s += f"Thought {step}:" + sgl.gen("thought", max_tokens=16, stop="\n") + f"\nAction {step}: "
            s += sgl.select("action", ["search", "finish"])
            if s["action"] == "finish":
                break
            s += f"\nObservation {step}: the Nile has 6,650 km.\n"

    state = act.run()
    assert state["action"] in ("search", "finish")


def test_parallel_decoding() -> None:
    """Parallel branches, joined in a text."""

    @sgl.function
    def tips(s: Any) -> None:
        s += "Two tips for sailors: knots, weather.\n"
        branches = s.fork(2)
        for branch, tip in zip(branches, ["knots", "weather"], strict=True):
            branch += f"About {tip}:" + sgl.gen("text", max_tokens=16, stop="\n")
        s += "1." + branches[0]["text"] + "\n2." + branches[1]["text"]
        s += "\nIn short:" + sgl.gen("end", max_tokens=8)

    state = tips.run()
    assert "1." in state.text()
    assert isinstance(state["end"], str)


def test_parallel_encoding(check_answer: bool = True) -> None:  # noqa: PT028
    """Branches' texts joined to a prompt; with check_answer, a fact of one is found."""

    @sgl.function
    def read(s: Any) -> None:
        s += "Notes.\n"
        branches = s.fork(2)
        branches += lambda i: ["The key is under the mat.\n", "The bell is broken.\n"][i]
        branches.join("concate_and_append")
        s += "Where is the key? It is under the" + sgl.gen("answer", max_tokens=8, temperature=0)

    state = read.run()
    assert "under the mat.\nThe bell" in state.text()
    assert not check_answer or "mat" in state["answer"]


def test_image_qa() -> None:
    """A question about an image."""
    picture = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEMLQkAKP8/wc53yE8AAAAASUVORK5CYII="
    red = base64.b64decode(picture)

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(red) + "Which colour is this?")
        s += sgl.assistant(sgl.gen("colour", max_tokens=16, temperature=0))

    assert look.run()["colour"].strip()


def test_stream() -> None:
    """Streamed pieces join to the text."""

    @sgl.function
    def tell(s: Any) -> None:
        s += "A story:" + sgl.gen("story", max_tokens=24)

    state = tell.run(stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text()
    again = tell.run(stream=True)
    assert "".join(again.text_iter("story")) == again["story"]


def test_regex() -> None:
    """A text by regex."""
    pattern = r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)"

    @sgl.function
    def resolve(s: Any) -> None:
        s += "The address is " + sgl.gen("address", max_tokens=48, regex=pattern) + "."

    assert re.fullmatch(pattern, resolve.run()["address"])


def test_dtype_gen() -> None:
    """Values by each dtype."""

    @sgl.function
    def fill(s: Any) -> None:
        s += "whole: " + sgl.gen("int", dtype=int, max_tokens=8)
        s += "\nfraction: " + sgl.gen("float", dtype=float, max_tokens=12)
        s += "\ntruth: " + sgl.gen("bool", dtype=bool, max_tokens=8)
        s += "\ntext: " + sgl.gen("str", dtype=str, max_tokens=24)

    state = fill.run()
    assert isinstance(int(state["int"]), int)
    assert isinstance(float(state["float"]), float)
    assert state["bool"] in ("True", "False")
    assert isinstance(state["str"], str)


def test_completion_speculative() -> None:
    """Several gens served by one speculated completion, if the backend can."""

    @sgl.function(num_api_spec_tokens=64)
    def profile(s: Any) -> None:
        s += "Construct a profile.\nName: Ann Lee\nPort: Cork\n\nName:"
        s += sgl.gen("name", stop="\n", max_tokens=16) + "\nPort:" + sgl.gen("port", stop="\n", max_tokens=16)

    state = profile.run()
    assert "\n" not in state["name"] + state["port"]


def test_chat_completion_speculative() -> None:
    """Several gens served by one speculated turn, if the backend can."""

    @sgl.function(num_api_spec_tokens=64)
    def profile(s: Any) -> None:
        s += sgl.user("Construct a profile as 'Name: …' and 'Port: …'.")
        name, port = (sgl.gen(name, stop="\n", max_tokens=16) for name in ("name", "port"))
        s += sgl.assistant("Name:" + name + "\nPort:" + port)

    state = profile.run()
    assert "\n" not in state["name"] + state["port"]


_ENDINGS = [
    ("The boy opens his umbrella because", ["it begins to rain", "the soup is purple", "seven is a number"], 0),
    ("She puts the kettle on to", ["paint the ceiling", "make some tea", "fly a mountain"], 1),
    ("The dog hears the door and", ["reads the paper", "divides by two", "runs to greet them"], 2),
    ("To cross the river they take", ["the ferry", "a comma", "the colour blue"], 0),
]


def test_hellaswag_select() -> tuple[float, float]:
    """Share of sensible endings, and seconds. Checks only that they are choices."""

    @sgl.function
    def complete(s: Any, beginning: str, endings: list[str]) -> None:
        s += "He turns the key and the engine starts.\n" + beginning + " "
        s += sgl.select("ending", choices=endings)

    begin = time.perf_counter()
    rows = [{"beginning": beginning, "endings": endings} for beginning, endings, _ in _ENDINGS]
    chosen = [state["ending"] for state in complete.run_batch(rows)]
    seconds = time.perf_counter() - begin
    assert all(ending in endings for ending, (_, endings, _) in zip(chosen, _ENDINGS, strict=True))
    right = sum(ending == endings[best] for ending, (_, endings, best) in zip(chosen, _ENDINGS, strict=True))
    return right / len(_ENDINGS), seconds


def test_gen_min_new_tokens() -> None:
    """Generation does not end early."""

    @sgl.function
    def tell(s: Any) -> None:
        s += sgl.user("Say yes.")
        s += sgl.assistant(sgl.gen("answer", min_tokens=12, max_tokens=16))

    state = tell.run()
    assert state.get_meta_info("answer")["completion_tokens"] >= 12
