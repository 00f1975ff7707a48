"""The engine's surface on a trained model: result shapes, streams, asynchronous use, aborts, and bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from sgl.errors import (
    ConfigError,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    TokenizerError,
)
from sgl.runtime.engine import Engine
from sgl.runtime.requests.arguments import GenerateOptions, GenerateRequest
from sgl.runtime.server.fields import ForeignArguments
from sgl.runtime.server.native import GenerateBody
from tests.live_server import slow_steps
from tests.pages import in_whole_pages
from tests.patience import PATIENCE

GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("stories260K")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    options = {"check_ledger": True, "max_total_tokens": 8192, "random_seed": 1, "dtype": "float32"}
    with Engine(str(folder), device=request.param, **options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the engine is idle and each page is free or cached."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        deadline = time.monotonic() + PATIENCE
        while engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline, "a request goes on for nobody"
            time.sleep(0.01)
        assert engine.check_ledger() == []
        assert not engine._calls.rids
        assert not engine._router._sinks


def test_a_result_has_the_native_shape(engine: Engine) -> None:
    result = engine.generate(PROMPT, GREEDY)
    meta = result["meta_info"]
    assert result["text"] == ", there was a little girl named Lily. She loved to play"
    assert len(result["output_ids"]) == meta["completion_tokens"] == 16
    assert meta["finish_reason"] == {"type": "length", "length": 16}
    assert meta["prompt_tokens"] == len(engine.get_tokenizer().encode(PROMPT))
    assert meta["cached_tokens"] >= 0
    assert isinstance(meta["id"], str)
    assert meta["e2e_latency"] > 0
    json.dumps(result)


def test_token_ids_and_text_are_the_same_request(engine: Engine) -> None:
    ids = engine.get_tokenizer().encode(PROMPT)
    assert engine.generate(input_ids=ids, sampling_params=GREEDY)["text"] == engine.generate(PROMPT, GREEDY)["text"]


def test_lists_come_back_in_order_with_parameters_of_their_own(engine: Engine) -> None:
    prompts = [PROMPT, "The dog", "A big red ball"]
    params = [{**GREEDY, "max_new_tokens": n} for n in (3, 5, 7)]
    results = engine.generate(prompts, params)
    assert [result["meta_info"]["completion_tokens"] for result in results] == [3, 5, 7]
    assert [result["text"] for result in results] == [
        engine.generate(prompt, its)["text"] for prompt, its in zip(prompts, params, strict=True)
    ]
    assert isinstance(engine.generate([PROMPT], GREEDY), list)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_list_is_queued_at_once_or_not_at_all(folder: Path, overlap: bool) -> None:
    prompts = [[1, 5 + i % 40, 7 + i % 3] for i in range(150)]
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    options = {"dtype": "float32", "disable_overlap_schedule": not overlap, "max_total_tokens": 8192}
    with Engine(str(folder), device="cpu", **options) as engine:
        queued = engine.submit
        sizes = []
        engine.submit = lambda prepared, sink: (sizes.append(len(prepared.uids)), queued(prepared, sink))[1]  # type: ignore[method-assign]
        together = engine.generate(input_ids=prompts, sampling_params=params)
        assert sizes == [150]
        alone = [engine.generate(input_ids=prompts[i], sampling_params=params) for i in (0, 127, 128, 149)]
        assert [together[i]["output_ids"] for i in (0, 127, 128, 149)] == [each["output_ids"] for each in alone]
        sizes.clear()
        with pytest.raises(InvalidRequest, match="vocabulary"):
            engine.generate(input_ids=[*prompts, [10**6]], sampling_params=params)
        with pytest.raises(InvalidRequest, match="rid 'r0' is given to two requests"):
            engine.generate(input_ids=prompts, sampling_params=params, rid=[f"r{i % 149}" for i in range(150)])
        assert sizes == []
        assert not engine._calls.rids


def test_samples_are_grouped_by_prompt_and_differ(engine: Engine) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 12, "n": 3, "seed": 5}
    results = engine.generate([PROMPT, "The dog"], params)
    assert len(results) == 6
    assert [r["meta_info"]["prompt_tokens"] for r in results] == [5] * 3 + [4] * 3
    assert len({r["text"] for r in results[:3]}) == 3
    assert [r["text"] for r in engine.generate(PROMPT, params)] == [r["text"] for r in results[:3]]


def test_a_seed_decides_the_draw_whatever_else_runs(engine: Engine) -> None:
    params = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 20, "seed": 11}
    alone = engine.generate(PROMPT, params)["output_ids"]
    others = [f"The {word}" for word in ("cat", "dog", "sun", "big ball", "little girl")]
    batch = engine.generate([*others, PROMPT], [{"max_new_tokens": 9}] * 5 + [params])
    assert batch[-1]["output_ids"] == alone
    assert engine.generate(PROMPT, {**params, "seed": 12})["output_ids"] != alone


def test_logprobs_have_one_entry_a_token(engine: Engine) -> None:
    result = engine.generate(
        PROMPT,
        {**GREEDY, "max_new_tokens": 4},
        return_logprob=True,
        logprob_start_len=2,
        top_logprobs_num=3,
        token_ids_logprob=[5, 403],
        return_text_in_logprobs=True,
    )
    meta, prompt = result["meta_info"], engine.get_tokenizer().encode(PROMPT)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[2:]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == result["output_ids"]
    assert meta["output_token_logprobs_length"] == 4
    assert [len(top) for top in meta["output_top_logprobs"]] == [3] * 4
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == len(prompt) - 2
    for chosen, top, given in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True
    ):
        assert top[0] == chosen  # greedy
        assert [entry[0] for entry in top] == sorted((entry[0] for entry in top), reverse=True)
        assert [entry[1] for entry in given] == [5, 403]
        assert isinstance(chosen[2], str)
    json.dumps(result)


def test_a_prompt_alone_is_scored_and_its_next_token_shown(engine: Engine) -> None:
    params = {"max_new_tokens": 0, "temperature": 0.0}
    plain = engine.generate(PROMPT, params)
    assert (plain["text"], plain["output_ids"]) == ("", [])
    assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    scored = engine.generate(PROMPT, params, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = scored["meta_info"]
    assert meta["completion_tokens"] == 0
    assert len(meta["input_token_logprobs"]) == 5
    assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 1
    first = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 1})["output_ids"][0]
    assert meta["output_top_logprobs"][0][0][1] == first


@pytest.mark.parametrize("stops", [{"stop": "girl"}, {"stop": ["zzz", "girl"]}, {"stop_regex": "g[a-z]rl"}])
def test_a_stop_is_not_part_of_the_text_nor_of_the_stream(engine: Engine, stops: dict[str, Any]) -> None:
    params = {**GREEDY, "max_new_tokens": 40, **stops}
    result = engine.generate(PROMPT, params)
    assert result["text"] == ", there was a little "
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "girl"}
    assert all("g" not in event["text"] for event in engine.generate(PROMPT, params, stream=True))


def test_a_stop_token_ends_and_is_counted(engine: Engine) -> None:
    free = engine.generate(PROMPT, GREEDY)["output_ids"]
    result = engine.generate(PROMPT, {**GREEDY, "stop_token_ids": [free[6]]})
    first = free.index(free[6]) + 1
    assert result["output_ids"] == free[:first]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[6]}


@pytest.mark.parametrize("params", [GREEDY, {**GREEDY, "min_new_tokens": 6}, {**GREEDY, "regex": "[a-z ]{20}"}])
def test_a_stop_token_of_another_model_ends_nothing(engine: Engine, params: dict[str, Any]) -> None:
    free = engine.generate(PROMPT, params)
    beyond = engine.generate(PROMPT, {**params, "stop_token_ids": [119_690, 2**31 - 1]})
    assert [beyond[key] for key in ("text", "output_ids")] == [free[key] for key in ("text", "output_ids")]
    assert beyond["meta_info"]["finish_reason"] == free["meta_info"]["finish_reason"]


def test_events_of_a_stream_grow_to_the_result(engine: Engine) -> None:
    params = {**GREEDY, "max_new_tokens": 10}
    events = list(engine.generate(PROMPT, params, stream=True, return_logprob=True))
    whole = engine.generate(PROMPT, params, return_logprob=True)
    assert [event["meta_info"]["completion_tokens"] for event in events] == list(range(1, 11))
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    entries = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in entries] == whole["output_ids"]


def test_streams_of_several_prompts_carry_their_index(engine: Engine) -> None:
    texts = {}
    for event in engine.generate([PROMPT, "The dog"], GREEDY, stream=True):
        texts[event["index"]] = event["text"]
    assert [texts[0], texts[1]] == [result["text"] for result in engine.generate([PROMPT, "The dog"], GREEDY)]


@pytest.mark.usefixtures("slowly")
def test_closing_or_dropping_a_stream_aborts_the_request(engine: Engine) -> None:
    aborted = engine.get_server_info()["internal_states"][0]["aborted"]
    stream = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 400}, stream=True)
    next(stream)
    stream.close()
    assert list(stream) == []
    stream = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 400}, stream=True)
    del stream
    assert engine.get_server_info()["internal_states"][0]["aborted"] == aborted + 2


@pytest.mark.parametrize("rid", ["mine", None])
def test_an_abort_on_the_way_into_the_loop_is_kept(
    engine: Engine, rid: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rid is known, and the loop does not have it yet."""
    submit, is_known, may_go = engine._loop.submit, threading.Event(), threading.Event()

    def late(submissions: Any) -> None:
        is_known.set()
        assert may_go.wait(PATIENCE)
        submit(submissions)

    monkeypatch.setattr(engine._loop, "submit", late)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(
            engine.generate, [PROMPT, PROMPT], {**GREEDY, "max_new_tokens": 90}, rid=["mine", "my"]
        )
        assert is_known.wait(PATIENCE)
        engine.abort(rid)
        may_go.set()
        results = asked.result(PATIENCE)
    assert results[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert results[0]["output_ids"] == []
    assert len(results[1]["output_ids"]) == (90 if rid else 0)
    assert engine.check_ledger() == []


@pytest.mark.usefixtures("slowly")
def test_an_abort_by_rid_ends_the_call_with_what_there_was(engine: Engine) -> None:
    done: list[dict[str, Any]] = []
    params = {**GREEDY, "max_new_tokens": 490}
    caller = threading.Thread(target=lambda: done.append(engine.generate(PROMPT, params, rid="mine")))
    caller.start()
    while not engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
        time.sleep(0.001)
    engine.abort("min")  # another one
    engine.abort("mine")
    engine.abort("mine")
    caller.join(PATIENCE)
    reason = done[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["err_type"]) == ("abort", "RequestAborted")
    assert len(done[0]["output_ids"]) < 490


def test_asynchronous_calls_run_together_and_streams_iterate(engine: Engine) -> None:
    async def main() -> None:
        prompts = [PROMPT, "The dog", "The cat"]
        results = await asyncio.gather(*(engine.async_generate(prompt, GREEDY) for prompt in prompts))
        assert [r["text"] for r in results] == [r["text"] for r in engine.generate(prompts, GREEDY)]
        stream = await engine.async_generate(PROMPT, GREEDY, stream=True)
        events = [event async for event in stream]
        assert len(events) == 16
        assert events[-1]["text"] == results[0]["text"]

    asyncio.run(main())


@pytest.mark.usefixtures("slowly")
def test_cancelling_an_asynchronous_call_aborts_it(engine: Engine) -> None:
    async def main() -> None:
        task = asyncio.create_task(engine.async_generate(PROMPT, {**GREEDY, "max_new_tokens": 490}))
        while not engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    engine.get_server_info()
    assert engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0


def test_prefixes_are_shared_only_within_a_namespace(engine: Engine) -> None:
    engine.flush_cache()
    ids = list(range(100, 164))
    params = {**GREEDY, "max_new_tokens": 1}
    engine.generate(input_ids=ids, sampling_params=params, extra_key="a")
    other = engine.generate(input_ids=ids, sampling_params=params, extra_key="b")
    same = engine.generate(input_ids=ids, sampling_params=params, extra_key="a")
    cached = in_whole_pages(engine, len(ids) - 1)
    assert cached >= 48
    assert (other["meta_info"]["cached_tokens"], same["meta_info"]["cached_tokens"]) == (0, cached)


def test_the_next_turn_finds_the_generated_tokens_in_the_cache(engine: Engine) -> None:
    engine.flush_cache()
    ids = list(range(100, 120))
    first = engine.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 40})
    turn = [*ids, *first["output_ids"], 200, 201]
    second = engine.generate(input_ids=turn, sampling_params=GREEDY)
    assert second["meta_info"]["cached_tokens"] == in_whole_pages(engine, len(ids) + 39)


