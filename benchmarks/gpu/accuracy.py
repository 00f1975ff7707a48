"""What 8 bits cost in accuracy: logits with keys and values, matrices, or both in e4m3, beside those of bfloat16.

    python -m benchmarks.gpu.accuracy MODEL [--tokens 512] [--rows 8]

MODEL is a checkpoint; its own samples are the text that is scored. Prints the relative error of all logits against
float32 (bfloat16's own is the yardstick) and against bfloat16, and how often the likeliest token is bfloat16's.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from sgl import Engine
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.triton import TritonAttention
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.tokens import Tokens

PAGE_SIZE = 16
E4M3 = torch.float8_e4m3fn
WAYS = {
    "bfloat16": ("bfloat16", None, None),
    "fp8 keys and values": ("bfloat16", E4M3, None),
    "fp8 matrices": ("bfloat16", None, "fp8"),
    "fp8 both": ("bfloat16", E4M3, "fp8"),
}


def logits_of(
    model: str, rows: list[list[int]], dtype: str, kv_dtype: torch.dtype | None, quantization: str | None
) -> torch.Tensor:
    """float32 [tokens, vocab] of rows of as many tokens each, on the host."""
    config = ModelConfig.from_pretrained(model)
    decoder = load_decoder(config, device="cuda", dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    length = len(rows[0])
    pages_each = -(-length // PAGE_SIZE)
    table = np.arange(len(rows) * pages_each, dtype=np.int32).reshape(len(rows), pages_each)
    kv = KVCache(config, table.size, PAGE_SIZE, kv_dtype or decoder.dtype, decoder.device)
    attention = TritonAttention(decoder.attention_shape(PAGE_SIZE, kv_dtype))
    lengths = np.full(len(rows), length, np.int32)
    attention.plan(AttentionStep(lengths, lengths, table))
    positions = torch.arange(length, device=decoder.device).repeat(len(rows))
    starts = torch.from_numpy(table[:, :1].astype(np.int64) * PAGE_SIZE).to(decoder.device)
    slots = (starts + torch.arange(length, device=decoder.device)).flatten()
    tokens = Tokens(torch.tensor(rows, device=decoder.device).flatten(), positions, slots)
    hidden = decoder.forward(tokens, kv, attention)
    return decoder.logits(hidden).cpu()


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    arguments = parser.parse_args()
    config = ModelConfig.from_pretrained(arguments.model)
    first = config.bos_token_id if config.bos_token_id is not None else 1
    options: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "triton", "skip_tokenizer_init": True}
    with Engine(arguments.model, device="cuda", random_seed=0, **options) as engine:
        params = {"temperature": 1.0, "max_new_tokens": arguments.tokens - 1, "ignore_eos": True}
        results = engine.generate(input_ids=[[first]] * arguments.rows, sampling_params=params)
    rows = [[first, *result["output_ids"]] for result in results]
    exact = logits_of(arguments.model, rows, "float32", None, None)
    plain = logits_of(arguments.model, rows, *WAYS["bfloat16"])
    print(f"{len(exact)} tokens of {arguments.model}")
    print(f"{'':20} {'error against float32':>22} {'against bfloat16':>17} {'same likeliest token':>21}")
    for name, way in WAYS.items():
        logits = plain if name == "bfloat16" else logits_of(arguments.model, rows, *way)
        errors = [float((logits - other).norm() / other.norm()) for other in (exact, plain)]
        same = float((logits.argmax(-1) == plain.argmax(-1)).float().mean())
        print(f"{name:20} {errors[0]:22.4f} {errors[1]:17.4f} {same:21.1%}")


if __name__ == "__main__":
    main()
