"""What programs of the original language depend on, and the public names they use."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from tests.lang_mocks import MockBackend
from tests.patience import PATIENCE


def names(prompt: Any, params: Any) -> str:
    """A reply that is the gen's name in brackets."""
    return f"<{params.node.name}>"


def echo() -> MockBackend:
    return MockBackend(names)


# Public names


def test_every_public_name_is_there() -> None:
    for name in sgl.__all__:
        assert getattr(sgl, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sgl.nothing  # noqa: B018


EXPORTS = {
    "sgl": """function gen gen_int gen_string select image video system user assistant system_begin system_end
    user_begin user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache
    get_server_info
    global_config token_length_normalized greedy_token_selection unconditional_likelihood_normalized Runtime
    RuntimeEndpoint Engine ServerArgs OpenAI Anthropic LiteLLM VertexAI Crusoe __version__""",
    "sgl.lang.ir": """REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglGen SglSelect SglExpr SglExprList
    SglConstantText SglRoleBegin SglRoleEnd SglVariable SglFork""",
    "sgl.lang.choices": "ChoicesDecision ChoicesSamplingMethod token_length_normalized greedy_token_selection",
    "sgl.lang.chat_template": "get_chat_template register_chat_template ChatTemplate",
    "sgl.lang.backend.base_backend": "BaseBackend",
    "sgl.lang.backend.runtime_endpoint": "Runtime RuntimeEndpoint",
    "sgl.lang.api": "function gen select set_default_backend",
    "sgl.lang.interpreter": "ProgramState ProgramStateGroup",
    "sgl.utils": """dump_state_text read_jsonl http_request normalize_base_url download_and_cache_file
    print_highlight wait_for_server terminate_process launch_server_cmd""",
    "sgl.test.test_utils": """add_common_sglang_args_and_parse select_sglang_backend DEFAULT_MODEL_NAME_FOR_TEST
    CustomTestCase""",
}


@pytest.mark.parametrize("module", EXPORTS)
def test_names_that_existing_programs_import(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in EXPORTS[module].split():
        assert hasattr(loaded, name), name


@pytest.mark.parametrize("module", ["sgl.test.test_programs", "sgl.utils"])
def test_modules_under_the_originals_names_run_and_are_found_as_files(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).name == module.rpartition(".")[2] + ".py"
    subprocess.run([sys.executable, "-m", module], check=True, timeout=PATIENCE)


def test_the_decorator_works_with_and_without_parentheses() -> None:
    def body(s, x):
        """What it does."""
        s += x

    for decorated in (sgl.function(body), sgl.function()(body), sgl.function(num_api_spec_tokens=8)(body)):
        assert decorated.__doc__ == "What it does."
        assert decorated.run("x", backend=echo()).text() == "x"
    with pytest.raises(InvalidRequest, match="must be named s"):
        sgl.function(lambda state: None)


# The must-keep behaviours, in the order of the specification


def test_01_appending_never_blocks_and_reading_does() -> None:
    gate = threading.Event()

    class Slow(MockBackend):
        async def generate(self, prompt: Any, params: Any) -> Any:
            await asyncio.to_thread(gate.wait, 5)
            return await super().generate(prompt, params)

    @sgl.function
    def program(s):
        for i in range(3):
            s += sgl.gen(f"x{i}")
        gate.set()  # all were appended before any was generated
        return s["x2"]

    assert program.run(backend=Slow(names)).ret_value == "<x2>"


def test_02_branches_come_in_index_order() -> None:
    @sgl.function
    def program(s):
        forks = s.fork(5)
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks.join()

    class Backwards(MockBackend):
        async def generate(self, prompt: Any, params: Any) -> Any:
            await asyncio.sleep(0.02 * (5 - int(prompt.text[-1])))
            return await super().generate(prompt, params)

    backend = Backwards(lambda prompt, _: prompt.text[-1])
    states = program.run_batch([{}, {}], backend=backend)
    assert [state["x"] for state in states] == [list("01234")] * 2


def test_03_values_are_plain_strings_without_the_stop() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x", stop="\n") + "\n"
        assert type(s["x"]) is str

    assert program.run(backend=echo()).text() == "<x>\n"


def test_04_and_05_text_has_every_character_and_messages_the_closed_turns() -> None:
    @sgl.function
    def chat(s, question):
        s += sgl.user(question)
        s += sgl.assistant_begin() + " " + sgl.gen("a") + sgl.assistant_end()
        with s.user():
            s += "  second"
        s += sgl.assistant_begin()

    state = chat.run("first", backend=MockBackend(names, chat_template="qwen"))
    assert state.text() == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\n <a><|im_end|>\n<|im_start|>user\n  second<|im_end|>\n<|im_start|>assistant\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<a>"},
        {"role": "user", "content": "second"},
    ]


def test_06_and_07_forks_copy_variables_and_stay_readable_after_the_join() -> None:
    @sgl.function
    def program(s):
        s["given"] = "parent"
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork["given"] = f"child {i}"
            fork += sgl.gen(f"own{i}")
        assert s["given"] == "parent"
        assert "own0" not in s
        forks.join()
        assert forks[1]["own1"] == "<own1>"
        assert forks[0].text() == "<own0>"
        assert s["given"] == ["child 0", "child 1"]
        assert s["own0"] == ["<own0>", None]
        with pytest.raises(ProgramError, match="joined"):
            forks[0] += "too late"
        with pytest.raises(ProgramError, match="joined already"):
            forks.join()

    program.run(backend=echo()).sync()


def test_08_groups_are_iterated_indexed_and_passed_to_helpers() -> None:
    def helper(s: Any, label: str) -> Any:
        s += label
        forks = s.fork(2)
        for fork in forks:
            fork += "for "
        forks[0] += "zero" + sgl.gen("x")
        forks[1] += "one" + sgl.gen("x")
        forks += lambda i: f" {i}"
        forks += ["!", "?"]
        return forks

    @sgl.function
    def program(s):
        forks = helper(s, "Label. ")
        single = s.fork(1)[0]
        single += sgl.gen("alone")
        texts = [fork.text() for fork in forks]
        forks.join()
        with pytest.raises(ProgramError, match="cannot be replaced"):
            forks[0] = single
        with pytest.raises(ProgramError, match="3 items for 2 branches"):
            forks += ["a", "b", "c"]
        return [*texts, single["alone"], len(forks)]

    expected = ["Label. for zero<x> 0!", "Label. for one<x> 1?", "<alone>", 2]
    assert program.run(backend=echo()).ret_value == expected


def test_09_and_12_positional_and_default_arguments_and_the_return_value() -> None:
    @sgl.function
    def program(s, a, b="B", *, c="C"):
        s += a + b + c + sgl.gen("x", 7, stop="!")
        return {"is": "returned"}

    backend = echo()
    state = program.run("A", backend=backend)
    assert state.text() == "ABC<x>"
    assert state.ret_value == {"is": "returned"}
    assert backend.calls[0][1].sampling["max_tokens"] == 7
    assert program("A", "b", c="c", backend=backend).text() == "Abc<x>"


def test_10_run_level_parameters_reach_every_gen_that_says_nothing_else() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("own", temperature=0.2)
        forks = s.fork(2)
        forks += sgl.gen("inherited")
        forks.join()

    backend = echo()
    program.run(backend=backend, temperature=0.9, max_new_tokens=5, stop=["x"]).sync()
    sampling = [params.sampling for _, params in backend.calls]
    assert [s["temperature"] for s in sampling] == [0.2, 0.9, 0.9]
    assert [(s["max_tokens"], s["stop"]) for s in sampling] == [(5, ["x"])] * 3


def test_11_a_backend_of_the_call_wins_and_endpoints_are_unwrapped() -> None:
    class Holder:
        endpoint = echo()

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    default = MockBackend(lambda *_: "default")
    sgl.set_default_backend(default)
    try:
        assert program.run()["x"] == "default"
        assert program.run(backend=Holder())["x"] == "<x>"
        assert sgl.flush_cache() is False
        assert sgl.get_server_info() is None
    finally:
        sgl.set_default_backend(None)
    assert sgl.flush_cache() is False
    with pytest.raises(ProgramError, match="3 is no backend"):
        program.run(backend=3)


def test_13_a_progress_bar_counts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("x")

    program.run_batch([("a",), ("b",), ("c",)], progress_bar=True, backend=echo())
    assert "3/3" in capsys.readouterr().err


def test_14_meta_info_of_gens_and_selects() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.select("y", ["a", "b"])
        s["z"] = "set"

        forks = s.fork(2)
        forks[1] += sgl.gen("w", n=2)
        forks.join()

    state = program.run(backend=echo())
    assert state.get_meta_info("x")["completion_tokens"] == 3
    assert [meta and len(meta) for meta in state.get_meta_info("w")] == [None, 2]
    lists = ("normalized_prompt_logprobs", "input_token_logprobs", "output_token_logprobs")
    assert [len(state.get_meta_info("y")[name]) for name in lists] == [2, 2, 2]
    assert state.get_meta_info("z") is None
    assert state.get_meta_info("unknown") is None


def test_15_and_16_verbosity_prints_and_a_state_shows_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    @sgl.function
    def program(s):
        s += "text " + sgl.gen("x")

    sgl.global_config.verbosity = 2
    try:
        state = program.run(backend=echo())
        state.sync()
        assert str(state) == "ProgramState(text <x>)"
    finally:
        sgl.global_config.verbosity = 0
    assert "text <x>" in capsys.readouterr().out


def test_17_programs_run_inside_loops_and_threads() -> None:
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("x")

    async def inside() -> str:
        state = program.run("a", backend=echo(), stream=True)
        pieces = [piece async for piece in state.text_async_iter("x")]
        assert "".join(pieces) == "<x>"
        return program.run("b", backend=echo())["x"]  # blocking, as in a notebook cell

    assert asyncio.run(inside()) == "<x>"
    texts: list[str] = []
    backend = echo()
    threads = [
        threading.Thread(target=lambda i=i: texts.append(program.run(str(i), backend=backend).text()))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"{i}<x>" for i in range(8)]


def test_images_are_paths_bytes_pictures_or_tensors(tmp_path: Path) -> None:
    import torch

    (tmp_path / "file.png").write_bytes(b"bytes")
    assert sgl.image(tmp_path / "file.png") == sgl.image(str(tmp_path / "file.png")) == sgl.image(b"bytes")

    class Picture:
        """Saves itself as PIL's do."""

        def save(self, buffer: Any, format: str) -> None:
            buffer.write(format.encode())

    assert sgl.image(Picture()).bytes() == b"PNG"
    whole = torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3)
    real = sgl.image(whole.permute(2, 0, 1).float() / 255).bytes()
    assert sgl.image(whole).bytes() == real
    assert real[16:26] == (4).to_bytes(4, "big") + (2).to_bytes(4, "big") + b"\x08\x02"
    data = real[real.index(b"IDAT") + 4 : real.index(b"IEND") - 8]
    assert zlib.decompress(data) == b"\0" + bytes(range(12)) + b"\0" + bytes(range(12, 24))
    assert sgl.image(torch.zeros(1, 2, 2)).bytes()[24:26] == b"\x08\x00"
    for wrong in (tmp_path / "absent", torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(5, 2, 2)):
        with pytest.raises(InvalidRequest, match="no image"):
            sgl.image(wrong)
    with pytest.raises(InvalidRequest, match=r"opencv|no video"):
        sgl.video(tmp_path / "absent", 4)


