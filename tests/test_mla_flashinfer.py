"""What prompts over latents tell FlashInfer's kernels for latent attention, on any machine: these are played by a few
lines of torch, which read what the real ones read. The real ones are tested in test_mla.py."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl.errors import ConfigError
from sgl.kernels import flashinfer_version
from sgl.kernels.attention.base import AttentionShape
from sgl.kernels.attention.flashinfer_modules import CannotCompile
from sgl.kernels.latent import flashinfer
from sgl.kernels.latent.attention import LatentAttention
from sgl.kernels.latent.flashinfer import FlashInferPrompts
from sgl.runtime import attention_choice
from sgl.runtime.config import EngineConfig
from tests.test_attention import Case
from tests.test_flashinfer import Event
from tests.test_mla_kernels import latents, near

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="decodes run in Triton's interpreter, which is off beside a GPU",
)


def stand_in(num_extra: int) -> SimpleNamespace:
    """A module as FlashInfer compiles it: plan and run. The plan's rows are in its workspace, as they are there."""
    rows: dict[int, list[tuple[int, int, int, int]]] = {}

    def plan(*arguments: Any) -> int:
        partial, workspace, pinned, query_starts, page_starts, kv_lens, num_heads, rank, causal = arguments
        assert len(partial) >= 2 * 2 * 64 * (2 * rank + 4)
        assert len(pinned) == len(workspace)
        assert all(its.dtype == torch.int32 and its.is_contiguous() for its in (query_starts, page_starts, kv_lens))
        assert len(query_starts) == len(page_starts) == len(kv_lens) + 1
        assert query_starts[0] == 0
        assert causal
        assert int(query_starts[-1]) * num_heads <= flashinfer._MOST_WORKS * 64
        starts = query_starts.tolist()
        rows[workspace.data_ptr()] = list(
            zip(starts, starts[1:], page_starts.tolist(), kv_lens.tolist(), strict=False)
        )
        return workspace.data_ptr()

    def run(*arguments: Any) -> None:
        assert len(arguments) == 15 + num_extra
        _, workspace, planned, q, q_rotated, latents, keys, pages, out, lse, mask = arguments[:11]
        num_heads, page_size, scale, _ = arguments[11:15]
        assert planned == workspace.data_ptr()
        assert (lse, mask, num_heads, page_size) == (None, 1, q.shape[1], latents.shape[1])
        for first, end, first_page, kv_len in rows[workspace.data_ptr()]:
            assert kv_len >= end - first > 0
            chosen = pages[first_page : first_page + -(-kv_len // page_size)].long()
            values = latents[chosen].flatten(0, 1)[:kv_len]
            rotated = keys[chosen].flatten(0, 1)[:kv_len]
            scores = torch.einsum("qhd,kd->qhk", q[first:end], values)
            scores = (scores + torch.einsum("qhd,kd->qhk", q_rotated[first:end], rotated)) * scale
            hidden = torch.arange(kv_len) > torch.arange(kv_len - (end - first), kv_len)[:, None]
            weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
            out[first:end] = torch.einsum("qhk,kd->qhd", weights, values)

    return SimpleNamespace(plan=plan, run=run)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(multi_processor_count=2, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FlashInferPrompts, "_compiled", lambda self, kernel: stand_in(0))
    pinned = torch.empty(flashinfer._INT_WORKSPACE, dtype=torch.uint8), Event()
    monkeypatch.setattr(FlashInferPrompts, "_pinned_buffer", staticmethod(lambda: pinned))
    install(monkeypatch, "0.6.6")


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__=version))


def attention(case: Case) -> LatentAttention:
    return LatentAttention(case.shape, FlashInferPrompts(case.shape, "fa3"))


@interpreted
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    decodes=st.lists(st.integers(1, 40).map(lambda kv: (1, kv)), max_size=2),
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=4),
    most_works=st.sampled_from([12_000, 1]),
)
def test_any_step_equals_attention_written_out(
    decodes: list[tuple[int, int]], prompts: list[tuple[int, int]], most_works: int
) -> None:
    """Also where one plan is too small for a step's prompts, so that rows are cut."""
    case = latents([*decodes, *((q, q + past) for q, past in prompts)], num_heads=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "_MOST_WORKS", most_works)
        backend = attention(case)
        backend.plan(case.step)
        near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


@pytest.mark.parametrize(
    ("version", "num_extra"), [("0.6.6", 0), ("0.6.13", 0), ("0.6.14", 2), ("0.6.18", 3), ("0.7.1", 3)]
)
def test_each_version_is_given_what_its_kernels_take(
    version: str, num_extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    monkeypatch.setattr(FlashInferPrompts, "_compiled", lambda self, kernel: stand_in(num_extra))
    case = latents([(5, 9), (3, 3)])
    backend = attention(case)
    backend.plan(case.step)
    near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


def on_a_gpu(**fields: Any) -> AttentionShape:
    case = latents([(1, 1)], rank=512, rope_dim=64)
    return replace(case.shape, device=torch.device("cuda"), dtype=torch.bfloat16, **fields)


CONFIG = EngineConfig(model_path="none", context_length=64, max_running_requests=8, device="cuda")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are only named."""
    monkeypatch.setattr(attention_choice, "LatentAttention", lambda shape, prompts, **bounds: prompts)
    monkeypatch.setattr(attention_choice, "TritonPrompts", lambda shape: "triton")
    monkeypatch.setattr(attention_choice, "FlashInferPrompts", lambda shape, kernel: kernel)
    monkeypatch.setattr(flashinfer_version, "why_not", lambda: None)


@pytest.mark.usefixtures("built")
def test_latents_of_deepseek_take_flashinfers_kernels_on_hopper(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        config, backend = attention_choice.choose_attention(CONFIG, on_a_gpu())
    assert backend == "fa3"
    assert (config.attention_backend, config.prefill_kernel) == ("flashinfer", "fa3")
    assert config.cuda_graph_max_bs == 8
    assert "decodes by triton, prompts by fa3" in caplog.text
    asked = replace(CONFIG, prefill_kernel="fa2")
    assert attention_choice.choose_attention(asked, on_a_gpu())[1] == "fa2"


@pytest.mark.usefixtures("built")
def test_other_latents_take_triton_where_it_is_asked_for() -> None:
    shape = on_a_gpu(head_dim=24, latent_dim=16)
    config, backend = attention_choice.choose_attention(replace(CONFIG, attention_backend="triton"), shape)
    assert (config.attention_backend, backend) == ("triton", "triton")
    with pytest.raises(ConfigError, match="latents of 512 numbers and rotated keys of 64, not 16 and 8"):
        attention_choice.choose_attention(replace(CONFIG, attention_backend="flashinfer"), shape)


@pytest.mark.usefixtures("built")
def test_triton_serves_where_flashinfers_kernels_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(shape: AttentionShape, kernel: str) -> None:
        raise CannotCompile("no nvcc")

    monkeypatch.setattr(attention_choice, "FlashInferPrompts", failing)
    with caplog.at_level("INFO"):
        config, backend = attention_choice.choose_attention(CONFIG, on_a_gpu())
    assert (config.attention_backend, backend) == ("triton", "triton")
    assert "no nvcc" in caplog.text
    with pytest.raises(ConfigError, match="no nvcc"):
        attention_choice.choose_attention(replace(CONFIG, attention_backend="flashinfer"), on_a_gpu())
