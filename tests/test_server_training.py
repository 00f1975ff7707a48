"""Trainers' endpoints: pauses and new weights over HTTP, as verl, slime and others ask for them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import io
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
import torch.multiprocessing
from torch.distributed import TCPStore

from sgl import Engine
from sgl.errors import InvalidRequest
from sgl.runtime.model.update.shipped import shipped_tensors
from sgl.runtime.server.adapters import change_adapter
from sgl.runtime.server.training import DiskBody, MemoryBody, TrainingApi
from tests.live_server import LiveServer
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.test_weights_update import shaken, tensors_of
from tests.tiny_models import tiny_checkpoint

NORM = "model.norm.weight"
SECONDS = 240
"""Of patience with a process beside others on few cores."""
ASKED = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
SERVED = {"admin_api_key": "boss", "api_key": "guest"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=259, with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, device="cpu", max_total_tokens=2048, check_ledger=True) as engine:
        yield engine


def post(server: LiveServer, path: str, key: str = "boss", **body: Any) -> requests.Response:
    return requests.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS)


def shared(tensors: Any) -> str:
    """What MultiprocessingSerializer of the original makes of tensors on a CPU."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(tensors)
        return base64.b64encode(buffer.getvalue()).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def norm(engine: Engine) -> torch.Tensor:
    return torch.tensor(engine.get_weights_by_name(NORM))


def test_a_pause_is_answered_as_the_original_answers(server: LiveServer, engine: Engine) -> None:
    for mode in ("abort", "retract", "in_place"):
        reply = post(server, "/pause_generation", mode=mode)
        assert reply.json() == {"message": "Generation paused successfully.", "status": "ok"}
        assert engine.get_server_info()["internal_states"][0]["is_paused"]
    assert post(server, "/continue_generation").json()["status"] == "ok"
    assert not engine.get_server_info()["internal_states"][0]["is_paused"]
    assert post(server, "/generate", **ASKED).status_code == 200
    assert post(server, "/pause_generation", mode="wait").status_code == 400


def test_memory_is_released_and_resumed(server: LiveServer, engine: Engine) -> None:
    before = post(server, "/generate", **ASKED).json()["text"]
    reply = post(server, "/release_memory_occupation", tags=["kv_cache"]).json()
    assert reply["released"] == {"kv_cache": engine.get_server_info()["kv_bytes"]}
    state = engine.get_server_info()["internal_states"][0]
    assert state["is_paused"]
    assert state["released_memory"] == reply["released"]
    later = post(server, "/continue_generation").json()
    assert later == {"message": "Generation continues once all memory is resumed.", "status": "ok"}
    assert post(server, "/generate", **ASKED, timeout=0.1).status_code in (408, 504)
    assert post(server, "/resume_memory_occupation").json()["status"] == "ok"
    assert post(server, "/generate", **ASKED).json()["text"] == before
    for tags in (["kv"], [], "kv_cache", ["weights"]):  # the last on a CPU
        assert post(server, "/release_memory_occupation", tags=tags).status_code == 400
    assert not engine.get_server_info()["internal_states"][0]["is_paused"]


def test_weights_come_from_a_folder(server: LiveServer, engine: Engine, folder: Path, tmp_path: Path) -> None:
    new = shaken(folder, tmp_path / "new")
    for path in (new, folder):
        reply = post(
            server, "/update_weights_from_disk", model_path=str(path), abort_all_requests=True, flush_cache=True
        )
        assert reply.json()["success"], reply.text
        torch.testing.assert_close(norm(engine), tensors_of(path)[NORM])
    reply = post(server, "/update_weights_from_disk", model_path=str(tmp_path / "none"))
    assert reply.status_code == 400
    assert reply.json()["success"] is False
    assert "neither a checkpoint folder" in reply.json()["message"]
    reply = post(server, "/update_weights_from_disk", model_path=str(folder), load_format="dummy")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert "load_format must be auto or safetensors" in reply.json()["message"]
    rows = post(server, "/get_weights_by_name", name=NORM, truncate_size=3).json()
    assert rows == pytest.approx(norm(engine)[:3].tolist())
    assert post(server, "/get_weights_by_name", name="other").status_code == 400


