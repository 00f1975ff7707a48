"""Trains what drafts for a Llama, on texts that the model generates itself: a small draft model, and an EAGLE-3 head.

    python -m benchmarks.draft_training MODEL DATA --out FOLDER [--only draft,eagle3] [--prompts 3000] [--own 3000]
                                        [--samples 4] [--tokens 256] [--steps 1200] [--seconds 90] [--batch 24]
                                        [--length 384] [--rate 6e-4] [--seed 0] [--option NAME=VALUE …]

MODEL is a folder or GGUF file of a plain Llama with tied embeddings and a chat template; DATA has prompts (see
benchmarks/real_prompts.py), to which the model adds some of its own. FOLDER gets draft/ and eagle3/, which
`speculative_draft_model_path` names, and texts.safetensors, which a later run reads instead of generating it. One GPU,
no network; each of the two ends after --steps, or --seconds at the latest (then the result depends on the machine's
speed). --option: of the engine that generates.

The draft model is four of the model's layers between its own embedding and norm, distilled (KL divergence of its
distribution from the model's at every token). The head is trained as it will be used (EAGLE-3, arXiv 2503.01840,
"training-time test"): it goes on from its own states for some tokens, and each of them counts.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from benchmarks.real_prompts import SUITES, Asked, prompts
from benchmarks.torch_llama import Attention, FeedForward, Norm, Shape, TorchLlama, rotated, write
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.eagle.config import default_layers

SHARES = {"gsm8k": 0.35, "mtbench": 0.3, "bfcl": 0.15, "json": 0.2}
"""Of the prompts."""
MOST_PROMPT = 640  # tokens
OWN_TOKENS = 96  # of a prompt that the model makes up
DRAFT_VOCABULARY = 16_384
UNROLLED = 4  # tokens that the head goes on from its own states in training
DECAY = 0.8  # of the weight of each of them
DRAFT_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Texts:
    """Chats with answers, padded: int64 [N, most]; answers are tokens [starts, ends)."""

    ids: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def windows(self, length: int, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For ever: token ids [batch, length], each around an answer, and which of them are of the answer."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.ids), generator=generator)
            for start in range(0, len(order) - len(order) % batch or len(order), batch):
                chosen = order[start : start + batch]
                firsts = (self.ends[chosen] - length).clamp(min=0)
                places = firsts[:, None] + torch.arange(length)
                inside = (places >= self.starts[chosen, None]) & (places < self.ends[chosen, None])
                yield self.ids[chosen[:, None], places.clamp(max=self.ids.shape[1] - 1)], inside


def own_prompts(engine: Engine, count: int, seed: int) -> list[Asked]:
    """What the model makes up where a user would speak (Magpie, arXiv 2406.08464); fewer where it does not end."""
    tokenizer, mark = engine.tokenizer, "@@"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], add_generation_prompt=False)
    [ids] = tokenizer.encode_all([chat[: chat.index(mark)]], add_special_tokens=False)
    params = [
        {"temperature": 1.0, "top_p": 0.95, "seed": seed + number, "max_new_tokens": OWN_TOKENS}
        for number in range(count)
    ]
    results = engine.generate(input_ids=[ids] * count, sampling_params=params)
    ended = [its["text"] for its in results if its["meta_info"]["finish_reason"]["type"] == "stop"]
    return [Asked([{"role": "user", "content": text}]) for text in ended if text.strip()]


def generate(arguments: argparse.Namespace) -> Texts:
    """Answers of the model to training prompts: to each the likeliest, and drawn ones, so many in all; fewer would be
    learnt by heart."""
    rng, num_samples = random.Random(arguments.seed), arguments.samples
    asked: list[Asked] = []
    for suite in SUITES:
        most = math.ceil(SHARES[suite] * arguments.prompts)
        asked += prompts(arguments.data, suite, training=True, most=most, seed=arguments.seed)
    options = parse_options(EngineConfig, dict(its.split("=", 1) for its in arguments.option))
    given = {"mem_fraction_static": 0.4, "constraint_timeout": 120.0, **options}
    with Engine(model_path=arguments.model, random_seed=arguments.seed, **given) as engine:
        asked += own_prompts(engine, arguments.own, arguments.seed)
        rng.shuffle(asked)
        tokenizer = engine.tokenizer
        texts = [tokenizer.apply_chat_template(its.messages, add_generation_prompt=True) for its in asked]
        ids = tokenizer.encode_all(texts, add_special_tokens=False)
        fitting = [(its, each) for its, each in zip(asked, ids, strict=True) if len(each) <= MOST_PROMPT]
        kept = [each for each in fitting for _ in range(num_samples)]
        params = [
            {
                "temperature": 0.8 if number % num_samples else 0.0,
                "seed": rng.randrange(1 << 30),
                "max_new_tokens": arguments.tokens,
                **({} if its.schema is None else {"json_schema": its.schema}),
            }
            for number, (its, _) in enumerate(kept)
        ]
        results = engine.generate(input_ids=[each for _, each in kept], sampling_params=params)
    answers = [result["output_ids"] for result in results]
    whole = [[*each, *answer] for (_, each), answer in zip(kept, answers, strict=True) if answer]
    starts = [len(each) for (_, each), answer in zip(kept, answers, strict=True) if answer]
    padded = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.int64)
    for row, its in zip(padded, whole, strict=True):
        row[: len(its)] = torch.tensor(its)
    return Texts(padded, torch.tensor(starts), torch.tensor(list(map(len, whole))))


def train(
    parameters: list[nn.Parameter],
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    texts: Texts,
    arguments: argparse.Namespace,
    device: torch.device,
    what: str,
) -> list[float]:
    """Minimise the loss of windows of texts; returns it at each step."""
    optimizer = torch.optim.AdamW(
        parameters, lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    began, found = time.monotonic(), []
    windows = texts.windows(arguments.length, arguments.batch, arguments.seed)
    warm_up = min(50, arguments.steps // 10 + 1)
    for step, (ids, inside) in zip(range(arguments.steps), windows, strict=False):
        spent = max(step / arguments.steps, (time.monotonic() - began) / arguments.seconds)
        if spent >= 1.0:
            break
        rate = arguments.rate * min((step + 1) / warm_up, 0.05 + 0.95 * (1 + math.cos(math.pi * spent)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = losses(ids.to(device), inside.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(loss.detach())
        if step % 100 == 0:
            print(f"{what}: step {step}, loss {float(found[-1]):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    values = torch.stack(found).tolist()
    print(f"{what}: {len(found)} steps, loss {sum(values[-20:]) / len(values[-20:]):.3f}", flush=True)
    return values


def divergence(logits: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each position to the goal's distribution, less its entropy: [n] of logits and goal [n, V]."""
    goal = goal.float().log_softmax(-1)
    return (goal.exp() * (goal - logits.float().log_softmax(-1))).sum(-1)


