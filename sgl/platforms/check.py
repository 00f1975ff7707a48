"""`python -m sgl.platforms.check NAME` holds a platform to what engines need of one: models, ragged steps, the cache,
masks, sampling, programs and ranks, each against transformers or against the same engine on the CPU.

Needs sgl[engine]. Everything is in float32, with tiny random models and the one that comes with the package.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import sgl
from sgl.errors import ConfigError, SglError, UnsupportedModel
from sgl.runtime.config import EMBEDDED, EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.model.choice import read_config
from sgl.runtime.platform.registry import parsed, platform_of, registered
from sgl.runtime.runner.own import OwnRunner

NEAR = 1e-4
"""Of logprobs."""
_TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **_LATENT,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
_EVERYWHERE = "llama", "qwen3"
_PROMPTS = [
    [3 + (7 * row + 5 * place) % 370 for place in range(length)] for row, length in enumerate((1, 7, 64, 150))
]
_GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
_TEXTS = ["Once upon a time", "name: Ada\nage:", "a b c d"]
_WAYS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 3, "logit_bias": {"17": 5.0}, "n": 3},
]
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
_MASKS: list[dict[str, Any]] = [
    {"regex": "[a-z]{3,9} [0-9]{2}", "temperature": 0.0},
    {"json_schema": json.dumps(_SCHEMA), "temperature": 0.8, "seed": 1},
    {"json_schema": '{"enum": ["red", "green", 17]}', "temperature": 0.8, "seed": 2},
]


@sgl.function
def _forks(s: Any) -> None:
    s += "Three words about foxes:"
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f" {number}." + sgl.gen("word", max_tokens=6)
    s += "".join(branch["word"] for branch in branches)
    s += sgl.select("mood", choices=["good", "bad"]) + sgl.gen("code", regex="[0-9]{4}")


class Suite:
    """The checks of one device, by name. They raise AssertionError, what the engine does, or _LeftOutError."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.checks: dict[str, Callable[[], None]] = {
            "platform": self._platform,
            **{f"models: {name}": partial(self._model, name) for name in MODELS},
            "ragged steps": self._ragged,
            "cache": self._cache,
            "masks": lambda: self._same(_MASKS),
            "sampling": lambda: self._same(_WAYS),
            "programs": self._programs,
            "parallel": self._parallel,
        }

    def _engine(self, device: str | None = None, **options: Any) -> Engine:
        sizes: dict[str, Any] = {"max_total_tokens": 4096, "check_ledger": True, "dtype": "float32"}
        return Engine(device=device or self._device, **{**sizes, **options})

    def _platform(self) -> None:
        platform, index = parsed(self._device)
        assert platform.names(), "there is no such device here"
        device = platform.device(index)
        assert parsed(platform.option(device))[0] is platform, "option() names another platform"
        assert platform.total_memory(device, 1)[0] > 0
        assert platform.step_tokens(device, 1 << 30) > 0
        matrix = torch.arange(96.0, device=device).view(8, 12)
        laid_out = platform.lay_out(matrix.clone())
        assert laid_out.shape == matrix.shape, "lay_out keeps shapes"
        assert torch.equal(laid_out, matrix), "lay_out keeps contents"

    def _model(self, name: str) -> None:
        """Greedy tokens and the prompt's logprobs are those of transformers, whatever the steps' sizes."""
        torch.manual_seed(5)
        config = transformers.AutoConfig.for_model(name, **{**_TINY, **MODELS[name]})
        auto: Any = transformers.AutoModelForCausalLM
        oracle = auto.from_config(config, dtype=torch.float32).eval()
        expected = [_expected(oracle, ids) for ids in _PROMPTS]
        with tempfile.TemporaryDirectory() as folder:
            oracle.save_pretrained(folder)
            self._leave_out(folder, name)
            for chunk, page_size in ((None, None), (7, 4), (64, 1)):
                options: dict[str, Any] = {
                    "model_path": folder,
                    "skip_tokenizer_init": True,
                    "page_size": page_size,
                }
                with self._engine(**options, chunked_prefill_size=chunk) as engine:
                    found = engine.generate(
                        input_ids=_PROMPTS, sampling_params=_GREEDY, return_logprob=True, logprob_start_len=0
                    )
                    assert engine.check_ledger() == []
                for (ids, logprobs), result in zip(expected, found, strict=True):
                    assert result["output_ids"] == ids, f"greedy tokens in steps of {chunk}"
                    given = [each[0] for each in result["meta_info"]["input_token_logprobs"][1:]]
                    assert torch.allclose(torch.tensor(given), logprobs, atol=NEAR), "logprobs of the prompt"

    def _leave_out(self, folder: str, name: str) -> None:
        """A platform with its own runner may refuse families by name, but for the dense ones."""
        platform, _ = parsed(self._device)
        if name not in _EVERYWHERE and isinstance(platform, OwnRunner):
            config = EngineConfig(model_path=folder, device=self._device)
            try:
                platform.check(config, read_config(folder, "auto"))
            except UnsupportedModel as error:
                raise _LeftOutError(str(error)) from None

    def _ragged(self) -> None:
        """Rows that decode beside prompts and forced runs, and end one after another while others wait."""
        forced = {"regex": "(The answer is certainly|I do not know, but it may be) [0-9]{1,3}", "temperature": 0.0}
        params = [{**(forced if row % 3 == 1 else _WAYS[0]), "max_new_tokens": 2 + 5 * row} for row in range(7)]
        texts = [f"{row}: " + "so it goes " * (3 * row + 1) for row in range(7)]
        answers = []
        for device in ("cpu", None):
            with self._engine(device, max_running_requests=3, chunked_prefill_size=16, page_size=4) as engine:
                answers.append([each["output_ids"] for each in engine.generate(texts, params)])
                assert engine.check_ledger() == []
        assert answers[0] == answers[1]

    def _cache(self) -> None:
        with self._engine() as engine:
            prompt = "A story that is told again and again. " * 8
            params = {"temperature": 0.0, "max_new_tokens": 12}
            first, again = (engine.generate(prompt, params) for _ in range(2))
            longer = engine.generate(prompt + "And", params)
            engine.flush_cache()
            assert again["meta_info"]["cached_tokens"] > 0, "a prefix is found"
            assert again["output_ids"] == first["output_ids"], "and read as it was computed"
            assert longer["output_ids"] == engine.generate(prompt + "And", params)["output_ids"]
            assert engine.check_ledger() == []

    def _same(self, ways: list[dict[str, Any]], **options: Any) -> None:
        """The tokens of one engine on the CPU."""
        params = [{"max_new_tokens": 24, **way} for way in ways]
        answers = []
        for engine in (self._engine("cpu"), self._engine(**options)):
            with engine:
                answers.append([engine.generate(_TEXTS, each) for each in params])
        for way, expected, found in zip(ways, *answers, strict=True):
            ids = [[each["output_ids"] for each in results] for results in (expected, found)]
            assert ids[0] == ids[1], way
            for each in found:
                if "regex" in way:
                    assert re.fullmatch(way["regex"], each["text"]), each["text"]
                elif "json_schema" in way:
                    json.loads(each["text"])

    def _programs(self) -> None:
        texts = []
        for engine in (self._engine("cpu"), self._engine()):
            with engine:
                texts.append(_forks.run(backend=engine, temperature=0.0).text())
                assert engine.check_ledger() == []
        assert texts[0] == texts[1]

    def _parallel(self) -> None:
        """Two ranks, where there is room for them."""
        platform, _ = parsed(self._device)
        if not platform.is_shared and len(platform.names()) < 2:
            raise _LeftOutError("it takes two devices")
        self._same(_WAYS, tp_size=2)


