"""What a gateway knows by its workers' KV events: of a real engine, and of publishers that lie, stumble or die."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq

from sgl.runtime.engine import Engine
from sgl.runtime.gateway import kv_follower
from sgl.runtime.gateway.demands import facts_of
from sgl.runtime.gateway.index import PrefixIndex
from sgl.runtime.gateway.kv_follower import KvFollower, sources_of
from sgl.runtime.kv_events import END, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from sgl.runtime.server import kv_stream
from sgl.runtime.server.kv_stream import Source
from sgl.runtime.server.placement import MOST_BLOCKS
from tests.live_server import LiveServer
from tests.patience import PATIENCE
from tests.test_gateway import echo, gateway_of, run, until
from tests.test_gateway_hostile import INFO, STATE
from tests.tiny_models import tiny_checkpoint


def blocks_of(ids: list[int], **more: Any) -> list[int]:
    """As a request's are named."""
    return list(facts_of(msgspec.json.encode({"input_ids": ids, **more}), "/generate", None).demand.blocks)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_position_embeddings=256)
    options: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "skip_tokenizer_init": True}
    where = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    with Engine(str(folder), device="cpu", **options, **where) as engine:  # type: ignore[arg-type]
        server = LiveServer(engine)
        yield server
        server.close()


def test_a_gateway_knows_what_a_worker_has_computed_for_others_and_dropped(server: LiveServer) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(64) for _ in range(100)] for _ in range(12)]
    params = {"max_new_tokens": 1}

    async def test() -> None:
        async with (
            gateway_of(echo, routing_policy="cache_aware") as (gateway, workers, client),
            aiohttp.ClientSession(server.url) as direct,  # past the gateway, and before it looked
        ):
            for ids in prompts[:3]:
                await direct.post("/generate", json={"input_ids": ids, "sampling_params": params})
            gateway.servers.add(server.url)
            index = gateway.fleet.index

            def found(ids: list[int]) -> int:
                return index.found(blocks_of(ids)).get(server.url, 0)

            await until(lambda: [found(ids) for ids in prompts[:3]] == [6, 6, 6])
            for _ in range(4):
                async with client.post(
                    "/generate", json={"input_ids": prompts[1], "sampling_params": params}
                ) as answer:
                    assert answer.headers["X-Sgl-Worker"] == server.url
            for ids in prompts[3:]:  # more than it has room for
                await direct.post("/generate", json={"input_ids": ids, "sampling_params": params})
            await until(lambda: found(prompts[0]) == 0 and found(prompts[-1]) == 6)
            async with client.get("/metrics") as answer:
                text = await answer.text()
            assert f'sgl_gateway_worker_kv_gaps{{worker="{server.url}"}} 0.0' in text
            assert f'sgl_gateway_worker_kv_blocks{{worker="{server.url}"}}' in text
            about = {
                each["id"]: each["kv_events"] for each in (await (await client.get("/workers")).json())["workers"]
            }
            assert about == {server.url: True, workers[0].url: False}
            await direct.post("/flush_cache")
            await until(lambda: not any(found(ids) for ids in prompts))
            gateway.servers.remove(server.url)
            assert not gateway.servers.kv.workers

    run(test)


