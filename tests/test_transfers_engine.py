"""A prefill and a decode engine answer like one engine, also when either dies, and refuse what is not theirs."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.errors import ConfigError, InvalidRequest, QueueFull
from sgl.runtime.engine import Engine
from sgl.runtime.transfer import reader
from sgl.runtime.transfer.params import TransferParams, prompt_hash
from sgl.runtime.transfer.reader import TcpReader
from sgl.runtime.transfer.wire import ANSWER, ASK, GONE, MAGIC, PAGES
from tests.live_server import served
from tests.patience import PATIENCE, wait_until
from tests.test_gdn_models import tiny_hybrid
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 768,
    "max_running_requests": 4,
    "page_size": 8,
    "random_seed": 1,
    "check_ledger": True,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ROOMY = {"disaggregation_buffer_mb": 100}  # as many as there are pages
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
OFFERED: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_kv_transfer_params": True}
OFFERS: list[dict[str, Any]] = []
"""Of the present test."""
_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(3, 300) for _ in range(90)] for _ in range(4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), with_tokenizer=True))


@pytest.fixture(scope="module", autouse=True)
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("0123456789abcdef0123456789abcdef")
    OPTIONS["disaggregation_key_file"] = str(file)
    return str(file)


@pytest.fixture(scope="module")
def prefill(path: str, key: str) -> Iterator[Engine]:
    with Engine(path, **OPTIONS, **ROOMY, disaggregation_mode="prefill") as engine:
        yield engine


@pytest.fixture(scope="module")
def decode(path: str, key: str) -> Iterator[Engine]:
    with Engine(path, **OPTIONS, disaggregation_mode="decode") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(path: str) -> Iterator[Engine]:
    options = {name: value for name, value in OPTIONS.items() if name != "disaggregation_key_file"}
    with Engine(path, **options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _empty_caches(request: pytest.FixtureRequest) -> Iterator[None]:
    for name in ("prefill", "decode", "plain"):
        if name in request.fixturenames:
            request.getfixturevalue(name).flush_cache()
    yield
    if "prefill" in request.fixturenames:  # what nobody pulled would be in the next test's way
        request.getfixturevalue("prefill").end_kv_transfer(OFFERS)
    OFFERS.clear()


def offer(engine: Engine, prompt: Any = None, **options: Any) -> dict[str, Any]:
    prompt = PROMPTS[0] if prompt is None else prompt
    given = {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    params = engine.generate(**given, **OFFERED, **options)["kv_transfer_params"]
    assert isinstance(params, dict)
    json.dumps(params)
    OFFERS.append(params)
    return params


def logprobs(result: dict[str, Any]) -> list[Any]:
    meta = result["meta_info"]
    return [*meta["output_token_logprobs"], *(entry for row in meta["output_top_logprobs"] for entry in row)]


def state(engine: Engine) -> dict[str, Any]:
    found = engine.get_server_info()["internal_states"][0]
    assert isinstance(found, dict)
    return found


def assert_all_is_back(engine: Engine) -> None:
    wait_until(lambda: not state(engine)["transfer_used_tokens"])
    assert engine.check_ledger() == []
    assert engine.flush_cache()
    assert state(engine)["kv_available_tokens"] == 768


def test_tokens_and_logprobs_are_those_of_one_engine(prefill: Engine, decode: Engine, plain: Engine) -> None:
    for prompt in PROMPTS:
        options: dict[str, Any] = {"sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 3}
        wanted = plain.generate(input_ids=prompt, **options)
        found = decode.generate(input_ids=prompt, **options, kv_transfer_params=offer(prefill, prompt))
        assert found["output_ids"] == wanted["output_ids"]
        for one, other in zip(logprobs(found), logprobs(wanted), strict=True):
            assert one[1] == other[1]
            assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert found["meta_info"]["cached_tokens"] == 88
    assert_all_is_back(prefill)
    assert_all_is_back(decode)


@pytest.mark.costly
@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("kind", ["latent", "experts", "tiers", "window"])
def test_other_models_and_caches_answer_like_one_engine(
    kind: str, transport: str, tmp_path: Path, key: str
) -> None:
    options: dict[str, Any] = {**OPTIONS, "skip_tokenizer_init": True}
    plainly = {name: value for name, value in options.items() if name != "disaggregation_key_file"}
    options["disaggregation_transport"] = transport
    if kind == "latent":
        tiny_transformer(tmp_path, "DeepseekV3ForCausalLM", **ARCHITECTURES["DeepseekV3ForCausalLM"])
    else:
        families = {"experts": ("qwen3-moe", {}), "window": ("mistral", {"sliding_window": 24})}
        family, shape = families.get(kind, ("llama", {}))
        tiny_checkpoint(tmp_path, family, **shape)
    if kind == "tiers":
        options |= {"enable_hierarchical_cache": True, "max_total_tokens": 256}  # two prompts fill it
    with Engine(tmp_path, **plainly) as engine:
        wanted = [each["output_ids"] for each in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    with (
        Engine(tmp_path, **options, **ROOMY, disaggregation_mode="prefill") as first,
        Engine(tmp_path, **options, **ROOMY, disaggregation_mode="decode") as second,
    ):
        for _ in range(2):  # the second time, copies may be loaded instead
            for prompt, ids in zip(PROMPTS, wanted, strict=True):
                params = offer(first, prompt)
                found = second.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=params)
                assert found["output_ids"] == ids
                assert found["meta_info"]["cached_tokens"] == 88
        for engine in (first, second):
            wait_until(lambda engine=engine: not state(engine)["transfer_used_tokens"])  # type: ignore[misc]
            assert engine.check_ledger() == []


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "[a-c]{2,5}(x|yz)+", "max_new_tokens": 12},
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}', "max_new_tokens": 20},
        {"temperature": 0.9, "seed": 5, "max_new_tokens": 8, "n": 3},
    ],
    ids=["regex", "schema", "samples"],
)
def test_constrained_and_sampled_outputs_are_those_of_one_engine(
    prefill: Engine, decode: Engine, plain: Engine, params: dict[str, Any]
) -> None:
    prompt = "a text that is long enough for a few pages of the cache"
    wanted = plain.generate(prompt=prompt, sampling_params=params)
    pulled = state(decode)["transfer_pulled_tokens"]
    found = decode.generate(prompt=prompt, sampling_params=params, kv_transfer_params=offer(prefill, prompt))
    for one, other in zip(*(its if isinstance(its, list) else [its] for its in (found, wanted)), strict=True):
        assert one["output_ids"] == other["output_ids"]
    assert state(decode)["transfer_pulled_tokens"] > pulled


def test_a_list_of_prompts_has_a_list_of_params(prefill: Engine, decode: Engine, plain: Engine) -> None:
    offers = [each["kv_transfer_params"] for each in prefill.generate(input_ids=PROMPTS, **OFFERED)]
    wanted = plain.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    offers[2], late = None, offers[2]
    found = decode.generate(input_ids=PROMPTS, sampling_params=GREEDY, kv_transfer_params=offers)
    assert [its["output_ids"] for its in found] == [its["output_ids"] for its in wanted]
    assert [its["meta_info"]["cached_tokens"] for its in found] == [88, 88, 0, 88]
    decode.generate(input_ids=PROMPTS[2], sampling_params=GREEDY, kv_transfer_params=late)  # which ends its lease


def test_whole_pages_and_short_prompts(prefill: Engine, decode: Engine, plain: Engine) -> None:
    for length in (1, 7, 8, 9, 16, 17):
        prompt = PROMPTS[1][:length]
        params = offer(prefill, prompt)
        assert params["num_tokens"] == length // 8 * 8
        found = decode.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=params)
        assert found["output_ids"] == plain.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
    assert_all_is_back(prefill)


def test_what_does_not_fit_is_refused_by_name(prefill: Engine, decode: Engine, plain: Engine, path: str) -> None:
    params = offer(prefill)
    with pytest.raises(InvalidRequest, match="another prompt"):
        decode.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, kv_transfer_params=params)
    with pytest.raises(InvalidRequest, match="extra_key"):
        decode.generate(
            input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params, extra_key="another tenant"
        )
    with pytest.raises(InvalidRequest, match="not signed"):
        decode.generate(input_ids=PROMPTS[0], kv_transfer_params={**params, "host": "169.254.169.254"})
    for wrong in (np.array([1, 2]), [[1, 2]], 0, np.array(1)):
        with pytest.raises(InvalidRequest, match="is an object"):
            decode.generate(input_ids=PROMPTS[0], kv_transfer_params=wrong)
    with pytest.raises(InvalidRequest, match="is an object"):
        prefill.end_kv_transfer(np.array(1))
    for engine in (plain, prefill):
        with pytest.raises(InvalidRequest, match="disaggregation_mode='decode'"):
            engine.generate(input_ids=PROMPTS[0], kv_transfer_params=params)
    for engine in (plain, decode):
        with pytest.raises(InvalidRequest, match="disaggregation_mode='prefill'"):
            engine.generate(input_ids=PROMPTS[0], **OFFERED)
    with pytest.raises(InvalidRequest, match="max_new_tokens: 0"):
        prefill.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, return_kv_transfer_params=True)
    for changes, match in (({"page_size": 16}, "page_size"), ({"dtype": "bfloat16"}, "dtype")):
        with (
            Engine(path, **{**OPTIONS, **changes}, disaggregation_mode="decode") as other,
            pytest.raises(InvalidRequest, match=match),
        ):
            other.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params)


def test_other_weights_are_another_model(prefill: Engine, tmp_path: Path) -> None:
    other = str(tiny_checkpoint(tmp_path, seed=1, with_tokenizer=True))
    with (
        Engine(other, **OPTIONS, disaggregation_mode="decode") as engine,
        pytest.raises(InvalidRequest, match="another model"),
    ):
        engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=offer(prefill))


def test_other_settings_of_modules_of_transformers_are_another_model(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path / "model", "GPTNeoXForCausalLM")
    other = Path(shutil.copytree(path, tmp_path / "other"))
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    edit_json(other / "config.json", rope_parameters={**rope, "rope_theta": 50.0})
    prompt, options = [5] * 40, {**OPTIONS, "skip_tokenizer_init": True}
    with (
        Engine(str(path), **options, disaggregation_mode="prefill") as first,
        Engine(str(other), **options, disaggregation_mode="decode") as second,
    ):
        params = first.generate(input_ids=prompt, **OFFERED)["kv_transfer_params"]
        with pytest.raises(InvalidRequest, match="another model"):
            second.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=params)


def test_options_that_cannot_go_together_are_refused(path: str, tmp_path: Path) -> None:
    for options, match in (
        (
            {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:1", "dist_key_file": "none"},
            "nnodes=2 with disaggregation_mode='prefill'",
        ),
        ({"disable_radix_cache": True}, "disable_radix_cache"),
        ({"disaggregation_host": "0.0.0.0"}, "disaggregation_host"),
        ({"disaggregation_host": "203.0.113.1"}, "disaggregation_host"),
        ({"disaggregation_key_file": str(tmp_path / "none")}, "secret cannot be read"),
    ):
        with pytest.raises(ConfigError, match=match):
            Engine(path, **{**OPTIONS, **options}, disaggregation_mode="prefill")
    plain = {name: value for name, value in OPTIONS.items() if not name.startswith("disaggregation_")}
    for option, value in {**OPTIONS, "disaggregation_port": 3, "disaggregation_lease": 5}.items():
        if option not in plain:
            with pytest.raises(ConfigError, match=f"{option}=.* is for disaggregation_mode prefill or decode"):
                Engine(path, **plain, **{option: value})
    hybrid, _ = tiny_hybrid(tmp_path, "next")
    with pytest.raises(ConfigError, match="recurrent"):
        Engine(str(hybrid), **OPTIONS, disaggregation_mode="decode", skip_tokenizer_init=True)


def test_without_a_key_file_the_engines_of_one_user_share_one(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {**OPTIONS, "disaggregation_key_file": None}
    with Engine(path, **options, disaggregation_mode="prefill") as one:
        params = offer(one)
        with Engine(path, **options, disaggregation_mode="decode") as other:
            found = other.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params)
    assert found["meta_info"]["cached_tokens"] == 88
    file = tmp_path / ".cache" / "sgl" / "disaggregation.key"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_lease_ends_by_time_and_bounds_what_is_held(path: str) -> None:
    options = {**OPTIONS, "disaggregation_lease": 0.5, "max_total_tokens": 256}
    with Engine(path, **options, disaggregation_mode="prefill") as engine:
        params = offer(engine)  # the buffer holds 128 tokens
        with pytest.raises(QueueFull, match="transfer buffer"):
            offer(engine, PROMPTS[1])
        wait_until(lambda: not state(engine)["transfer_used_tokens"])
        assert state(engine)["num_transfers_expired"] == 1
        assert answer_to(params, bytes.fromhex(params["prompt"])) == GONE
        offer(engine, PROMPTS[1])


def answer_to(params: dict[str, Any], prompt: bytes, lease: str | None = None, count: int = 1) -> int | None:
    """The status that a reader is answered; None: the connection was closed."""
    with socket.create_connection((params["host"], params["port"]), timeout=PATIENCE) as sock:
        sock.sendall(ASK.pack(MAGIC, PAGES, bytes.fromhex(lease or params["lease"]), prompt, 0, count))
        data = sock.recv(ANSWER.size)
        return int(ANSWER.unpack(data)[0]) if data else None


def test_pages_are_read_only_with_the_lease_and_the_prompt(prefill: Engine) -> None:
    params = offer(prefill)
    prompt = bytes.fromhex(params["prompt"])
    assert answer_to(params, bytes(32)) == GONE
    assert answer_to(params, prompt, lease="0" * 32) == GONE
    assert answer_to(params, prompt, count=params["num_pages"] + 1) == GONE
    assert answer_to(params, prompt, count=1 << 31) == GONE
    with socket.create_connection((params["host"], params["port"])) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert answer_to(params, prompt) == 0
    assert prefill.check_ledger() == []


def test_an_aborted_request_gives_its_pages_back_when_its_read_is_quiet(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, has_begun = threading.Event(), threading.Event()
    receive = TcpReader._receive

    def slow(self: TcpReader, read: Any, peer: Any) -> None:
        has_begun.set()
        may_go_on.wait(PATIENCE)
        receive(self, read, peer)

    monkeypatch.setattr(TcpReader, "_receive", slow)
    params = offer(prefill)
    events = decode.generate(
        input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params, stream=True, rid="gone"
    )
    assert has_begun.wait(PATIENCE)
    decode.abort("gone")
    list(events)
    assert state(decode)["transfer_used_tokens"] == 88
    assert decode.check_ledger() == []
    found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert found["output_ids"] == plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    may_go_on.set()
    assert_all_is_back(decode)


def test_damaged_pages_are_computed_instead(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = prefill._scheduler.memory
    assert memory.transfers is not None
    assert memory.transfers.exports is not None
    server: Any = memory.transfers.exports._server

    def damaged(peer: Any, offer: Any, first: int, count: int) -> None:
        sent = peer.send

        def send(data: Any) -> None:
            if len(data) > 100:  # a page
                data = bytearray(data)
                data[99] ^= 4
            sent(data)

        peer.send = send
        type(server)._send(server, peer, offer, first, count)

    monkeypatch.setattr(server, "_send", damaged)
    wanted = plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    failed = state(decode)["num_transfers_failed"]
    found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=offer(prefill))
    assert found["output_ids"] == wanted
    assert found["meta_info"]["cached_tokens"] == 0
    assert state(decode)["num_transfers_failed"] == failed + 1
    assert_all_is_back(decode)


def test_a_lease_that_nobody_needs_is_ended_before_its_time(prefill: Engine, decode: Engine, plain: Engine) -> None:
    params = [offer(prefill, prompt) for prompt in PROMPTS[:3]]
    assert state(prefill)["num_transfer_leases"] == 3
    assert prefill.end_kv_transfer(params[0]) == 1
    with served(prefill) as server:
        ended = server.post("/end_kv_transfer", {"kv_transfer_params": params})
        assert (ended.status_code, ended.json()) == (200, {"ended": 2})
        for wrong in ({**params[0], "port": 1}, {"lease": 5}, [5]):
            assert server.post("/end_kv_transfer", {"kv_transfer_params": wrong}).status_code == 400
    with pytest.raises(InvalidRequest, match="4096 entries at most, not 1000000"):
        prefill.end_kv_transfer([params[0]] * 10**6)
    with pytest.raises(InvalidRequest, match="disaggregation_mode='prefill'"):
        decode.end_kv_transfer(params[0])
    assert_all_is_back(prefill)
    found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params[0])
    assert found["output_ids"] == plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0
    assert_all_is_back(decode)


_PREFILL = """
    import json, os, signal, sys
    from sgl.runtime.engine import Engine
    from sgl.runtime.transfer.server import TransferServer
    from tests.test_transfers_engine import OFFERED

    die_after = int(sys.argv[3])
    sent = 0
    whole = TransferServer._send

    def send(self, peer, offer, first, count):
        class Counting:
            def send(self, data):
                global sent
                if sent == die_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                sent += 1
                peer.send(data)
        whole(self, Counting(), offer, first, count)

    TransferServer._send = send
    engine = Engine(sys.argv[1], **json.loads(sys.argv[2]), disaggregation_mode="prefill")
    for line in sys.stdin:
        params = engine.generate(input_ids=json.loads(line), **OFFERED)["kv_transfer_params"]
        print(json.dumps(params), flush=True)
