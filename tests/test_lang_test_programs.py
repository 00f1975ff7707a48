"""The programs of `sgl.test.test_programs` pass on the embedded model, which is the default backend."""

from __future__ import annotations

import inspect

import pytest

from sgl.compat import test_programs
from sgl.errors import SglError

PROGRAMS = [
    name
    for name, function in vars(test_programs).items()
    if name.startswith("test_") and not inspect.signature(function).parameters and name != "test_image_qa"
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_passes(name: str) -> None:
    result = getattr(test_programs, name)()
    if name == "test_hellaswag_select":
        accuracy, seconds = result
        assert 0 <= accuracy <= 1
        assert seconds > 0


def test_programs_that_may_check_the_answer_pass_without() -> None:
    test_programs.test_select(check_answer=False)
    test_programs.test_expert_answer(check_answer=False)
    test_programs.test_parallel_encoding(check_answer=False)


def test_an_image_is_refused_by_a_model_that_takes_none() -> None:
    with pytest.raises(SglError, match="takes no images"):
        test_programs.test_image_qa()
