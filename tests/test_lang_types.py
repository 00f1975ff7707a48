"""What type checkers learn of the language: mypy finds the mistakes planted in planted_types.py, and nothing else.
Keyword arguments are written down twice, for type checkers and for checks at run time: both say the same."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BeforeValidator
from pydantic_core import PydanticUndefined

import sgl
from sgl.lang.backends.launch import Runtime
from sgl.lang.ir.sampling import PARAMS, RENAMED, SampleOptions, SamplingOptions
from sgl.lang.record.call import Call, RunOptions
from sgl.options import ORIGINALS, EngineOptions, ServerOptions
from sgl.runtime.config import EngineConfig, ServerConfig

REPOSITORY = Path(__file__).resolve().parent.parent
PLANTED = REPOSITORY / "tests" / "planted_types.py"


def mypy(*arguments: str) -> str:
    """What mypy says, with the project's options and from its cache where there is one."""
    from mypy import api

    out, err, _ = api.run(["--config-file", str(REPOSITORY / "pyproject.toml"), *arguments])
    return out + err


@pytest.mark.slow
def test_planted_mistakes_and_nothing_else_are_found() -> None:
    assert len(re.findall(r"\):? +# type: ignore\[", PLANTED.read_text())) > 30
    said = mypy("--no-error-summary", str(PLANTED))
    assert said == "", said


def test_examples_are_typed_and_right() -> None:
    said = mypy("--no-error-summary", str(REPOSITORY / "examples"))
    assert said == "", said


def test_sampling_options_are_the_sampling_parameters() -> None:
    hints = get_type_hints(SamplingOptions)
    assert hints.keys() == PARAMS.keys() | RENAMED.keys()
    for name, hint in hints.items():
        first, *others = get_args(hint)
        kind = PARAMS[RENAMED.get(name, name)].kind
        plain = {"integer": int, "number": float, "boolean": bool, "texts": str}
        assert first is plain[kind] if kind in plain else kind in ("ids", "object"), name
        assert others[-1] is type(None)


def test_gen_takes_every_sampling_parameter() -> None:
    assert inspect.signature(sgl.gen).parameters.keys() >= PARAMS.keys()
    assert SampleOptions.__annotations__.keys() | {"max_tokens", "n"} == PARAMS.keys()


def test_every_option_of_a_run_may_follow_arguments_by_name() -> None:
    found = re.findall(r"def __call__\(self, \*, (\w+): (.*), \*\*arguments", inspect.getsource(Call))
    hints = {name: str(hint) for name, hint in inspect.get_annotations(RunOptions).items()}
    assert {name for name, _ in found} == hints.keys()
    wrong = [(name, kind) for name, kind in found if f"'{kind}'" not in hints[name]]
    assert wrong == []


def plain(hint: Any) -> Any:
    """What callers may give: a type without what only checks at run time need."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        given = [note.json_schema_input_type for note in notes if isinstance(note, BeforeValidator)]
        return plain(next((its for its in given if its is not PydanticUndefined), kind))
    if get_origin(hint) in (Union, types.UnionType):
        parts = [plain(part) for part in get_args(hint)]
        return frozenset(part for part in parts if get_origin(part) is not Literal or int not in parts)
    return hint


def test_the_options_of_engine_and_server_are_their_configurations() -> None:
    engine = {name: plain(hint) for name, hint in get_type_hints(EngineConfig, include_extras=True).items()}
    server = {name: plain(hint) for name, hint in get_type_hints(ServerConfig, include_extras=True).items()}
    engine |= {other: engine[name] for other, name in ORIGINALS.items()}
    assert {name: plain(hint) for name, hint in get_type_hints(EngineOptions).items()} == {
        name: hint for name, hint in engine.items() if name != "model_path"
    }
    named = inspect.signature(Runtime).parameters.keys()
    assert {name: plain(hint) for name, hint in get_type_hints(ServerOptions).items()} == engine | {
        name: hint for name, hint in server.items() if name not in named
    }