class Publisher:
    """One engine's events, as a test wants them."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.out, self.replay = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        for its in (self.out, self.replay):
            its.setsockopt(zmq.LINGER, 0)
            its.bind("tcp://127.0.0.1:0")
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.number = 0
        self.source = Source(*(each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (self.out, self.replay)))

    def send(self, *events: Any, is_lost: bool = False, is_kept: bool = True) -> None:
        data = msgspec.msgpack.encode(EventBatch(0.0, list(events)))
        if is_kept:
            self.kept.append((self.number, data))
        if not is_lost:
            self.out.send_multipart((b"", self.number.to_bytes(8, "big"), data))
        self.number += 1

    async def answer(self) -> None:
        """Send again what is asked for, until cancelled."""
        while True:
            while self.replay.poll(0):
                client, empty, first = self.replay.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                for number, data in self.kept:
                    if number >= self.asked[-1]:
                        self.replay.send_multipart((client, empty, number.to_bytes(8, "big"), data))
                self.replay.send_multipart((client, empty, END, b""))
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.context.destroy(linger=0)


def stored(name: int, ids: list[int], parent: int | None = None, size: int = 16, **more: Any) -> BlockStored:
    hashes = [name * 1000 + i for i in range(len(ids) // size)]
    about = [more.get(name) for name in ("lora_id", "medium", "lora_name", "extra_keys")]
    return BlockStored(hashes, parent, ids, size, *about)


@contextlib.asynccontextmanager
async def followed(answers: bool = True) -> AsyncIterator[tuple[Publisher, PrefixIndex, KvFollower]]:
    publisher, index = Publisher(), PrefixIndex()
    follower = KvFollower(index)
    task = asyncio.ensure_future(publisher.answer() if answers else asyncio.sleep(60))
    if answers:
        publisher.send(stored(0, IDS[0]))
    follower.follow("w", [publisher.source])
    try:
        await until(lambda: bool(publisher.out.poll(0)))  # it has subscribed
        if not answers:
            publisher.send(stored(0, IDS[0]))
        await until(lambda: has(index, 0) == 4)
        yield publisher, index, follower
    finally:
        task.cancel()
        await asyncio.to_thread(follower.close)
        publisher.close()


IDS = [[1000 * name + i for i in range(64)] for name in range(9)]


def has(index: PrefixIndex, name: int) -> int:
    return index.found(blocks_of(IDS[name])).get("w", 0)


def test_a_stream_that_ends_before_it_told_anything_takes_nothing_back() -> None:
    """It may be no engine's: a server that speaks HTTP ends the connection, too."""

    async def test() -> None:
        first, again, index = Publisher(), Publisher(), PrefixIndex()
        follower, where = KvFollower(index), first.out.getsockopt_string(zmq.LAST_ENDPOINT)
        index.sent("w", blocks_of(IDS[0]))
        follower.follow("w", [Source(where, None)])
        await until(lambda: bool(first.out.poll(0)))  # it has subscribed
        first.close()
        again.out.bind(where)
        await until(lambda: bool(again.out.poll(0)))
        again.send(stored(1, IDS[1]))
        await until(lambda: has(index, 1) == 4)
        assert has(index, 0) == 4
        await asyncio.to_thread(follower.close)
        again.close()

    run(test)


def test_missing_batches_are_asked_for_and_what_cannot_be_had_again_is_not_believed() -> None:
    async def test() -> None:
        async with followed() as (publisher, index, follower):
            publisher.send(stored(1, IDS[1]), is_lost=True)
            publisher.send(stored(2, IDS[2]), is_lost=True)
            publisher.send(stored(3, IDS[3]))
            await until(lambda: [has(index, name) for name in range(4)] == [4, 4, 4, 4])
            assert publisher.asked[-1] == 1
            assert follower.workers["w"].gaps == 1
            index.sent("w", blocks_of(IDS[8]))
            publisher.send(BlockRemoved([0]), is_lost=True, is_kept=False)
            publisher.send(stored(5, IDS[5]))
            await until(lambda: has(index, 5) == 4)
            assert [has(index, name) for name in range(4)] == [0, 0, 0, 0]
            assert has(index, 8) == 4, "what was sent there counts still"
            publisher.send(stored(6, IDS[6]), BlockRemoved([6002]), AllBlocksCleared(), stored(7, IDS[7]))
            await until(lambda: has(index, 7) == 4)
            assert [has(index, name) for name in (5, 6, 8)] == [0, 0, 0]
            publisher.number, publisher.kept = 0, []  # another engine in its place
            publisher.send(stored(4, IDS[4]))
            await until(lambda: has(index, 4) == 4 and has(index, 7) == 0)

    run(test)


