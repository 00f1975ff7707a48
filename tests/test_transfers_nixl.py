"""KV pages through NIXL, on a CPU: answers are those of one engine, also when the other side dies or stands still."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sgl.errors import MissingExtra, is_installed
from sgl.runtime.engine import Engine
from sgl.runtime.transfer.nixl import NixlReader
from tests.patience import PATIENCE, wait_until
from tests.test_transfers_engine import (
    _PREFILL,
    GREEDY,
    OPTIONS,
    PROMPTS,
    ROOMY,
    Child,
    assert_all_is_back,
    key,
    offer,
    path,
    plain,
    state,
)

__all__ = ["key", "path", "plain"]  # fixtures

needs_nixl = pytest.mark.skipif(
    not any(map(is_installed, ("nixl_cu13", "nixl_cu12", "nixl"))), reason="needs sgl[nixl]"
)
NIXL = {"disaggregation_transport": "nixl"}


@pytest.fixture
def decode(path: str, key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Over TCP, where a process that stands still holds up its readers: it would not over shared memory."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with Engine(path, **OPTIONS, **NIXL, disaggregation_mode="decode") as engine:
        yield engine


def answer(engine: Engine, prompt: list[int], params: Any = None) -> Any:
    return engine.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=params)


@needs_nixl
@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_tokens_are_those_of_one_engine(
    path: str, key: str, plain: Engine, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    with (
        Engine(path, **OPTIONS, **ROOMY, **NIXL, disaggregation_mode="prefill") as one,
        Engine(path, **OPTIONS, **NIXL, disaggregation_mode="decode") as other,
    ):
        for prompt in PROMPTS:
            found = answer(other, prompt, offer(one, prompt))
            assert found["output_ids"] == answer(plain, prompt)["output_ids"]
            assert found["meta_info"]["cached_tokens"] == 88
        for engine in (one, other):
            assert_all_is_back(engine)


@needs_nixl
def test_a_damaged_page_is_computed(path: str, plain: Engine, decode: Engine) -> None:
    with Engine(path, **OPTIONS, **ROOMY, **NIXL, disaggregation_mode="prefill") as one:
        params = offer(one)
        transfers: Any = one._scheduler.memory.transfers
        [held] = transfers.exports.offers.held()
        assert held.is_copied.wait(PATIENCE)
        memory = transfers.exports._server._memory
        held.checksums = [0] * len(held.pages)
        memory[held.pages[0]][:4] ^= 255
        found = answer(decode, PROMPTS[0], params)
    assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0
    assert_all_is_back(decode)


@needs_nixl
def test_engines_of_different_transports_compute(path: str, plain: Engine, decode: Engine) -> None:
    with Engine(path, **OPTIONS, **ROOMY, disaggregation_mode="prefill") as one:
        found = answer(decode, PROMPTS[0], offer(one))
    assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0
    assert_all_is_back(decode)


@needs_nixl
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_prefill_process_that_fails_amid_a_read_costs_nothing_but_time(
    path: str, plain: Engine, decode: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.runtime.transfer.nixl._SILENT_SECONDS", 0.5)
    monkeypatch.setenv("UCX_TLS", "tcp")
    wanted = answer(plain, PROMPTS[0])["output_ids"]
    with Child(_PREFILL, path, -1, **NIXL) as child:
        params = child.ask(PROMPTS[0])
        begin = NixlReader._begin

        def begin_late(self: NixlReader, read: Any, told: Any) -> None:
            os.kill(child.process.pid, signal.SIGSTOP)
            begin(self, read, told)
            if how == "killed":
                child.process.kill()

        monkeypatch.setattr(NixlReader, "_begin", begin_late)
        found = answer(decode, PROMPTS[0], params)
        assert found["output_ids"] == wanted
        assert found["meta_info"]["cached_tokens"] == 0
        assert decode.check_ledger() == []
        if how == "stopped":
            assert state(decode)["transfer_used_tokens"] == 88  # it may write to them yet
            os.kill(child.process.pid, signal.SIGCONT)
        wait_until(lambda: not state(decode)["transfer_used_tokens"])
        assert answer(decode, PROMPTS[0])["output_ids"] == wanted
    assert_all_is_back(decode)


@needs_nixl
def test_an_engine_ends_although_a_read_does_not(
    path: str, plain: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.runtime.transfer.nixl._SILENT_SECONDS", 0.2)
    with Child(_PREFILL, path, -1, **NIXL) as child:
        params = child.ask(PROMPTS[0])
        begin = NixlReader._begin

        def begin_late(self: NixlReader, read: Any, told: Any) -> None:
            os.kill(child.process.pid, signal.SIGSTOP)
            begin(self, read, told)

        monkeypatch.setattr(NixlReader, "_begin", begin_late)
        assert answer(decode, PROMPTS[0], params)["meta_info"]["cached_tokens"] == 0
        decode.shutdown()


def test_without_nixl_the_extra_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        for module in (name, f"{name}._api"):
            monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"sgl\[nixl\]"):
        Engine(path, **OPTIONS, **NIXL, disaggregation_mode="decode")


@needs_nixl
def test_an_engine_that_waits_takes_no_time(decode: Engine) -> None:
    """NIXL has a thread that would turn without a pause."""

    def is_quiet() -> bool:
        before, began = time.process_time(), time.monotonic()
        time.sleep(2.0)
        return time.process_time() - before < 0.1 * (time.monotonic() - began)

    wait_until(is_quiet)  # once what started it has ended
