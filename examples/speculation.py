"""Speculation: tokens that can be guessed from what came before cost no step of their own, and change nothing.

python examples/speculation.py
"""

from __future__ import annotations

import sgl

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "people": {"type": "integer", "maximum": 20}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
MESSAGES = [
    "Four of us fly to Oslo.",
    "Two of us go to Lima.",
    "We are three and visit Oslo.",
    "Five for Rome, please.",
]


def main() -> None:
    outputs = []
    model: str | None = None  # the embedded one
    for algorithm in ("off", "auto"):
        with sgl.Engine(model, speculative_algorithm=algorithm, random_seed=0) as engine:
            model = engine.config.model_path
            texts, drafted, accepted = [], 0, 0
            for message in MESSAGES:
                params = {"json_schema": SCHEMA, "max_new_tokens": 48, "temperature": 0.0}
                result = engine.generate(prompt=f"{message}\nAs JSON: ", sampling_params=params)
                texts.append(result["text"])
                drafted += result["meta_info"].get("drafted_tokens", 0)
                accepted += result["meta_info"].get("accepted_tokens", 0)
            steps = engine.get_server_info()["internal_states"][0]["steps"]
        outputs.append(texts)
        print(f"{algorithm:5} {steps} steps, {accepted} of {drafted} drafts stood")
    print("the outputs are the same" if outputs[0] == outputs[1] else "the outputs differ")
    print("\n".join(outputs[1]))


if __name__ == "__main__":
    main()