"""
_DECODE = """
    import json, os, signal, sys
    from sgl.runtime.engine import Engine
    from sgl.runtime.transfer.reader import TcpReader
    from sgl.runtime.transfer.wire import DeadlineSocket

    die_after = int(sys.argv[3])
    received = 0
    whole = DeadlineSocket.receive_into

    def receive_into(self, view):
        global received
        whole(self, view[: len(view) // 2])
        received += 1
        if received == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, view[len(view) // 2 :])

    DeadlineSocket.receive_into = receive_into
    engine = Engine(sys.argv[1], **json.loads(sys.argv[2]), disaggregation_mode="decode")
    for line in sys.stdin:
        prompt, params, sampling = json.loads(line)
        found = engine.generate(input_ids=prompt, sampling_params=sampling, kv_transfer_params=params)
        print(json.dumps(found), flush=True)
"""


class Child:
    """An engine in a process of its own, which kills itself amid a transfer."""

    def __init__(self, code: str, path: str, die_after: int, **options: Any) -> None:
        command = [sys.executable, "-c", textwrap.dedent(code), path, json.dumps({**OPTIONS, **options})]
        self.process = subprocess.Popen(
            [*command, str(die_after)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, value: Any) -> Any:
        """What it answers; None: it died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("die_after", [9, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 1, 2, 21))])
def test_a_prefill_process_killed_amid_a_read_costs_nothing_but_time(
    path: str, decode: Engine, plain: Engine, die_after: int
) -> None:
    with Child(_PREFILL, path, die_after) as child:
        params = child.ask(PROMPTS[0])
        found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params)
        child.process.wait(PATIENCE)
    again = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params)
    wanted = plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    assert found["output_ids"] == again["output_ids"] == wanted
    assert_all_is_back(decode)