# More of the specification


def test_batches_take_dicts_and_tuples_and_check_their_length() -> None:
    @sgl.function
    def program(s, a, b):
        s += a + b + sgl.gen("x")

    rows = [{"a": "1", "b": "2"}, ("3", "4"), ["5", "6"]]
    assert [state.text() for state in program.run_batch(rows, backend=echo())] == ["12<x>", "34<x>", "56<x>"]
    assert program.run_batch([], backend=echo()) == []
    in_order = program.run_batch(rows * 100, generator_style=True, backend=echo())
    assert [state.text()[:2] for state in in_order] == ["12", "34", "56"] * 100
    with pytest.raises(InvalidRequest, match="a row of 1 values for the arguments a, b"):
        program.run_batch([("1",)], backend=echo())
    [state] = program.bind(a="7").run_batch([("8",)], backend=echo())  # values are for what is not bound
    assert state.text() == "78<x>"
    with pytest.raises(InvalidRequest, match="must be a list"):
        program.run_batch({"a": 1}, backend=echo())


def test_expressions_concatenate_and_refuse_what_is_no_text() -> None:
    expression = "a" + sgl.gen("x") + "b" + sgl.gen("y")
    assert [node.op for node in expression.items] == ["text", "gen", "text", "gen"]
    with pytest.raises(TypeError, match="not int"):
        sgl.gen("x") + 1
    with pytest.raises(TypeError, match="inside an f-string"):
        f"{sgl.gen('x')}"

    @sgl.function
    def program(s, what):
        s += what

    for wrong in (None, 3, {"a": 1}):
        with pytest.raises(ProgramError, match="appended"):
            program.run(wrong, backend=echo())


