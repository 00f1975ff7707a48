"""KV events by gRPC: what a subscriber knows is what the cache has, wherever it begins and however slowly it reads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

import grpc
import zmq
from smg_grpc_proto.generated import common_pb2

from sgl.runtime.engine import Engine
from sgl.runtime.kv_events import END, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from sgl.runtime.server.kv_stream import Source
from sgl.runtime.server.rpc import kv_relay
from sgl.runtime.server.rpc.kv_relay import KvRelay, sources_of
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE, wait_until
from tests.test_kv_events import PAGE, tree_of
from tests.test_server_rpc import Client
from tests.tiny_models import tiny_checkpoint

REPLAYS = {"kv_events_replay": "tcp://127.0.0.1:0"}


@pytest.fixture(scope="module", params=[{}, REPLAYS], ids=["live", "replays"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_position_embeddings=128)
    options: dict[str, Any] = {"page_size": PAGE, "max_total_tokens": 160, "skip_tokenizer_init": True}
    with Engine(
        str(folder), device="cpu", check_ledger=True, kv_events="tcp://127.0.0.1:0", **request.param, **options
    ) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, grpc_port=0) as server:
        live: list[Any] = []
        call = subscribe(Client(server))
        reading = threading.Thread(target=lambda: live.extend([next(call), next(call)]))
        reading.start()
        number = 100
        while len(live) < 2:  # until the relay hears the engine
            fill(engine, number := number + 1, 1)
            reading.join(0.05)
        engine.flush_cache()
        call.cancel()
        yield server


def read(batch: Any) -> Any:
    return common_pb2.KvEventBatch.FromString(batch) if isinstance(batch, bytes) else batch


class Subscriber:
    """What a router knows: blocks by hash, with all tokens up to their end, and its place."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.ranks: dict[int, int] = {}
        self.latest = 0
        self.snapshots: list[Any] = []

    def take(self, batch: Any) -> None:
        """Raises KeyError for what contradicts itself."""
        batch = read(batch)
        if batch.HasField("snapshot"):
            assert batch.snapshot.index == (0 if not self.snapshots else (self.snapshots[-1].index + 1)) % (
                batch.snapshot.count
            )
            self.snapshots.append(batch.snapshot)
        if self.latest and not (batch.HasField("snapshot") and batch.snapshot.index == 0):
            assert batch.sequence_number == self.latest + 1
        self.latest = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    stored = event.stored
                    assert (stored.tier, stored.medium) == (common_pb2.KV_CACHE_TIER_DEVICE, "GPU")
                    before = self.blocks[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ()
                    for block in stored.blocks:
                        assert block.block_size == len(block.token_ids)
                        before += tuple(block.token_ids)
                        self.blocks[block.block_hash] = before
                        self.ranks[block.block_hash] = batch.dp_rank
                case "removed":
                    for name in event.removed.block_hashes:
                        del self.blocks[name]
                case "cleared":
                    for name in [name for name in self.blocks if self.ranks[name] == batch.dp_rank]:
                        del self.blocks[name]

    def known(self) -> set[tuple[int, ...]]:
        return set(self.blocks.values())


def fill(engine: Engine, first: int, count: int = 6) -> None:
    for number in range(first, first + count):
        prompt = [(13 * k + 7 * (number // 2) + (k > 12) * number) % 60 + 2 for k in range(28)]
        engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 3, "ignore_eos": True})


def follow(call: Any, subscriber: Subscriber, engine: Engine) -> None:
    """Read until it knows what the cache has."""
    wanted = tree_of(engine)
    deadline = time.monotonic() + PATIENCE
    for batch in call:
        subscriber.take(batch)
        if subscriber.snapshots[-1:] and subscriber.known() == wanted:
            return
        assert time.monotonic() < deadline


def subscribe(client: Client, start: int = 0) -> Any:
    asked = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    return client.stub.SubscribeKvEvents(asked, metadata=client.metadata, timeout=PATIENCE)


def test_a_subscriber_knows_what_the_cache_has(engine: Engine, server: LiveServer) -> None:
    fill(engine, 0)
    assert len(tree_of(engine)) > 10
    client, subscriber = Client(server), Subscriber()
    call = subscribe(client)
    follow(call, subscriber, engine)
    for first in range(6, 24, 6):  # far more than there is room for
        fill(engine, first)
        follow(call, subscriber, engine)
    place = subscriber.latest
    late, again = Subscriber(), subscribe(client)
    follow(again, late, engine)
    assert late.blocks == subscriber.blocks, "a snapshot has the same hashes"
    engine.flush_cache()
    fill(engine, 30, 2)
    follow(call, subscriber, engine)
    resumed = subscribe(client, place + 1)
    for batch in resumed:
        late.take(batch)
        if late.latest == subscriber.latest:
            break
    assert late.blocks == subscriber.blocks
    assert len(late.snapshots) == 1, "its place was kept"
    for lost in (17, place - 10**6, subscriber.latest + 1000):
        call = subscribe(client, lost)
        assert next(call).HasField("snapshot")
        call.cancel()


def test_who_may_not_and_what_is_not_told(
    engine: Engine, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_relay, "MOST_SUBSCRIBERS", 1)
    client = Client(server)
    one = subscribe(client)
    next(one)
    with pytest.raises(grpc.RpcError, match="1 subscribers") as raised:
        next(subscribe(client))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    one.cancel()
    wait_until(lambda: not server.service.metrics.open_requests)
    next(subscribe(client))
    with served(engine, grpc_port=0, api_key=["me=k"], admin_api_key="boss") as other:
        with pytest.raises(grpc.RpcError) as raised:
            next(subscribe(Client(other, "k")))
        assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert next(subscribe(Client(other, "boss"))).HasField("snapshot")


def test_a_server_that_ends_ends_its_streams(server: LiveServer) -> None:
    call = subscribe(Client(server))
    next(call)
    server.service.is_draining = True
    assert len(list(call)) <= 16  # what it had taken
    assert call.code() == grpc.StatusCode.OK


def test_without_the_option_it_is_said(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, vocab_size=64, max_position_embeddings=128)
    with (
        Engine(str(folder), device="cpu", skip_tokenizer_init=True, max_total_tokens=160) as engine,
        served(engine, grpc_port=0) as server,
    ):
        with pytest.raises(grpc.RpcError, match="--kv-events") as raised:
            next(subscribe(Client(server)))
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


# ── the relay alone, before publishers of the tests' own ────────────────────────────────────────────────────────────


class Publisher:
    """An engine's two sockets."""

    def __init__(self, port: int = 0) -> None:
        self.context = zmq.Context()
        self.out, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.out.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoint = self.out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.number = 0
        self.kept: list[bytes] = []

    def send(self, *events: Any, hidden: bool = False) -> None:
        data = msgspec.msgpack.encode(EventBatch(time.time(), list(events), 0))
        self.kept.append(data)
        if not hidden:
            self.out.send_multipart((b"", self.number.to_bytes(8, "big"), data))
        self.number += 1

    def answer(self, until: threading.Event) -> None:
        """All asks, with all that they ask for."""
        while not until.is_set():
            if self.router.poll(20):
                client, empty, first = self.router.recv_multipart()
                for number in range(int.from_bytes(first, "big"), len(self.kept)):
                    self.router.send_multipart((client, empty, number.to_bytes(8, "big"), self.kept[number]))
                self.router.send_multipart((client, empty, END, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


def chain(*names: int, parent: int | None = None, size: int = 2) -> BlockStored:
    ids = [name * 10 + k for name in names for k in range(size)]
    return BlockStored(list(names), parent, ids, size, None, "GPU")


@contextlib.asynccontextmanager
async def relay_of(
    publishers: Sequence[Publisher] | dict[int, Publisher], replays: bool = False
) -> AsyncGenerator[KvRelay, None]:
    async def info() -> dict[str, Any]:
        return {
            "internal_states": [
                {
                    "dp_rank": rank,
                    "kv_events": each.endpoint,
                    "kv_events_replay": each.router.getsockopt_string(zmq.LAST_ENDPOINT) if replays else None,
                }
                for rank, each in running.items()
            ]
        }

    running = publishers if isinstance(publishers, dict) else dict(enumerate(publishers))
    relay = KvRelay(SimpleNamespace(info=info))  # type: ignore[arg-type]
    try:
        await until(lambda: len(relay._engines) == len(running))
        yield relay
    finally:
        await relay.close()


async def until(is_so: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


async def joined(relay: KvRelay, *publishers: Publisher) -> None:
    """Until what is published arrives."""
    for rank, publisher in enumerate(publishers):
        while relay._engines[rank].stream.next == 0:
            publisher.send(BlockRemoved([]))
            await asyncio.sleep(0.02)
        await until(lambda rank=rank, publisher=publisher: relay._engines[rank].stream.next == publisher.number)


async def read_to(relay: KvRelay, batches: Any, subscriber: Subscriber, blocks: set[int] | None = None) -> None:
    """All that there is."""
    async with asyncio.timeout(PATIENCE):
        while subscriber.latest < relay._last:
            subscriber.take(await anext(batches))
    assert blocks is None or set(subscriber.blocks) == blocks


def never() -> bool:
    return False


def test_who_reads_slowly_gets_a_snapshot_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_relay, "KEPT_BATCHES", 5)

    async def check() -> None:
        publisher, subscriber = Publisher(), Subscriber()
        async with relay_of([publisher]) as relay:
            await joined(relay, publisher)
            batches = relay.batches(0, never)
            subscriber.take(await anext(batches))
            for name in range(1, 50):
                publisher.send(chain(2 * name, 2 * name + 1))
            for name in range(1, 40):
                publisher.send(BlockRemoved([2 * name + 1]), BlockRemoved([2 * name]))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            assert len(relay._kept) == 5
            subscriber.snapshots.clear()
            await read_to(relay, batches, subscriber)
            assert len(subscriber.snapshots) == 1
            assert subscriber.blocks.keys() == relay._engines[0].blocks.keys() == set(range(80, 100))
            await batches.aclose()
            assert not relay._subscribers
        publisher.close()

    asyncio.run(check())


def test_snapshots_and_long_events_come_in_parts_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_relay, "_BATCH_TOKENS", 6)  # three blocks

    async def check() -> None:
        one, two = Publisher(), Publisher()
        async with relay_of([one, two]) as relay:
            await joined(relay, one, two)
            live, before = relay.batches(relay._last + 1, never), relay._last
            one.send(chain(*range(1, 9)))
            one.send(chain(20, 21, parent=3), chain(30, parent=21))
            two.send(chain(50, 51))
            await until(
                lambda: all(e.stream.next == its.number for e, its in zip(relay._engines, (one, two), strict=True))
            )
            assert relay._last - before == 5
            numbers, blocks = [], list[list[int]]()
            for _ in range(5):
                batch = read(await anext(live))
                numbers.append(batch.sequence_number)
                blocks.append([its.block_hash for event in batch.events for its in event.stored.blocks])
            assert numbers == [*range(before + 1, before + 6)]
            assert sorted(blocks) == [[1, 2, 3], [4, 5, 6], [7, 8], [20, 21, 30], [50, 51]]
            batches = relay.batches(0, never)
            chunks = [read(await anext(batches)) for _ in range(5)]
            assert [its.sequence_number for its in chunks] == [*range(relay._last - 4, relay._last + 1)]
            told = [(its.dp_rank, its.snapshot.index, its.snapshot.count, its.snapshot.blocks) for its in chunks]
            assert told == [(0, 0, 4, 11), (0, 1, 4, 11), (0, 2, 4, 11), (0, 3, 4, 11), (1, 0, 1, 2)]
            assert [its.events[0].HasField("cleared") for its in chunks] == [True, False, False, False, True]
            one.send(BlockRemoved([30]))
            assert read(await anext(batches)).events[0].removed.block_hashes == [30]
            for generator in (live, batches):
                await generator.aclose()
        one.close()
        two.close()

    asyncio.run(check())


@pytest.mark.parametrize("replays", [False, True])
def test_what_was_missed_is_unknown_or_asked_for(replays: bool) -> None:
    async def check(publisher: Publisher) -> None:
        subscriber = Subscriber()
        publisher.send(chain(1, 2), hidden=True)
        async with relay_of([publisher], replays=replays) as relay:
            await joined(relay, publisher)
            publisher.send(chain(3))
            batches = relay.batches(0, never)
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            await read_to(relay, batches, subscriber)
            assert (subscriber.snapshots[0].unknown_before == 0) is replays
            assert set(subscriber.blocks) == ({1, 2, 3} if replays else {3})
            unknown = relay._engines[0].stream.lost
            publisher.send(chain(4, parent=3), hidden=True)
            publisher.send(chain(5))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            await read_to(relay, batches, subscriber)
            assert set(subscriber.blocks) == ({1, 2, 3, 4, 5} if replays else {5}), "who knows what is left"
            assert relay._engines[0].stream.lost == unknown + (not replays)
            await batches.aclose()

    publisher, is_over = Publisher(), threading.Event()
    answering = threading.Thread(target=publisher.answer, args=(is_over,))
    answering.start()
    try:
        asyncio.run(check(publisher))
    finally:
        is_over.set()
        answering.join()
        publisher.close()


def test_an_engine_that_is_gone_has_nothing_and_begins_anew() -> None:
    async def check() -> None:
        publisher, subscriber = Publisher(), Subscriber()
        async with relay_of([publisher]) as relay:
            await joined(relay, publisher)
            publisher.send(chain(1, 2), AllBlocksCleared(), chain(3))
            batches = relay.batches(0, never)
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            await read_to(relay, batches, subscriber)
            assert set(subscriber.blocks) == {3}
            port = int(publisher.endpoint.rpartition(":")[2])
            publisher.close()
            await until(lambda: not relay._engines[0].blocks)
            await read_to(relay, batches, subscriber)
            assert subscriber.blocks == {}
            publisher = Publisher(port)
            await joined(relay, publisher)
            publisher.send(chain(8))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            await read_to(relay, batches, subscriber)
            assert set(subscriber.blocks) == {8}
            await batches.aclose()
        publisher.close()

    asyncio.run(check())


def test_engines_of_one_server_are_followed_wherever_each_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_relay, "_FIND_SECONDS", 0.05)

    async def check() -> None:
        one, two, again = Publisher(), Publisher(), Publisher()
        running, subscriber = {0: one, 1: two}, Subscriber()
        async with relay_of(running) as relay:
            await joined(relay, one, two)
            one.send(chain(1, 2))
            two.send(chain(3))
            await until(lambda: [len(each.blocks) for each in relay._engines] == [2, 1])
            batches, first = relay.batches(0, never), relay._engines[0]
            await read_to(relay, batches, subscriber)
            del running[1]
            await until(lambda: relay._engines == [first])
            await read_to(relay, batches, subscriber, {1, 2})
            running[1] = again  # on another port
            await until(lambda: len(relay._engines) == 2)
            await joined(relay, one, again)
            again.send(chain(5))
            await until(lambda: [len(each.blocks) for each in relay._engines] == [2, 1])
            await read_to(relay, batches, subscriber, {1, 2, 5})
            assert relay._engines[0] is first
            await batches.aclose()
        for publisher in (one, two, again):
            publisher.close()

    asyncio.run(check())


def test_what_is_kept_is_bounded_by_bytes_whatever_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of one token takes as much as one of many."""
    monkeypatch.setattr(kv_relay, "KEPT_BYTES", 100_000)

    async def check() -> None:
        publisher = Publisher()
        async with relay_of([publisher]) as relay:
            await joined(relay, publisher)
            for begin in range(0, 20_000, 500):
                names = range(2**60 + begin, 2**60 + begin + 500)
                publisher.send(BlockStored(list(names), None, list(range(500)), 1, None, "GPU"))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            assert 50_000 < sum(map(len, relay._kept)) == relay._bytes <= 100_000
            assert len(relay._engines[0].blocks) == 20_000
        publisher.close()

    asyncio.run(check())


def test_subscribers_share_a_snapshot_while_what_came_after_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_relay, "KEPT_BATCHES", 5)
    monkeypatch.setattr(kv_relay, "_BATCH_TOKENS", 2)  # a block

    async def check() -> None:
        publisher, slow = Publisher(), Subscriber()
        async with relay_of([publisher]) as relay:
            await joined(relay, publisher)
            publisher.send(chain(1, 2, 3, 4, 5, 6))
            await until(lambda: len(relay._engines[0].blocks) == 6)
            behind, other = relay.batches(0, never), relay.batches(0, never)
            slow.take(await anext(behind))
            await anext(other)
            shared = relay._latest_snapshot
            publisher.send(BlockRemoved([6]))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            later = relay.batches(0, never)
            await anext(later)
            assert relay._latest_snapshot is shared
            for name in range(10, 20):
                publisher.send(chain(name))
            await until(lambda: relay._engines[0].stream.next == publisher.number)
            slow.snapshots.clear()  # the rest of an old one is of no use
            await read_to(relay, behind, slow, {1, 2, 3, 4, 5, *range(10, 20)})
            assert [each.index for each in slow.snapshots] == list(range(15))
            for batches in (behind, other, later):
                await batches.aclose()
            assert relay._latest_snapshot[1] == []
        publisher.close()

    asyncio.run(check())


def test_what_is_no_event_ends_the_relay_and_its_streams() -> None:
    async def check() -> None:
        publisher = Publisher()
        async with relay_of([publisher]) as relay:
            await joined(relay, publisher)
            batches = relay.batches(0, never)
            await anext(batches)
            publisher.out.send_multipart((b"", publisher.number.to_bytes(8, "big"), b"nothing"))
            with pytest.raises(Exception, match="not read any more"):
                await anext(batches)
        publisher.close()

    asyncio.run(check())


def test_images_are_no_texts_and_endpoints_are_this_machines() -> None:
    blocks: dict[int, Any] = {}
    event = BlockStored([1], None, [-5, 7], 2, 4, "GPU", "sql", [["sql", "tenant"]])
    [message] = kv_relay._applied(blocks, event)
    assert kv_relay._tokens(message) == 2
    assert (message.stored.lora_name, message.stored.cache_salt) == ("sql", "tenant")
    [block] = message.stored.blocks
    assert list(block.token_ids) == [2**32 - 5, 7]
    assert block.lora_id == 4
    [below] = kv_relay._applied(blocks, BlockStored([2], 1, [8, 9], 2, 4, "GPU", "sql"))
    assert (below.stored.lora_name, below.stored.cache_salt) == ("sql", "tenant"), "its beginning's"
    assert kv_relay._applied(blocks, BlockStored([4], 3, [8, 9], 2, None, "GPU")) == [], "below what is not known"
    states = [
        {"dp_rank": 2, "kv_events": "tcp://0.0.0.0:5000", "kv_events_replay": "tcp://[::]:6000"},
        {"dp_rank": 0, "kv_events": "tcp://127.0.0.2:41234", "kv_events_replay": None},
    ]
    assert sources_of({"internal_states": states}) == {
        2: Source("tcp://127.0.0.1:5000", "tcp://[::1]:6000"),
        0: Source("tcp://127.0.0.2:41234", None),
    }


def test_no_message_is_longer_than_clients_take() -> None:
    """4 MB, by default: a cache that is emptied removes all that it has at once."""
    blocks: dict[int, Any] = {}
    names = [2**62 + name for name in range(1_000_000)]
    events = kv_relay._applied(blocks, BlockRemoved(names))
    assert [name for event in events for name in event.removed.block_hashes] == names
    assert max(event.ByteSize() for event in events) < 1 << 20
    assert all(
        kv_relay._tokens(each) == len(each.removed.block_hashes) <= kv_relay._BATCH_TOKENS for each in events
    )