class _LeftOutError(Exception):
    """A check says nothing of this device, or has no room on this machine."""


def _expected(oracle: Any, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    given, length = torch.tensor([ids]), _GREEDY["max_new_tokens"]
    with torch.inference_mode():
        out = oracle.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=length, min_new_tokens=length,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        logprobs = oracle(given).logits[0, :-1].log_softmax(-1)
    return out[0, len(ids) :].tolist(), logprobs.gather(1, given[0, 1:, None]).squeeze(1)


def main(arguments: list[str]) -> int:
    """Run the suite on the device of that name, and say what failed. Returns the exit status."""
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise ConfigError(f"usage: python -m sgl.platforms.check NAME, of {', '.join(registered())}")
        if not platform_of(arguments[0]).is_available():
            raise ConfigError(f"there is no {arguments[0]} device on this machine")
    except Exception as error:  # another package's code, which may raise anything
        kind = "" if isinstance(error, SglError) else f"{arguments[0]}.is_available: {type(error).__name__}: "
        sys.stderr.write(f"{kind}{error}\n")
        return 2
    assert Path(EMBEDDED).is_dir(), "it comes with the package"
    logging.disable(logging.WARNING)
    try:
        return 1 if _failed(arguments[0]) else 0
    finally:
        logging.disable(logging.NOTSET)


def _failed(platform: str) -> int:
    """How many checks do; each is told."""
    failed = 0
    for name, check in Suite(platform).checks.items():
        try:
            check()
        except _LeftOutError as reason:
            said = f"left out {name}: {reason}"
        except Exception as error:  # as above: the other checks are told, too
            failed += 1
            said = f"FAILED {name}: {type(error).__name__}: {error}"
        else:
            said = f"ok {name}"
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
