"""ReAct: think, choose an action, see what comes of it, and again, until the model finishes.

Actions are chosen by select and their arguments held to a regex, so that every step can be executed.
python examples/react.py, or sgl run [--model MODEL | --url URL] examples/react.py
"""

from __future__ import annotations

import sgl

ARGUMENT = r"[0-9]{1,2} [+*-] [0-9]{1,2}"


def calculate(expression: str) -> int:
    """The value of an expression that matches `ARGUMENT`."""
    left, operator, right = expression.split()
    return {"+": int.__add__, "*": int.__mul__, "-": int.__sub__}[operator](int(left), int(right))


@sgl.function
def react(s: sgl.ProgramState, question: str, max_steps: int = 4) -> None:
    s += f"Question: {question}\n"
    for step in range(1, max_steps + 1):
        s += f"Thought {step}:" + sgl.gen("thought", max_tokens=24, stop="\n")
        s += f"\nAction {step}: " + sgl.select("action", ["calculate", "finish"])
        if s["action"] == "finish":
            break
        s += "(" + sgl.gen("argument", regex=ARGUMENT, max_tokens=12) + ")"
        s += f"\nObservation {step}: {calculate(s['argument'])}\n"
    s += "\nAnswer:" + sgl.gen("answer", max_tokens=8, stop="\n")


def main() -> None:
    state = react.run("How much is 6 times 7, and 8 more?", temperature=0.3)
    print(state.text())
    print(f"\n{state.usage['requests']} requests")


if __name__ == "__main__":
    main()
