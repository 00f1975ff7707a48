"""Errors say where in the program: the file and line of the `s += …`, whoever executes it and however it is written."""

from __future__ import annotations

import asyncio
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.errors import BackendError, InvalidRequest, ProgramError, RegexSyntaxError, SglError
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint
from tests.patience import PATIENCE
from tests.test_lang_defects import within

SOURCE = Path(__file__).read_text().splitlines()
BACKENDS = [lambda: MockBackend(fail_on=["bad"]), lambda: ProgramBackend(MockBackend(fail_on=["bad"]))]


def line_of(mark: str) -> int:
    """The number of the line that ends with that comment."""
    [number] = [number for number, line in enumerate(SOURCE, 1) if line.endswith(f"# here: {mark}")]
    return number


def place(mark: str, function: str) -> str:
    return f"(test_lang_places.py:{line_of(mark)}, in {function})"


@pytest.fixture(params=BACKENDS, ids=["calls", "programs"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param()


def plain(s: Any) -> None:
    s += "text"
    s += "more" + sgl.gen("bad")  # here: plain


def several(s: Any) -> None:
    word = "word"
    s += (  # here: several
        f"{word} one"
        + sgl.gen("good")
        + f"{word} two"
        + sgl.gen("bad")
        + "after"
    )  # fmt: skip


def listed(s: Any) -> None:
    s += ["a", sgl.gen("bad"), "b"]  # type: ignore[arg-type]  # here: listed


def looped(s: Any) -> None:
    for i in range(5):
        s += sgl.gen("good")
        if i == 3:
            s += sgl.gen("bad")  # here: looped


def branched(s: Any) -> None:
    forks = s.fork(3)
    forks[0] += sgl.gen("good")
    forks[2] += sgl.gen("bad")  # here: branched
    forks.join()
    s += sgl.gen("later")


def grouped(s: Any) -> None:
    forks = s.fork(2)
    forks += lambda i: sgl.gen("bad" if i else "good")  # here: grouped
    forks.join("concate_and_append")


def append_in_helper(s: Any) -> None:
    s += sgl.gen("bad")  # here: helped


def helped(s: Any) -> None:
    append_in_helper(s)


def in_blocks(s: Any) -> None:
    with s.user():
        s += "q"
    with s.assistant(), s.var_scope("all"):
        s += sgl.gen("bad")  # here: in_blocks


def as_a_turn(s: Any) -> None:
    s.user("q")
    s.assistant(sgl.gen("bad"))  # here: as_a_turn


def copied(s: Any) -> None:
    with s.copy() as branch:
        branch += sgl.gen("bad")  # here: copied


def tagged(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapper(s: Any) -> Any:
        return func(s)

    return wrapper


@tagged
def decorated(s: Any) -> None:
    s += sgl.gen("bad")  # here: decorated


def called(s: Any) -> None:
    sgl.function(plain)().sync()


def referring(s: Any) -> None:
    left, right = s.fork(2)
    left += sgl.gen("bad")
    right += "see" + left.ref("bad")  # here: referring
    right.sync()


async def asynchronous(s: Any) -> None:
    s += "a" + sgl.gen("good")
    await s["good"]
    async with s.fork(2) as branches:
        branches += sgl.gen("bad")  # here: asynchronous
    await s.text()


WHERE = {
    plain: place("plain", "plain"),
    several: place("several", "several"),
    listed: place("listed", "listed"),
    looped: place("looped", "looped"),
    branched: place("branched", "branched"),
    grouped: place("grouped", "grouped"),
    helped: place("helped", "append_in_helper"),
    in_blocks: place("in_blocks", "in_blocks"),
    as_a_turn: place("as_a_turn", "as_a_turn"),
    copied: place("copied", "copied"),
    decorated: place("decorated", "decorated"),
    called: place("plain", "plain"),
    referring: place("referring", "referring"),
    asynchronous: place("asynchronous", "asynchronous"),
}


@pytest.mark.parametrize("body", WHERE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("how", ["run", "stream", "arun", "batch"])
def test_what_fails_says_where_it_was_written(backend: Any, body: Any, how: str) -> None:
    program = sgl.function(body)

    def run() -> None:
        if how == "run":
            program.run(backend=backend).sync()
        elif how == "stream":
            list(program.run(backend=backend, stream=True).text_iter())
        elif how == "arun":
            asyncio.run(program.arun(backend=backend))
        else:
            [outcome] = program.run_batch([()], backend=backend, return_exceptions=True)
            raise outcome

    with pytest.raises(ProgramError) as caught:
        within(PATIENCE, run)
    message = str(caught.value)
    assert message.endswith(WHERE[body]), message
    assert message.count("test_lang_places.py") == 1
    assert caught.value.place == WHERE[body].strip("()")
    assert pickle.loads(pickle.dumps(caught.value)).place == caught.value.place


def test_a_compiled_program_knows_the_lines_of_its_body(backend: Any) -> None:
    with pytest.raises(ProgramError) as caught:
        sgl.function(several).compile().run(backend=backend).sync()
    assert str(caught.value).endswith(WHERE[several])


def test_code_without_a_file_has_a_place_too(backend: Any) -> None:
    scope: dict[str, Any] = {"sgl": sgl}
    exec(compile("def body(s):\n    s += 'x'\n    s += sgl.gen('bad')\n", "<cell 3>", "exec"), scope)
    with pytest.raises(ProgramError, match=r"\(<cell 3>:3, in body\)$"):
        sgl.function(scope["body"]).run(backend=backend).sync()


# What is raised while recording

BAD_SCHEMA = {"type": "object", "properties": 3}


def appends_none(s: Any) -> None:
    s += None  # here: appends_none


def appends_a_number(s: Any) -> None:
    s += "a"
    s += 5  # here: appends_a_number


def wrong_dtype(s: Any) -> None:
    s += "a" + sgl.gen("x", dtype="complex")  # here: wrong_dtype


def wrong_regex(s: Any) -> None:
    s += sgl.gen("x", regex="(a")  # here: wrong_regex


def wrong_choices(s: Any) -> None:
    s += sgl.select("x", [])  # here: wrong_choices


def nested_turns(s: Any) -> None:
    with s.user():
        s += sgl.assistant("no")  # here: nested_turns


def no_such_variable(s: Any) -> None:
    s += sgl.gen("answer")
    print(s["anwser"])  # here: no_such_variable


def joined_twice(s: Any) -> None:
    forks = s.fork(2)
    forks.join()
    forks.join()  # here: joined_twice


def appends_to_what_was_joined(s: Any) -> None:
    forks = s.fork(2)
    forks.join()
    forks[0] += "x"  # here: appends_to_what_was_joined


def no_branches(s: Any) -> None:
    s.fork(0)  # here: no_branches


def too_few_items(s: Any) -> None:
    forks = s.fork(2)
    forks += ["a"]  # here: too_few_items


def no_such_mode(s: Any) -> None:
    s.fork(2).join("all")  # here: no_such_mode


def no_such_ref(s: Any) -> None:
    s += s.ref("nothing")  # here: no_such_ref


def endless(s: Any) -> None:
    while True:
        s += "x"  # here: endless


def in_a_called_program(s: Any) -> None:
    sgl.function(wrong_dtype)()


async def awaits_nothing(s: Any) -> None:
    s += "a"
    await s["nothing"]  # here: awaits_nothing


RECORDED = {
    body: place(body.__name__, body.__name__)
    for body in (
        *(appends_none, appends_a_number, wrong_dtype, wrong_regex, wrong_choices, nested_turns, no_such_variable),
        *(joined_twice, appends_to_what_was_joined, no_branches, too_few_items, no_such_mode, no_such_ref, endless),
        awaits_nothing,
    )
} | {in_a_called_program: place("wrong_dtype", "wrong_dtype")}


@pytest.mark.parametrize("body", RECORDED, ids=lambda body: body.__name__)
@pytest.mark.parametrize("how", ["run", "stream", "batch"])
def test_what_cannot_be_recorded_says_where_it_is_written(body: Any, how: str) -> None:
    program, backend = sgl.function(body), MockBackend()
    runs: dict[str, Callable[[], object]] = {
        "run": lambda: program.run(backend=backend),
        "stream": lambda: program.run(backend=backend, stream=True).sync(),
        "batch": lambda: program.run_batch([()], backend=backend),
    }
    with pytest.raises(SglError) as caught:
        runs[how]()
    assert str(caught.value).endswith(RECORDED[body]), str(caught.value)
    assert str(caught.value).count("test_lang_places.py") == 1
    assert caught.value.place is not None


def test_the_class_and_data_of_an_error_stay_when_its_place_is_added() -> None:
    with pytest.raises(RegexSyntaxError) as caught:
        sgl.function(wrong_regex).run(backend=MockBackend())
    assert caught.value.pattern == "(a"
    with pytest.raises(InvalidRequest) as invalid:
        sgl.function(wrong_dtype).run(backend=MockBackend())
    assert invalid.value.param == "dtype"


def test_a_body_that_catches_an_error_reads_the_place_as_well() -> None:
    @sgl.function
    def program(s: Any) -> str:
        try:
            s += None  # here: caught
        except ProgramError as error:
            return str(error)
        return ""

    assert program.run(backend=MockBackend()).ret_value.endswith(place("caught", "program"))


def test_errors_of_the_body_itself_stay_as_they_are() -> None:
    @sgl.function
    def program(s: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        program.run(backend=MockBackend())


def test_a_text_that_is_no_object_says_where_its_gen_is_written() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("x", dtype=int)  # here: parsed

    state = program.run(backend=MockBackend(lambda *_: "no number"))
    with pytest.raises(ProgramError) as caught:
        state.value("x")
    assert str(caught.value).endswith(place("parsed", "program"))


def test_a_program_that_is_late_says_how_far_it_came() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("first")
        s["first"]
        s += sgl.gen("slow", timeout=0.01)  # here: slow

    with pytest.raises(ProgramError, match="not finished within") as caught:
        program.run(backend=MockBackend(held=["slow"]), timeout=PATIENCE).sync()
    assert place("slow", "program") in str(caught.value)

    @sgl.function
    def whole(s: Any) -> None:
        s += "x"
        s += sgl.gen("slow")  # here: whole

    with pytest.raises(ProgramError, match="not finished within") as caught:
        whole.run(backend=MockBackend(together=ENDLESS), timeout=0.1).sync()
    assert str(caught.value).startswith("program 'whole' failed")
    assert place("whole", "whole") in str(caught.value)


# On an engine, and over HTTP


@pytest.fixture(scope="module", params=["in process", "over HTTP"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with sgl.Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        if request.param == "in process":
            yield engine
            return
        server = LiveServer(engine)
        yield sgl.RuntimeEndpoint(server.url)
        server.close()


def test_an_executor_elsewhere_needs_to_know_nothing_of_places(real: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=2)
        forks = s.fork(2)
        forks[1] += "a " * 5000 + sgl.gen("long", max_tokens=2)  # here: too long
        forks.join()

    with pytest.raises(ProgramError) as caught:
        program.run(backend=real).sync()
    assert str(caught.value).endswith(place("too long", "program"))
    assert not isinstance(caught.value.__cause__, BackendError)
    assert re.search(r"gen 'long' \(node 2\.1/1, after \d+ characters\) failed", str(caught.value))
