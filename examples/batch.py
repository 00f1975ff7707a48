"""A batch with a progress bar: rows run at the same time, come back in order, and fail alone.

python examples/batch.py, or sgl run [--model MODEL | --url URL] examples/batch.py
"""

from __future__ import annotations

import sgl


@sgl.function
def describe(s: sgl.ProgramState, city: str) -> None:
    if not city:
        raise ValueError("a city without a name")
    s += f"One sentence about {city}:" + sgl.gen("sentence", max_tokens=24, stop=["\n", "."])


def main() -> None:
    cities = ["Lima", "Oslo", "", "Kyoto", "Accra"] * 4
    rows = [{"city": city} for city in cities]
    outcomes = describe.run_batch(rows, seed=7, temperature=0.8, progress_bar=True, return_exceptions=True)
    for city, outcome in list(zip(cities, outcomes, strict=True))[:5]:
        print(f"{city or '-':>6}: {outcome if isinstance(outcome, Exception) else repr(outcome['sentence'])}")
    failed = sum(isinstance(outcome, Exception) for outcome in outcomes)
    print(f"{len(outcomes) - failed} rows done, {failed} failed")


if __name__ == "__main__":
    main()
