"""Streaming: the text as it comes, of a whole program or of one variable, in blocking and in asynchronous code.

python examples/streaming.py, or sgl run [--model MODEL | --url URL] examples/streaming.py
"""

from __future__ import annotations

import asyncio

import sgl


@sgl.function
def story(s: sgl.ProgramState, hero: str) -> None:
    s += f"A story about a {hero}. Once upon a time," + sgl.gen("begin", max_tokens=24)
    s += " And the moral is:" + sgl.gen("moral", max_tokens=12)


async def read_the_moral() -> int:
    """Count the pieces that one variable comes in."""
    state = story.run("hen", stream=True)
    return len([piece async for piece in state.text_async_iter("moral")])


def main() -> None:
    for piece in story.run("fox", stream=True).text_iter():
        print(piece, end="", flush=True)
    print(f"\n\nthe moral of another came in {asyncio.run(read_the_moral())} pieces")


if __name__ == "__main__":
    main()
