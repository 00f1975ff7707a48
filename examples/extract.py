"""Typed extraction: a sentence goes in, an object comes out, and its JSON is valid by construction.

python examples/extract.py, or sgl run [--model MODEL | --url URL] examples/extract.py
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

import sgl


class Booking(BaseModel):
    """A table that somebody wants."""

    name: Annotated[str, Field(max_length=12)]
    people: Annotated[int, Field(ge=1, le=20)]
    meal: Literal["lunch", "dinner"]
    vegetarian: bool


@sgl.function
def extract(s: sgl.ProgramState, message: str) -> None:
    s += f"Message: {message}\nAs JSON: " + sgl.gen("booking", schema=Booking, max_tokens=256)


def main() -> None:
    message = "Hi, this is Ada. We are four, one of us eats no meat, and we would like to come for dinner."
    state = extract.run(message, temperature=0)
    booking = state.value("booking")
    print(f"text:   {state['booking']}")
    print(f"object: {booking!r}")
    print(f"{state.usage['forced_tokens']} of {state.usage['completion_tokens']} tokens were forced by the schema")


if __name__ == "__main__":
    main()