def test_weights_have_a_version_that_every_answer_names(server: LiveServer, engine: Engine) -> None:
    def named() -> list[str]:
        about = [
            requests.get(server.url + path, headers={"Authorization": "Bearer guest"}, timeout=60).json()
            for path in ("/get_model_info", "/model_info", "/get_weight_version", "/weight_version")
        ]
        return [
            post(server, "/generate", **ASKED).json()["meta_info"]["weight_version"],
            *(its["weight_version"] for its in about),
        ]

    before = norm(engine)
    engine.update_weights({NORM: before}, weight_version="a")
    assert named() == ["a"] * 5
    reply = post(server, "/update_weight_version", new_version="b", abort_all_requests=False)
    assert (reply.status_code, reply.json()["success"], reply.json()["new_version"]) == (200, True, "b")
    assert named() == ["b"] * 5
    assert post(server, "/update_weight_version", new_version="").status_code == 400
    assert post(server, "/update_weight_version").status_code == 400
    assert named() == ["b"] * 5
    engine.pause_generation("in_place")
    sink = engine.generate("abc", {**ASKED["sampling_params"]}, stream=True)
    engine.update_weight_version("c")
    engine.continue_generation()
    assert list(sink)[-1]["meta_info"]["weight_version"] == "c"  # the latest that it was sampled by


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    values: list[bytes]


def test_weights_come_from_another_processs_memory(server: LiveServer, engine: Engine) -> None:
    before = norm(engine)
    value = before + 1
    embedding = torch.rand(259, 64)
    bucket = {
        "flattened_tensor": torch.cat([its.flatten().view(torch.uint8) for its in (value, embedding)]),
        "metadata": [
            FlattenedTensorMetadata(NORM, value.shape, value.dtype, 0, 256, 64),
            FlattenedTensorMetadata(
                "model.embed_tokens.weight", embedding.shape, embedding.dtype, 256, 66560, 16576
            ),
        ],
    }
    of_ranks = [(NORM, LocalSerializedTensor([base64.b64decode(shared(value + 1))] * 2))]
    for given, load_format, wanted in (
        ([(NORM, value)], None, value),
        ([(NORM, before)], "direct", before),
        (bucket, "flattened_bucket", value),
        (of_ranks, None, value + 1),
    ):
        body = {"serialized_named_tensors": [shared(given)], "load_format": load_format, "flush_cache": True}
        reply = post(server, "/update_weights_from_tensor", **body, weight_version="7")
        assert reply.json()["success"], reply.text
        torch.testing.assert_close(norm(engine), wanted)
    assert engine.weight_version == "7"
    reply = post(server, "/update_weights_from_tensor", serialized_named_tensors=[shared([("other", value)])])
    assert (reply.status_code == 400, reply.json()["success"]) == (True, False)
    engine.update_weights({NORM: before})


