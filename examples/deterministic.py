"""The same bits every time: log-probabilities of a prompt alone, among others, and behind a cached prefix.

python examples/deterministic.py
"""

from __future__ import annotations

import itertools

import sgl

PROMPTS = [f"{i} plus {i + 1} is" for i in range(16)]


def logprobs(engine: sgl.Engine, prompts: list[str]) -> list[list[float]]:
    """Of each prompt's output."""
    params = {"max_new_tokens": 8, "temperature": 0.7, "seed": 1}
    results = engine.generate(prompt=prompts, sampling_params=params, return_logprob=True)
    return [[place[0] for place in result["meta_info"]["output_token_logprobs"]] for result in results]


def main() -> None:
    model: str | None = None  # the embedded one
    for deterministic in (False, True):
        with sgl.Engine(model, deterministic=deterministic) as engine:
            model = engine.config.model_path
            alone = [logprobs(engine, [prompt])[0] for prompt in PROMPTS]
            together = logprobs(engine, PROMPTS)
        pairs = zip(itertools.chain(*alone), itertools.chain(*together), strict=True)
        differing = sum(one != other for one, other in pairs)
        print(f"deterministic={deterministic}: {differing} log-probabilities differ between alone and together")


if __name__ == "__main__":
    main()
