"""Agents in an event loop: tools are Python functions, called in parallel; many agents run at once.

python examples/async_agent.py, or sgl run [--model MODEL | --url URL] examples/async_agent.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import sgl

WEATHER = {"Lima": 19, "Oslo": -3, "Accra": 29}


async def temperature_in(city: Literal["Lima", "Oslo", "Accra"]) -> str:
    """The temperature in a city, in degrees Celsius.

    Args:
        city: where
    """
    await asyncio.sleep(0.01)  # a real one would ask a service
    return f"{WEATHER[city]} degrees"


def packing_list(weather: Literal["hot", "cold"]) -> list[str]:
    """What to pack for a kind of weather."""
    return ["sandals", "hat"] if weather == "hot" else ["coat", "gloves"]


@sgl.function
async def advise(s: sgl.AsyncProgramState, question: str) -> tuple[list[Any], str]:
    tools: list[Callable[..., Any]] = [temperature_in, packing_list]
    s += sgl.system(sgl.describe_tools(tools))
    s += sgl.user(question)
    # The first step must be a call; from then on the model decides when it knows enough.
    s += sgl.assistant(sgl.gen("first", tools=tools, tool_choice="required", max_tokens=80))
    answer = await sgl.agent(s, tools, max_steps=3, max_tokens=48)
    return await s.value("first"), answer


async def ask_all() -> None:
    questions = [f"What shall I pack for {city}?" for city in WEATHER]
    batch = advise.arun_batch(
        [{"question": question} for question in questions],
        max_concurrency=8,
    )
    async for state in batch:
        [call], answer = state.ret_value
        print(f"{call.name}({call.arguments}) gave {call.content()!r}; then: {answer!r}")
        print(f"  {len(state.messages())} turns in {state.usage['requests']} requests")


def main() -> None:
    asyncio.run(ask_all())


if __name__ == "__main__":
    main()
