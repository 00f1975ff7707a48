"""What benchmarks/draft_training.py trains: at tiny size its loss falls, and the loaders read what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import draft_training
from benchmarks.draft_training import Head, Texts, arguments_of, train_draft, train_head
from benchmarks.gpu import drafts
from benchmarks.real_prompts import SUITES, prompts
from benchmarks.torch_llama import TorchLlama
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.eagle.config import EagleConfig, default_layers
from sgl.runtime.model.eagle.loader import load_head
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.text.tokenizer import Tokenizer
from tests.every_draft import stop_its_clock
from tests.tiny_heads import HeadOracle
from tests.tiny_models import byte_tokenizer, tiny_checkpoint

DATA = {
    "gsm8k/train.jsonl": {"question": "How many?"},
    "gsm8k/test.jsonl": {"question": "How much?"},
    "mtbench/question.jsonl": {"turns": ["Write.", "Again."]},
    "mtbench/vicuna_bench_question.jsonl": {"turns": ["Tell."]},
    "e2e/train_from_clean_dev.jsonl": {"text": "A pub."},
    "e2e/test_clean.jsonl": {"text": "A coffee shop."},
}
TOOL = {
    "name": "f",
    "parameters": {
        "type": "dict",
        "properties": {"x": {"type": "float"}, "y": {"type": "array", "items": {"type": "any"}}},
        "required": ["x"],
    },
}


FEW = "--steps", "20", "--batch", "8", "--length", "20", "--rate", "5e-3"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", num_hidden_layers=8, tie_word_embeddings=True)


def texts() -> Texts:
    """Counting, by steps of one to three."""
    starts, steps = torch.arange(64)[:, None], torch.arange(64)[:, None] % 3 + 1
    ids = (starts * 5 + steps * torch.arange(40)) % 384
    return Texts(ids, torch.full((64,), 4), 40 - torch.arange(64) % 7)


def test_a_plain_llama_is_the_same_in_torch(tiny: Path, tmp_path: Path) -> None:
    model, ids = TorchLlama.read(tiny), torch.randint(384, (2, 30))
    reference = AutoModelForCausalLM.from_pretrained(tiny, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(ids, output_hidden_states=True)
        hidden, states = model(ids)
        torch.testing.assert_close(model.logits(hidden), expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states[:-1], list(expected.hidden_states[:-1]), atol=1e-4, rtol=1e-4)
    model.with_layers([0, 7]).save(tmp_path / "draft", (2,))
    loaded = load_decoder(ModelConfig.from_pretrained(tmp_path / "draft"))
    assert loaded.config.num_layers == 2
    assert loaded.config.eos_token_ids == (2,)


def test_the_loss_of_a_draft_model_falls(tiny: Path) -> None:
    arguments = arguments_of([str(tiny), ".", "--out", ".", *FEW])
    model = TorchLlama.read(tiny).requires_grad_(False)
    draft, losses = train_draft(model, texts(), arguments)
    assert draft.shape.num_layers == 4
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    arguments.steps = 3
    again = [train_draft(model, texts(), arguments)[1] for _ in range(2)]
    assert again[0] == again[1]


def test_the_loss_of_a_head_falls_and_it_drafts_as_it_was_trained(tiny: Path, tmp_path: Path) -> None:
    arguments = arguments_of([str(tiny), ".", "--out", ".", *FEW])
    model = TorchLlama.read(tiny).requires_grad_(False)
    head, layers, losses = train_head(model, texts(), arguments)
    assert layers == default_layers(8)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    head.save(tmp_path / "head", layers)
    target = load_decoder(ModelConfig.from_pretrained(tiny))
    config = EagleConfig.from_pretrained(tmp_path / "head")
    assert config.layers_of(8) == layers
    assert load_head(config, target).weights.lm_head is not None
    _compare(head.bfloat16().float(), model, tmp_path / "head", layers)


@torch.inference_mode()
def _compare(head: Head, model: TorchLlama, folder: Path, layers: tuple[int, ...]) -> None:
    """Entries of every draft with the oracle's, which goes on from its own states."""
    ids = texts().ids[:1, :12]
    _, states = model(ids)
    hidden = torch.cat([states[layer + 1] for layer in layers], -1)
    unrolled = head.unrolled(model.embed_tokens(ids)[:, 1:], hidden[:, :-1], 3)
    oracle = HeadOracle(folder, model.embed_tokens.weight)
    for j, its in enumerate(unrolled):
        logits = head.lm_head(its)[0]
        for t in (j + 1, 7, 10):
            given: list[torch.Tensor] = []
            for known in range(t - j + 1, t + 2):  # the model has been at tokens before t - j + 1
                expected, state = oracle.logits(hidden[0, : t - j + 1], ids[0, : known + 1].tolist(), given)
                given.append(state)
            torch.testing.assert_close(logits[t], expected[head.drafted], atol=1e-3, rtol=1e-3)


