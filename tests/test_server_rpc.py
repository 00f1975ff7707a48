"""The gRPC service: what a gateway such as smg sends, answered by the engine that serves HTTP beside it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as stubs
from smg_grpc_proto.generated import common_pb2
from transformers import AutoTokenizer

from sgl.errors import ConfigError
from sgl.runtime.config import ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.rpc.handlers import SERVICE
from sgl.runtime.server.serve import listen_for_rpc
from tests.live_server import LiveServer, served, slow_steps
from tests.patience import PATIENCE, wait_until

PROMPT = [5, 6, 7, 8]
GREEDY = {"max_new_tokens": 6, "ignore_eos": True, "skip_special_tokens": True}


class Client:
    """A stub, and the calls that tests make of it."""

    def __init__(self, server: LiveServer, key: str | None = None) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.service.grpc_port}")
        self.stub = stubs.SglangSchedulerStub(self.channel)
        self.metadata = () if key is None else (("authorization", f"Bearer {key}"),)

    def generate(self, request: Any, **options: Any) -> Any:
        return self.stub.Generate(request, metadata=self.metadata, **{"timeout": PATIENCE, **options})

    def complete(self, request: Any) -> Any:
        """Its one output."""
        [message] = self.generate(request)
        return message.complete


def request(params: dict[str, Any] | None = None, **fields: Any) -> Any:
    """For PROMPT. params: beside GREEDY."""
    whole = pb.SamplingParams(**{**GREEDY, **(params or {})})
    return pb.GenerateRequest(
        **{"tokenized": pb.TokenizedInput(input_ids=PROMPT), "sampling_params": whole, **fields}
    )


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, grpc_port=0, max_request_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.channel.close()


def test_an_output_is_that_of_http(server: LiveServer, client: Client) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, 9],
    }
    theirs = server.post("/generate", body).json()
    meta = theirs["meta_info"]
    asked = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3, 9]}
    for stream in (False, True):
        *chunks, last = client.generate(request(request_id="mine", stream=stream, **asked))
        assert bool(chunks) is stream
        assert {message.request_id for message in [*chunks, last]} == {"mine"}
        ours = last.complete
        assert list(ours.output_ids) == theirs["output_ids"]
        assert (ours.finish_reason, ours.prompt_tokens, ours.completion_tokens) == ("length", 4, 6)
        output, prompt = ours.output_logprobs, ours.input_logprobs
        expected = [entry[0] for entry in meta["output_token_logprobs"]]
        assert list(output.token_logprobs) == pytest.approx(expected, abs=1e-5)
        assert list(output.token_ids) == theirs["output_ids"]
        assert [list(row.token_ids) for row in output.top_logprobs] == [
            [entry[1] for entry in row] for row in meta["output_top_logprobs"]
        ]
        assert [list(row.token_ids) for row in output.token_ids_logprobs] == [[3, 9]] * 6
        assert list(prompt.token_ids) == PROMPT
        assert not prompt.token_logprobs[0].HasField("value")
        expected = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert [its.value for its in prompt.token_logprobs[1:]] == pytest.approx(expected, abs=1e-5)
        if stream:
            assert [token for chunk in chunks for token in chunk.chunk.token_ids] == theirs["output_ids"]
            rows = [value for chunk in chunks for value in chunk.chunk.output_logprobs.token_logprobs]
            assert rows == list(output.token_logprobs)
            assert [chunk.chunk.HasField("input_logprobs") for chunk in chunks][:2] == [True, False]


def test_several_outputs_have_their_numbers(client: Client) -> None:
    for stream in (False, True):
        messages = list(client.generate(request({"temperature": 1.0, "n": 3}, stream=stream)))
        ends = {message.complete.index: message.complete for message in messages if message.HasField("complete")}
        assert sorted(ends) == [0, 1, 2]
        if stream:
            for index, end in ends.items():
                chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
                assert [token for chunk in chunks for token in chunk.token_ids] == list(end.output_ids)


def test_chunks_have_as_many_tokens_as_asked_for(client: Client) -> None:
    *chunks, last = client.generate(
        request({"max_new_tokens": 10, "stream_interval": 4}, stream=True, return_logprob=True)
    )
    assert all(len(message.chunk.token_ids) >= 4 for message in chunks[:-1])
    assert all(
        len(message.chunk.output_logprobs.token_logprobs) == len(message.chunk.token_ids) for message in chunks
    )
    assert sum(len(message.chunk.token_ids) for message in chunks) == 10
    assert len(last.complete.output_logprobs.token_logprobs) == 10


def test_without_a_limit_an_output_may_fill_the_context(client: Client) -> None:
    ended = client.complete(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)))
    assert ended.completion_tokens <= 508
    params = pb.SamplingParams(ignore_eos=True)
    ended = client.complete(
        pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5] * 500), sampling_params=params)
    )
    assert ended.completion_tokens == 12


def test_what_stopped_an_output_is_told(client: Client) -> None:
    free = list(client.complete(request()).output_ids)
    stopped = client.complete(request({"stop_token_ids": [free[2]]}))
    assert (stopped.finish_reason, stopped.matched_token_id) == ("stop", free[2])
    assert stopped.WhichOneof("matched_stop") == "matched_token_id"
    text = client.complete(request({"regex": "ab{9}", "stop": ["bb"], "max_new_tokens": 20}))
    assert (text.finish_reason, text.matched_stop_str) == ("stop", "bb")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("regex", "[a-c]{3}", None),
        ("json_schema", '{"const": 12}', "12"),
        ("ebnf_grammar", 'root ::= "yes"', "yes"),
    ],
)
def test_an_output_keeps_its_constraint(
    engine: Engine, client: Client, name: str, value: str, text: str | None
) -> None:
    if name == "ebnf_grammar":
        pytest.importorskip("llguidance")
    ended = client.complete(request({name: value, "ignore_eos": False, "max_new_tokens": 30}))
    assert engine.tokenizer is not None
    said = engine.tokenizer.decode(list(ended.output_ids), skip_special_tokens=True)
    assert ended.finish_reason == "stop"
    assert said == text if text else (len(said) == 3 and set(said) <= set("abc"))


REFUSED = [
    (pb.GenerateRequest(), "tokenized.input_ids"),
    (request(return_hidden_states=True), "return_hidden_states"),
    (request(mm_inputs=pb.MultimodalInputs(image_urls=["http://a/b.png"])), "mm_inputs"),
    (request(disaggregated_params=pb.DisaggregatedParams(bootstrap_room=1)), "disaggregated_params"),
    (request(custom_logit_processor="x"), "custom_logit_processor"),
    (request(input_embeds=[1.0]), "input_embeds"),
    (request(data_parallel_rank=1), "data_parallel_rank"),
    (request(lora_id="mine"), "LoRA adapters are not enabled"),
    (request(top_logprobs_num=2), "top_logprobs_num"),
    (request({"regex": "("}), "regex"),
    (request({"json_schema": '{"type": "nonsense"}'}), "nonsense"),
    (request({"structural_tag": "{"}), "structural_tag"),
    (request({"temperature": -1.0}), "temperature"),
    (request({"temperature": float("nan")}), "temperature"),
    (request({"logit_bias": {"word": 1.0}}), "logit_bias"),
    (request({"stream_interval": 0}, stream=True), "stream_interval"),
    (request(tokenized=pb.TokenizedInput(input_ids=[5] * 600)), "600 tokens"),
    (request(tokenized=pb.TokenizedInput(input_ids=[4_000_000_000])), "4000000000"),
]


@pytest.mark.parametrize(("wrong", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be_done_is_refused_by_its_name(client: Client, wrong: Any, named: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(client.generate(wrong))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in raised.value.details()


def test_custom_parameters_are_refused(client: Client) -> None:
    wrong = request()
    wrong.sampling_params.custom_params.update({"mine": 1})
    with pytest.raises(grpc.RpcError, match="custom_params"):
        list(client.generate(wrong))


SMALL = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(width=32)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {"max_new_tokens": st.integers(0, 3)},
        optional={
            "temperature": FLOATS,
            "top_p": FLOATS,
            "top_k": SMALL,
            "repetition_penalty": FLOATS,
            "n": st.integers(0, 4) | st.just(2**32 - 1),
            "min_new_tokens": st.integers(0, 2**32 - 1),
            "stop": st.lists(st.text(max_size=4), max_size=40),
            "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4),
            "regex": st.text(max_size=6),
            "logit_bias": st.dictionaries(st.text(max_size=3) | st.just("7"), FLOATS, max_size=3),
            "stream_interval": SMALL,
        },
    ),
    st.fixed_dictionaries(
        {"tokenized": st.lists(st.integers(0, 400), max_size=6).map(lambda ids: pb.TokenizedInput(input_ids=ids))},
        optional={
            "stream": st.booleans(),
            "return_logprob": st.booleans(),
            "logprob_start_len": SMALL,
            "top_logprobs_num": st.integers(-2, 30) | SMALL,
            "token_ids_logprob": st.lists(st.integers(0, 2**32 - 1), max_size=3),
        },
    ),
)
def test_whatever_is_sent_is_answered_or_refused(
    client: Client, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    call = client.generate(request(params, **fields))
    messages = []
    with contextlib.suppress(grpc.RpcError):
        messages += call
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), call.details()
    if call.code() == grpc.StatusCode.OK:
        assert sum(message.HasField("complete") for message in messages) == (params.get("n") or 1)


def test_whose_time_is_over_ends_and_says_so(engine: Engine, client: Client) -> None:
    with slow_steps(engine, 0.05), pytest.raises(grpc.RpcError) as raised:
        list(client.generate(request({"max_new_tokens": 400}, stream=True), timeout=0.5))
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not engine._calls.rids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(engine: Engine, client: Client, stream: bool) -> None:
    with slow_steps(engine):
        call = client.generate(request({"max_new_tokens": 400}, request_id="left", stream=stream))
        wait_until(lambda: bool(engine._calls.rids))
        call.cancel()
        wait_until(lambda: not engine._calls.rids)


def test_an_aborted_request_ends_with_what_there_was(engine: Engine, client: Client) -> None:
    with slow_steps(engine):
        call = client.generate(request({"max_new_tokens": 400}, request_id="mine", stream=True))
        first = next(call)
        assert client.stub.Abort(pb.AbortRequest(request_id="mine")).success
        last = [first, *call][-1].complete
    assert last.finish_reason == "abort"
    assert 0 < last.completion_tokens < 400
    assert client.stub.Abort(pb.AbortRequest(request_id="nobody's")).success


def test_a_message_is_bounded(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(client.generate(request(custom_logit_processor="x" * (1 << 20))))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_keys_are_those_of_http(engine: Engine) -> None:
    with served(engine, grpc_port=0, api_key=["me=k-me", "you=k-you"], admin_api_key="k-admin") as server:
        nobody, me, you, admin = (Client(server, key) for key in (None, "k-me", "k-you", "k-admin"))
        assert nobody.stub.HealthCheck(pb.HealthCheckRequest()).healthy
        with pytest.raises(grpc.RpcError) as raised:
            list(nobody.generate(request()))
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as raised:
            me.stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=me.metadata)
        assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert admin.stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=admin.metadata).success
        with slow_steps(engine):
            call = me.generate(request({"max_new_tokens": 400}, request_id="mine", stream=True))
            next(call)
            assert you.stub.Abort(pb.AbortRequest(request_id="mine"), metadata=you.metadata).success
            assert engine._calls.rids, "it is another's"
            assert me.stub.Abort(pb.AbortRequest(request_id="mine"), metadata=me.metadata).success
            assert list(call)[-1].complete.finish_reason == "abort"


def test_a_server_that_ends_says_so(server: LiveServer, client: Client) -> None:
    assert client.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    server.service.is_draining = True
    told = client.stub.HealthCheck(pb.HealthCheckRequest())
    assert (told.healthy, told.message) == (False, "the server is shutting down")
    with pytest.raises(grpc.RpcError) as raised:
        client.complete(request())
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


def test_model_server_and_load_are_told(engine: Engine, server: LiveServer, client: Client) -> None:
    model = client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert model.served_model_name == server.service.model_name
    assert (model.max_context_length, model.vocab_size, model.model_type) == (512, 384, "llama")
    assert list(model.architectures) == ["LlamaForCausalLM"]
    assert list(model.eos_token_ids) == [2]
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.max_total_num_tokens) == ("grpc", 8192)
    assert info.server_args["page_size"] == engine.config.page_size
    with slow_steps(engine):
        call = client.generate(request({"max_new_tokens": 400}, stream=True))
        next(call)
        loads = client.stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        call.cancel()
    [load] = loads.loads
    assert (load.num_running_reqs, loads.aggregate.total_reqs, loads.dp_rank_count) == (1, 1, 1)
    assert load.num_used_tokens > 0
    assert not load.HasField("memory")
    assert client.stub.GetLoads(pb.GetLoadsRequest()).loads[0].memory.token_capacity == 8192
    for wrong, named in (
        (pb.GetLoadsRequest(include=["queue"]), "queues"),
        (pb.GetLoadsRequest(dp_rank=1), "dp_rank"),
    ):
        with pytest.raises(grpc.RpcError, match=named) as raised:
            client.stub.GetLoads(wrong)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_an_embedding_is_that_of_http(server: LiveServer, client: Client) -> None:
    ours = client.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)))
    theirs = server.post("/v1/embeddings", {"input": PROMPT, "model": server.service.model_name}).json()
    assert list(ours.embedding) == pytest.approx(theirs["data"][0]["embedding"], abs=1e-6)
    assert (ours.prompt_tokens, ours.embedding_dim) == (4, len(ours.embedding))
    with pytest.raises(grpc.RpcError, match="is_cross_encoder"):
        client.stub.Embed(pb.EmbedRequest(is_cross_encoder=True))


def test_a_gateway_gets_the_tokenizer(engine: Engine, client: Client, tmp_path: Path) -> None:
    *chunks, last = client.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    assert {chunk.sha256 for chunk in chunks} <= {""}
    data = b"".join(chunk.data for chunk in [*chunks, last])
    assert hashlib.sha256(data).hexdigest() == last.sha256
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert not any(name.endswith(".safetensors") for name in files.namelist())
        files.extractall(tmp_path)
    assert engine.tokenizer is not None
    assert AutoTokenizer.from_pretrained(tmp_path).encode("Hello") == engine.tokenizer.encode("Hello").tolist()


def test_calls_are_counted_and_shown_as_those_of_http(server: LiveServer, client: Client) -> None:
    client.complete(request(request_id="mine"))
    path = f"/{SERVICE.full_name}/Generate"
    assert f'path="{path}",status="200"' in server.get("/metrics").text
    [noted] = server.get("/v1/requests").json()
    assert (noted["id"], noted["path"], noted["completion_tokens"]) == ("mine", path, 6)


def test_a_port_in_use_is_an_error_of_its_option(engine: Engine, server: LiveServer) -> None:
    async def listen() -> None:
        listen_for_rpc(ServerConfig.from_options({"grpc_port": server.service.grpc_port}))

    with pytest.raises(ConfigError) as raised:
        asyncio.run(listen())
    assert raised.value.option == "grpc_port"
    assert server.get("/get_server_info").json()["grpc_port"] == server.service.grpc_port
    assert ServerConfig.from_options({}).grpc_port is None
