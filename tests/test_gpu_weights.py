"""New weights and released memory on GPUs: tensors as handles of another process's memory, of one rank and of two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl import Engine
from sgl.errors import WeightsError
from sgl.runtime.runner.occupation import PARTS
from tests.patience import PATIENCE
from tests.test_weights_update import GREEDY, PROMPT, shaken, tensors_of
from tests.tiny_models import tiny_checkpoint

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU"),
    pytest.mark.xdist_group("gpus"),
]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "check_ledger": True,
}
TWO = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
NEAR = 0.05
"""Of logprobs: bfloat16, and sums in whatever order."""


def hold(pipe: Connection, folder: Path, spoilt: bool) -> None:
    """A trainer's process: its tensors lie on the GPU until it is told that they were read."""
    pairs = [(name, its.cuda()) for name, its in tensors_of(folder).items()]
    if spoilt:
        pairs[-1][1].view(-1)[-1] = float("nan")
    torch.cuda.synchronize()
    pipe.send_bytes(bytes(ForkingPickler.dumps(pairs)))
    pipe.poll(PATIENCE)


@contextmanager
def held(folder: Path, *, spoilt: bool = False) -> Iterator[bytes]:
    """A message with handles of a process's tensors."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, folder, spoilt), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE), "the trainer did not start"
        yield ours.recv_bytes()
        ours.send(None)
        process.join(PATIENCE)
    finally:
        process.kill()


def outcome(engine: Engine) -> tuple[list[int], list[float]]:
    assert engine.flush_cache()
    result = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    return result["output_ids"], [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


def are_near(found: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]]) -> bool:
    return found[0] == wanted[0] and bool(found[1] == pytest.approx(wanted[1], abs=NEAR))


@pytest.mark.parametrize(
    "cut", [{}, pytest.param({"tp_size": 2}, marks=TWO), pytest.param({"pp_size": 2}, marks=TWO)], ids=str
)
def test_tensors_come_as_handles_and_memory_goes_and_comes_back(tmp_path: Path, cut: dict[str, Any]) -> None:
    old = tiny_checkpoint(tmp_path / "old", "llama")
    new = shaken(old, tmp_path / "new")
    with Engine(new, **OPTIONS, **cut) as engine:
        wanted = outcome(engine)
    with Engine(old, **OPTIONS, **cut) as engine:
        before = outcome(engine)
        assert not are_near(before, wanted)
        with held(new, spoilt=True) as message, pytest.raises(WeightsError, match="has numbers NaN"):
            engine.update_weights_from_tensor(serialized_named_tensors=[message])
        assert are_near(outcome(engine), before)
        with held(new) as message:
            engine.update_weights_from_tensor(serialized_named_tensors=[message], weight_version="1")
        assert are_near(outcome(engine), wanted)
        released = engine.release_memory_occupation()
        assert {*released} >= {"kv_cache", "weights"}
        for part in PARTS:
            engine.resume_memory_occupation([part])
        assert engine.get_server_info()["internal_states"][0]["released_memory"] == {}
        assert are_near(outcome(engine), wanted)
        name = "model.layers.1.self_attn.k_proj.weight"
        found = torch.tensor(engine.get_weights_by_name(name, 1000))
        assert torch.equal(found, tensors_of(new)[name].bfloat16().float())
        assert engine.check_ledger() == []
