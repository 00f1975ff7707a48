"""Questions about an image, asked side by side on one copy of its pages. It needs a model that sees:

sgl run --model path/to/Qwen3-VL-2B-Instruct examples/image.py [photo.jpg]
"""

from __future__ import annotations

import sys
from typing import Any

import sgl
from sgl.errors import ProgramError

QUESTIONS = ["Which shape is it?", "Which colour is it?"]


@sgl.function
def ask(s: sgl.ProgramState, picture: Any) -> None:
    s += sgl.user(sgl.image(picture) + "Look at this.") + sgl.assistant("Yes?")
    branches = s.fork(len(QUESTIONS))
    branches += lambda i: sgl.user(QUESTIONS[i]) + sgl.assistant(sgl.gen("answer", max_tokens=24, stop="\n"))
    branches.join()


def square() -> Any:
    """A red one on white."""
    from PIL import Image  # of sgl[engine]

    image = Image.new("RGB", (224, 224), "white")
    image.paste("red", (64, 64, 160, 160))
    return image


def main() -> None:
    files = [argument for argument in sys.argv[1:] if argument.endswith((".jpg", ".png", ".webp"))]
    state = ask.run(files[0] if files else square(), temperature=0)
    try:
        for question, answer in zip(QUESTIONS, state["answer"], strict=True):
            print(f"{question} {answer.strip()}")
    except ProgramError as error:
        if "takes no images" not in str(error):
            raise
        print("This model takes no images: sgl run --model path/to/Qwen3-VL-2B-Instruct examples/image.py")


if __name__ == "__main__":
    main()
