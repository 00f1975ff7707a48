"""Chat templates: rendered turn by turn, they give what the model's own template renders at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.ir.chat_template import PrefixTemplate, as_template, jinja_template, register_chat_template, registry
from sgl.lang.ir.reasoning import FORMATS, ReasoningSplitter
from sgl.lang.record.run import IDLE_S
from tests.lang_mocks import MockBackend

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set sys = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set sys = none %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and sys %}<<SYS>>\n{{ sys }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    [("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
    [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
]
# A model that was trained on "[/INST] two" writes the blank itself: the generation prompt ends before it.
WITH_BLANKS = [[(r, f" {c}" if r == "assistant" else c) for r, c in turns] for turns in CONVERSATIONS]


def render_turns(template: Any, turns: list[tuple[str, str]]) -> str:
    """The text of a program that appends these turns."""

    @sgl.function
    def program(s):
        for role, content in turns:
            s += {"system": sgl.system, "user": sgl.user, "assistant": sgl.assistant}[role](content)

    return program.run(backend=MockBackend(chat_template=template)).text()


def render_at_once(source: str, turns: list[tuple[str, str]]) -> str:
    """What the template makes of the whole conversation."""
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = lambda message: pytest.fail(message)
    messages = [{"role": role, "content": content} for role, content in turns]
    return environment.from_string(source).render(messages=messages, add_generation_prompt=False, **SPECIAL)


@pytest.mark.parametrize(
    ("source", "turns"),
    [*[(CHATML, turns) for turns in CONVERSATIONS], *[(LLAMA2, turns) for turns in WITH_BLANKS]],
    ids=["chatml, system", "chatml", "llama2, system", "llama2"],
)
def test_turn_by_turn_is_the_same_as_at_once(source: str, turns: list[tuple[str, str]]) -> None:
    template = jinja_template(source, special_tokens=SPECIAL)
    assert render_turns(template, turns) == render_at_once(source, turns)


def test_what_is_marked_as_generated_is_rendered() -> None:
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    turns = CONVERSATIONS[0]
    assert render_turns(jinja_template(marked), turns) == render_at_once(CHATML, turns)


def test_an_assistant_turn_begins_with_the_generation_prompt() -> None:
    @sgl.function
    def program(s):
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x")) + sgl.user("more") + sgl.assistant(sgl.gen("y"))

    state = program.run(backend=MockBackend(lambda *_: "ok</think>", chat_template=jinja_template(THINKING)))
    turn = "<|assistant|><think>\nok</think><|end|>"
    assert state.text() == f"<|user|>hi<|end|>{turn}<|user|>more<|end|>{turn}"


ANSWERED = THINKING.replace("{{ m.content }}", "%s{{ m.content }}")
OPENINGS = {
    # how a template has a turn that was not thought about
    "as it is": ("", ""),
    "with an empty thought": (
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}",
        "<think>\n\n</think>\n\n",
    ),
    "never": ("{% if m.role == 'assistant' %}<think>\n{% endif %}", "<think>\n</think>\n\n"),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_what_a_program_says_for_the_model_is_no_thought(opening: str) -> None:
    written, unopened = OPENINGS[opening]
    template = jinja_template(ANSWERED.replace("%s", written))

    @sgl.function
    def program(s):
        s += sgl.user("1") + sgl.assistant("yes")
        s += sgl.user("2") + sgl.assistant(sgl.select("a", choices=["no"]))
        s += sgl.user("3") + sgl.assistant(sgl.gen("b", regex="[0-9]"))
        s += sgl.user("4") + sgl.assistant("It is " + sgl.gen("c"))
        s += sgl.user("5") + sgl.assistant(sgl.gen("d"))

    backend = MockBackend(lambda *_: "7", chat_template=template)
    asked = [("1", "yes"), ("2", "no"), ("3", "7"), ("4", "It is 7")]
    said = "".join(f"<|user|>{number}<|end|><|assistant|>{unopened}{text}<|end|>" for number, text in asked)
    expected = said + "<|user|>5<|end|><|assistant|><think>\n7<|end|>"
    assert program.run(backend=backend).text() == expected
    assert [state.text() for state in program.run_batch([{}] * 2, backend=backend)] == [expected] * 2


@pytest.mark.parametrize("model_type", ["deepseek-r1", "qwen3"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_its_reasoning_is_not_inside_a_thought(model_type: str, stream: bool) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("1")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type=model_type) + "!" + sgl.gen("b"))
        s += sgl.user("2") + sgl.assistant(sgl.gen("c"))

    replies = iter(["hm</think>\n\nfour", "?", "x"])
    backend = MockBackend(lambda *_: next(replies), chat_template=jinja_template(THINKING))
    state = program.run(backend=backend, stream=stream)
    turn = "<|user|>1<|end|><|assistant|>four!"
    assert state.text() == turn + "?<|end|><|user|>2<|end|><|assistant|><think>\nx<|end|>"
    assert (state["a"], state["a_reasoning_content"]) == ("four", "hm")
    assert [prompt.text for prompt, _ in backend.calls][:2] == ["<|user|>1<|end|><|assistant|><think>\n", turn]
    assert state.messages()[1]["content"] == "four!?"


@pytest.mark.parametrize("pause", [0.0, 3 * IDLE_S])
def test_how_a_turn_begins_is_no_matter_of_time(pause: float) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("1") + sgl.assistant(sgl.gen("a"))
        s += sgl.user("2")
        with s.assistant():
            time.sleep(pause)
            with s.var_scope("b"):
                s += "so " + s["a"]
        s += sgl.user("3") + sgl.assistant_begin()
        time.sleep(pause)
        s += sgl.gen("c") + sgl.assistant_end()

    state = program.run(backend=MockBackend(lambda *_: "x", chat_template=jinja_template(THINKING)))
    thought = "<|assistant|><think>\nx<|end|>"
    expected = f"<|user|>1<|end|>{thought}<|user|>2<|end|><|assistant|>so x<|end|><|user|>3<|end|>{thought}"
    assert state.text() == expected
    assert state["b"] == "so x"


def test_a_turn_that_is_looked_at_has_begun() -> None:
    @sgl.function
    def program(s):
        s += sgl.user("1") + sgl.assistant_begin()
        seen.append(s.text())
        s += "yes" + sgl.assistant_end() + sgl.user("2")
        branches = s.fork(2)
        branches += sgl.assistant_begin()
        branches.join("concate_and_append")

    seen = list[str]()
    backend = MockBackend(chat_template=jinja_template(THINKING))
    begun = "<|user|>1<|end|><|assistant|><think>\n"
    assert (
        program.run(backend=backend).text() == f"{begun}yes<|end|><|user|>2<|end|>" + 2 * "<|assistant|><think>\n"
    )
    assert seen == [begun]


def test_a_template_that_refuses_an_order_of_turns_is_an_error_with_its_words() -> None:
    template = jinja_template(LLAMA2, special_tokens=SPECIAL)
    with pytest.raises(ProgramError, match="roles must alternate"):
        render_turns(template, [("user", "a"), ("user", "b")])
    with pytest.raises(ProgramError, match="roles must alternate"):
        render_turns(template, [("assistant", "a")])


def test_contents_are_inserted_as_they_are() -> None:
    evil = "{{ 7 * 7 }} <|im_start|> \ue0000\ue001 é"
    assert evil in render_turns(as_template(CHATML), [("user", evil)])


def test_templates_from_callables_and_registered_ones() -> None:
    def custom(messages: Any, add_generation_prompt: bool) -> str:
        return "".join(f"({m['role']}){m['content']}" for m in messages) + "(assistant)" * add_generation_prompt

    assert render_turns(custom, [("user", "a"), ("assistant", "b")]) == "(user)a(assistant)b"
    mine = PrefixTemplate("mine", {"user": ("U:", "\n"), "assistant": ("A:", "\n")})
    register_chat_template(mine)
    try:
        assert render_turns("mine", [("user", "a"), ("assistant", "b")]) == "U:a\nA:b\n"
        with pytest.raises(ProgramError, match="has no role 'system'"):
            render_turns("mine", [("system", "a")])
    finally:
        del registry["mine"]
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        jinja_template("{% for %}")


NAMES = """default claude chatml chatml-llava qwen qwen2-vl vicuna_v1.1 llama-2-chat mistral llama-3-instruct
llama-3-instruct-llava llama-4 minicpmv minicpmo janus janus-pro yi-1.5 yi-vl gemma-it gemma-4-it dbrx-instruct
c4ai-command-r internvl-2-5 interns1 granite-3-instruct deepseek-v3 glm-4v"""


@pytest.mark.parametrize("name", NAMES.split())
def test_every_registered_name_renders_a_conversation(name: str) -> None:
    text = render_turns(name, CONVERSATIONS[0])
    places = [text.index(content) for _, content in CONVERSATIONS[0]]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-2-chat", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\none [/INST]two  </s><s>"),
        ("chatml", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"),
        (
            "llama-3-instruct",
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>",
        ),
        ("janus-pro", "Be brief.<|User|>one<|Assistant|>two"),
    ],
)
def test_known_templates(name: str, expected: str) -> None:
    assert render_turns(name, CONVERSATIONS[0]).startswith(expected)


def test_template_stops_hold_inside_turns_only() -> None:
    @sgl.function
    def program(s):
        s += "free" + sgl.gen("a") + sgl.user("q") + sgl.assistant(sgl.gen("b"))

    backend = MockBackend(chat_template="chatml")
    program.run(backend=backend).sync()
    assert [params.sampling["stop"] for _, params in backend.calls] == [[], ["<|im_end|>"]]


TEXTS = [
    ("qwen3", "<think>\nhmm\n</think>\n\nanswer", ("\nhmm\n", "answer")),
    ("qwen3", "no thoughts", ("", "no thoughts")),
    ("deepseek-r1", "started inside</think>answer", ("started inside", "answer")),
    ("deepseek-r1", "<think>said again</think>answer", ("said again", "answer")),
    ("qwen3", "<think>never ended", ("never ended", "")),
    ("kimi", "◁think▷a◁/think▷b", ("a", "b")),
    ("seed_oss", "<seed:think>a</seed:think>\nb", ("a", "b")),
    ("gemma4", "<|channel>thought\na\n<channel|>b", ("\na\n", "b")),
    ("apriel", "a\n[BEGIN FINAL RESPONSE]\nb", ("a\n", "b")),
    ("granite", "Here is my thought process: a\nHere is my response: b", (" a\n", "b")),
    ("qwen3", "<thin air", ("", "<thin air")),
]


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_is_split_alike_in_any_pieces(name: str, text: str, expected: Any, size: int) -> None:
    assert ReasoningSplitter(name).feed(text, final=True) == expected
    splitter = ReasoningSplitter(name)
    pieces = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(splitter.feed("", final=True))
    assert tuple("".join(part) for part in zip(*pieces, strict=True)) == expected
    assert name in FORMATS