@pytest.mark.slow
@pytest.mark.parametrize("die_after", [1, 2, 7, 23])
def test_a_decode_process_killed_amid_a_read_leaves_the_lease_to_another(
    path: str, prefill: Engine, decode: Engine, plain: Engine, die_after: int
) -> None:
    with Child(_DECODE, path, die_after) as child:
        assert child.ask([PROMPTS[1], None, GREEDY])  # its start may outlast a lease
        params = offer(prefill)
        assert child.ask([PROMPTS[0], params, GREEDY]) is None
    found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=params)
    assert found["output_ids"] == plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 88
    assert_all_is_back(prefill)
    assert_all_is_back(decode)


@pytest.mark.slow
def test_two_processes_answer_like_one_engine(path: str, plain: Engine) -> None:
    with Child(_PREFILL, path, -1) as one, Child(_DECODE, path, -1) as other:
        for prompt in PROMPTS:
            found = other.ask([prompt, one.ask(prompt), GREEDY])
            assert found["output_ids"] == plain.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
            assert found["meta_info"]["cached_tokens"] == 88


def test_an_address_that_does_not_answer_delays_a_request_for_a_bounded_time(
    prefill: Engine, decode: Engine, plain: Engine
) -> None:
    given = offer(prefill)
    secret = decode._scheduler.memory.transfers.secret  # type: ignore[union-attr]
    params = TransferParams.read(given, secret)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        there = replace(params, port=silent.getsockname()[1], lease_seconds=1).to_dict(secret)
        found = decode.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, kv_transfer_params=there)
    assert found["output_ids"] == plain.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0
    assert_all_is_back(decode)


