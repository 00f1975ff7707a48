"""SGLang's and vLLM's own deterministic modes: what is not the same, to the last bit, as for each prompt alone.

The peer kit's bench.py makes one of these classes its engine. They do all there is to do when they are made, print a
row for each way, and end the process. This file runs beside the peers' packages, and imports nothing of sgl.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Bits = list[list[Any]]
"""Of each prompt: output ids, then their logprobs."""


class Compared:
    """Greedy outputs of one engine."""

    name = ""

    def __init__(self, model: str, tokenizer: str | None = None, *, asked: str, deterministic: bool) -> None:
        """asked: a JSON file with `prompts`, all sent at once, `compared`, how many of them count, and `tokens`."""
        told = json.loads(Path(asked).read_text(encoding="utf-8"))
        self.tokens = told["tokens"]
        prompts, number = told["prompts"], told["compared"]
        self.start(model, deterministic)
        expected = self._alone(prompts[:number], cold=True)
        self._print("alone, again", expected, self._alone(prompts[:number], cold=True))
        self.flush()
        self._print("cold", expected, self.bits(prompts))
        self._print("warm", expected, self.bits(prompts))
        self._print("alone, warm", expected, self._alone(prompts[:number], cold=False))
        self.close()
        raise SystemExit(0)

    def start(self, model: str, deterministic: bool) -> None:
        """The engine, with or without its mode."""
        raise NotImplementedError

    def bits(self, prompts: list[list[int]]) -> Bits:
        """Of these at once."""
        raise NotImplementedError

    def flush(self) -> None:
        """Empty the cache."""
        raise NotImplementedError

    def close(self) -> None:
        """End the engine."""

    def _alone(self, prompts: list[list[int]], *, cold: bool) -> Bits:
        found = []
        for prompt in prompts:
            if cold:
                self.flush()
            found += self.bits([prompt])
        return found

    def _print(self, way: str, expected: Bits, found: Bits) -> None:
        pairs = list(zip(expected, found, strict=False))  # those that count are the first
        numbers = sum(sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairs)
        row = {"engine": self.name, "way": way, "prompts": sum(a != b for a, b in pairs), "numbers": numbers}
        print("ROW", json.dumps(row), flush=True)


class SGLang(Compared):
    """`enable_deterministic_inference`, with FlashAttention 3, which keeps its cache."""

    name = "sglang"

    def start(self, model: str, deterministic: bool) -> None:
        """See `Compared`."""
        import sglang

        options = {"model_path": model, "load_format": "dummy", "dtype": "bfloat16", "random_seed": 0}
        options |= {"skip_tokenizer_init": True, "context_length": 8192, "attention_backend": "fa3"}
        self._engine = sglang.Engine(**options, enable_deterministic_inference=deterministic)

    def bits(self, prompts: list[list[int]]) -> Bits:
        """See `Compared`."""
        params = {"temperature": 0.0, "max_new_tokens": self.tokens, "ignore_eos": True}
        results = self._engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return [
            [*its["output_ids"], *(entry[0] for entry in its["meta_info"]["output_token_logprobs"])]
            for its in results
        ]

    def flush(self) -> None:
        """See `Compared`."""
        self._engine.flush_cache()

    def close(self) -> None:
        """See `Compared`."""
        self._engine.shutdown()


class VLLM(Compared):
    """`VLLM_BATCH_INVARIANT`."""

    name = "vllm"

    def start(self, model: str, deterministic: bool) -> None:
        """See `Compared`."""
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(deterministic))  # which the import reads
        import vllm

        options = {"load_format": "dummy", "dtype": "bfloat16", "seed": 0, "max_model_len": 8192}
        options |= {"enable_prefix_caching": True, "skip_tokenizer_init": True}
        self._engine = vllm.LLM(model=model, **options)
        self._params = vllm.SamplingParams(
            temperature=0.0, max_tokens=self.tokens, ignore_eos=True, detokenize=False, logprobs=0
        )

    def bits(self, prompts: list[list[int]]) -> Bits:
        """See `Compared`."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [its.outputs[0] for its in self._engine.generate(asked, self._params, use_tqdm=False)]
        return [
            [
                *its.token_ids,
                *(among[token].logprob for token, among in zip(its.token_ids, its.logprobs, strict=True)),
            ]
            for its in outputs
        ]

    def flush(self) -> None:
        """See `Compared`."""
        self._engine.reset_prefix_cache()