def test_a_worker_that_restarts_and_tells_more_before_it_is_read_again_keeps_no_dead_blocks() -> None:
    async def test() -> None:
        async with followed() as (publisher, index, _):
            publisher.out.close(0)
            publisher.out = publisher.context.socket(zmq.XPUB)
            publisher.number, publisher.kept = 0, []
            for name in (1, 2, 3):
                publisher.send(stored(name, IDS[name]))
            async with asyncio.timeout(PATIENCE):
                while True:
                    with contextlib.suppress(zmq.ZMQError):  # the port is not free yet
                        publisher.out.bind(publisher.source.events)
                        break
                    await asyncio.sleep(0.01)
            await until(lambda: bool(publisher.out.poll(0)))
            publisher.send(stored(4, IDS[4]))
            await until(lambda: [has(index, name) for name in (1, 2, 3, 4)] == [4, 4, 4, 4])
            assert has(index, 0) == 0

    run(test)


def test_without_answers_to_what_was_asked_a_stream_is_followed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_stream, "REPLAY_SECONDS", 0.1)

    async def test() -> None:
        async with followed(answers=False) as (publisher, index, _):
            assert has(index, 0) == 4
            publisher.send(stored(1, IDS[1]), is_lost=True)
            publisher.send(stored(2, IDS[2]))
            await until(lambda: has(index, 2) == 4)
            assert [has(index, 0), has(index, 1)] == [0, 0]

    run(test)


@pytest.mark.parametrize("size", [1, 4, 16, 24, 64])
def test_blocks_of_any_size_have_the_names_of_requests(size: int) -> None:
    ids = list(range(5000))

    async def test() -> None:
        async with followed() as (publisher, index, _):
            half = 2400  # a multiple of them all but 64
            cut = half // size * size
            first = stored(1, ids[:cut], size=size)
            rest = ids[cut : len(ids) // size * size]
            publisher.send(first)
            publisher.send(
                BlockStored(
                    [900_000 + i for i in range(len(rest) // size)], first.block_hashes[-1], rest, size, None
                )
            )
            publisher.send(stored(2, IDS[2]))
            await until(lambda: has(index, 2) == 4)
            assert index.found(blocks_of(ids)) == {"w": MOST_BLOCKS}
            last = first.block_hashes[-1]
            publisher.send(BlockRemoved([last]), stored(3, IDS[3]))
            await until(lambda: has(index, 3) == 4)
            assert index.found(blocks_of(ids)) == {"w": (cut - size) // 16}

    run(test)


@pytest.mark.parametrize(
    "frames",
    [
        (b"", bytes(7), b""),
        (b"", (1).to_bytes(8, "big")),
        (b"", (1).to_bytes(8, "big"), b"\xc1"),
        (b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [["Unknown", 1]]])),
        (
            b"",
            (1).to_bytes(8, "big"),
            msgspec.msgpack.encode([0.0, [["BlockStored", [1, 2], None, [1], 16, None]]]),
        ),
        (b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1], 0, None]]])),
        (b"", (1).to_bytes(8, "big"), b"\x91" * 10_000),
    ],
)
def test_who_sends_what_is_no_event_is_followed_no_longer(frames: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with followed() as (publisher, index, follower):
            index.sent("w", blocks_of(IDS[8]))
            publisher.out.send_multipart(frames)
            await until(lambda: "w" not in follower.workers)
            assert (has(index, 0), has(index, 8)) == (0, 4)
            follower.follow("w", [publisher.source])
            await asyncio.sleep(0.05)
            assert "w" not in follower.workers, "not before it is another one"

    run(test)


def test_a_worker_that_lies_and_falls_silent_keeps_no_other_from_being_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_stream, "REPLAY_SECONDS", 1.0)

    async def test() -> None:
        async with followed() as (publisher, index, follower):
            liar = Publisher()  # which answers nothing
            follower.follow("liar", [liar.source])
            await until(lambda: "liar" in follower.workers)
            while "liar" in follower.workers:
                liar.out.send_multipart((b"", (1 << 60).to_bytes(8, "big"), b"\xc1"))
                await asyncio.sleep(0.02)
            publisher.send(stored(1, IDS[1]))
            await until(lambda: has(index, 1) == 4)
            liar.close()

    run(test)