def test_scopes_refs_and_text_functions() -> None:
    @sgl.function
    def program(s):
        with s.var_scope("scope"):
            s += "a " + sgl.gen("x") + " z"
        s += "|" + s.ref("x").upper() + "|" + s.ref("scope").split(" ", take=-1) + "|"
        s += s.ref("x").strip().slice(1, -1).replace("x", "yy") + "|" + s.ref("x").lower().split(take=9)
        s["plain"] = "P"
        s += s.ref("plain")
        with pytest.raises(ProgramError, match="not a variable"):
            s.ref("missing")

    state = program.run(backend=echo())
    assert state["scope"] == "a <x> z"
    assert state.text() == "a <x> z|<X>|z|yy|P"


def test_roles_neither_nest_nor_end_unopened() -> None:
    @sgl.function
    def nested(s):
        s += sgl.user_begin() + sgl.assistant_begin()

    @sgl.function
    def unopened(s):
        s += sgl.user_end()

    for program in (nested, unopened):
        with pytest.raises(ProgramError, match="turn"):
            program.run(backend=echo())

    @sgl.function
    def raising(s):
        with s.user():
            s += "x"
            raise KeyError("inside")

    with pytest.raises(KeyError):
        raising.run(backend=echo())


def test_variables_of_a_finished_program_can_be_set() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")

    state = program.run(backend=echo())
    state["x"] = state["x"].strip("<>")
    state["number"] = 3
    assert (state["x"], state["number"]) == ("x", 3)
    assert state.text() == "<x>"
    assert state.error() is None