def train_draft(model: TorchLlama, texts: Texts, arguments: argparse.Namespace) -> tuple[TorchLlama, list[float]]:
    """A draft model of some of the model's layers."""
    last = model.shape.num_layers - 1
    chosen = sorted({round(its * last / (DRAFT_LAYERS - 1)) for its in range(DRAFT_LAYERS)})
    draft = model.with_layers(chosen)
    device = draft.norm.weight.device

    def losses(ids: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        # a position counts if the token behind it is of the answer
        counts = inside[:, 1:]
        with torch.no_grad():
            goal = model.logits(model(ids)[0][:, :-1][counts])
        return divergence(draft.logits(draft(ids)[0][:, :-1][counts]), goal).mean()

    return draft, train(list(draft.parameters()), losses, texts, arguments, device, "draft model")


class Head(nn.Module):
    """An EAGLE-3 head over whole sequences; see sgl/runtime/model/eagle/head.py for what its entries are."""

    def __init__(self, shape: Shape, drafted: torch.Tensor) -> None:
        """drafted: int64 [n] ascending, the tokens that it may draft."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": Norm(shape.hidden_size, shape.eps),
                "hidden_norm": Norm(shape.hidden_size, shape.eps),
                "self_attn": Attention(shape, 2 * shape.hidden_size),
                "post_attention_layernorm": Norm(shape.hidden_size, shape.eps),
                "mlp": FeedForward(shape),
            }
        )
        self.norm = Norm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(drafted), bias=False)
        self.register_buffer("drafted", drafted)

    def unrolled(self, embedded: torch.Tensor, hidden: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
        """Hidden states for logits, [B, T, hidden], of drafting the first, second, ... token.

        embedded, hidden: [B, T, hidden] and [B, T, 3 * hidden]: entry t has token t + 1, and what the model made of
        token t. For draft j, entry t goes on from j entries of its own, before which it sees the model's.
        """
        layer, shape, length = self.midlayer, self.shape, embedded.shape[1]
        feature = self.fc(hidden)
        tokens = layer["input_layernorm"](embedded)
        causal = torch.ones(length, length, device=embedded.device, dtype=torch.bool).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for j in range(count):
            x = torch.cat((tokens, layer["hidden_norm"](feature)), -1)
            query, key, value = layer["self_attn"].heads(x)
            query, key = rotated(query, shape.rope_theta), rotated(key, shape.rope_theta)
            keys.append(key)
            values.append(value)
            scale = shape.head_dim**-0.5
            # what the model has seen, up to j entries ago, then the own entries since
            scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~causal.tril(-j), -1e9)
            shifts = [j - m for m in range(1, j + 1)]
            own = [
                (query * _shifted(k, s)).sum(-1, keepdim=True) * scale
                for k, s in zip(keys[1:], shifts, strict=True)
            ]
            weights = torch.cat((scores, *own), -1).float().softmax(-1).to(value.dtype)
            attended = weights[..., :length] @ values[0]
            for m, (v, s) in enumerate(zip(values[1:], shifts, strict=True)):
                attended = attended + weights[..., length + m, None] * _shifted(v, s)
            x = feature + layer["self_attn"].o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer["mlp"](layer["post_attention_layernorm"](x))
            yield self.norm(x)
            feature = _shifted(x, 1)

    def save(self, folder: Path, layers: tuple[int, ...]) -> None:
        """As the files that SGLang and vLLM load."""
        vocab_size = self.shape.vocab_size
        tensors = {name: its for name, its in self.state_dict().items() if name != "drafted"}
        tensors["d2t"] = self.drafted - torch.arange(len(self.drafted), device=self.drafted.device)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, self.drafted.cpu(), True)
        fields = self.shape.fields() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.drafted),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
        }
        write(folder, fields, tensors)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x [..., T, n] with what was at t - by at t."""
    return x if not by else functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def train_head(
    model: TorchLlama, texts: Texts, arguments: argparse.Namespace
) -> tuple[Head, tuple[int, ...], list[float]]:
    """A head, and the layers that it reads."""
    layers, shape = default_layers(model.shape.num_layers), model.shape
    inside = torch.arange(texts.ids.shape[1]) < texts.ends[:, None]
    counts = torch.bincount(texts.ids[inside], minlength=shape.vocab_size)
    drafted = counts.topk(min(DRAFT_VOCABULARY, shape.vocab_size)).indices.sort().values
    device = model.norm.weight.device
    torch.manual_seed(arguments.seed)
    head = Head(shape, drafted).to(device)
    with torch.no_grad():
        head.lm_head.weight.copy_(model.embed_tokens.weight[head.drafted])
        head.norm.load_state_dict(model.norm.state_dict())
        head.midlayer["mlp"].load_state_dict(model.layers[-1].mlp.state_dict())
        thirds = torch.eye(shape.hidden_size, device=device)
        head.fc.weight.copy_(
            torch.cat((0 * thirds, 0 * thirds, thirds), -1) + 0.02 * torch.randn_like(head.fc.weight)
        )

    def losses(ids: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            last, states = model(ids)
            hidden = torch.cat([states[layer + 1] for layer in layers], -1)[:, :-2]
            embedded = model.embed_tokens(ids)[:, 1:-1]
        total = torch.zeros((), device=device)
        counts = inside[:, 2:]  # entry t drafts token t + 2
        with torch.no_grad():
            goal = model.logits(last[:, 1:-1][counts])[:, head.drafted]
        unrolled = head.unrolled(embedded.float(), hidden.float(), UNROLLED)
        for j, states_of_draft in enumerate(unrolled):
            logits = head.lm_head(states_of_draft[counts])
            here = divergence(logits, goal)
            if j:  # entries without j before them
                late = (torch.arange(counts.shape[1], device=device) >= j).expand_as(counts)[counts]
                here = here * late
            total = total + DECAY**j * here.mean()
        return total

    trained = [its for its in head.parameters() if its.requires_grad]
    return head, layers, train(trained, losses, texts, arguments, device, "EAGLE-3 head")


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="draft,eagle3")
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--own", type=int, default=3000, help="prompts that the model makes up")
    parser.add_argument("--samples", type=int, default=4, help="answers to each")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[])
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Train and write them."""
    arguments = arguments_of(given)
    kept = arguments.out / "texts.safetensors"
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if not kept.exists():
        texts = generate(arguments)
        save_file({"ids": texts.ids, "starts": texts.starts, "ends": texts.ends}, kept)
    texts = Texts(**load_file(kept))
    num_tokens = int((texts.ends - texts.starts).sum())
    print(f"{len(texts.ids)} answers of {num_tokens} tokens, {time.monotonic() - began:.0f} s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(arguments.seed)
    model = TorchLlama.read(arguments.model).to(device).requires_grad_(False)
    eos_ids = ModelConfig.from_pretrained(arguments.model).eos_token_ids
    if "draft" in arguments.only:
        draft, _ = train_draft(model, texts, arguments)
        draft.save(arguments.out / "draft", eos_ids)
    if "eagle3" in arguments.only:
        head, layers, _ = train_head(model, texts, arguments)
        head.save(arguments.out / "eagle3", layers)


if __name__ == "__main__":
    main()
