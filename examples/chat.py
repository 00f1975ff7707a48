"""Turns: as calls, as blocks, and what the conversation looks like afterwards.

python examples/chat.py, or sgl run [--model MODEL | --url URL] examples/chat.py
"""

from __future__ import annotations

import sgl


@sgl.function
def interview(s: sgl.ProgramState, first: str, second: str) -> None:
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first", max_tokens=32))
    with s.user():
        s += second
    with s.assistant():
        s += sgl.gen("second", max_tokens=32)


def main() -> None:
    state = interview.run(
        "Where do penguins live?",
        "And what do they eat?",
        temperature=0.5,
    )
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content']!r}")
    print(f"in {state.usage['requests']} request")


if __name__ == "__main__":
    main()
