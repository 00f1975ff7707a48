"""Groups of samples on a deterministic engine: their logprobs are, to the bit, those of a forward pass of the same
weights."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sgl import Engine
from sgl.errors import InvalidRequest
from sgl.kernels import cpu
from tests.bits import Requests, differing
from tests.live_server import slow_steps
from tests.patience import PATIENCE, wait_until
from tests.test_weights_update import shaken, tensors_of
from tests.tiny_heads import tiny_head
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=f"cannot be compiled: {cpu.why_not()}")

RNG = random.Random(5)
PROMPT = [RNG.randrange(3, 380) for _ in range(37)]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "deterministic": True,
    "max_total_tokens": 2048,
    "page_size": 4,
    "check_ledger": True,
}
SAMPLED = {"temperature": 1.0, "seed": 1, "ignore_eos": True}
Sample = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("old") / "m", "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(old, tmp_path_factory.mktemp("new") / "m")


def logprobs(result: Any, side: str = "output") -> list[float]:
    return [entry[0] for entry in result["meta_info"][f"{side}_token_logprobs"]]


def group(engine: Engine, **params: Any) -> list[Sample]:
    given = {**SAMPLED, "n": 4, "max_new_tokens": 12, **params}
    found = engine.generate(input_ids=PROMPT, sampling_params=given, return_logprob=True)
    return [(its["output_ids"], logprobs(its)) for its in found]


def computed(engine: Engine, samples: list[Sample]) -> list[list[float]]:
    """The logprobs of samples as a trainer's forward pass has them: of whole texts, as prompts."""
    found = engine.generate(
        input_ids=[PROMPT + ids for ids, _ in samples],
        sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [logprobs(its, "input")[len(PROMPT) :] for its in found]


def test_a_groups_logprobs_are_those_of_a_forward_pass_also_after_an_update(old: Path, new: Path) -> None:
    with Engine(old, **OPTIONS) as engine:
        before = group(engine)
        engine.update_weights(tensors_of(new))
        after = group(engine)
        constrained = engine.generate(
            input_ids=PROMPT, sampling_params={**SAMPLED, "max_new_tokens": 9, "top_p": 0.8}, return_logprob=True
        )
        assert engine.check_ledger() == []
    assert len({tuple(ids) for ids, _ in before}) == 4
    after.append((constrained["output_ids"], logprobs(constrained)))
    for folder, samples in ((old, before), (new, after)):
        with Engine(folder, **{**OPTIONS, "chunked_prefill_size": 9}) as other:
            assert computed(other, samples) == [its for _, its in samples]
            if folder == new:
                assert group(other) == after[:4]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for ids, found in samples:
            with torch.no_grad():
                rows = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            wanted = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["retract", pytest.param("in_place", marks=pytest.mark.slow)])
def test_a_pause_changes_no_bits_and_an_update_those_behind_it(old: Path, new: Path, mode: Any) -> None:
    with Engine(old, **OPTIONS) as engine:
        plain = group(engine, max_new_tokens=100)
        for folder in (None, new):
            found: list[list[Sample]] = []

            def run(found: list[list[Sample]] = found) -> None:
                found.append(group(engine, max_new_tokens=100))

            before = steps(engine)
            thread = threading.Thread(target=run, daemon=True)
            with slow_steps(engine):
                thread.start()
                wait_until(lambda before=before: steps(engine) > before + 5)  # type: ignore[misc]
                engine.pause_generation(mode)
            done = engine._loop.call(lambda: {tuple(its.request.output_ids) for its in engine._loop._live.values()})
            if folder is not None:
                engine.update_weights_from_disk(folder)
            engine.continue_generation()
            thread.join(PATIENCE)
            if folder is None:
                assert found == [plain]
    so_far = [next(len(its) for its in done if list(its) == ids[: len(its)]) for ids, _ in found[0]]
    assert all(0 < n < 100 for n in so_far)
    for n, (ids, its), (same, old_ones) in zip(so_far, found[0], plain, strict=True):
        assert (ids[:n], its[:n]) == (same[:n], old_ones[:n])  # of the weights that sampled them
    with Engine(new, **OPTIONS) as other:
        whole = [its[n:] for n, its in zip(so_far, computed(other, found[0]), strict=True)]
    behind = [its[n:] for n, (_, its) in zip(so_far, found[0], strict=True)]
    assert (behind == whole) == (mode == "retract")  # in place, they also attend to KV of the old weights


def steps(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_drafts_and_jumps_leave_all_bits(old: Path, tmp_path: Path, backend: str) -> None:
    """Draft models, EAGLE-3 heads, and jumps over text that a constraint forces."""
    small = tiny_checkpoint(tmp_path / "small", "llama", with_tokenizer=True, hidden_size=32, seed=3)
    head = tiny_head(tmp_path / "head")
    options = {**OPTIONS, "attention_backend": backend, "skip_tokenizer_init": False}
    requests = Requests(4, 380, 60, 8)
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"enum": ["alpha", "beta"]}, "b": {"type": "integer"}},
        "required": ["a_long_name", "b"],
        "additionalProperties": False,
    }
    constrained = {**SAMPLED, "max_new_tokens": 60, "json_schema": schema, "ignore_eos": False}
    variants: list[dict[str, Any]] = [
        {"disable_radix_cache": True, "disable_jump_forward": True},
        {},
        {"chunked_prefill_size": 7},
        {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": str(small)},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(old)},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head), "chunked_prefill_size": 7},
        {"speculative_algorithm": "auto", "disable_jump_forward": True},
    ]
    expected: Any = None
    for variant in variants:
        with Engine(old, **{**options, **variant}) as engine:
            for _ in range(2):
                forced = engine.generate(
                    input_ids=[PROMPT, PROMPT[:11]], sampling_params=constrained, return_logprob=True
                )
                of_forced = [(its["output_ids"], logprobs(its)) for its in forced]
                found = (of_forced, requests.bits(engine, range(4)), requests.alone(engine))
                expected = expected or found
                assert of_forced == expected[0], variant
                assert differing(expected[1], found[1]) == differing(expected[2], found[2]) == 0, variant


def test_means_over_tokens_are_refused_by_name(old: Path) -> None:
    with Engine(old, **OPTIONS) as engine:
        alone = engine.encode(input_ids=PROMPT)["embedding"]
        assert engine.encode(input_ids=[PROMPT[:9], PROMPT, PROMPT[:20]])[1]["embedding"] == alone
        with pytest.raises(InvalidRequest, match="deterministic=True: means over tokens"):
            engine.encode(input_ids=PROMPT, pooling="mean")