def test_calls_are_those_of_the_originals_engine(engine: Engine, folder: Path) -> None:
    """With its arguments, in its order, as trainers that hold an engine call it."""
    before = norm(engine)
    value = before + 1
    engine.update_weights_from_tensor([(NORM, value)], None, False)
    torch.testing.assert_close(norm(engine), value)
    place = FlattenedTensorMetadata(NORM, before.shape, before.dtype, 0, 256, 64)
    bucket = {"flattened_tensor": before.flatten().view(torch.uint8), "metadata": [place]}
    given = [base64.b64decode(shared(bucket))]
    success, message = engine.update_weights_from_tensor(given, load_format="flattened_bucket", flush_cache=False)
    assert success, message
    torch.testing.assert_close(norm(engine), before)
    with pytest.raises(InvalidRequest, match="must be a list with one text"):
        engine.update_weights_from_tensor([], "flattened_bucket")
    assert engine.update_weights_from_disk(str(folder), "auto").success
    with pytest.raises(InvalidRequest, match="load_format must be auto or safetensors, not 'dummy'"):
        engine.update_weights_from_disk(str(folder), "dummy")
    with pytest.raises(InvalidRequest, match="there is no group 'g'"):
        engine.update_weights_from_distributed([NORM], ["float32"], [[64]], "g", False, None)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("called",)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (pickle.dumps(Hostile()), "calls for builtins.print"),
        (pickle.dumps([("a", torch.nn.Linear(2, 2))]), "calls for torch.nn"),
        (pickle.dumps([1]), "something else than pairs"),
        (pickle.dumps("a"), "holds a str"),
        (b"\x80\x05", "cannot be read"),
        ("?", "is no base64"),
        (7, "must be at most"),
    ],
    ids=lambda its: its if isinstance(its, str) else "",
)
def test_a_message_that_is_no_tensors_is_refused(
    message: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        shipped_tensors(message, None)
    assert "called" not in capsys.readouterr().out


def test_only_the_admin_changes_weights(server: LiveServer) -> None:
    for path in (
        *("/pause_generation", "/continue_generation", "/get_weights_by_name", "/init_weights_update_group"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        *("/destroy_weights_update_group", "/update_weight_version", "/release_memory_occupation"),
        *("/resume_memory_occupation", "/begin_weight_update", "/end_weight_update", "/post_process_weights"),
    ):
        assert post(server, path, key="guest").status_code == 403


def trainers_group(port: int, size: int) -> Any:
    """A trainer's end, as verl and slime make it with torch's own functions."""
    c10d: Any = torch.distributed.distributed_c10d
    timeout = datetime.timedelta(seconds=SECONDS)
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=timeout))
    store.set_timeout(timeout)
    store, backend = c10d.PrefixStore("g", store), c10d.Backend("gloo")
    group, _ = c10d._new_process_group_helper(size, rank, [], backend, store, group_name="g", timeout=timeout)
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def trainer(told: Connection, values: list[torch.Tensor], size: int = 2) -> None:
    """A trainer's process: it tells its port, makes the group, broadcasts, and is gone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)  # the group's, too
    told.send(store.port)
    group = trainers_group(store.port, size)
    for value in values:
        torch.distributed.broadcast(value, src=0, group=group)


def started(values: list[torch.Tensor], size: int = 2) -> tuple[SpawnProcess, int]:
    """A trainer of a group of so many, and its port."""
    context = multiprocessing.get_context("spawn")
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=trainer, args=(tells, values, size), daemon=True)
    process.start()
    assert hears.poll(SECONDS), "the trainer did not start"
    return process, int(hears.recv())


def test_no_trainer_is_awaited_over_nccl_without_a_gpu(server: LiveServer) -> None:
    place = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    reply = post(server, "/init_weights_update_group", **place)
    assert reply.status_code == 400
    assert "take 'gloo'" in reply.json()["message"]
    reply = post(server, "/init_weights_update_group", **{**place, "master_port": "29500"})  # AReaL's
    assert "take 'gloo'" in reply.json()["message"]
    for wrong, said in (({"master_port": "29500 "}, "master_port"), ({"pp_rank": 0}, "all ranks of an engine")):
        reply = post(server, "/init_weights_update_group", **{**place, **wrong})
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]


@pytest.mark.slow
def test_a_trainer_broadcasts_weights_and_its_death_holds_nobody(server: LiveServer, engine: Engine) -> None:
    before = norm(engine)
    values = [before + 2, torch.rand(259, 64)]
    process, port = started(values)
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    reply = post(server, "/init_weights_update_group", **place, group_name="g", backend="gloo")
    assert reply.json()["success"], reply.text
    names = {
        "names": [NORM, "model.embed_tokens.weight"],
        "dtypes": ["float32", "torch.float32"],
        "group_name": "g",
    }
    wrong = post(server, "/update_weights_from_distributed", **names, shapes=[[63], [259, 64]])
    assert "[63]" in wrong.json()["message"]
    reply = post(server, "/update_weights_from_distributed", **names, shapes=[[64], [259, 64]])
    assert reply.json()["success"], reply.text
    torch.testing.assert_close(norm(engine), before + 2)
    process.join(SECONDS)
    reply = post(server, "/update_weights_from_distributed", **names, shapes=[[64], [259, 64]])
    assert "did not arrive" in reply.json()["message"]
    assert "there is no group" in post(server, "/destroy_weights_update_group", group_name="g").json()["message"]
    torch.testing.assert_close(norm(engine), before + 2)
    with pytest.raises(InvalidRequest, match="came about within"):
        engine.init_weights_update_group("127.0.0.1", free_port(), 1, 2, "h", "gloo", timeout=0.2)
    with pytest.raises(InvalidRequest, match="rank_offset=2"):
        engine.init_weights_update_group("127.0.0.1", port, 2, 2)
    engine.update_weights({NORM: before})


@pytest.mark.parametrize("what", ["weights", "adapter", "release", "resume"])
def test_who_hangs_up_leaves_nothing_half_done(what: str) -> None:
    """Some of several engines would have new weights, and one that is started again none of what was changed."""
    told: list[tuple[Any, ...]] = []

    async def check() -> None:
        has_come, goes_on = asyncio.Event(), asyncio.Event()

        async def call(method: str, *arguments: Any, **options: Any) -> tuple[bool, str]:
            has_come.set()
            await goes_on.wait()
            if method.endswith("occupation"):
                told.append((method,))
            return True, method

        engine = SimpleNamespace(
            call=call, note_model=lambda *of: told.append(of), note_adapter=lambda *of: told.append(of)
        )
        service: Any = SimpleNamespace(engine=engine)
        if what == "weights":
            body = DiskBody(model_path="new")
            asking = asyncio.create_task(TrainingApi(service)._changed("update_weights_from_disk", body))
        elif what in ("release", "resume"):
            change = getattr(TrainingApi(service), what)
            asking = asyncio.create_task(change(None, MemoryBody()))
        else:
            asking = asyncio.create_task(change_adapter(service, "load_lora_adapter", "sql", "folder", False))
        await has_come.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            while not told:
                await asyncio.sleep(0)

    asyncio.run(check())
    memory = (f"{what}_memory_occupation",)
    wanted = {"weights": ("new",), "adapter": ("load_lora_adapter", "sql", "folder", False)}
    assert told == [wanted.get(what, memory)]
