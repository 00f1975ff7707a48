"""Make the embedded model: `python -m tools.train_embedded --corpora DIR --out sgl/models/embedded`.

One command from the generated data to a Hugging Face folder: learn the tokenizer, train, export. On one H200 with 16
cores it takes less than ten minutes. --tokenizer keeps one that was learnt before; --steps 30 tries the way through.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train_embedded import tokenizer as tokenizers
from tools.train_embedded.corpora import Corpora
from tools.train_embedded.mixture import examples
from tools.train_embedded.model import CONFIG, Decoder
from tools.train_embedded.train import Recipe, train

TOKENIZER_EXAMPLES = 60_000
GENERATION = {"eos_token_id": [2, 0], "pad_token_id": 0}


def main() -> None:
    """Read the options, make the model."""
    parser = argparse.ArgumentParser(prog="tools.train_embedded", description=__doc__)
    parser.add_argument(
        "--corpora", type=Path, required=True, help="folder with snips, rnnlg, taskmaster4 and text"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to keep")
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--learning-rate", type=float, default=Recipe.__dataclass_fields__["learning_rate"].default)
    parser.add_argument("--minutes", type=float, help="train for so long instead")
    parser.add_argument("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--batch-tokens", type=int, default=Recipe.__dataclass_fields__["batch_tokens"].default)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers encode side by side
    options.out.mkdir(parents=True, exist_ok=True)
    corpora = Corpora.read(options.corpora)
    if options.tokenizer:
        learnt = Tokenizer.from_file(str(options.tokenizer))
    else:
        some = itertools.islice(examples(corpora, options.seed), TOKENIZER_EXAMPLES)
        learnt = tokenizers.train("".join(text for text, _ in example.pieces) for example in some)
    tokenizers.save(learnt, options.out)
    if options.steps:
        recipe = Recipe(
            options.steps,
            options.minutes,
            batch_tokens=options.batch_tokens,
            workers=options.workers,
            seed=options.seed,
            learning_rate=options.learning_rate,
            short_batches=0 if options.start else Recipe.__dataclass_fields__["short_batches"].default,
        )
        weights = load_file(options.start / "model.safetensors") if options.start else None
        export(train(corpora, learnt, recipe, options.out / "training.log", weights), options.out)


def export(model: Decoder, folder: Path) -> None:
    """The checkpoint as Hugging Face folders have it."""
    weights = {
        f"model.{name}": p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, data in {"config.json": CONFIG, "generation_config.json": GENERATION}.items():
        (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
