"""Embeddings: the hidden states that transformers has, whatever else a step computes and however a prompt is cut."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sgl.errors import InvalidRequest, RequestAborted
from sgl.runtime.batch import Float32Array
from sgl.runtime.engine import Engine
from sgl.runtime.scheduler.request import Pooling
from sgl.runtime.server.embeddings import api
from sgl.runtime.server.texts import MAX_TOKENIZED
from tests.live_server import LiveServer, served
from tests.patience import wait_until
from tests.tiny_models import CLASSES, tiny_checkpoint

OPTIONS: dict[str, Any] = {"dtype": "float32", "check_ledger": True, "random_seed": 1, "max_total_tokens": 4096}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 384, length).tolist() for length in lengths]


class Oracle:
    """transformers, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def embed(self, ids: list[int], pooling: Pooling, *, normalize: bool = False) -> Float32Array:
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([ids])).last_hidden_state[0]
        found = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
        return found / np.linalg.norm(found) if normalize else found

    def probabilities(self, ids: list[int]) -> Float32Array:
        """[V] of the token that follows."""
        with torch.no_grad():
            found: Float32Array = self._model(torch.tensor([ids])).logits[0, -1].softmax(-1).numpy()
        return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(tmp_path_factory.mktemp(family), family, with_tokenizer=True)
        return made[family]

    return folder


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def oracle(folders: Callable[[str], Path]) -> Oracle:
    return Oracle(folders("llama"))


@pytest.fixture(scope="module")
def engine(folders: Callable[[str], Path], device: str) -> Iterator[Engine]:
    """Prompts of more than 16 tokens are computed in several steps."""
    with Engine(str(folders("llama")), device=device, chunked_prefill_size=16, page_size=4, **OPTIONS) as engine:
        yield engine