def test_ten_thousand_events_of_nonsense_leave_nothing_behind() -> None:
    rng = random.Random(7)

    def nonsense() -> Any:
        blocks = [rng.randrange(300) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.3:
            return BlockRemoved(blocks)
        size = rng.choice([1, 7, 16, 40])
        ids = [rng.randrange(-2, 5) for _ in range(size * len(blocks))]
        return BlockStored(blocks, rng.choice([None, rng.randrange(300)]), ids, size, None)

    async def test() -> None:
        async with followed() as (publisher, index, follower):
            for _ in range(100):
                publisher.send(*(nonsense() for _ in range(100)))
            publisher.send(AllBlocksCleared(), stored(1, IDS[1]))
            await until(lambda: has(index, 1) == follower.workers["w"].blocks == 4)  # told one by one
            assert len(index._stored) == 4
            its = follower._followed["w"]
            assert (len(its.names), len(its.engines[0].pages)) == (4, 4)

    run(test)


def test_what_is_kept_of_a_worker_is_bounded_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follower, "MOST_PAGES", 100)

    async def test() -> None:
        async with followed() as (publisher, index, follower):
            for name in range(10, 200):
                ids = [name * 1000 + i for i in range(64)]
                publisher.send(stored(name, ids), stored(name, ids, lora_id=1), stored(name, ids, medium="CPU"))
            await until(lambda: follower.workers["w"].batches >= 191)
            assert follower.workers["w"].blocks == 100
            publisher.send(AllBlocksCleared(), stored(1, IDS[1]))
            await until(lambda: has(index, 1) == 4)
            assert follower.workers["w"].blocks == 4
            follower.follow("w", [])
            assert not index._stored
            assert not index.tells("w")

    run(test)


@pytest.mark.parametrize(
    ("said", "sources"),
    [
        ([{"kv_events": "tcp://0.0.0.0:5557"}], [("tcp://10.0.0.1:5557", None)]),
        (
            [
                {"kv_events": "tcp://elsewhere:5557", "kv_events_replay": "tcp://*:6000"},
                {"kv_events": "tcp://elsewhere:41234", "kv_events_replay": "tcp://*:5"},
            ],
            [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6000"), ("tcp://10.0.0.1:41234", "tcp://10.0.0.1:5")],
        ),
        ([{"kv_events": "ipc:///etc/passwd"}], []),
        ([{"kv_events": "tcp://x:99999999999"}, {"kv_events": "tcp://x:0"}], []),
        (
            [{"kv_events": "tcp://x:000001" + "0" * 3}, {"kv_events": "tcp://x:1_0"}, {"kv_events": "tcp://x:１"}],
            [],
        ),
        ([{"kv_events": 5}, 5, None], []),
        ([{"kv_events": "tcp://x:5"}] * 1000, [("tcp://10.0.0.1:5", None)]),
        ([{}], []),
        ([], []),
    ],
)
def test_events_are_followed_at_a_workers_own_host_only(said: list[Any], sources: list[Any]) -> None:
    found = sources_of({"internal_states": said}, "http://10.0.0.1:30000")
    assert found == [Source(*each) for each in sources]


def test_what_another_tenant_or_adapter_has_computed_is_no_hit() -> None:
    own: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of a request, and of events
        ({}, {}),
        ({"extra_key": "a"}, {"extra_keys": [["a"], None, None, None]}),
        ({"extra_key": "b"}, {"extra_keys": [["b"], None, None, None]}),
        ({"lora_path": "a"}, {"lora_id": 1, "lora_name": "a"}),
        ({"lora_path": "b"}, {"lora_id": 2, "lora_name": "b", "extra_keys": [["b"]] * 4}),  # vLLM's way
        (
            {"lora_path": "a", "extra_key": "a"},
            {"lora_id": 1, "lora_name": "a", "extra_keys": [["a", "a"]] + [None] * 3},
        ),
    ]

    async def test() -> None:
        async with followed() as (publisher, index, _):
            for name, (_, about) in enumerate(own, 10):
                publisher.send(AllBlocksCleared(), stored(name, IDS[1], **about))
                publisher.send(stored(name + 50, IDS[2], parent=name * 1000 + 3))
                request = own[name - 10][0]
                await until(lambda request=request: index.found(blocks_of(IDS[1] + IDS[2], **request)) == {"w": 8})  # type: ignore[misc]
                others = [other for other, _ in own if other != request]
                assert not any(index.found(blocks_of(IDS[1], **other)) for other in others)
            for about in (
                {"lora_id": 1},  # whose name nobody knows
                {"extra_keys": [["a", "b"], None, None, None]},
                {"extra_keys": [[b"image"], None, None, None]},
            ):
                publisher.send(AllBlocksCleared(), stored(70, IDS[3], **about))
            publisher.send(stored(71, IDS[4], extra_keys=[None, None, [["image", 0]], None]), stored(72, IDS[5]))
            await until(lambda: has(index, 5) == 4)
            assert (has(index, 3), has(index, 4)) == (0, 2)

    run(test)


