"""Fork and join: an outline is expanded point by point, all points at the same time.

python examples/parallel_decoding.py, or sgl run [--model MODEL | --url URL] examples/parallel_decoding.py
"""

from __future__ import annotations

import sgl

POINTS = ["what they eat", "where they live", "how they sleep"]


@sgl.function
def article(s: sgl.ProgramState, animal: str) -> None:
    s += f"A short article about the {animal}.\n\n"
    branches = s.fork(len(POINTS))
    branches += lambda i: f"One sentence on {POINTS[i]}:" + sgl.gen("point", max_tokens=24, stop=["\n", "."])
    for point, branch in zip(POINTS, branches, strict=True):
        s += f"- {point}:" + branch.ref("point") + ".\n"  # a reference: nobody waits for the text here
    branches.join()
    s += "In one word:" + sgl.gen("summary", max_tokens=4)


def main() -> None:
    state = article.run("otter", temperature=0.7)
    print(state.text())
    print(f"\n{len(state['point'])} branches and a summary in {state.usage['requests']} request")


if __name__ == "__main__":
    main()