def is_close(embedding: Any, expected: Float32Array) -> bool:
    return bool(np.allclose(np.array(embedding), expected, atol=2e-4, rtol=2e-4))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_family_has_the_hidden_states_of_transformers(
    folders: Callable[[str], Path], device: str, family: str, pooling: Pooling
) -> None:
    oracle, prompts = Oracle(folders(family)), prompts_of(1, 1, 2, 17, 60)
    with Engine(str(folders(family)), device=device, **OPTIONS) as engine:
        results = engine.encode(input_ids=prompts, pooling=pooling, normalize=False)
    for ids, result in zip(prompts, results, strict=True):
        assert is_close(result["embedding"], oracle.embed(ids, pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_cut_into_chunks_has_one_embedding(engine: Engine, oracle: Oracle, pooling: Pooling) -> None:
    for ids in prompts_of(2, 1, 15, 16, 17, 33, 100, 200):
        found = engine.encode(input_ids=ids, pooling=pooling, normalize=False)
        assert is_close(found["embedding"], oracle.embed(ids, pooling))
        assert found["meta_info"]["prompt_tokens"] == len(ids)
        assert found["meta_info"]["completion_tokens"] == 0


def test_a_mean_takes_no_cached_prefix_and_leaves_its_pages(engine: Engine, oracle: Oracle) -> None:
    shared, *tails = prompts_of(3, 40, 5, 9)
    engine.flush_cache()
    first = engine.encode(input_ids=shared + tails[0], pooling="mean", normalize=False)
    again = engine.encode(input_ids=shared + tails[0], pooling="mean", normalize=False)
    assert first["meta_info"]["cached_tokens"] == again["meta_info"]["cached_tokens"] == 0
    assert is_close(again["embedding"], oracle.embed(shared + tails[0], "mean"))
    last = engine.encode(input_ids=shared + tails[1], pooling="last", normalize=False)
    assert last["meta_info"]["cached_tokens"] == 40
    assert is_close(last["embedding"], oracle.embed(shared + tails[1], "last"))


def test_embeddings_beside_generations_change_neither(engine: Engine, oracle: Oracle) -> None:
    prompts = prompts_of(4, *range(1, 60, 7))
    alone = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    expected = {pooling: [oracle.embed(ids, pooling) for ids in prompts] for pooling in POOLINGS}
    found: dict[Any, Any] = {}

    def generate() -> None:
        found["generate"] = engine.generate(input_ids=prompts, sampling_params=GREEDY)

    def embed(pooling: Pooling) -> None:
        found[pooling] = engine.encode(input_ids=prompts, pooling=pooling, normalize=False)

    for _ in range(3):
        engine.flush_cache()
        threads = [threading.Thread(target=generate)]
        threads += [threading.Thread(target=embed, args=(pooling,)) for pooling in POOLINGS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one["output_ids"] for one in found["generate"]] == [one["output_ids"] for one in alone]
        for pooling in POOLINGS:
            for result, vector in zip(found[pooling], expected[pooling], strict=True):
                assert is_close(result["embedding"], vector)


def test_a_retracted_mean_begins_anew(folders: Callable[[str], Path], oracle: Oracle) -> None:
    """The pages hold a few of these prompts, beside outputs that grow."""
    prompts = prompts_of(5, 80, 90, 70, 85)
    options = {**OPTIONS, "max_total_tokens": 300, "chunked_prefill_size": 8, "page_size": 4}
    grown = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    with Engine(str(folders("llama")), device="cpu", **options) as engine:
        for _ in range(50):
            others = {"input_ids": prompts_of(6, 40, 40, 40), "sampling_params": grown}
            thread = threading.Thread(target=engine.generate, kwargs=others)
            thread.start()
            wait_until(lambda thread=thread: engine._scheduler.num_running or not thread.is_alive())  # type: ignore[misc]
            found = engine.encode(input_ids=prompts, pooling="mean", normalize=False)
            thread.join()
            for ids, result in zip(prompts, found, strict=True):
                assert is_close(result["embedding"], oracle.embed(ids, "mean"))
            if any(result["meta_info"]["num_retractions"] for result in found):
                return
    pytest.fail("no prompt was retracted, so this showed nothing")


@pytest.mark.parametrize("call", ["encode", "score"])
def test_what_is_aborted_is_an_error(folders: Callable[[str], Path], call: str) -> None:
    with Engine(folders("llama"), device="cpu", **OPTIONS) as engine, ThreadPoolExecutor(1) as threads:
        engine.pause_generation()
        use: Any = {"encode": lambda: engine.encode("a"), "score": lambda: engine.score("a", ["b", "c"])}[call]
        waiting = threads.submit(use)
        wait_until(lambda: engine.get_server_info()["internal_states"][0]["num_queue_reqs"] > 0)
        engine.abort(None)
        with pytest.raises(RequestAborted, match="was aborted"):
            waiting.result()


def test_an_embedding_that_is_aborted_is_a_499(server: LiveServer) -> None:
    server.post("/pause_generation", {"mode": "retract"})
    try:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.post, "/v1/embeddings", {"input": "a"})
            wait_until(lambda: server.get("/get_server_info").json()["internal_states"][0]["num_queue_reqs"] > 0)
            server.post("/abort_request", {"abort_all": True})
            assert waiting.result().status_code == 499
    finally:
        server.post("/continue_generation", {})


def test_texts_are_embedded_and_vectors_have_length_one(engine: Engine, oracle: Oracle) -> None:
    text = "hello there"
    ids = engine.get_tokenizer().encode(text)
    found = engine.encode(text)
    assert is_close(found["embedding"], oracle.embed(ids, "last", normalize=True))
    assert np.linalg.norm(found["embedding"]) == pytest.approx(1.0, abs=1e-5)
    (listed,) = engine.encode([text])
    assert is_close(listed["embedding"], np.array(found["embedding"], np.float32))


def test_dimensions_keep_the_first_numbers_and_the_length(engine: Engine) -> None:
    whole = np.array(engine.encode("hello there", normalize=False)["embedding"])
    cut = engine.encode("hello there", dimensions=10)["embedding"]
    assert np.allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "a", "pooling": "first"}, "pooling must be 'last' or 'mean', not 'first'"),
        ({"prompt": "a", "dimensions": 0}, "dimensions must be"),
        ({"prompt": "a", "dimensions": 65}, "dimensions must be"),
        ({"prompt": "a", "dimensions": True}, "dimensions must be"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the list of prompts is empty"),
        ({}, "give either prompt or input_ids"),
        ({"input_ids": [384]}, "token id 384 is out of range"),
        ({"input_ids": [5] * 300}, "256"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
    ],
)
def test_mistakes_are_named(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.encode(**arguments)


def test_generate_takes_no_pooling(engine: Engine) -> None:
    with pytest.raises(TypeError, match="pooling"):
        engine.generate("a", pooling="mean")  # type: ignore[call-arg]


# ── over HTTP ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def server(folders: Callable[[str], Path]) -> Iterator[LiveServer]:
    with Engine(str(folders("llama")), device="cpu", **OPTIONS) as engine, served(engine) as server:
        yield server


def vector_of(server: LiveServer, text: str) -> Float32Array:
    answer = server.post("/v1/embeddings", {"input": text}).json()
    return np.array(answer["data"][0]["embedding"], np.float32)


def test_openais_client_gets_vectors(server: LiveServer, oracle: Oracle) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    texts = ["hello there", "a cat"]
    answer = client.embeddings.create(model="default", input=texts)
    floats = client.embeddings.create(model="default", input=texts, encoding_format="float")
    assert [one.index for one in answer.data] == [0, 1]
    for text, one, other in zip(texts, answer.data, floats.data, strict=True):
        ids = PreTrainedTokenizerFast.from_pretrained(oracle.folder).encode(text)
        assert is_close(one.embedding, oracle.embed(ids, "last", normalize=True))
        assert is_close(other.embedding, np.array(one.embedding, np.float32))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = client.embeddings.create(model="default", input=[[5, 6, 7], [8]], dimensions=7)
    assert [len(one.embedding) for one in short.data] == [7, 7]


def test_a_conversation_is_embedded_as_the_template_writes_it(engine: Engine) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last %}.{% endif %}{% endfor %}"
    template += (
        "{% if not continue_final_message %}.{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "Hi"}]
    with served(engine, template=template) as server:
        for options, written in (
            ({}, "[user]hello there.[assistant]Hi."),
            ({"add_generation_prompt": True}, "[user]hello there.[assistant]Hi.[assistant]"),
            ({"continue_final_message": True}, "[user]hello there.[assistant]Hi"),
        ):
            ids = server.service.tokenizer.encode(written, add_special_tokens=False).tolist()
            answer = server.post("/v1/embeddings", {"messages": messages, **options})
            assert answer.status_code == 200, answer.text
            expected = server.post("/v1/embeddings", {"input": ids}).json()
            assert answer.json()["usage"] == expected["usage"]
            found, wanted = (np.array(each["data"][0]["embedding"]) for each in (answer.json(), expected))
            assert is_close(found, wanted)
        last = server.post("/v1/embeddings", {"messages": messages, "truncate_prompt_tokens": 3})
        assert last.json()["usage"]["prompt_tokens"] == 3
        long = server.post("/v1/embeddings", {"messages": [{"role": "user", "content": "a" * 9999}]})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "messages")


