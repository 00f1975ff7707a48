"""Training: batches made by worker processes while the device computes, Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.train_embedded.corpora import Corpora
from tools.train_embedded.mixture import examples
from tools.train_embedded.model import CONFIG, Decoder, loss_of
from tools.train_embedded.muon import Muon
from tools.train_embedded.prompts import Example
from tools.train_embedded.tokenizer import CONTEXT

ROUND = 32  # lengths are padded to multiples of it
SHORT = 192  # tokens
PIECE = re.compile(r"<\|[a-z_]+\|>|[^\W\d_]+|.", re.DOTALL)
SHORT_ANSWER = 6  # tokens, the end of the turn among them
KNOWN = 200_000  # pieces to remember
POOL = 10  # batches made at a time, of examples sorted by length


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run depends on beside the data."""

    minutes: float = 9.1
    steps: int | None = None  # instead
    short_batches: int = 1500  # at first, all examples are short: copying is found sooner
    batch_tokens: int = 131072  # of a step, padding included
    learning_rate: float = 5e-3
    warmup: int = 200  # steps
    weight_decay: float = 0.02
    read_share: float = (
        0.1  # of the tokens that the model reads, how many it is to foretell beside those it is to write
    )
    short_weight: float = 4.0  # of tokens in answers of few, which would drown among the many of records
    seed: int = 1
    workers: int = 14


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids int16 [rows, length]; flat positions int32 [n] whose next token counts; whether that is one of a short
answer, bool [n]."""


class Batches(IterableDataset[Batch]):
    """Endless batches."""

    def __init__(self, corpora: Corpora, tokenizer: str, recipe: Recipe) -> None:
        self.corpora, self.tokenizer, self.recipe = corpora, tokenizer, recipe

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self.recipe.seed * 1000 + (worker.id if worker else 0)
        encode = Encoder(Tokenizer.from_str(self.tokenizer))
        stream = examples(self.corpora, seed)
        order = np.random.default_rng(seed)
        short = self.recipe.short_batches // max(1, self.recipe.workers)
        later: list[tuple[list[int], list[int]]] = []  # too long for the first batches
        for made in itertools.count():
            is_first = made * POOL < short
            share = 0 if is_first else -(-len(later) // 10)
            rows, later = later[:share], later[share:]
            tokens = sum(len(row[0]) for row in rows)
            while tokens < POOL * self.recipe.batch_tokens:
                row = encode(next(stream))
                if len(row[0]) > CONTEXT:
                    continue
                if is_first and len(row[0]) > SHORT:
                    later.append(row)
                else:
                    rows.append(row)
                    tokens += len(row[0])
            rows.sort(key=lambda row: len(row[0]), reverse=True)
            batches = list(_padded(rows, self.recipe, order))
            for i in order.permutation(len(batches)):
                yield batches[i]


class Encoder:
    """The tokenizer with a memory. No merge crosses from a run of letters to anything else (tokenizer.py), so a text's
    tokens are those of its pieces, and most pieces are old acquaintances: an order of magnitude faster than encoding
    whole texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def __call__(self, example: Example) -> tuple[list[int], list[int]]:
        """The tokens of an example and their weights: 1 read, 2 to be written, 3 to be written as a short answer."""
        ids: list[int] = []
        weights: list[int] = []
        for text, learn in example.pieces:
            start = len(ids)
            for piece in PIECE.findall(text):
                found = self.known.get(piece)
                if found is None:
                    if len(self.known) > KNOWN:
                        self.known.clear()
                    found = self.known[piece] = self.tokenizer.encode(piece).ids
                ids += found
            count = len(ids) - start
            weights += [(3 if count <= SHORT_ANSWER else 2) if learn else 1] * count
        return ids, weights


def _padded(rows: list[tuple[list[int], list[int]]], recipe: Recipe, rng: np.random.Generator) -> Iterator[Batch]:
    while rows:
        length = -(-len(rows[0][0]) // ROUND) * ROUND
        count = recipe.batch_tokens // length
        taken, rows = rows[:count], rows[count:]
        ids = np.zeros((len(taken), length), np.int16)
        kinds = np.zeros((len(taken), length), np.uint8)
        for i, (row, kind) in enumerate(taken):
            ids[i, : len(row)] = row
            kinds[i, : len(row) - 1] = kind[1:]  # of the token that follows
        flat = kinds.ravel()
        (picked,) = np.nonzero((flat > 1) | ((flat == 1) & (rng.random(flat.size) < recipe.read_share)))
        yield torch.from_numpy(ids), torch.from_numpy(picked.astype(np.int32)), torch.from_numpy(flat[picked] == 3)


def train(
    corpora: Corpora,
    tokenizer: Tokenizer,
    recipe: Recipe,
    log: Path,
    start_from: dict[str, torch.Tensor] | None = None,
) -> Decoder:
    """A trained model, from random weights or those of a checkpoint. Every fifty steps a line with the loss goes to
    the file `log`."""
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    loader = DataLoader(
        Batches(corpora, tokenizer.to_str(), recipe), batch_size=None, num_workers=recipe.workers,
        pin_memory=device == "cuda", prefetch_factor=8 if recipe.workers else None,
    )  # fmt: skip
    batches = iter(loader)
    model = Decoder(CONFIG).to(device)
    if start_from is not None:
        model.load_state_dict({name.removeprefix("model."): weights for name, weights in start_from.items()})
    loss_function = loss_of
    if device == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=True)
        loss_function = torch.compile(loss_of, dynamic=True)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda"
        ),
    ]
    start, seen, total = time.perf_counter(), 0, torch.zeros((), device=device)
    with log.open("a", encoding="utf-8") as lines:
        step, progress, waited = 0, 0.0, 0.0
        while progress < 1.0:
            step += 1
            elapsed = time.perf_counter() - start
            progress = elapsed / (60 * recipe.minutes) if recipe.steps is None else step / recipe.steps
            rate = recipe.learning_rate * min(step / recipe.warmup, _cosine(progress))
            asked = time.perf_counter()
            ids, picked, is_short = (part.to(device, non_blocking=True) for part in next(batches))
            waited += time.perf_counter() - asked
            weights = 1.0 + (recipe.short_weight - 1.0) * is_short
            with torch.autocast(device, torch.bfloat16):
                hidden = model(ids.long())
                loss = loss_function(hidden, model.embed_tokens.weight, ids, picked, weights)
            loss.backward()
            total += loss.detach()
            seen += ids.numel()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0 or progress >= 1.0:
                mean = total.item() / (step % 50 or 50)
                speed = seen / (time.perf_counter() - start) / 1e6
                line = f"step {step} loss {mean:.4f} {speed:.2f} Mtok/s {elapsed:.0f} s, {waited:.0f} s for data"
                print(line, file=lines, flush=True)
                total.zero_()
    return model


def _cosine(progress: float) -> float:
    """From one to a hundredth."""
    return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, progress))) / 2
