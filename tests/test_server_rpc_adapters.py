"""LoRA adapters by gRPC: loaded under ids that callers mint, named by these, listed, and gone again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from sgl.runtime.engine import Engine
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.server.rpc.adapters import AdapterIds
from tests.live_server import LiveServer, served
from tests.test_server_lora import adapters, engine, model
from tests.test_server_rpc import PROMPT, Client, client, request
from tests.tiny_adapters import greedy, merged

__all__ = ["adapters", "client", "engine", "model"]  # fixtures


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, served_model_name="base", grpc_port=0) as server:
        yield server


def load(client: Client, name: str, path: Any, identity: str, **fields: Any) -> Any:
    asked = pb.LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), lora_id=identity, **fields)
    return client.stub.LoadLoRAAdapter(asked, metadata=client.metadata)


def unload(client: Client, name: str, identity: str = "") -> Any:
    return client.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name=name, lora_id=identity))


def listed(client: Client) -> list[tuple[str, str, str, bool]]:
    found = client.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest()).loaded_adapters
    return [(its.lora_id, its.lora_name, its.lora_path, its.pinned) for its in found]


def test_adapters_come_answer_and_go(client: Client, model: Path, adapters: dict[str, Path]) -> None:
    sql = ("sql", "sql", str(adapters["sql"]), False)
    assert listed(client) == [sql], "its name is its id"
    loaded = load(client, "law", adapters["law"], "mint-7")
    assert (loaded.success, loaded.message, list(loaded.loaded_lora_ids)) == (True, "", ["sql", "mint-7"])
    assert listed(client) == [sql, ("mint-7", "law", str(adapters["law"]), False)]
    expected = {name: greedy(merged(model, path), PROMPT, 6) for name, path in adapters.items()}
    assert expected["sql"] != expected["law"]
    for identity, name in (("mint-7", "law"), ("law", "law"), ("sql", "sql")):
        assert list(client.complete(request(lora_id=identity)).output_ids) == expected[name]
    gone = unload(client, "law", "mint-7")
    assert (gone.success, gone.message, list(gone.loaded_lora_ids)) == (True, "", ["sql"])
    assert listed(client) == [sql]
    for identity in ("mint-7", "law"):
        with pytest.raises(grpc.RpcError, match=identity) as raised:
            client.complete(request(lora_id=identity))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_what_cannot_be_loaded_or_unloaded_is_said(
    client: Client, adapters: dict[str, Path], tmp_path: Path
) -> None:
    assert load(client, "law", adapters["law"], "mint-7", pinned=True).success
    for (name, path, identity), words in (
        (("law", adapters["law"], "mint-8"), "already"),
        (("new", adapters["law"], "mint-7"), "lora_id='mint-7' is the adapter 'law'"),
        (("new", adapters["law"], "sql"), "lora_id='sql' is the adapter 'sql'"),
        (("new", adapters["law"], ""), "lora_id is needed"),
        (("new", adapters["law"], "m" * 257), "257 characters"),
        (("", adapters["law"], "mint-8"), "lora_name is needed"),
        (("new", "", "mint-8"), "lora_path is needed"),
        (("new", tmp_path / "nowhere", "mint-8"), "neither"),
        (("base", adapters["law"], "mint-8"), "own name"),
    ):
        answer = load(client, name, path, identity)
        assert not answer.success
        assert words in answer.message
        assert list(answer.loaded_lora_ids) == ["sql", "mint-7"]
    for name, identity, words in (
        ("", "mint-7", "lora_name is needed"),
        ("law", "sql", "lora_id='sql' is not the id of the adapter 'law'"),
        ("nothing", "", "nothing"),
    ):
        refused = unload(client, name, identity)
        assert not refused.success
        assert words in refused.message
    assert unload(client, "law").success


def test_an_id_ends_with_its_adapter_however_that_goes(
    server: LiveServer, client: Client, adapters: dict[str, Path]
) -> None:
    assert load(client, "law", adapters["law"], "mint-7").success
    assert server.post("/unload_lora_adapter", {"lora_name": "law"}).json()["success"]
    body = {"lora_name": "law", "lora_path": str(adapters["sql"])}
    assert server.post("/load_lora_adapter", body).json()["success"]
    assert listed(client)[1] == ("law", "law", str(adapters["sql"]), False)
    with pytest.raises(grpc.RpcError, match="mint-7"):
        client.complete(request(lora_id="mint-7"))
    assert load(client, "other", adapters["law"], "mint-7").success
    assert unload(client, "other").success
    assert unload(client, "law").success


def test_changes_are_for_the_admin(engine: Engine, adapters: dict[str, Path]) -> None:
    with served(engine, grpc_port=0, api_key=["me=k-me"], admin_api_key="k-admin") as server:
        me, admin = Client(server, "k-me"), Client(server, "k-admin")
        for call in (
            lambda: load(me, "law", adapters["law"], "mint-7"),
            lambda: me.stub.StartProfile(common_pb2.StartProfileRequest(), metadata=me.metadata),
            lambda: me.stub.StopProfile(common_pb2.StopProfileRequest(), metadata=me.metadata),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                call()
            assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert load(admin, "law", adapters["law"], "mint-7").success
        found = me.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest(), metadata=me.metadata)
        assert [its.lora_id for its in found.loaded_adapters] == ["sql", "mint-7"]
        gone = pb.UnloadLoRAAdapterRequest(lora_name="law")
        assert admin.stub.UnloadLoRAAdapter(gone, metadata=admin.metadata).success


def test_a_profile_is_recorded(client: Client) -> None:
    start, stop = common_pb2.StartProfileRequest, common_pb2.StopProfileRequest
    with pytest.raises(grpc.RpcError) as raised:
        client.stub.StopProfile(stop())
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for wrong, name in ((start(num_steps=3), "num_steps"), (start(activities=["CPU"]), "activities")):
        with pytest.raises(grpc.RpcError, match=name) as raised:
            client.stub.StartProfile(wrong)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert client.stub.StartProfile(start()).success
    client.complete(request())
    told = client.stub.StopProfile(stop())
    path = Path(told.message.removeprefix("the profile is in ").removesuffix(" on the server"))
    assert path.stat().st_size > 1000
    path.unlink()


def test_an_id_means_one_adapter_however_many_are_loaded_at_once() -> None:
    loaded: list[LoraPath] = []

    async def call(method: str, *about: Any) -> None:
        await asyncio.sleep(0.01)

    def note(method: str, *about: Any) -> None:
        loaded.append(LoraPath(*about))

    async def check() -> None:
        engine = SimpleNamespace(call=call, note_adapter=note, config=SimpleNamespace(model_path="m"))
        service: Any = SimpleNamespace(engine=engine, model_name="m", adapters=loaded, has_adapter=lambda _: False)
        ids = AdapterIds(service)
        asked = [pb.LoadLoRAAdapterRequest(lora_name=name, lora_path="p", lora_id="x") for name in ("sql", "law")]
        first, second = await asyncio.gather(*map(ids.load, asked))
        assert (first.success, second.success) == (True, False)
        assert "'x' is being loaded already" in second.message
        assert ids.name_of("x") == "sql"

    asyncio.run(check())
