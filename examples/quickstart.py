"""The first minute: one program with gen, select and fork, and what the engine did for it.

    python examples/quickstart.py [MODEL]

MODEL is a Hugging Face folder or hub id. Without one, a tiny model with random weights runs the same program, and
its words mean nothing.
"""

from __future__ import annotations

import sys
import time

from random_model import random_model

import sgl


@sgl.function
def animal_story(s, animal):
    s += f"A story about a {animal}.\nOnce upon a time, there was a {animal} named"
    s += sgl.gen("name", max_tokens=6, stop=["\n", ".", ","])
    s += "\nThe mood of the story is " + sgl.select("mood", ["happy", "sad", "exciting"])
    s += ".\nThree ways in which it goes on:"
    branches = s.fork(3)
    branches += lambda i: f"\n{i + 1}. One day," + sgl.gen("next", max_tokens=24, stop="\n")
    branches.join()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    if model is None:
        print("No MODEL given: running a tiny model with random weights, so expect gibberish.")
        print("Name one to see sense: python examples/quickstart.py path/to/model\n")
        engine = sgl.Engine(model_path=random_model(), load_format="dummy")
    else:
        engine = sgl.Engine(model_path=model)

    with engine:
        start = time.perf_counter()
        states = animal_story.run_batch([{"animal": "fox"}, {"animal": "hen"}], temperature=0.7, backend=engine)
        for state in states:
            print(f"name: {state['name']!r}   mood: {state['mood']!r}")
            for i, text in enumerate(state["next"], 1):
                print(f"  {i}. {text!r}")
        seconds = time.perf_counter() - start

        print("\nstreamed: ", end="", flush=True)
        for piece in animal_story.run(animal="cat", backend=engine, stream=True, temperature=0.7).text_iter("name"):
            print(piece, end="", flush=True)

        did = engine.get_server_info()["internal_states"][0]
        print(
            f"\n\n{did['generated_tokens'] / seconds:.0f} generated tokens/s, "
            f"{did['cached_tokens']} of {did['prompt_tokens']} prompt tokens came from the cache, "
            f"{did['finished']} requests"
        )


if __name__ == "__main__":
    main()