def test_an_engine_that_does_not_answer_keeps_no_thread_from_reads_of_others(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_READS", 1)
    monkeypatch.setattr(reader, "_MUTE_SECONDS", 1e6)
    given, key = offer(prefill), np.array(PROMPTS[0], np.int32).tobytes()
    transfers: Any = prefill._scheduler.memory.transfers
    params = TransferParams.read(given, transfers.secret)
    prompt = prompt_hash(transfers.layout, None, key[: params.num_tokens * 4])
    own = TcpReader(np.zeros((1, params.page_bytes), np.uint8), lambda page, its: None)
    with contextlib.closing(own), socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        mute = replace(params, engine="mute", port=silent.getsockname()[1])
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_SILENT_SECONDS", 0.2)
            reads = [own.read(mute, prompt, 0, [0]) for _ in range(3)]
            wait_until(lambda: all(read.is_quiet for read in reads))
        errors = [str(read.error).partition(":")[0] for read in reads]
        assert errors == ["TimeoutError", "EOFError", "EOFError"], "others do not wait for it"
        silent.accept()[0].close()
        own._mute = dict.fromkeys(["mute", params.engine], 0.0)  # some time later
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_SILENT_SECONDS", 0.2)
            reads = [own.read(mute, prompt, 0, [0]) for _ in range(2)]
            wait_until(lambda: all(read.is_quiet for read in reads))
        silent.accept()[0].close()
        errors = [str(read.error).partition(":")[0] for read in reads]
        assert errors == ["TimeoutError", "EOFError"], "one finds out for all"
        good = own.read(params, prompt, 0, [0])
        wait_until(lambda: good.is_quiet)
        assert (good.error, good.num_good) == (None, 1)
        assert own._mute.keys() == {"mute"}


@pytest.mark.parametrize("how", ["closes", "refuses"])
def test_an_engine_that_is_back_is_asked_again_whatever_it_says(
    how: str, prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a read that was cut while it would find out leaves it to the next; one that did not ask does not."""
    monkeypatch.setattr(reader, "_MUTE_SECONDS", 1e6)
    params = TransferParams.read(offer(prefill), prefill._scheduler.memory.transfers.secret)  # type: ignore[union-attr]
    own = TcpReader(np.zeros((1, params.page_bytes), np.uint8), lambda page, its: None)
    with contextlib.closing(own), socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        mute = replace(params, engine="mute", port=server.getsockname()[1])
        own._mute = {"mute": 0.0}
        for _ in range(2):
            probe = own.read(mute, bytes(32), 0, [0])
            with server.accept()[0] as peer:
                assert peer.recv(ASK.size, socket.MSG_WAITALL)
                for is_cut in (True, False):
                    other = own.read(mute, bytes(32), 0, [0])
                    if is_cut:
                        other.cut()
                    wait_until(lambda its=other: its.is_quiet)  # type: ignore[misc]
                    assert "lately" in str(other.error) or is_cut
                probe.cut()
                wait_until(lambda its=probe: its.is_quiet)  # type: ignore[misc]
        assert own._mute.keys() == {"mute"}
        if how == "refuses":
            server.close()
        last = own.read(mute, bytes(32), 0, [0])
        if how == "closes":
            server.accept()[0].close()
        wait_until(lambda: last.is_quiet)
        assert str(last.error).startswith(
            "ConnectionRefusedError" if how == "refuses" else ("EOF", "ConnectionReset")
        )
        assert not own._mute


def test_over_http_the_params_are_fields_of_all_endpoints(prefill: Engine, decode: Engine) -> None:
    chat = {"messages": [{"role": "user", "content": "what is there to say of it?"}], "temperature": 0}
    text = {"prompt": "a text that is long enough for pages", "temperature": 0}
    with served(prefill, template=TEMPLATE) as one, served(decode, template=TEMPLATE) as other:
        for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
            wanted = other.post(path, {**body, "max_tokens": 5}).json()
            assert other.post("/flush_cache", {}).status_code == 200
            computed = one.post(path, {**body, "max_tokens": 0, "return_kv_transfer_params": True}).json()
            assert "kv_transfer_params" in computed, computed
            params = computed["kv_transfer_params"]
            found = other.post(path, {**body, "max_tokens": 5, "kv_transfer_params": params}).json()
            assert found["choices"] == wanted["choices"]
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 8
            wrong = other.post(path, {**body, "max_tokens": 5, "kv_transfer_params": {**params, "port": 1}})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "kv_transfer_params")
        messages = {"messages": chat["messages"], "temperature": 0, "max_tokens": 0}
        responses = {"input": chat["messages"], "temperature": 0, "max_output_tokens": 0, "store": False}
        for path, body, limit in (
            ("/v1/messages", messages, "max_tokens"),
            ("/v1/responses", responses, "max_output_tokens"),
        ):
            assert other.post("/flush_cache", {}).status_code == 200
            params = one.post(path, {**body, "return_kv_transfer_params": True}).json()["kv_transfer_params"]
            found = other.post(path, {**body, limit: 5, "kv_transfer_params": params}).json()
            assert "kv_transfer_params" not in found
            usage = found["usage"]
            cached = usage.get("cache_read_input_tokens") or usage["input_tokens_details"]["cached_tokens"]
            assert cached >= 8
            wrong = other.post(path, {**body, "kv_transfer_params": {**params, "port": 1}})
            assert (wrong.status_code, "kv_transfer_params" in wrong.text) == (400, True)
            refused = one.post(path, {**body, "stream": True, "return_kv_transfer_params": True})
            assert (refused.status_code, "leave stream out" in refused.text) == (400, True)
        body = {"text": "of this one, too, there are pages", "sampling_params": {"max_new_tokens": 0}}
        params = one.post("/generate", {**body, "return_kv_transfer_params": True}).json()["kv_transfer_params"]
        body = {**body, "sampling_params": {"max_new_tokens": 4}, "kv_transfer_params": params}
        assert other.post("/generate", body).json()["meta_info"]["cached_tokens"] >= 8
        refused = one.post(
            "/v1/completions", {**text, "max_tokens": 0, "stream": True, "return_kv_transfer_params": True}
        )
        assert refused.status_code == 400
