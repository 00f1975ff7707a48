"""Make the embedded model: `python -m tools.train_embedded --corpora DIR --out sgl/models/embedded`.

One command from the generated data to a Hugging Face folder: learn the tokenizer, train for 9.1 minutes on one GPU,
export. --tokenizer keeps one that was learnt before; --steps 30 tries the way through.
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
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, default=Recipe.__dataclass_fields__["minutes"].default, help="for which to train"
    )
    length.add_argument("--steps", type=int, help="train for so many instead; 0 leaves it at the tokenizer")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--keep", type=float, default=0.0, help="share of --start's weights in the result")
    parser.add_argument("--learning-rate", type=float, default=Recipe.__dataclass_fields__["learning_rate"].default)
    parser.add_argument("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--batch-tokens", type=int, default=Recipe.__dataclass_fields__["batch_tokens"].default)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.keep and not options.start:
        parser.error("--keep is a share of the weights that --start names")
    if options.minutes <= 0 or (options.steps or 0) < 0:
        parser.error("--minutes must be positive, and --steps at least 0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers encode side by side
    options.out.mkdir(parents=True, exist_ok=True)
    corpora = Corpora.read(options.corpora)
    if options.tokenizer:
        learnt = Tokenizer.from_file(str(options.tokenizer))
    else:
        some = itertools.islice(examples(corpora, options.seed), TOKENIZER_EXAMPLES)
        learnt = tokenizers.train("".join(text for text, _ in example.pieces) for example in some)
    tokenizers.save(learnt, options.out)
    if options.steps != 0:
        recipe = Recipe(
            options.minutes,
            options.steps,
            batch_tokens=options.batch_tokens,
            workers=options.workers,
            seed=options.seed,
            learning_rate=options.learning_rate,
            short_batches=0 if options.start else Recipe.__dataclass_fields__["short_batches"].default,
        )
        weights = load_file(options.start / "model.safetensors") if options.start else None
        trained = train(corpora, learnt, recipe, options.out / "training.log", weights)
        export(blended(trained, weights, options.keep) if weights else weights_of(trained), options.out)


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """The weights as float32 on the CPU, by their names in a checkpoint."""
    return {f"model.{name}": p.detach().to("cpu", torch.float32) for name, p in model.named_parameters()}


def blended(model: Decoder, start: dict[str, torch.Tensor], keep: float) -> dict[str, torch.Tensor]:
    """The model's weights and, for the share `keep`, those it started from: the two err on different sentences."""
    return {name: torch.lerp(after, start[name].float(), keep) for name, after in weights_of(model).items()}


def export(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """The checkpoint as Hugging Face folders have it."""
    rounded = {name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()}
    save_file(rounded, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, data in {"config.json": CONFIG, "generation_config.json": GENERATION}.items():
        (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
