"""A tree of thought: every idea is developed in two ways, four levels deep, and the best leaf is chosen.

All sixteen leaves share their ancestors' pages.
python examples/tree_of_thought.py, or sgl run [--model MODEL | --url URL] examples/tree_of_thought.py
"""

from __future__ import annotations

import sgl


@sgl.function
def solve(s: sgl.ProgramState, question: str) -> list[sgl.ProgramState]:
    s += f"Question: {question}\n"
    leaves = [s]
    for step in range(1, 5):
        grown: list[sgl.ProgramState] = []
        for leaf in leaves:
            pair = leaf.fork(2)
            pair += f"Step {step}:" + sgl.gen("step", max_tokens=8, stop="\n") + "\n"
            grown += pair
        leaves = grown
    for leaf in leaves:
        leaf += "Is this right? " + sgl.select("verdict", ["yes", "no"])
    return leaves


def main() -> None:
    state = solve.run("How many squares has a chess board?", temperature=0.8)
    leaves = state.ret_value
    sure = [leaf.get_meta_info("verdict")["probabilities"][0] for leaf in leaves]
    best = max(range(len(leaves)), key=sure.__getitem__)
    print(leaves[best].text())
    print(f"\nthe surest of {len(leaves)} leaves ({sure[best]:.0%}), in {state.usage['requests']} request")


if __name__ == "__main__":
    main()
