"""Few-shot questions in a batch: the shots are computed once and shared by every row.

python examples/few_shot.py, or sgl run [--model MODEL | --url URL] examples/few_shot.py
"""

from __future__ import annotations

import sgl

SHOTS = [
    ("What is the capital of France?", "Paris"),
    ("How many legs has a spider?", "Eight"),
    ("Which planet is the largest?", "Jupiter"),
]


@sgl.function
def answer(s: sgl.ProgramState, question: str) -> None:
    for asked, answered in SHOTS:
        s += f"Q: {asked}\nA: {answered}\n\n"
    s += f"Q: {question}\nA:" + sgl.gen("answer", max_tokens=16, stop="\n")


def main() -> None:
    questions = ["How many days has a week?", "What is the capital of Japan?", "Who wrote Hamlet?"]
    states = answer.run_batch([{"question": question} for question in questions], temperature=0)
    for question, state in zip(questions, states, strict=True):
        print(f"{question}  {state['answer'].strip()!r}")
    usage = states[-1].usage
    print(f"the last row: {usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them from the cache")


if __name__ == "__main__":
    main()
