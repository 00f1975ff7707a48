"""KV pages from GPU to GPU, or between two processes on one: bit for bit, also when the other process is killed."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from sgl.runtime.batch import PageMoves
from sgl.runtime.engine import Engine
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.mapped_rows import MappedRows
from tests.patience import PATIENCE, wait_until
from tests.test_gpu_tiers import NOTHING, Layout, pairs
from tests.test_transfers_engine import _PREFILL, GREEDY, OPTIONS, PROMPTS, ROOMY, Child, key, state
from tests.test_transfers_mapped import reader
from tests.tiny_models import tiny_checkpoint

__all__ = ["key"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpus")]
NUM_PAGES = 40
MAPPED: dict[str, Any] = {
    "disaggregation_transport": "cuda_ipc",
    "device": "cuda",
    "dtype": "bfloat16",
    "page_size": 16,
}


def made(seed: int) -> tuple[torch.Tensor, HostPages, MappedRows]:
    device = torch.device("cuda", torch.cuda.current_device())
    cache = KVCache(Layout(), NUM_PAGES, 16, torch.bfloat16, device).fragments()
    cache.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, tuple(cache.shape), np.uint8)))
    host = HostPages(cache, 3, device, num_mapped=NUM_PAGES)
    assert host.mapped is not None
    return cache, host, host.mapped


def offering(connection: Connection, visible: str) -> None:
    """A process whose rows hold its cache's pages: row 3 + n page n."""
    torch.cuda.set_device(int(visible))
    _, host, mapped = made(1)
    pages = list(range(1, NUM_PAGES))
    rows = [3 + page for page in pages]
    for _ in range(2):  # the second time, another prompt's
        wait_until(host.move(PageMoves(pairs(pages, rows), NOTHING)).is_saved)
        connection.send((mapped.handle, mapped.mark, mapped.number(rows)[1]))
        connection.recv()
    before = torch.cuda.memory_allocated()
    size = NUM_PAGES * mapped.page_bytes
    mapped.close()
    del host, mapped
    gc.collect()
    connection.send(before - torch.cuda.memory_allocated() - size)


def test_rows_of_another_process_are_read_bit_for_bit() -> None:
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    other = context.Process(target=offering, args=(theirs, str(torch.cuda.device_count() - 1)))
    other.start()
    try:
        assert own.poll(PATIENCE)
        handle, mark, stamp = own.recv()
        torch.cuda.set_device(0)
        cache, host, mapped = made(2)
        there = np.random.default_rng(1).integers(0, 256, tuple(cache.shape), np.uint8)
        opened = mapped.open(handle, mark)
        with pytest.raises(ConnectionError, match="not on this host"):
            mapped.open(handle, bytes(16))
        for seed in range(5):
            rng = np.random.default_rng(seed)
            count = int(rng.integers(1, NUM_PAGES - 1))
            pages = list(range(1, count + 1)) if not seed else (rng.permutation(NUM_PAGES - 1)[:count] + 1).tolist()
            rows, to = ((rng.permutation(NUM_PAGES - 1)[:count] + 1).tolist() for _ in range(2))
            wait_until(mapped.read(opened, pages, stamp, [3 + row for row in rows]).has_ended)
            wait_until(host.move(PageMoves(NOTHING, pairs([3 + row for row in rows], to))).is_loaded)
            assert np.array_equal(cache[:, to].cpu().numpy(), there[:, pages])
        own.send("go on")
        assert own.poll(PATIENCE)
        later = own.recv()[2]
        with pytest.raises(ConnectionError, match="overwritten"):
            wait_until(mapped.read(opened, pages, stamp, [3 + row for row in rows]).has_ended)
        copying = mapped.read(opened, pages, later, [3 + row for row in rows])
        wait_until(copying.has_ended)
        assert copying.seconds > 0
        mapped.forget(opened)
        still = mapped.open(handle, mark)
        own.send("close")
        assert own.poll(PATIENCE)
        assert own.recv() >= 0, "memory is freed, however often others opened it"
        mapped.forget(still)
        mapped.close()
    finally:
        other.kill()
        other.join()


@pytest.fixture
def path(tmp_path: Any) -> str:
    return str(tiny_checkpoint(tmp_path, head_dim=64))


@pytest.fixture
def decode(path: str, key: str) -> Iterator[Engine]:
    options = {**OPTIONS, **ROOMY, **MAPPED, "skip_tokenizer_init": True}
    with Engine(path, **options, disaggregation_mode="decode") as engine:
        yield engine


def test_a_prompt_of_another_process_is_pulled_whoever_dies(
    path: str, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(params: Any = None) -> list[Any]:
        return [
            decode.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=its)
            for prompt, its in zip(PROMPTS, params or [None] * len(PROMPTS), strict=True)
        ]

    answers()  # computed, then found in the cache
    expected = [its["output_ids"] for its in answers()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.device_count() - 1))  # the child sees no other
    for _ in range(2):
        with Child(_PREFILL, path, -1, **ROOMY, **MAPPED, skip_tokenizer_init=True) as child:
            decode.flush_cache()
            found = answers([child.ask(prompt) for prompt in PROMPTS])
            assert [its["meta_info"]["cached_tokens"] for its in found] == [80] * len(PROMPTS)
            same = sum(its["output_ids"] == ids for its, ids in zip(found, expected, strict=True))
            assert same >= len(PROMPTS) - 1, "rounding may choose another token once"
            late = child.ask(PROMPTS[0])
            child.process.kill()
            child.process.wait(PATIENCE)
            decode.flush_cache()
            params = {"sampling_params": GREEDY, "kv_transfer_params": late}
            assert decode.generate(input_ids=PROMPTS[0], **params)["meta_info"]["cached_tokens"] == 0
        wait_until(lambda: not reader(decode)._peers)
    wait_until(lambda: not state(decode)["transfer_used_tokens"])
    assert decode.check_ledger() == []