def write_prompts(tmp_path: Path) -> None:
    for name, line in DATA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(line) + "\n", encoding="utf-8")
    (tmp_path / "bfcl").mkdir()
    question = [[{"role": "user", "content": "Call."}]]
    for name in ("simple_python", "live_simple", "multiple"):
        lines = [{"question": question, "function": [TOOL]}, {"question": question, "function": [TOOL, TOOL]}]
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / "bfcl" / f"BFCL_v4_{name}.json").write_text(text, encoding="utf-8")


def test_prompts_for_training_are_not_those_of_the_evaluation(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    for suite in SUITES:
        training, others = (prompts(tmp_path, suite, training=its, most=9) for its in (True, False))
        assert training
        assert others
        assert not [its for its in training if its in others]
        assert training == prompts(tmp_path, suite, training=True, most=9)
    schema = prompts(tmp_path, "bfcl", training=False, most=1)[0].schema
    assert schema is not None
    arguments = (schema.get("anyOf") or [schema])[0]["properties"]["arguments"]
    assert arguments["properties"] == {"x": {"type": "number"}, "y": {"type": "array", "items": {}, "maxItems": 8}}
    assert draft_training.SHARES.keys() == set(SUITES)


def test_a_models_own_prompts_are_what_it_ends_where_a_user_speaks() -> None:
    tokenizer = byte_tokenizer(384)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    results = iter([("Why?", "stop"), ("And then", "length"), (" ", "stop")])

    class Engine:
        def __init__(self) -> None:
            self.tokenizer = Tokenizer(tokenizer)

        def generate(
            self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]
        ) -> list[dict[str, Any]]:
            assert [self.tokenizer.decode(ids) for ids in input_ids] == ["[user]"] * 3
            assert len({its["seed"] for its in sampling_params}) == 3
            return [{"text": text, "meta_info": {"finish_reason": {"type": its}}} for text, its in results]

    [own] = draft_training.own_prompts(Engine(), 3, 0)  # type: ignore[arg-type]
    assert own.messages == [{"role": "user", "content": "Why?"}]


@pytest.mark.slow
def test_the_benchmark_trains_what_is_missing_and_measures_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_its_clock(monkeypatch)
    sizes = {"num_hidden_layers": 8, "vocab_size": 400, "max_position_embeddings": 2048}
    tiny_checkpoint(tmp_path / "model", tie_word_embeddings=True, **sizes)
    tokenizer = byte_tokenizer(384)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_prompts(tmp_path / "data")
    few = ["--prompts", "4", "--own", "4", "--tokens", "12", "--steps", "2", "--batch", "2", "--length", "24"]
    folders = [str(tmp_path / "model"), str(tmp_path / "data"), "--drafts", str(tmp_path / "drafts")]
    drafts.main(
        [*folders, "--prompts", "2", "--tokens", "20", "--json", str(tmp_path / "rows.json"), "--train", *few]
    )
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [(row["suite"], row["mode"]) for row in rows] == [(its, mode) for mode in drafts.MODES for its in SUITES]
    assert all(row["equal"] == 1.0 for row in rows)
    assert all(row["drafted"] for row in rows if row["suite"] == "gsm8k" and row["mode"] in ("draft", "eagle3"))
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


def test_outputs_that_part_at_a_near_tie_are_counted_apart() -> None:
    class Engine:
        """Tells a token's logprob behind a text, and another one where others are asked about, too."""

        def generate(self, *, input_ids: Any, token_ids_logprob: Any, **_: Any) -> list[dict[str, Any]]:
            moved = 0.02 if len(input_ids) > 1 else 0.0
            known = {1: -0.1, 3: -0.7, 4: -0.72, 5: -9.0}
            return [
                {
                    "meta_info": {
                        "output_token_ids_logprobs": [[(known[token] - moved, token, None) for token in tokens]]
                    }
                }
                for tokens in token_ids_logprob
            ]

    engine: Any = Engine()
    answers = drafts.Answers()
    prompts = [[7]] * 4
    answers.keep(engine, "gsm8k", prompts, [[1, 3]] * 4)
    assert answers.rounding == pytest.approx(0.02)
    assert answers.compare(engine, "gsm8k", prompts, [[1, 3]] * 4) == (1.0, 1.0)
    assert answers.compare(engine, "gsm8k", prompts, [[1, 3], [1, 4], [1, 4], [1, 3]]) == (0.5, 1.0)
    assert answers.compare(engine, "gsm8k", prompts, [[1, 3], [1, 5], [1], [1, 3]]) == (0.5, 0.0)
