"""KV events: a follower's picture of the cache is the cache's, live and replayed."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from sgl.errors import ConfigError
from sgl.runtime import kv_events
from sgl.runtime.cache import page_events
from sgl.runtime.cache.keys import Namespace, key_of
from sgl.runtime.cache.page_events import Lost, PageEvents, Removed, Stored
from sgl.runtime.engine import Engine
from sgl.runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvents
from tests.patience import PATIENCE
from tests.scheduler_driver import Driver, Setting, random_request
from tests.tiny_models import tiny_checkpoint

PAGE = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_position_embeddings=128)
    options: dict[str, Any] = {"page_size": PAGE, "max_total_tokens": 160, "skip_tokenizer_init": True}
    where = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    with Engine(str(folder), device="cpu", check_ledger=True, **options, **where) as engine:  # type: ignore[arg-type]
        yield engine


class Follower:
    """What a router knows: blocks by hash, with all tokens up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def take(self, data: bytes) -> None:
        batch = msgspec.msgpack.decode(data, type=EventBatch)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    for i, block in enumerate(event.block_hashes):
                        before += tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                        self.blocks[block] = before
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[block]
                case AllBlocksCleared():
                    self.blocks.clear()


def tree_of(engine: Engine) -> set[tuple[int, ...]]:
    """All prefixes of whole pages that the tree holds."""

    def look() -> set[tuple[int, ...]]:
        found, stack = set(), [(engine._scheduler.memory.cache.root, ())]
        while stack:
            node, before = stack.pop()
            ids = tuple(np.frombuffer(node.key, np.int32).tolist())
            found |= {before + ids[:end] for end in range(PAGE, len(ids) + 1, PAGE)}
            stack += [(child, before + ids) for child in node.children.values()]
        return found

    return engine._loop.call(look)


def test_what_a_follower_knows_is_what_the_cache_has_also_after_evictions_and_by_replay(engine: Engine) -> None:
    info = engine.get_server_info()
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    live.connect(info["kv_events"])
    rng = np.random.default_rng(0)
    while not live.poll(10):  # subscriptions are not acknowledged
        engine.generate(input_ids=rng.integers(0, 64, 9).tolist(), sampling_params={"max_new_tokens": 1})
    stem = rng.integers(0, 64, 20).tolist()
    for i in range(40):
        own = rng.integers(0, 64, 1 + i % 17).tolist()
        engine.generate(input_ids=stem[: i % 21] + own, sampling_params={"max_new_tokens": 5, "ignore_eos": True})

    def replayed() -> list[bytes]:
        asking, found = context.socket(zmq.DEALER), list[bytes]()
        asking.connect(info["kv_events_replay"])
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            assert asking.poll(1000 * PATIENCE)
            _, number, data = asking.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append(data)

    follower, numbers = Follower(), list[int]()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and set(follower.blocks.values()) != tree_of(engine):
        while live.poll(100):
            topic, number, data = live.recv_multipart()
            assert topic == b""
            numbers.append(int.from_bytes(number, "big"))
            for each in (*(replayed()[: numbers[0]] if len(numbers) == 1 else ()), data):
                follower.take(each)
    assert set(follower.blocks.values()) == tree_of(engine)
    assert engine._scheduler.memory.cache.evicted_pages
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    again = Follower()
    for data in replayed():
        again.take(data)
    assert set(again.blocks.values()) == set(follower.blocks.values())
    engine.flush_cache()
    while time.monotonic() < end and follower.blocks:
        assert live.poll(1000 * PATIENCE)
        follower.take(live.recv_multipart()[2])
    assert not follower.blocks
    context.destroy(linger=0)


def test_a_queue_that_nobody_reads_is_bounded_and_says_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_events, "MOST", 5)
    driver = Driver(Setting(num_pages=30, rows=2, overlap=False))
    recorded = PageEvents(driver.scheduler.memory.cache)
    for uid in range(30):
        driver.scheduler.add(random_request(uid, uid, 96))
        driver.run()
        assert len(recorded._waiting) <= 6
    taken = recorded.take()
    assert isinstance(taken[0], Lost)
    assert recorded.take() == []
    driver.scheduler.memory.cache.reset()
    assert all(isinstance(event, Removed) for event in recorded.take())
    driver.check()


def test_a_queue_that_is_dropped_while_it_is_read_is_empty() -> None:
    class Dropped(deque[Any]):
        def popleft(self) -> Any:
            self.clear()  # by the scheduler's thread
            return super().popleft()

    recorded = PageEvents(Driver(Setting()).scheduler.memory.cache)
    recorded._waiting = Dropped([Removed([])])
    assert recorded.take() == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:0"}, "no kv_events"),
        ({"kv_events": "tcp://127.0.0.1:0", "disable_radix_cache": True}, "nothing to tell"),
    ],
)
def test_options_that_would_tell_nothing_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine("nowhere", device="cpu", **options)


def test_blocks_name_what_keeps_them_apart() -> None:
    events = KvEvents(PageEvents(Driver(Setting()).scheduler.memory.cache), PAGE, "tcp://127.0.0.1:0")
    events.adapter_name = {3: "sql", 4: "key"}.get

    def told(parent: int | None, page: int, namespace: Namespace = None) -> tuple[int | None, str | None, Any]:
        key = key_of(range(page, page + 2 * PAGE))
        [event] = events._told(Stored(parent, key, np.array([page, page + 1], np.int32), namespace))
        assert isinstance(event, BlockStored)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=BlockStored) == event
        return event.lora_id, event.lora_name, event.extra_keys

    try:
        assert told(None, 2, (3, None)) == told(2, 4) == told(5, 6) == (3, "sql", None)
        assert told(None, 10, (4, "key")) == (4, "key", [["key", "key"], None])
        assert told(None, 12, "key") == (None, None, [["key"], None])
        assert told(13, 14) == told(None, 16) == (None, None, None)
        assert told(None, 18, (5, None)) == (5, None, None), "it has been unloaded since"
        events._told(Removed([np.array([2, 3, 4, 5, 6, 7], np.int32)]))
        assert told(None, 2) == told(2, 4) == (None, None, None)
    finally:
        events.close()


