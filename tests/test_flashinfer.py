"""What the FlashInfer backend tells FlashInfer, on any machine: its kernels are played by a few lines of torch, and
those of decodes run in Triton's interpreter.

The stand-in reads what the real kernels read, where they read it: so a captured launch that would look in the wrong
place shows. The real ones are tested in test_gpu.py.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl import Engine
from sgl.errors import ConfigError
from sgl.kernels import flashinfer_version
from sgl.kernels.attention import flashinfer, flashinfer_modules
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.flashinfer_modules import PrefillKernel
from sgl.kernels.attention.torch import TorchAttention
from sgl.runtime import attention_choice
from sgl.runtime.config import EngineConfig
from tests.patience import PATIENCE
from tests.test_attention import Case
from tests.tiny_models import tiny_checkpoint

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="decodes run in Triton's interpreter, which is off beside a GPU: test_gpu.py has the real kernels",
)
LOG2E = math.log2(math.e)
NUM_SMS = 8  # few, so that fa3 is chosen for shared keys, too


def stand_in(kernel: str, *, caps: bool = False) -> SimpleNamespace:
    """A module as FlashInfer compiles them, with soft caps or without: plan and paged_run."""

    def plan(*arguments: Any) -> list[int]:
        workspace, query_starts, page_starts, kv_lens, num_tokens, num_rows = (
            arguments[i] for i in (1, 3, 4, 5, 6, 7)
        )
        assert (
            len(arguments) == {"fa2": 19 if flashinfer_version.installed() < (0, 6, 16) else 20, "fa3": 16}[kernel]
        )
        assert all(tensor.device.type == "cpu" for tensor in (query_starts, page_starts, kv_lens))
        assert len(query_starts) == len(page_starts) == len(kv_lens) + 1 == num_rows + 1
        assert int(query_starts[-1]) <= num_tokens
        # A plan's integers depend on these numbers alone, which a captured launch keeps.
        return [num_rows, num_tokens, int(arguments[11]) or len(workspace)]

    def paged_run(*arguments: Any) -> None:
        plan_info, query, keys, values, query_starts, page_starts, pages, last_lens, out, lse, mask = arguments[
            2:13
        ]
        window, softcap, scale = arguments[14], arguments[22], arguments[23]
        assert (softcap > 0) == caps
        assert plan_info[0] == len(last_lens)
        # From a pointer on, however long the tensor was that it was captured with
        pages = torch.empty(0, dtype=torch.int32).set_(pages.untyped_storage())[pages.storage_offset() :]
        page_size = keys.shape[1]
        group = query.shape[1] // keys.shape[2]
        for row in range(len(last_lens)):
            first, end = int(page_starts[row]), int(page_starts[row + 1])
            if first == end:
                assert query_starts[row] == query_starts[row + 1]
                continue
            kv_len = (end - first - 1) * page_size + int(last_lens[row])
            chosen = pages[first:end].long()
            some = slice(int(query_starts[row]), int(query_starts[row + 1]))
            k, v = (cache[chosen].flatten(0, 1)[:kv_len].repeat_interleave(group, 1) for cache in (keys, values))
            scores = torch.einsum("qhd,khd->qhk", query[some], k) * scale
            if caps:
                scores = softcap * (scores / softcap).tanh()
            q_len = len(scores)
            last = torch.arange(kv_len - q_len, kv_len)[:, None] if mask else torch.full((q_len, 1), kv_len - 1)
            hidden = torch.arange(kv_len) > last
            if window >= 0:
                hidden |= torch.arange(kv_len) < last - window
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            out[some] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
            if lse is not None:
                lse[some] = scores.logsumexp(-1) * LOG2E

    return SimpleNamespace(plan=plan, paged_run=paged_run)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__=version))


class Event:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = SimpleNamespace(multi_processor_count=NUM_SMS, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    backend = flashinfer.FlashInferAttention
    monkeypatch.setattr(
        flashinfer_modules,
        "module",
        lambda shape, kernel, window: stand_in(kernel, caps=shape.softcap is not None),
    )
    installed(monkeypatch, "0.7.2.post1")
    monkeypatch.setattr(
        backend, "_pinned_buffer", staticmethod(lambda: (torch.empty(1 << 23, dtype=torch.uint8), Event()))
    )
    monkeypatch.setattr(flashinfer, "_FLOAT_WORKSPACE", 1)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-5)


ROWS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@interpreted
@given(
    decodes=st.lists(st.integers(1, 60).map(lambda kv: (1, kv)), max_size=6),
    prompts=ROWS,
    windows=st.sampled_from([(None,), (7,), (None, 7)]),
    shared=st.integers(0, 3),
    prefill=st.sampled_from(["fa2", "fa3"]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
)
def test_any_step_equals_attention_written_out(
    decodes: list[tuple[int, int]],
    prompts: list[tuple[int, int]],
    windows: tuple[int | None, ...],
    shared: int,
    prefill: PrefillKernel,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """With prefixes that rows share or not, and attended to once or not; a sink counts once."""
    rows = [*decodes, *prompts]
    case = Case(
        rows,
        page_size=4,
        windows=windows,
        shared=min(shared, -(-rows[0][1] // 4)),
        softcap=softcap,
        has_sinks=has_sinks,
    )
    backend = flashinfer.FlashInferAttention(case.shape, prefill=prefill)
    backend._least_saved = backend._least_work = 1
    backend.plan(case.step)
    for window in windows:
        found = backend.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)
        near(found, case.expected(window))


@pytest.mark.costly
@interpreted
@pytest.mark.parametrize("num_rows", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("windows", "variant", "has_sinks"),
    [((None,), 0, False), ((None,), 1, False), ((None,), 1, True), ((None, 7), 0, True)],
)
def test_what_was_captured_attends_for_later_steps(
    num_rows: int, windows: tuple[int | None, ...], variant: int, has_sinks: bool
) -> None:
    """With padding, and with any number of keys shared by all rows or within groups."""
    rng = np.random.default_rng(0)
    case = Case(
        [(1, 60)] * num_rows,
        page_size=4,
        windows=windows,
        has_sinks=has_sinks,
        softcap=3.0 if has_sinks else None,
    )
    backend = flashinfer.FlashInferAttention(case.shape, prefill="fa3", max_graph_rows=num_rows, max_pages=16)
    backend._least_saved = 1
    if variant not in backend.variants(num_rows):
        pytest.skip("no such variant for these rows")
    ones = np.ones(num_rows, np.int32)
    backend.plan_decode(AttentionStep(ones, ones, np.zeros((num_rows, 1), np.int32)), variant, ())
    captured = backend._planned_step
    for real in (num_rows, num_rows - 2):
        for shared, num_groups in ((0, 1), (1, 1), (10, 1), (3, 2), (7, 5)):
            table = case.page_table.copy()
            for group in range(min(num_groups, real)):
                table[group:real:num_groups, :shared] = table[group, :shared]
            kv_lens = rng.integers(4 * shared + 1, 61, num_rows).astype(np.int32)
            step = AttentionStep(ones[:real], kv_lens[:real], table[:real])
            wanted = backend.variant(step)
            if wanted != variant:
                continue
            kv_lens[real:], table[real:] = 1, 0
            backend.plan_decode(AttentionStep(ones, kv_lens, table), variant, ())
            backend._planned_step = captured  # a replay knows nothing of the plans that follow it
            case.kv_lens, case.page_table = kv_lens, table
            for window in windows:
                actual = backend.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)
                near(actual[:real], case.expected(window)[:real])


def test_the_right_way_for_each_step() -> None:
    case = Case([(1, 40)] * 20, page_size=4)
    backend = flashinfer.FlashInferAttention(case.shape, max_graph_rows=20, max_pages=10)
    backend._least_saved = 100
    assert backend.variant(case.step) == 0, "nothing shared"
    case.page_table[:, :5] = case.page_table[0, :5]
    assert backend.variant(case.step) == 1, "all rows share 20 keys"
    assert len(backend._groups) == 1
    case.page_table[10:, :5] = case.page_table[10, 5:10]
    assert backend.variant(case.step) == 1, "two groups, each with its own"
    assert len(backend._groups) == 2
    case.page_table[2:10, 0] = np.arange(50, 58)
    assert backend.variant(case.step) == 1, "one group, and rows by themselves"
    assert [len(group.rows) for group in backend._groups] == [10]


@interpreted
def test_short_prompts_attend_together_to_what_all_of_them_share() -> None:
    """Where that is much, fa3 is the faster for it, and nothing else is between them."""
    for prefill, rows, least, num_shared in (
        ("fa3", [(1, 60), (7, 40), (5, 60)], 32 * 12, 8),
        ("fa3", [(7, 40), (5, 60)], 32 * 12 + 1, 0),
        ("fa3", [(7, 40)], 1, 0),
        ("fa3", [(7, 7), (5, 60)], 1, 0),
        ("fa3", [(130, 170), (140, 180)], 1, 0),
        ("fa2", [(7, 40), (5, 60)], 1, 0),
    ):
        case = Case(rows, page_size=4, shared=min(9, min(kv_len for _, kv_len in rows) // 4))
        backend = flashinfer.FlashInferAttention(case.shape, prefill=prefill)
        backend._least_work = least
        backend.plan(case.step)
        assert backend._planned_step is not None
        shared = backend._planned_step.prompts_shared
        assert (0 if shared is None else int(shared.page_starts[1])) == num_shared
        near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


@pytest.mark.parametrize(
    ("prefill", "rows", "expected"),
    [
        ("fa3", [(300, 400), (128, 128)], "fa3"),
        pytest.param("fa3", [(1, 30), (128, 128)], "fa3", marks=interpreted),  # decodes are no prompts
        ("fa3", [(300, 400), (2, 40), (2, 90)], "fa2"),  # fewer than 128 on average
        ("fa3", [(127, 1000)], "fa2"),
        ("fa2", [(300, 400)], "fa2"),
    ],
)
def test_short_prompts_take_fa2(
    prefill: Literal["fa2", "fa3"], rows: list[tuple[int, int]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "0.6.6")
    monkeypatch.setattr(flashinfer.FlashInferAttention, "_merge", lambda *_: None)  # of CPU tensors, beside a GPU
    case = Case(rows)
    backend = flashinfer.FlashInferAttention(case.shape, prefill=prefill)
    backend.plan(case.step)
    assert backend._planned_step is not None
    assert {part.kernel for part in backend._planned_step.prompts.values()} == {expected}
    near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


@pytest.mark.parametrize("version", ["0.6.6", "0.6.15.post1", "0.6.16", "0.6.18.post1", "0.7.0", "0.7.2.post1"])
def test_each_version_is_planned_with_the_arguments_it_takes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    monkeypatch.setattr(flashinfer.FlashInferAttention, "_merge", lambda *_: None)
    case = Case([(5, 9), (200, 230)])
    for prefill in ("fa2", "fa3"):
        backend = flashinfer.FlashInferAttention(case.shape, prefill=prefill)
        backend.plan(case.step)
        near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


@pytest.mark.parametrize(
    ("version", "is_served"),
    [
        ("0.6.5", False),
        ("0.6.6", True),
        ("0.7.2.post1", True),
        ("0.7.9+cu130", True),
        ("0.8.0", False),
        ("1.0", False),
        ("unknown", False),
    ],
)
def test_unknown_versions_are_refused_by_their_number(
    version: str, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    monkeypatch.setattr(flashinfer_version.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    shape = replace(Case([(1, 4)]).shape, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64)
    reason = flashinfer.why_not(shape)
    assert (reason is None) == is_served
    assert is_served or "0.6.6 or later is needed, but below 0.8" in reason


def kernels_take(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], SimpleNamespace]) -> None:
    monkeypatch.setattr(flashinfer_modules, "module", lambda shape, kernel, window: load(kernel))


def test_what_is_not_compiled_is_compiled_side_by_side_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer.FlashInferAttention, "_merge", lambda *_: None)
    monkeypatch.setattr(flashinfer_modules, "_COMPILING", 0.01)
    both, said = threading.Barrier(2), threading.Event()
    lines: list[str] = []

    def info(message: str, *values: object) -> None:
        lines.append(message % values)
        said.set()

    monkeypatch.setattr(flashinfer_modules.logger, "info", info)

    def compile_slowly(kernel: str) -> SimpleNamespace:
        both.wait(PATIENCE)
        assert said.wait(PATIENCE)
        return stand_in(kernel)

    kernels_take(monkeypatch, compile_slowly)
    flashinfer.FlashInferAttention(Case([(1, 40)]).shape, prefill="fa3")
    assert [line for line in lines if "fa2 and fa3 kernels" in line and "heads of 8" in line]


@pytest.mark.parametrize("error", [RuntimeError("Could not find nvcc\nand so on"), FileNotFoundError("ninja")])
def test_without_a_compiler_flashinfer_is_refused_or_passed_over(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(kernel: str) -> SimpleNamespace:
        raise error

    kernels_take(monkeypatch, fail)
    monkeypatch.setitem(attention_choice._OBSTACLES, "flashinfer", lambda shape: None)
    shape = Case([(1, 40)]).shape
    options: dict[str, Any] = {"max_running_requests": 4, "context_length": 64}
    with caplog.at_level(logging.INFO, attention_choice.__name__):
        config, backend = attention_choice.choose_attention(EngineConfig(**options), shape)
    assert config.attention_backend == "torch"
    assert isinstance(backend, TorchAttention)
    [line] = [line for line in caplog.messages if "attention: torch" in line]
    assert f"takes CUDA's nvcc ({str(error).splitlines()[0]})" in line
    for asked in ({"attention_backend": "flashinfer"}, {"prefill_kernel": "fa2"}):
        with pytest.raises(ConfigError, match="takes CUDA's nvcc") as caught:
            attention_choice.choose_attention(EngineConfig(**options, **asked), shape)
        assert caught.value.option == "attention_backend"


@pytest.mark.parametrize(
    ("options", "option", "reason"),
    [
        ({"attention_backend": "flashinfer"}, "attention_backend", "needs an NVIDIA GPU"),
        ({"prefill_kernel": "fa3"}, "prefill_kernel", "attention_backend='flashinfer'"),
        ({"attention_backend": "triton"}, "attention_backend", "needs a GPU"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype", "needs an NVIDIA GPU"),
        ({"quantization": "fp8"}, "quantization", "needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], option: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Engine(tiny_checkpoint(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=64, **options)
    assert caught.value.option == option


@pytest.mark.usefixtures("plain_torch")
def test_the_choice_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "sgl.runtime.attention_choice"),
        Engine(tiny_checkpoint(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=64) as engine,
    ):
        assert engine.config.attention_backend == "torch"
    [line] = [line for line in caplog.records if "attention: torch" in line.message]
    assert "not cpu: the test says so" in line.message
    assert line.levelno == logging.WARNING