def test_unnamed_gens_and_empty_turns() -> None:
    @sgl.function
    def program(s):
        s += sgl.user() + sgl.assistant(sgl.gen())

    assert (
        program.run(backend=MockBackend(lambda *_: "x", chat_template="default")).text() == "USER:\nASSISTANT:x\n"
    )


def test_reading_what_was_never_set_says_what_was() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("answer")
        s["anser"]

    with pytest.raises(ProgramError, match="did you mean 'answer'") as caught:
        program.run(backend=echo())
    assert caught.value.variable == "anser"


def test_speculation_answers_several_gens_with_one_call() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "Name:" + sgl.gen("name", stop="\n") + "\nBorn:" + sgl.gen("born", stop="\n")
        s += "\nDied:" + sgl.gen("died", stop="\n")

    backend = MockBackend(lambda *_: " Ada\nBorn: 1815\nDied: 1852\n")
    state = program.run(backend=backend)
    assert [state[name] for name in ("name", "born", "died")] == [" Ada", " 1815", " 1852"]
    assert len(backend.calls) == 1
    surprised = MockBackend(lambda *_: " Ada\nDate: 1815\n")
    program.run(backend=surprised).sync()
    assert len(surprised.calls) == 3


def test_streaming_passes_by_branches_and_shows_constants() -> None:
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        forks = s.fork(2)
        forks += "in a branch" + sgl.gen("y")
        forks.join()
        s += "b" + sgl.select("z", ["cc", "dd"], temperature=None)

    state = program.run(backend=echo(), stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == "a<x>bdd" == state.text()
    assert len(pieces) > 3
    assert list(state.text_iter("z")) == ["dd"]
    assert "".join(program.stream(backend=echo()).text_iter()) == "a<x>bdd"


def test_a_name_that_never_comes_ends_a_stream_with_an_error() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")

    with pytest.raises(ProgramError, match="never set a variable 'y'"):
        list(program.run(backend=echo(), stream=True).text_iter("y"))
