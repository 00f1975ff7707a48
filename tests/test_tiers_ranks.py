"""Engines of several ranks keep pages in files: the next engine of the same ranks finds them, whoever died before."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sgl.errors import ConfigError, EngineDead
from sgl.runtime.cache import segments as segments_module
from sgl.runtime.cache.files import Kind
from sgl.runtime.engine import Engine
from sgl.runtime.parallel import wire
from tests.patience import PATIENCE, wait_until
from tests.test_gdn_models import tiny_hybrid
from tests.test_tiers_engine import OPTIONS, PROMPTS, answers, cached, eager, ids, tiers_of
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

Ranks = dict[str, int]
TP: Ranks = {"tp_size": 2}
BARE: dict[str, Any] = {"skip_tokenizer_init": True}


def files(folder: Path) -> dict[str, Any]:
    return {**BARE, "hicache_storage_backend": "file", "hicache_storage_dir": str(folder)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers of two heads: stages differ in length."""
    folder = tmp_path_factory.mktemp("model")
    return str(tiny_checkpoint(folder, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2))


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    with Engine(path, **OPTIONS, **BARE) as engine:
        return ids(answers(engine))


@pytest.mark.parametrize(
    "ranks",
    [
        TP,
        pytest.param({"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 4}, marks=pytest.mark.slow),  # of which two hold the same head
        pytest.param({"tp_size": 2, "pp_size": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_next_engine_of_the_same_ranks_finds_the_pages(
    path: str, expected: list[list[int]], ranks: Ranks, tmp_path: Path
) -> None:
    with eager(path, **files(tmp_path), **ranks) as engine:
        assert ids(answers(engine)) == expected
        assert engine.check_ledger() == []
    with eager(path, **files(tmp_path), **ranks) as engine:
        again = answers(engine)
        assert (ids(again), cached(again)) == (expected, [88] * 8)
        assert tiers_of(engine).counters.read_pages >= 8 * 11
        assert ids(answers(engine)) == expected
        assert engine.check_ledger() == []
        assert engine.flush_cache()
        assert cached(answers(engine, PROMPTS[:1])) == [0]


@pytest.mark.costly
def test_other_ranks_and_other_weights_find_nothing(path: str, expected: list[list[int]], tmp_path: Path) -> None:
    """A page of one rank has the same size, and its numbers in another order."""
    folder = tmp_path / "files"
    with eager(path, **files(folder), **TP) as engine:
        answers(engine)
    for ranks in ({}, {"pp_size": 2}):
        with eager(path, **files(folder), **ranks) as engine:
            results = answers(engine)
            assert (ids(results), cached(results)) == (expected, [0] * 8)
    other = tmp_path / "other"
    shutil.copytree(path, other)
    [weights] = other.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"][:, -1] += 1.0  # rank 1's, and small enough to be missed
    save_file(tensors, weights, metadata={"format": "pt"})
    with Engine(str(other), **OPTIONS, **BARE) as plain:
        wanted = ids(answers(plain))
    with eager(str(other), **files(folder), **TP) as engine:
        results = answers(engine)
        assert (ids(results), cached(results)) == (wanted, [0] * 8)
    with eager(path, **files(folder), **TP) as engine:
        assert cached(answers(engine)) == [88] * 8


@pytest.mark.parametrize(
    "kind",
    ["states", *(pytest.param(each, marks=pytest.mark.slow) for each in ("windows", "latents", "transfers"))],
)
def test_what_other_models_keep_is_found_too(kind: str, tmp_path: Path) -> None:
    options, prompts = {**BARE}, PROMPTS
    model = tmp_path / "model"
    model.mkdir()
    if kind == "states":
        tiny_hybrid(model, "next")
        options["state_checkpoints"] = 20
    elif kind == "windows":
        tiny_checkpoint(model, "gpt-oss")
    elif kind == "latents":
        tiny_transformer(model, "DeepseekV3ForCausalLM", **ARCHITECTURES["DeepseekV3ForCausalLM"])
        prompts = [[token % 90 + 3 for token in prompt] for prompt in PROMPTS]
    else:
        tiny_checkpoint(model)
    with Engine(str(model), **OPTIONS, **options) as engine:
        wanted = ids(answers(engine, prompts))
    if kind == "transfers":
        key = tmp_path / "key"
        key.write_text("5" * 64)
        options |= {"disaggregation_mode": "decode", "disaggregation_key_file": str(key)}
    options |= {**files(tmp_path / "files"), **TP}
    with eager(str(model), **options) as engine:
        assert ids(answers(engine, prompts)) == wanted
    with eager(str(model), **options) as engine:
        again = answers(engine, prompts)
        assert ids(again) == wanted
        assert min(cached(again)) >= 80
        assert tiers_of(engine).counters.read_pages >= 8 * 10
        assert engine.check_ledger() == []


def test_a_record_has_each_head_once(tmp_path: Path) -> None:
    """Of ranks that hold the same heads, files have one's."""
    tiny_checkpoint(tmp_path / "model", num_attention_heads=4, num_key_value_heads=1)
    sizes = []
    for ranks in ({}, TP):
        with eager(str(tmp_path / "model"), **files(tmp_path / str(ranks)), **ranks) as engine:
            answers(engine)
            page_files = tiers_of(engine).files
            assert page_files is not None
            sizes.append(page_files._sizes[Kind.PAGE])
    assert sizes[0] == sizes[1]


def test_nothing_is_written_before_each_rank_has_copied_its_part(
    path: str, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with eager(path, **files(tmp_path), **TP, rank_timeout=60.0) as engine:
        group, rank_1, has_stopped = engine._started.group, pid_of_rank_1(engine), threading.Event()
        assert group is not None
        page_files, send = tiers_of(engine).files, group.send
        assert page_files is not None

        def stop_before_moves(frame: wire.Frame) -> None:
            if isinstance(frame, wire.Move) and not has_stopped.is_set():
                os.kill(rank_1, signal.SIGSTOP)
                has_stopped.set()
            send(frame)

        answers(engine, PROMPTS[:1])
        monkeypatch.setattr(group, "send", stop_before_moves)
        engine._loop.call(tiers_of(engine).saves.save_all_later)
        assert has_stopped.wait(PATIENCE)
        time.sleep(0.3)
        assert len(page_files) == 0
        os.kill(rank_1, signal.SIGCONT)
        wait_until(lambda: len(page_files) == 11)
    with eager(path, **files(tmp_path), **TP) as engine:
        again = answers(engine, PROMPTS[:1])
        assert (ids(again), cached(again)) == (expected[:1], [88])


def pid_of_rank_1(engine: Engine) -> int:
    assert engine._started.group is not None
    return engine._started.group._processes[1].pid


@pytest.mark.parametrize(
    "number", [4, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 1, 2, 3, 11, 12, 30, 60))]
)
def test_a_rank_killed_between_two_writes_leaves_whole_pages(
    path: str, expected: list[list[int]], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, count = segments_module.Segments.append, itertools.count()
    with monkeypatch.context() as patch, eager(path, **files(tmp_path), **TP) as engine:
        rank_1 = pid_of_rank_1(engine)

        def kill_then_append(self: Any, name: bytes, parts: Any) -> None:
            if next(count) == number:
                os.kill(rank_1, signal.SIGKILL)
            append(self, name, parts)

        patch.setattr(segments_module.Segments, "append", kill_then_append)
        with pytest.raises(EngineDead):
            answers(engine, PROMPTS * 20)
    with eager(path, **files(tmp_path), **TP) as engine:
        assert ids(answers(engine)) == expected
        page_files = tiers_of(engine).files
        assert page_files is not None
        assert page_files.num_bad == 0
        assert engine.check_ledger() == []


_DYING = """
import itertools, json, os, signal, sys
from sgl.runtime.cache import segments
from tests.test_tiers_ranks import answers, eager

path, options, number, moment = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
write_all, count = segments.write_all, itertools.count()

def die_at(file, data):
    if next(count) != number:
        return write_all(file, data)
    if moment != "before":
        write_all(file, data[: len(data) // 2 if moment == "amid" else None])
    os.kill(os.getpid(), signal.SIGKILL)

segments.write_all = die_at
with eager(path, **options) as engine:
    for _ in range(20):
        answers(engine)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "amid", "behind"])
@pytest.mark.parametrize("number", [0, 1, 20])
def test_the_leading_process_killed_at_a_write_leaves_whole_pages(
    path: str, expected: list[list[int]], number: int, moment: str, tmp_path: Path
) -> None:
    options = {**files(tmp_path), **TP}
    command = [sys.executable, "-c", _DYING, path, json.dumps(options), str(number), moment]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == -signal.SIGKILL
    with eager(path, **options) as engine:
        again = answers(engine)
        assert ids(again) == expected
        page_files = tiers_of(engine).files
        assert page_files is not None
        assert page_files.num_bad == 0
        assert tiers_of(engine).counters.read_pages >= (number > 1)
        assert engine.check_ledger() == []


def test_damage_costs_what_is_damaged(path: str, expected: list[list[int]], tmp_path: Path) -> None:
    with eager(path, **files(tmp_path), **TP) as engine:
        answers(engine)
    for file in tmp_path.rglob("*.pages"):
        data = bytearray(file.read_bytes())
        for at in range(5000, len(data), 20_000):
            data[at] ^= 1
        file.write_bytes(data)
    with eager(path, **files(tmp_path), **TP) as engine:
        again = answers(engine)
        assert ids(again) == expected
        assert min(cached(again)) < 88
        assert tiers_of(engine).files.num_bad > 0  # type: ignore[union-attr]
        assert engine.check_ledger() == []


def test_files_of_ranks_on_several_hosts_are_refused(path: str, tmp_path: Path) -> None:
    options = {**files(tmp_path), **TP, "nnodes": 2, "dist_init_addr": "127.0.0.1:9", "dist_key_file": "x"}
    with pytest.raises(ConfigError, match="is for engines on one host, whose ranks share the memory"):
        Engine(path, **OPTIONS, enable_hierarchical_cache=True, **options)
