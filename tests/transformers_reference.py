"""The oracle of whole models: what transformers makes of a checkpoint, float32 on the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, path: Path, architecture: str = "AutoModelForCausalLM") -> None:
        self.path = path
        self.model: Any = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
        if architecture == "Llama4ForConditionalGeneration":  # its forward pass fails without images
            self.model = self.model.language_model
        self._cached_greedy = cache(self._greedy)

    def greedy(self, prompt: list[int], max_new: int) -> list[int]:
        return list(self._cached_greedy(tuple(prompt), max_new))

    def _greedy(self, prompt: tuple[int, ...], max_new: int) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, pad_token_id=0
            )
        return tuple(out[0, len(prompt) :].tolist())

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids) - 1] of each token given those before it."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
