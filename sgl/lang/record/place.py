"""File and line of the user's code that recorded or raised something.

Recording keeps the code object and offset (under a microsecond); messages look up the line. Frames of the language and
of `with` blocks are skipped."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType, TracebackType
from typing import TypeAlias

from sgl.errors import ProgramError, SglError

Place: TypeAlias = tuple[CodeType, int]  # user code, byte offset of its last instruction

_HERE = str(Path(__file__).parent.parent) + os.sep
_is_ours: dict[str, bool] = {contextlib.__file__: True}  # by file


def here() -> Place | None:
    """The user code that led here, or None."""
    frame = sys._getframe(1)
    while True:
        code = frame.f_code
        ours = _is_ours.get(code.co_filename)
        if ours is None:
            ours = _is_ours[code.co_filename] = code.co_filename.startswith(_HERE)
        if not ours:
            return code, frame.f_lasti
        if frame.f_back is None:
            return None
        frame = frame.f_back


def place_text(place: Place | None) -> str | None:
    """`FILE:LINE, in FUNCTION`."""
    if place is None:
        return None
    code, offset = place
    line = next((line for start, end, line in code.co_lines() if start <= offset < end and line), None)
    return _text(code, line or code.co_firstlineno)


def with_place(message: str, place: str | None) -> str:
    """The message with its place."""
    return f"{message} ({place})" if place else message


def misuse(message: str, *, variable: str | None = None) -> ProgramError:
    """The error of a wrong call in a program, with its place."""
    place = place_text(here())
    error = ProgramError(with_place(message, place), variable=variable)
    error.place = place
    return error


def add_place(error: BaseException) -> None:
    """Add to our error, once, where in the body it was raised."""
    if not isinstance(error, SglError) or error.place is not None or not error.args:
        return
    found = _raised_at(error.__traceback__)
    if found is not None:
        error.place = found
        error.args = (with_place(str(error.args[0]), found), *error.args[1:])


def _raised_at(trace: TracebackType | None) -> str | None:
    """The user's innermost place."""
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not (_is_ours.get(code.co_filename) or code.co_filename.startswith(_HERE)):
            found = _text(code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _text(code: CodeType, line: int) -> str:
    name = Path(code.co_filename).name
    return f"{name}:{line}" if code.co_name == "<module>" else f"{name}:{line}, in {code.co_name}"
