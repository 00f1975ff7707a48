"""LoRA adapters over HTTP: named by requests of every protocol, listed, loaded and unloaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import sgl
from sgl import Engine
from tests.live_server import LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE, wait_until
from tests.test_server_process import Served
from tests.tiny_adapters import greedy, merged, tiny_adapter

PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    return {name: tiny_adapter(model.parent / name, model, seed=i) for i, name in enumerate(("sql", "law"))}


@pytest.fixture(scope="module")
def engine(model: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    options: dict[str, Any] = {"device": "cpu", "max_total_tokens": 4096, "check_ledger": True}
    with Engine(model_path=model, lora_paths={"sql": adapters["sql"]}, max_loras_per_batch=2, **options) as engine:
        yield engine


@pytest.fixture
def lora_server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, served_model_name="base", admin_api_key="boss") as server:
        yield server


def load(server: LiveServer, path: str, body: dict[str, Any], key: str = "boss") -> Any:
    return server.post(path, body, headers={"Authorization": f"Bearer {key}"})


def test_generate_takes_a_name_or_one_for_each_text(
    lora_server: LiveServer, engine: Engine, model: Path, adapters: dict[str, Path]
) -> None:
    ids = engine.get_tokenizer().encode("Once upon a time")
    expected = {None: greedy(merged(model, None), ids, 8), "sql": greedy(merged(model, adapters["sql"]), ids, 8)}
    body = {"text": "Once upon a time", "sampling_params": PARAMS}
    for name in (None, "sql"):
        assert lora_server.post("/generate", {**body, "lora_path": name}).json()["output_ids"] == expected[name]
    several = lora_server.post(
        "/generate",
        {"text": ["Once upon a time"] * 3, "sampling_params": PARAMS, "lora_path": ["sql", None, "sql"]},
    ).json()
    assert [its["output_ids"] for its in several] == [expected["sql"], expected[None], expected["sql"]]
    refused = lora_server.post("/generate", {**body, "lora_path": "sqk"})
    assert refused.status_code == 400
    assert "did you mean 'sql'" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "lora_path"


def test_openai_requests_name_adapters_as_models(lora_server: LiveServer) -> None:
    def completed(body: dict[str, Any]) -> dict[str, Any]:
        more = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = lora_server.post("/v1/completions", {**more, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    base, sql = completed({"model": "base"}), completed({"model": "sql"})
    assert (base["model"], sql["model"]) == ("base", "sql")
    assert base["choices"][0]["text"] != sql["choices"][0]["text"]
    for body in ({"model": "base:sql"}, {"model": "base", "lora_path": "sql"}, {"lora_path": ["sql"]}):
        assert completed(body)["choices"][0]["text"] == sql["choices"][0]["text"]
    both = completed({"model": "base", "prompt": ["Once upon a time"] * 2, "lora_path": [None, "sql"]})
    assert [its["text"] for its in both["choices"]] == [its["choices"][0]["text"] for its in (base, sql)]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    answers = [lora_server.post("/v1/chat/completions", {**chat, "model": name}).json() for name in ("base", "sql")]
    assert answers[1]["model"] == "sql"
    assert answers[0]["choices"] != answers[1]["choices"]
    response = lora_server.post("/v1/responses", {"input": "Hello", "model": "sql", "max_output_tokens": 8})
    assert response.json()["model"] == "sql"
    again = {"input": "More", "model": "sql", "previous_response_id": response.json()["id"], "max_output_tokens": 4}
    assert lora_server.post("/v1/responses", again).status_code == 200
    message = lora_server.post("/v1/messages", {**chat, "model": "base:sql"})
    assert message.json()["model"] == "sql"
    vectors = [
        lora_server.post("/v1/embeddings", {"input": "Hello", "model": name}).json()["data"][0]["embedding"]
        for name in ("base", "sql")
    ]
    assert vectors[0] != vectors[1]
    for body in ({"model": "sqk"}, {"model": "base:sqk"}):
        refused = lora_server.post("/v1/chat/completions", {**chat, **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'sql'" in refused.json()["error"]["message"]
    refused = lora_server.post("/v1/chat/completions", {**chat, "model": "sql", "lora_path": "law"})
    assert refused.status_code == 400


def test_models_lists_adapters_below_their_parent(lora_server: LiveServer, adapters: dict[str, Path]) -> None:
    base, sql = lora_server.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("base", None)
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "base", str(adapters["sql"]))
    assert lora_server.get("/v1/models/sql").json()["root"] == str(adapters["sql"])
    assert lora_server.get("/server_info", headers={"Authorization": "Bearer boss"}).json()["lora_paths"] == [
        {"lora_name": "sql", "lora_path": str(adapters["sql"]), "pinned": False}
    ]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_adapters_come_and_go(
    lora_server: LiveServer, adapters: dict[str, Path], prefix: str, tmp_path: Path
) -> None:
    def names() -> list[str]:
        return [its["id"] for its in lora_server.get("/v1/models").json()["data"]]

    law = {"lora_name": "law", "lora_path": str(adapters["law"])}
    paths = {"sql": str(adapters["sql"]), "law": str(adapters["law"])}
    assert load(lora_server, f"{prefix}/load_lora_adapter", law, key="").status_code == 403
    loaded = load(lora_server, f"{prefix}/load_lora_adapter", law)
    assert loaded.json() == {"success": True, "error_message": "", "loaded_adapters": paths}
    assert names() == ["base", "sql", "law"]
    assert lora_server.post("/v1/completions", {"prompt": "a", "model": "law"}).status_code == 200
    for body, words in (
        (law, "already"),
        ({"lora_name": "new", "lora_path": str(tmp_path / "nowhere")}, "neither"),
        ({"lora_name": "base", "lora_path": str(adapters["law"])}, "own name"),
        ({**law, "lora_name": "new", "pinned": True}, None),
        ({**law, "lora_name": "newer", "pinned": True}, "pinned"),
    ):
        answer = load(lora_server, f"{prefix}/load_lora_adapter", body)
        if words is None:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400
        assert not answer.json()["success"]
        assert words in answer.json()["error_message"]
        assert words in answer.json()["error"]["message"]
    assert (
        load(lora_server, f"{prefix}/load_lora_adapter", {"lora_name": "x"}).json()["error"]["param"] == "lora_path"
    )
    for name in ("law", "new"):
        gone = load(lora_server, f"{prefix}/unload_lora_adapter", {"lora_name": name})
        assert gone.json()["success"]
    assert names() == ["base", "sql"]
    answer = load(lora_server, f"{prefix}/unload_lora_adapter", {"lora_name": "law"})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert lora_server.post("/v1/completions", {"prompt": "a", "model": "law"}).status_code == 404


def test_without_adapters_names_are_refused(model: Path) -> None:
    with Engine(model_path=model, device="cpu", max_total_tokens=512) as engine, served(engine) as server:
        for path, body in (
            ("/generate", {"text": "a", "lora_path": "sql"}),
            ("/v1/completions", {"prompt": "a", "lora_path": "sql"}),
            ("/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400
            assert "enable_lora" in answer.json()["error"]["message"]


def test_programs_name_adapters_for_a_gen_or_for_all_they_do(engine: Engine, lora_server: LiveServer) -> None:
    @sgl.function
    def story(s: sgl.ProgramState, name: str | None) -> None:
        extra = None if name is None else {"lora_path": name}
        s += "Once upon a time" + sgl.gen("text", max_tokens=8, ignore_eos=True, extra=extra)
        s += sgl.select("end", ["the end", "to be continued"])

    def asked(name: str | None) -> str:
        text: str = engine.generate("Once upon a time", PARAMS, lora_path=name)["text"]
        return text

    for backend in (engine, sgl.RuntimeEndpoint(lora_server.url, api_key="boss")):
        for name in (None, "sql"):
            assert story.run(name, backend=backend, temperature=0)["text"] == asked(name)
        whole = story.run(None, backend=backend, temperature=0, extra={"lora_path": "sql"})
        assert whole["text"] == asked("sql")
        alone = story.run(None, backend=backend, temperature=0)
        ends = [its.get_meta_info("end")["normalized_prompt_logprobs"] for its in (alone, whole)]
        assert ends[0] != ends[1]
        with pytest.raises(sgl.errors.SglError, match="did you mean 'sql'"):
            story.run("sqk", backend=backend)["text"]


@pytest.mark.slow
def test_engines_that_are_replaced_load_what_was_loaded(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    flags = "--max-total-tokens", "1024", "--dp", "2"
    server = Served(model, "--lora-paths", f"sql={adapters['sql']}", *flags)
    try:
        body = {"lora_name": "law", "lora_path": str(adapters["law"])}
        assert requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=PATIENCE).json()["success"]
        gone = tiny_adapter(tmp_path / "gone", model)
        body = {"lora_name": "gone", "lora_path": str(gone)}
        assert requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=PATIENCE).json()["success"]
        (gone / "adapter_config.json").unlink()

        def outputs() -> list[Any]:
            texts = [f"{i} Once upon a time" for i in range(6)]
            found = server.generate(
                {"text": texts, "sampling_params": PARAMS, "lora_path": ["law", "sql", None] * 2}
            )
            return [its["output_ids"] for its in found.json()] if found.status_code == 200 else []

        before = outputs()
        assert len(before) == 6
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: outputs() == before)
        names = [its["id"] for its in server.get("/v1/models").json()["data"][1:]]
        assert names == ["sql", "law"]
    finally:
        log = server.stop()
    assert "did not start" in log  # until the adapter whose file is gone was left out
