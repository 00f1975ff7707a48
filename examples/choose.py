"""Select: the model decides among given answers, by their exact probabilities. No answer is ever misspelt.

python examples/choose.py, or sgl run [--model MODEL | --url URL] examples/choose.py
"""

from __future__ import annotations

import sgl

LABELS = ["praise", "complaint", "question"]
METHODS = [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]


@sgl.function
def classify(s: sgl.ProgramState, letter: str) -> None:
    s += f"Letter: {letter}\nThis letter is a"
    branches = s.fork(len(METHODS))
    for branch, method in zip(branches, METHODS, strict=True):
        branch += sgl.select("label", [f" {label}" for label in LABELS], choices_method=method)
    branches.join()


def main() -> None:
    state = classify.run("The soup was cold and so was the waiter.")
    for method, label, meta in zip(METHODS, state["label"], state.get_meta_info("label"), strict=True):
        shown = ", ".join(f"{name} {share:.0%}" for name, share in zip(LABELS, meta["probabilities"], strict=True))
        print(f"{method.name:>36}: {label.strip():<10} ({shown})")


if __name__ == "__main__":
    main()