def test_min_new_tokens_holds_the_end_back(engine: Engine) -> None:
    free = engine.generate(PROMPT, GREEDY)["output_ids"]
    params = {**GREEDY, "stop_token_ids": [free[2]], "min_new_tokens": 8}
    assert engine.generate(PROMPT, params)["meta_info"]["completion_tokens"] >= 8
    assert (
        engine.generate(PROMPT, {**GREEDY, "stop": ",", "min_new_tokens": 8})["meta_info"]["completion_tokens"] >= 8
    )


def test_biases_and_penalties_reach_the_sampler(engine: Engine) -> None:
    free = engine.generate(PROMPT, GREEDY)["output_ids"]
    banned = engine.generate(PROMPT, {**GREEDY, "logit_bias": {str(free[0]): -100}})["output_ids"]
    assert free[0] not in banned[:1]
    params = {**GREEDY, "max_new_tokens": 60}
    repeated = engine.generate(PROMPT, params)["output_ids"]
    varied = engine.generate(PROMPT, {**params, "presence_penalty": 2.0, "frequency_penalty": 2.0})["output_ids"]
    assert len(set(varied)) > len(set(repeated))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("neither prompt nor ids", {}, "either prompt or input_ids"),
    ("both", {"prompt": "x", "input_ids": [5]}, "either prompt or input_ids"),
    ("empty text", {"prompt": ""}, "empty"),
    ("empty ids", {"input_ids": []}, "empty"),
    ("empty list", {"prompt": []}, "empty"),
    ("text is a number", {"prompt": 5}, "string"),
    ("id too large", {"input_ids": [5, 512]}, "512 is out of range.*0 to 511"),
    ("negative id", {"input_ids": [-1]}, "-1 is out of range"),
    ("huge id", {"input_ids": [2**40]}, "out of range"),
    ("ids are floats", {"input_ids": [1.5]}, "integers"),
    ("ids are text", {"input_ids": ["a"]}, "integers"),
    ("an array without length", {"input_ids": np.array(5)}, "list of token ids"),
    ("text in an array without length", {"prompt": np.array("x")}, "list of strings"),
    ("ids are ragged", {"input_ids": [5, [6]]}, "input_ids"),
    ("NaN temperature", {"prompt": "x", "sampling_params": {"temperature": float("nan")}}, "temperature"),
    ("text temperature", {"prompt": "x", "sampling_params": {"temperature": "1"}}, "temperature"),
    ("unknown parameter", {"prompt": "x", "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    (
        "min over max",
        {"prompt": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
        "min_new_tokens",
    ),
    ("negative stop id", {"prompt": "x", "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ("bias out of range", {"prompt": "x", "sampling_params": {"logit_bias": {"9999": 1}}}, "9999"),
    ("bad stop regex", {"prompt": "x", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
    ("two constraints", {"prompt": "x", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "regex"),
    ("logprob start", {"prompt": "x", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    (
        "too many top logprobs",
        {"prompt": "x", "return_logprob": True, "top_logprobs_num": 10**6},
        "top_logprobs_num",
    ),
    ("timeout", {"prompt": "x", "timeout": -1}, "timeout"),
    ("priority", {"prompt": "x", "priority": "high"}, "priority"),
    ("extra key", {"prompt": "x", "extra_key": 5}, "extra_key"),
    (
        "params of another length",
        {"prompt": ["a", "b"], "sampling_params": [{}]},
        "sampling_params has 1 values for 2",
    ),
    ("params of a wrong type", {"prompt": "x", "sampling_params": 5}, "sampling_params"),
    ("one rid for many", {"prompt": ["a", "b"], "rid": "r"}, "rid"),
    ("one rid twice", {"prompt": ["a", "b"], "rid": ["r", "r"]}, "given to two"),
]


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_by_name_and_the_others_are_served(
    engine: Engine, arguments: dict[str, Any], message: str
) -> None:
    stream = engine.generate(PROMPT, GREEDY, stream=True)
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(**arguments)
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(engine.async_generate(**arguments))
    assert len(list(stream)) == 16


def test_a_prompt_over_the_context_says_both_lengths(engine: Engine) -> None:
    words = "the prompt is too long: it has 600 tokens and this model's maximum context length is 512 tokens"
    with pytest.raises(ContextTooLong, match=words) as caught:
        engine.generate(input_ids=[5] * 600)
    assert (caught.value.tokens, caught.value.limit) == (600, 512)
    assert engine.generate(input_ids=[5] * 512, sampling_params={"max_new_tokens": 0})["output_ids"] == []
    cut = engine.generate(input_ids=[5] * 500, sampling_params={**GREEDY, "max_new_tokens": 100})
    assert len(cut["output_ids"]) == 12


@pytest.mark.usefixtures("slowly")
def test_a_rid_in_use_is_refused(engine: Engine) -> None:
    stream = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 300}, stream=True, rid="taken")
    with pytest.raises(InvalidRequest, match="in use"):
        engine.generate(PROMPT, rid="taken")
    stream.close()


@pytest.mark.usefixtures("slowly")
def test_a_timeout_raises_and_frees(engine: Engine) -> None:
    with pytest.raises(RequestTimeout):
        engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 490}, timeout=0.01)
    results = engine.generate([PROMPT, "The"], [{**GREEDY, "max_new_tokens": 490}, GREEDY], timeout=0.02)
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} <= {"abort", "length"}


def test_a_full_queue_raises(folder: Path) -> None:
    with (
        Engine(str(folder), max_running_requests=1, max_queued_requests=1, device="cpu") as engine,
        pytest.raises(QueueFull),
    ):
        engine.generate([PROMPT] * 8, GREEDY)


def test_without_a_tokenizer_text_is_refused(folder: Path) -> None:
    with Engine(str(folder), skip_tokenizer_init=True, device="cpu") as engine:
        assert engine.generate(input_ids=[5, 6], sampling_params=GREEDY)["text"] == ""
        for arguments in ({"prompt": "x"}, {"input_ids": [5], "sampling_params": {"stop": "x"}}):
            with pytest.raises(InvalidRequest, match="without a tokenizer"):
                engine.generate(**arguments)
        with pytest.raises(InvalidRequest):
            engine.get_tokenizer()


def test_a_tokenizer_of_another_model_is_refused(folder: Path, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(TokenizerError, match=r"511.*0 to 104"):
        Engine(str(checkpoint("babyllama-105")), tokenizer_path=str(folder), device="cpu")


def test_pages_are_shorter_on_a_cpu(folder: Path) -> None:
    with Engine(str(folder), device="cpu", max_total_tokens=256) as engine:
        assert engine.config.page_size == 8
    with Engine(str(folder), device="cpu", max_total_tokens=256, page_size=4) as engine:
        assert engine.config.page_size == 4


def test_options_that_cannot_be_are_refused(folder: Path) -> None:
    for options, message in (
        ({"page_sise": 4}, "did you mean 'page_size'"),
        ({"context_length": 10**6}, "512"),
        ({"device": "tpu"}, "cuda"),
        (
            {"speculative_algorithm": "ngram"},
            "^speculative_algorithm='ngram': input should be 'auto', 'off', 'NGRAM'",
        ),
        ({"device": "cuda:63"}, "CUDA device"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(str(folder), **options)


@pytest.mark.parametrize("path", ["", "a\0b"])
@pytest.mark.parametrize(
    "option",
    ["model_path", "tokenizer_path", "dist_key_file", "hicache_storage_dir", "speculative_draft_model_path"],
)
def test_a_path_that_is_empty_or_holds_nul_is_refused_by_name(option: str, path: str) -> None:
    with pytest.raises(ConfigError, match="name a file or folder") as refused:
        Engine(**{"model_path": "embedded", option: path})  # type: ignore[arg-type]  # names are tested
    assert refused.value.option == option


@pytest.mark.parametrize("option", ["model_path", "hicache_storage_dir", "speculative_draft_model_path"])
def test_a_path_of_a_user_who_is_not_there_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match="there is no user 'nobody-of-that-name'") as refused:
        Engine(**{"model_path": "embedded", option: "~nobody-of-that-name/x"})  # type: ignore[arg-type]  # as above
    assert refused.value.option == option


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = Engine(str(folder), device="cpu")
    with slow_steps(engine):
        stream = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 490}, stream=True)
        next(stream)
        engine.shutdown()
        engine.shutdown()
    with pytest.raises(EngineDead):
        list(stream)
    for params in (GREEDY, {"regex": "a"}):
        with pytest.raises(EngineDead):
            engine.generate(PROMPT, params)


def test_what_an_application_froze_stays_frozen_beside_an_engine_on_a_cpu(folder: Path) -> None:
    gc.freeze()
    with Engine(str(folder), device="cpu", max_total_tokens=256) as engine:
        assert gc.get_freeze_count() > 0
        engine.generate(PROMPT, GREEDY)
    assert gc.get_freeze_count() > 0


def test_whether_to_stream_may_be_said_by_any_truth(engine: Engine) -> None:
    expected = engine.generate(PROMPT, GREEDY)["text"]
    for value in (None, 0, ""):
        assert engine.generate(PROMPT, GREEDY, stream=value)["text"] == expected  # type: ignore[arg-type]
    for value in ("yes", 2):
        assert list(engine.generate(PROMPT, GREEDY, stream=value))[-1]["text"] == expected  # type: ignore[arg-type]


def test_many_threads_share_one_engine(engine: Engine) -> None:
    expected = engine.generate(PROMPT, GREEDY)["text"]
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(engine.generate(PROMPT, GREEDY)["text"])) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 16


def test_the_arguments_of_a_generation_are_the_same_at_every_door(engine: Engine) -> None:
    """Of one call, of an asynchronous one, of a prompt's request and of a body."""
    first = ["prompt", "sampling_params", "input_ids"]
    options = get_type_hints(GenerateOptions)
    for method in (Engine.generate, Engine.async_generate):
        assert list(inspect.signature(method).parameters) == ["self", *first, "options"]
        assert method.__annotations__["options"] == "Unpack[GenerateOptions]"
    request = {each.name: each for each in dataclasses.fields(GenerateRequest)}
    assert request.keys() == {*first, *options, "layout", "limits_logprobs", "origin", "pooling", "arrived"}
    body = GenerateBody.model_fields.keys() - ForeignArguments.model_fields.keys()
    assert body == {*first, *options, "text", "image_data", "video_data"} - {"prompt", "owner"}
    for name, hint in options.items():
        one = get_type_hints(GenerateRequest)[name]
        kinds = set(get_args(hint)) - set(get_args(one)) - {one, type(None)}
        assert (hint is Any or bool(kinds)) == request[name].metadata.get("per_prompt", False), name
    for misspelt in ("retrun_logprob", "arrived"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelt}'"):
            engine.generate(PROMPT, **{misspelt: True})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelt}'"):
            asyncio.run(engine.async_generate(PROMPT, **{misspelt: True}))


@pytest.mark.usefixtures("slowly")
def test_a_rid_is_each_owners_own(engine: Engine) -> None:
    long = {**GREEDY, "max_new_tokens": 490}
    streams = [engine.generate(PROMPT, long, rid="same", owner=owner, stream=True) for owner in ("a", "b", "c")]
    firsts = [next(stream) for stream in streams]
    assert {event["meta_info"]["id"] for event in firsts} == {"same"}
    for rid, owner, ended in (("same", "a", [0]), (None, "b", [1]), ("same", "d", []), ("same", None, [2])):
        engine.abort(rid, owner)
        for i in ended:
            assert list(streams[i])[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        if rid is not None and owner == "d":
            next(streams[2])
