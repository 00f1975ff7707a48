"""Programs that wait for their clients keep copies, and what they wait with is loaded before their gen needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.lang.ir import nodes as ir
from sgl.runtime.cache.keys import key_of
from sgl.runtime.engine import Engine
from tests.patience import wait_until
from tests.program_client import Client, gen
from tests.test_tiers_engine import eager, tiers_of
from tests.tiny_models import tiny_checkpoint

LONG = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(tiny_checkpoint(folder, vocab_size=259, max_position_embeddings=1024, with_tokenizer=True))


@contextmanager
def small(folder: str, **options: Any) -> Iterator[Engine]:
    """Of 48 pages of four tokens."""
    with eager(folder, **{"page_size": 4, "max_total_tokens": 192, **options}) as engine:
        yield engine


def crowd(engine: Engine) -> None:
    """Others, who need all pages."""
    for letter in "zyu":
        engine.generate(letter * 100, LONG)


def quiet(engine: Engine) -> None:
    wait_until(lambda: engine._loop.call(lambda: tiers_of(engine).poll_seconds) is None)


def usage_of(client: Client) -> dict[str, Any]:
    usage: dict[str, Any] = client.of(ir.NodeDone)[-1].meta["usage"]
    return usage


def test_a_lease_that_gave_way_is_loaded_when_any_node_of_its_stream_arrives(folder: str) -> None:
    texts = []
    for others in (False, True):
        with small(folder) as engine:
            client = Client(engine)
            client.send(ir.Text("x" * 60), gen(max_tokens=4, ignore_eos=True))
            client.wait(ir.NodeDone)
            if others:
                crowd(engine)
                quiet(engine)
                assert tiers_of(engine).counters.num_loads == 0
                client.send(ir.Text("y"))
                wait_until(lambda: tiers_of(engine).counters.num_loads == 1)
                quiet(engine)
            else:
                client.send(ir.Text("y"))
            texts.append([event.text for event in client.finish(gen(max_tokens=4))])
            assert usage_of(client)["lease"] == ("demoted" if others else "held")
            assert usage_of(client)["cached_tokens"] == 64
            assert engine.check_ledger() == []
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_chat_that_waited_too_long_comes_back_from_files(folder: str, tmp_path: Path) -> None:
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path), "hicache_ratio": 1.5}
    with small(folder, **files) as engine:
        client = Client(engine, lease_s=0.02)
        client.send(ir.Text("x" * 60), gen(max_tokens=4, ignore_eos=True))
        client.wait(ir.NodeDone)
        wait_until(lambda: engine._loop.call(lambda: len(engine._scheduler.memory.leases)) == 0)
        wait_until(lambda: tiers_of(engine).counters.written_pages >= 15)
        for letter in "srqp":
            crowd(engine)
            engine.generate(letter * 100, LONG)
        quiet(engine)
        read = tiers_of(engine).counters.read_pages
        client.finish(ir.Text("y"), gen(max_tokens=4))
        assert usage_of(client)["lease"] == "expired"
        assert usage_of(client)["cached_tokens"] == 64
        assert tiers_of(engine).counters.read_pages > read
        assert engine.check_ledger() == []


def test_a_finished_program_leaves_no_copy_of_what_it_generated(folder: str) -> None:
    with small(folder) as engine:
        client = Client(engine)
        client.send(ir.Text("x" * 40), gen(max_tokens=30, ignore_eos=True))
        client.wait(ir.NodeDone)
        engine.generate("w" * 40, {**LONG, "max_new_tokens": 4})
        client.finish()
        crowd(engine)
        quiet(engine)
        key = engine.tokenizer.encode("x" * 40)

        def copied() -> int:
            tree = tiers_of(engine).host.tree
            match = tree.match(key_of(key), None)
            below = match.node.children
            return match.length + sum(len(child.pages) * 4 for child in below.values())

        assert engine._loop.call(copied) <= 44


def test_sessions_of_the_language_go_on_after_others_took_their_pages(folder: str) -> None:
    answers = []
    for others in (False, True):
        with small(folder) as engine, sgl.session(engine, temperature=0.0) as s:
            s += "x" * 60 + sgl.gen("a", max_tokens=4)
            first = s["a"]
            if others:
                crowd(engine)
            s += "y" + sgl.gen("b", max_tokens=4)
            answers.append((first, s["b"]))
    assert answers[0] == answers[1]
