"""The agent loop: generate and run the called tools until the model calls none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, overload

from sgl.errors import ProgramError
from sgl.lang.aio import Wait, drive, drive_async
from sgl.lang.record.expr import assistant, gen
from sgl.lang.record.state import AsyncProgramState, ProgramState, Recording

Tools = Sequence[Callable[..., Any]]


@overload
def agent(s: ProgramState, tools: Tools, *, name: str = "answer", max_steps: int = 10, **params: Any) -> str: ...


@overload
def agent(
    s: AsyncProgramState, tools: Tools, *, name: str = "answer", max_steps: int = 10, **params: Any
) -> Awaitable[str]: ...


def agent(s: Recording, tools: Tools, *, name: str = "answer", max_steps: int = 10, **params: Any) -> Any:
    """Append assistant turns, `gen(name, tools=tools, **params)`, until one calls no tool; return its text.

    Calls of one turn run in parallel and append tool turns. In an `async def` program, await the result. Raises
    `ProgramError` after `max_steps` turns."""
    steps = _steps(s, tools, name, max_steps, params)
    return drive(steps) if isinstance(s, ProgramState) else drive_async(steps)


def _steps(
    s: Recording, tools: Tools, name: str, max_steps: int, params: dict[str, Any]
) -> Generator[Wait, None, str]:
    for _ in range(max_steps):
        s += assistant(gen(name, tools=tools, **params))
        calls = yield from s.parsed(name)
        if not calls:
            answer: str = yield from s.observed(name)
            return answer
    raise ProgramError(f"the agent still calls tools after {max_steps} steps", variable=name)