def test_pooling_normalizing_and_base64_are_asked_for(server: LiveServer, oracle: Oracle) -> None:
    ids = prompts_of(8, 20)[0]
    answer = server.post(
        "/v1/embeddings", {"input": ids, "pooling": "mean", "normalize": False, "encoding_format": "base64"}
    ).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert is_close(vector, oracle.embed(ids, "mean"))


def test_the_originals_endpoint_answers_like_its_engine(server: LiveServer) -> None:
    one = server.post("/encode", {"text": "hello there"}).json()
    several = server.post("/encode", {"text": ["hello there", "a cat"]}).json()
    assert is_close(one["embedding"], vector_of(server, "hello there"))
    assert [len(each["embedding"]) for each in several] == [64, 64]
    assert one["meta_info"]["prompt_tokens"] > 0


def test_scores_are_cosines(server: LiveServer) -> None:
    texts = ["a cat", "a kitten", "hello there"]
    vectors = [vector_of(server, text) for text in texts]
    answer = server.post("/v1/score", {"text_1": texts[0], "text_2": texts[1:]}).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(
        [vectors[0] @ one for one in vectors[1:]], abs=1e-4
    )
    each = server.post("/v1/score", {"text_1": texts, "text_2": texts}).json()
    assert [one["score"] for one in each["data"]] == pytest.approx([1.0] * 3, abs=1e-4)


def test_labels_are_scored_behind_items(server: LiveServer, oracle: Oracle) -> None:
    query, items, labels = [5, 6, 7], [[8], [9, 10]], [11, 12, 300]
    body = {"query": query, "items": items, "label_token_ids": labels}
    plain = server.post("/v1/score", body).json()["scores"]
    among = server.post("/v1/score", {**body, "apply_softmax": True}).json()["scores"]
    first = server.post("/v1/score", {**body, "item_first": True}).json()["scores"]
    for item, found, shared, turned in zip(items, plain, among, first, strict=True):
        assert found == pytest.approx(oracle.probabilities(query + item)[labels].tolist(), rel=1e-3)
        assert shared == pytest.approx([each / sum(found) for each in found], rel=1e-4)
        assert turned == pytest.approx(oracle.probabilities(item + query)[labels].tolist(), rel=1e-3)


def test_documents_are_ranked(server: LiveServer) -> None:
    documents = ["hello there", "a cat", "one more text"]
    query = vector_of(server, "a cat")
    expected = {i: float(query @ vector_of(server, text)) for i, text in enumerate(documents)}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = server.post(path, {"query": "a cat", "documents": documents}).json()
        assert [one["index"] for one in answer["results"]] == sorted(expected, key=lambda i: -expected[i])
        for one in answer["results"]:
            assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-4)
            assert one["document"] == {"text": documents[one["index"]]}
    best = {"query": "a cat", "documents": [{"text": each} for each in documents], "top_n": 1}
    [one] = server.post("/v1/rerank", {**best, "return_documents": False}).json()["results"]
    assert one["index"] == 1
    assert "document" not in one