@pytest.mark.parametrize(
    "endpoint", ["nowhere", "tcp://127.0.0.1", "tcp://:5557", "tcp://127.0.0.1:99999", "ipc://x:1", "tcp://a:-1"]
)
@pytest.mark.parametrize("option", ["kv_events", "kv_events_replay"])
def test_what_is_no_endpoint_is_refused_before_a_model_is_looked_for(option: str, endpoint: str) -> None:
    options: Any = {"kv_events": "tcp://127.0.0.1:0", option: endpoint}
    with pytest.raises(ConfigError, match="give tcp://HOST:PORT, with a port up to 65535") as refused:
        Engine("nowhere", device="cpu", **options)
    assert refused.value.option == option


def test_an_endpoint_that_cannot_be_listened_at_is_refused() -> None:
    recorded = PageEvents(Driver(Setting()).scheduler.memory.cache)
    with pytest.raises(ConfigError, match="give an address of this machine, and a free port") as refused:
        KvEvents(recorded, PAGE, "tcp://127.0.0.1:0", "tcp://192.0.2.1:5557")
    assert refused.value.option == "kv_events_replay"


def test_each_engine_tells_where_it_is_itself() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recorded = PageEvents(Driver(Setting()).scheduler.memory.cache)
    events = KvEvents(recorded, PAGE, f"tcp://127.0.0.1:{port - 1}", "tcp://127.0.0.1:0", rank=1)
    try:
        assert events.endpoints["kv_events"] == f"tcp://127.0.0.1:{port}"
        assert events._replay.getsockopt_string(zmq.LAST_ENDPOINT) == events.endpoints["kv_events_replay"]
    finally:
        events.close()


@pytest.mark.parametrize(("port", "engines"), [(5557, 1), (5558, 2), (5556, 2), (5561, 8)])
def test_ports_that_engines_would_take_twice_are_refused(port: int, engines: int) -> None:
    where: dict[str, Any] = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": f"tcp://127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match=f"give a port that is {engines} or more away") as refused:
        Engine("nowhere", device="cpu", dp_size=engines, dp_rank=0 if engines > 1 else None, **where)
    assert refused.value.option == "kv_events_replay"


class Answers:
    """What clients of the replay socket get, of batches of 1000 bytes: turn by turn, without a socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_a_turn: int) -> None:
        monkeypatch.setattr(kv_events, "REPLAY_BYTES", bytes_a_turn / kv_events._PAUSE_SECONDS)
        self.events = KvEvents(PageEvents(Driver(Setting()).scheduler.memory.cache), PAGE, "tcp://127.0.0.1:0")
        self.events._kept.extend((number, bytes(1000)) for number in range(100, 200))
        self.asks: list[list[bytes]] = []
        self.sent: list[tuple[bytes, int]] = []
        self.full: set[bytes] = set()

    def turn(self) -> list[tuple[bytes, int]]:
        self.sent = []
        self.events._answer(self)
        return self.sent

    def poll(self, _: int) -> bool:
        return bool(self.asks)

    def recv_multipart(self) -> list[bytes]:
        return self.asks.pop(0)

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        assert flags == zmq.DONTWAIT
        if frames[0] in self.full:
            raise zmq.Again
        if frames[0] == b"gone":
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append((frames[0], int.from_bytes(frames[2], "big", signed=True)))


def ask(client: bytes, first: int) -> list[bytes]:
    return [client, b"", first.to_bytes(8, "big")]


def test_kept_batches_are_sent_again_so_many_bytes_a_turn_to_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, 5000)
    answers.asks = [ask(b"a", 0), ask(b"b", 150), ask(b"gone", 0), [b"c", b"", b"short"]]
    got = [answers.turn() for _ in range(40)]
    assert max(map(len, got)) <= 7  # five batches, and two ends
    assert got[0] == [(b"a", 100), (b"b", 150), (b"a", 101), (b"b", 151), (b"a", 102)]
    every = [each for turn in got for each in turn]
    assert [number for client, number in every if client == b"a"] == [*range(100, 200), -1]
    assert [number for client, number in every if client == b"b"] == [*range(150, 200), -1]
    assert len(every) == 152
    assert not answers.events._replays
    answers.events.close()


def test_a_client_has_one_answer_at_a_time_and_must_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, 5000)
    answers.asks = [ask(b"a", 100), ask(b"a", 180), *(ask(b"%d" % i, 100) for i in range(100))]
    answers.turn()
    assert answers.events._replays[b"a"].next >= 180
    assert len(answers.events._replays) == kv_events._MOST_ASKS - 1
    assert len(answers.asks) > 30, "others wait"
    answers.full = {b"a", *(b"%d" % i for i in range(100))}
    assert answers.turn() == []
    now = time.monotonic()
    monkeypatch.setattr(kv_events.time, "monotonic", lambda: now + 2 * kv_events._ASK_SECONDS)
    answers.turn()
    assert not answers.events._replays
    answers.full.clear()
    assert len(answers.turn()) == 5
    answers.events.close()