@pytest.mark.parametrize(
    ("more", "adapter"),
    [
        ({}, None),
        ({"model": "served"}, None),
        ({"model": "sql"}, "sql"),
        ({"model": "org/served:sql"}, "sql"),
        ({"model": "a:b:sql:v2"}, "sql:v2"),
        ({"model": "served", "lora_path": "sql"}, "sql"),
        ({"lora_path": ["sql", None]}, "sql"),
        ({"model": ":" * 10**6}, None),
    ],
)
def test_an_adapter_may_stand_in_a_models_name(more: dict[str, Any], adapter: str | None) -> None:
    body = msgspec.json.encode({"prompt": IDS[0], **more})
    demand = facts_of(body, "/v1/completions", None, frozenset({"sql", "sql:v2"})).demand
    assert demand.blocks == (blocks_of(IDS[0], lora_path=adapter) if adapter else blocks_of(IDS[0]))


def test_engines_of_one_server_are_followed_wherever_each_publishes(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, vocab_size=64, max_position_embeddings=256)
    options: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "skip_tokenizer_init": True, "dp_size": 2}
    where = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    prompts = [list(range(20)), list(range(20, 40)), list(range(40, 60))]

    def engine(rank: int) -> Engine:
        return Engine(str(folder), device="cpu", dp_rank=rank, **options, **where)

    def sources(*engines: Engine) -> list[Source]:
        states = [state for each in engines for state in each.get_server_info()["internal_states"]]
        return sources_of({"internal_states": states}, "http://127.0.0.1:1")

    def fill(engine: Engine, prompt: list[int]) -> None:
        engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})

    async def test() -> None:
        index = PrefixIndex()
        follower = KvFollower(index)

        def found() -> list[int]:
            return [index.found(blocks_of(ids)).get("w", 0) for ids in prompts]

        with engine(0) as one:
            with engine(1) as two:
                assert one.get_server_info()["kv_events"] == "tcp://127.0.0.1:0", "it is that of no engine"
                follower.follow("w", sources(one, two))
                fill(one, prompts[0])
                fill(two, prompts[1])
                await until(lambda: found() == [1, 1, 0] and follower.workers["w"].batches == 2)
            with engine(1) as again:  # in the second one's place, on another port
                follower.follow("w", sources(one))
                await until(lambda: found() == [1, 0, 0])
                follower.follow("w", sources(one, again))
                fill(again, prompts[2])
                await until(lambda: found() == [1, 0, 1] and follower.workers["w"].batches > 2)  # counted last
                assert follower.workers["w"].batches == 3, "the first one was followed on"
        await asyncio.to_thread(follower.close)

    run(test)


def test_a_worker_that_announces_events_and_has_none_serves_as_others_do() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo, routing_policy="cache_aware") as (gateway, workers, client):
            nobody.bind(("127.0.0.1", 0))
            for worker in workers:
                own = worker.url.rpartition(":")[2]  # which speaks HTTP
                where = {
                    "kv_events": f"tcp://x:{own}",
                    "kv_events_replay": f"tcp://x:{nobody.getsockname()[1]}",
                }
                worker.info = {**INFO, "internal_states": [{**STATE, **where}]}
            await until(lambda: len(gateway.servers.kv.workers) == 2)
            answers = [await client.post("/generate", json={"input_ids": IDS[0]}) for _ in range(4)]
            assert {answer.status for answer in answers} == {200}
            assert len({answer.headers["X-Sgl-Worker"] for answer in answers}) == 1, "by what was sent where"

    with socket.socket() as nobody:  # it has a port that nobody listens at, and nobody else gets
        run(test)