def test_prompts_are_cut_to_their_last_tokens_where_that_is_asked_for(server: LiveServer) -> None:
    tokenizer = server.service.tokenizer
    long = "word " * 500
    bare = tokenizer.encode(long, add_special_tokens=False).tolist()
    around = tokenizer.encode("a").tolist()
    place = around.index(*tokenizer.encode("a", add_special_tokens=False).tolist())
    for asked, kept in ((5, 5), (-1, 256)):
        ids = [*around[:place], *bare[len(around) - 1 - kept :], *around[place + 1 :]]
        assert len(ids) == kept
        expected = server.post("/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"]
        for given in (long, [*bare[:-kept], *ids]):
            answer = server.post("/v1/embeddings", {"input": given, "truncate_prompt_tokens": asked}).json()
            assert answer["usage"]["prompt_tokens"] == kept
            assert is_close(answer["data"][0]["embedding"], np.array(expected, np.float32))
    cut = {"truncate_prompt_tokens": -1}
    both = {"text_1": "a", "text_2": [long, "a"], **cut}
    assert server.post("/v1/score", both).json()["data"][1]["score"] == pytest.approx(1)
    ranks = server.post("/v1/rerank", {"query": "a", "documents": [long, "a"], **cut}).json()["results"]
    assert ranks[0]["index"] == 1
    benchmark = {"model": "default", "input": long, "ignore_eos": True, **cut}  # as vLLM's sends it
    assert server.post("/v1/embeddings", benchmark).status_code == 200
    labels = {"query": long, "items": ["a"], "label_token_ids": [5], **cut}
    assert server.post("/v1/score", labels).status_code == 200


def test_ollamas_endpoints(server: LiveServer) -> None:
    client = ollama.Client(server.url)
    answer = client.embed(model="default", input=["hello there", "a cat"])
    assert is_close(answer.embeddings[0], vector_of(server, "hello there"))
    assert answer.prompt_eval_count
    cut = client.embed(model="default", input="word " * 500)
    assert cut.prompt_eval_count == 256
    with pytest.raises(ollama.ResponseError, match="256"):
        client.embed(model="default", input="word " * 500, truncate=False)
    old = np.array(client.embeddings(model="default", prompt="hello there").embedding)
    assert is_close(old / np.linalg.norm(old), vector_of(server, "hello there"))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_many_scores_are_worked_out_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    cosine, threads = api._cosine, set[str]()

    def scored(*vectors: Any) -> float:
        threads.add(threading.current_thread().name)
        return cosine(*vectors)

    monkeypatch.setattr(api, "_cosine", scored)
    texts = ["a"] * 1100
    body = {"query": "a", "documents": texts} if path == "/v1/rerank" else {"text_1": "a", "text_2": texts}
    assert server.post(path, body).status_code == 200
    assert threads
    assert all(name.startswith("sgl-results") for name in threads)


def test_of_a_text_that_is_cut_no_more_is_read_than_that_takes(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = server.service.tokenizer
    texts = ["word " * 100_000, "\n" * 20_000 + "a cat", "a cat"]  # a token may have many characters
    wanted = [ids[:256] for ids in tokenizer.encode_all(texts)]
    encode_all, read = tokenizer.encode_all, list[int]()

    def reading(texts: list[str], **options: Any) -> Any:
        read.extend(map(len, texts))
        return encode_all(texts, **options)

    monkeypatch.setattr(tokenizer, "encode_all", reading)
    found = ollama.Client(server.url).embed(model="default", input=texts)
    assert found.prompt_eval_count == sum(map(len, wanted))
    assert sum(read) < 60_000
    monkeypatch.undo()
    ids = server.post("/v1/embeddings", {"input": wanted}).json()["data"]
    assert all(
        is_close(vector, np.array(one["embedding"])) for vector, one in zip(found.embeddings, ids, strict=True)
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "messages"),  # there is no template
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": [5] * 1000}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 100_000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "lora_path": "none"}, "lora_path"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "another"}, "model"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": "3"}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x" * MAX_TOKENIZED, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/encode", {}, "text"),
        ("/encode", {"text": []}, "text"),
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": []}, "text_2"),
        ("/v1/score", {"query": "a"}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": [[5]], "label_token_ids": [5]}, "items"),
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [5]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [999]}, "label_token_ids"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
    ],
)
def test_bodies_that_cannot_be_served_name_the_field(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param)
