"""Turns: as calls, as blocks, and what the conversation looks like afterwards.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

from open_engine import chat_template, open_engine

import sgl


@sgl.function
def interview(s, first, second):
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first", max_tokens=32))
    with s.user():
        s += second
    with s.assistant():
        s += sgl.gen("second", max_tokens=32)


def main(engine: sgl.Engine) -> None:
    state = interview.run(
        "Where do penguins live?",
        "And what do they eat?",
        temperature=0.5,
        chat_template=chat_template(engine),
        backend=engine,
    )
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content']!r}")
    print(f"in {state.usage['requests']} request")


if __name__ == "__main__":
    with open_engine() as engine:
        main(engine)
