"""A model learns from its own samples: GRPO, with rollouts from sgl and the weights pushed back in place.

Each step asks for several answers to each message and rewards those that are a valid record of it. The trainer computes
the same tokens' logprobs, moves the weights towards what was better than its group, and hands them to the engine,
which goes on without a restart.

python examples/rl.py [--steps 40] [--device cuda] [--curve reward.png]
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import sgl

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo"]
GROUP = 8  # answers to each message
MESSAGES = 4  # of each step
MOST_TOKENS = 24
CLIP = 0.2


def message(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A message, and the record that is wanted of it. The prompt does not say which: rewards do."""
    record = {"name": rng.choice(NAMES), "people": rng.randint(2, 9)}
    return f"Text: This is {record['name']}, a table for {record['people']} people, please.\nJSON: ", record


def reward(answer: str, record: dict[str, Any]) -> float:
    """1 for the record, less for a part of it, 0 for what is no JSON."""
    try:
        found, _ = json.JSONDecoder().raw_decode(answer)
    except ValueError:
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    num_right = sum(bool(found.get(key) == value) for key, value in record.items())
    return 0.1 + 0.3 * num_right + 0.3 * int(found == record)


def rollouts(engine: sgl.Engine, prompts: list[str], seed: int) -> list[dict[str, Any]]:
    """GROUP samples of each prompt: the prompt is computed once, and each sample goes on from it."""
    params = [
        {
            "n": GROUP,
            "temperature": 1.0,
            "max_new_tokens": MOST_TOKENS,
            "stop": "}",
            "no_stop_trim": True,
            "seed": seed + i,
        }
        for i in range(len(prompts))
    ]
    results: list[dict[str, Any]] = engine.generate(prompts, params, return_logprob=True)
    return results


def logprobs(model: nn.Module, prompt: list[int], outputs: list[list[int]]) -> list[torch.Tensor]:
    """Of each output's tokens, as the trainer computes them."""
    longest = max(map(len, outputs))
    rows = [prompt + ids + [0] * (longest - len(ids)) for ids in outputs]
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor(rows, device=device)).logits.float()
    whole = logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    return [
        whole[i, : len(ids)].gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
        for i, ids in enumerate(outputs)
    ]


def train(
    engine: sgl.Engine, model: Any, *, steps: int, learning_rate: float = 2e-4, seed: int = 0
) -> tuple[list[float], float]:
    """The mean reward of each step, and the largest difference between the engine's logprobs and the trainer's."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    tokenizer = engine.get_tokenizer()
    curve, largest = [], 0.0
    for step in range(steps):
        asked = [message(rng) for _ in range(MESSAGES)]
        prompts = [text for text, _ in asked]
        results = rollouts(engine, prompts, seed=1000 * step + seed)
        rewards = []
        for i, (prompt, record) in enumerate(asked):
            group = results[i * GROUP : (i + 1) * GROUP]
            gained = torch.tensor([reward(each["text"], record) for each in group])
            rewards.append(gained.mean().item())
            outputs = [each["output_ids"] for each in group]
            new = logprobs(model, tokenizer.encode(prompt), outputs)
            advantages = (gained - gained.mean()) / (gained.std(correction=0) + 1e-4)
            loss = torch.zeros((), device=new[0].device)
            for each, its, advantage in zip(group, new, advantages.tolist(), strict=True):
                entries = each["meta_info"]["output_token_logprobs"]
                old = torch.tensor([entry[0] for entry in entries], device=its.device)
                if i == 0:
                    largest = max(largest, (its.detach() - old).abs().max().item())
                ratio = (its - old).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                loss = loss - gain.mean() / (GROUP * MESSAGES)
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        engine.update_weights(model.named_parameters(), weight_version=str(step + 1))
        curve.append(sum(rewards) / len(rewards))
        print(f"step {step + 1:3}  reward {curve[-1]:.3f}")
    return curve, largest


def draw(curve: list[float], path: str) -> None:
    """The reward's curve as a picture."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(range(1, len(curve) + 1), curve, color="#2a78c2")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="GRPO on the embedded model")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--curve", help="write the reward's curve to this PNG")
    options = parser.parse_args()
    with sgl.Engine(device=options.device, dtype="float32", max_total_tokens=16384) as engine:
        path = engine.config.model_path
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(options.device)
        curve, largest = train(engine, model, steps=options.steps)
    print(f"reward {curve[0]:.3f} -> {curve[-1]:.3f}; logprobs differ by {largest:.1e} at most")
    if options.curve:
        draw(curve, options.curve)


if __name__ == "__main__":
    main()
