"""Constraints in the engine: every output that ends by itself matches, whatever runs beside it and however steps are
scheduled; what cannot be enforced is refused and disturbs nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sgl import Engine
from sgl.errors import EngineDead, GrammarError, InvalidRequest, RegexSyntaxError, RequestTimeout, UnsupportedSchema
from sgl.grammar.compiler import make_constraint
from sgl.runtime.constraints import request_matcher
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.constraints.service import CompileService
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.requests import builder
from sgl.runtime.scheduler.request import Request
from sgl.runtime.text.tokenizer import Tokenizer
from tests.patience import PATIENCE
from tests.tiny_models import tiny_checkpoint

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "d"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d( \w{2,5})?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.fixture(scope="module", params=["synchronous", "run-ahead"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"disable_overlap_schedule": request.param != "run-ahead", "speculative_algorithm": "off"}
    with Engine(folder, dtype="float32", check_ledger=True, **options) as engine:
        yield engine


def assert_matches(result: dict[str, Any], params: dict[str, Any]) -> None:
    assert result["meta_info"]["finish_reason"]["type"] == "stop", result
    if "regex" in params:
        assert re.fullmatch(params["regex"], result["text"]), result["text"]
    else:
        jsonschema.validate(json.loads(result["text"]), params["json_schema"])


CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": DATE},
    {"regex": "(yes|no|yesterday)"},
    {"regex": "é{2,4}[^a]"},
    {"json_schema": PERSON},
    {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 4}},
    {"json_schema": {"enum": ["a", 1, None, {"b": [True]}]}},
]


@pytest.mark.parametrize("params", CONSTRAINTS, ids=lambda params: next(iter(params)))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_outputs_match_their_constraint(engine: Engine, params: dict[str, Any], temperature: float) -> None:
    results = engine.generate(
        prompt="the answer is",
        sampling_params={**params, "n": 4, "temperature": temperature, "seed": 1, "max_new_tokens": 200},
    )
    for result in results:
        assert_matches(result, params)


def test_constrained_and_free_requests_share_steps_and_do_not_touch_each_other(engine: Engine) -> None:
    free: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
    params = [{**free, "seed": seed, "regex": DATE} if seed % 2 else {**free, "seed": seed} for seed in range(12)]
    together = engine.generate(prompt=["tell me"] * 12, sampling_params=params)
    for alone, result, its in zip(
        [engine.generate(prompt="tell me", sampling_params=its) for its in params], together, params, strict=True
    ):
        assert result["output_ids"] == alone["output_ids"]
        if "regex" in its:
            assert_matches(result, its)
        else:
            assert len(result["output_ids"]) == 30


def test_a_stream_of_constrained_text_joins_to_the_result(engine: Engine) -> None:
    params = {"json_schema": PERSON, "seed": 3, "max_new_tokens": 200}
    events = list(engine.generate(prompt="a person:", sampling_params=params, stream=True))
    assert_matches(events[-1], params)
    assert events[-1]["text"] == engine.generate(prompt="a person:", sampling_params=params)["text"]
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_a_complete_output_ends_without_an_end_token(engine: Engine) -> None:
    result = engine.generate(
        prompt="so", sampling_params={"regex": "abc", "max_new_tokens": 50, "ignore_eos": True}
    )
    assert result["text"] == "abc"
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


def test_an_output_may_end_early_where_the_constraint_allows_it(engine: Engine) -> None:
    params = {"regex": "a(b*)", "max_new_tokens": 20, "n": 16, "seed": 5, "temperature": 20.0}
    results = engine.generate(prompt="so", sampling_params=params)
    ended = [result for result in results if result["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for result in ended:
        assert_matches(result, params)


def test_stops_length_and_bias_hold_inside_a_constraint(engine: Engine) -> None:
    stopped = engine.generate(prompt="so", sampling_params={"regex": "a{50}", "max_new_tokens": 80, "stop": "aaa"})
    assert stopped["text"] == ""
    short = engine.generate(prompt="so", sampling_params={"regex": "[ab]{50}", "max_new_tokens": 3})
    assert short["meta_info"]["finish_reason"]["type"] == "length"
    b = engine.get_tokenizer().encode("b", add_special_tokens=False)[0]
    biased = {"regex": "[bc]{5}", "max_new_tokens": 9, "logit_bias": {b: -100}, "temperature": 0}
    assert engine.generate(prompt="so", sampling_params=biased)["text"] == "ccccc"


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3}])
def test_a_minimum_that_the_constraint_cannot_reach_is_told(engine: Engine, more: dict[str, Any]) -> None:
    """Where all tokens that it allows are stop tokens."""
    assert engine.tokenizer is not None
    stops = engine.tokenizer.encode("BC", add_special_tokens=False).tolist()
    params = {"temperature": 0.0, "regex": "[XY][BC][x-z]{9}", "stop_token_ids": stops, **more}
    with pytest.raises(InvalidRequest, match=r"min_new_tokens=3 holds back .* behind 1 tokens") as told:
        engine.generate("a", {**params, "min_new_tokens": 3})
    assert told.value.param == "min_new_tokens"
    with pytest.raises(InvalidRequest, match=r"min_new_tokens=3 holds back"):  # where token 0 is one of them
        engine.generate("a", {**params, "stop_token_ids": [0, *stops], "min_new_tokens": 3})
    assert engine.generate("a", {**params, "min_new_tokens": 1})["text"] in ("X", "Y")
    assert not engine.check_ledger()


@pytest.mark.parametrize("name", ["json_schema", "structural_tag"])
def test_what_prompts_of_a_call_share_is_worked_out_once(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a schema of megabytes and thousands of stops, each prompt would take its time and memory."""
    made = []

    def counted(given: Any, *arguments: Any, **options: Any) -> Any:
        made.append(given)
        return make_constraint(given, *arguments, **options)

    monkeypatch.setattr(request_matcher, "make_constraint", counted)
    monkeypatch.setattr(
        builder.hashlib, "blake2b", lambda *given, **options: made.append(0) or blake2b(*given, **options)
    )
    schema = {"description": f"{name} of {id(engine)} " * 30, "type": "integer"}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    params = {name: json.dumps(tag if name == "structural_tag" else schema), "stop_token_ids": [5, 6, 7]}
    call = engine.prepare(input_ids=[[3], [4], [5]] * 10, sampling_params=params)
    engine.abandon(call)
    assert len(made) == 2, "the constraint, and what tells its requests from others"
    assert len({id(each.request.stop_ids) for each in call.submissions}) == 1


def test_a_retracted_request_goes_on_inside_its_constraint(folder: Path) -> None:
    tight = {"max_total_tokens": 144, "page_size": 4, "schedule_conservativeness": 0.01}
    with Engine(folder, dtype="float32", max_running_requests=8, **tight) as engine:
        params = {"regex": r"(\d{3}-){12}", "max_new_tokens": 60, "temperature": 1.0}
        results = engine.generate(
            prompt=["one", "two", "three", "four", "five", "six"],
            sampling_params=[{**params, "seed": seed} for seed in range(6)],
        )
        assert sum(result["meta_info"]["num_retractions"] for result in results)
        for result in results:
            assert_matches(result, params)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"regex": "a(?<!b)"}, RegexSyntaxError, "look-behind"),
        ({"regex": "(a"}, RegexSyntaxError, "position"),
        ({"regex": "[^\\s\\S]"}, GrammarError, "nothing"),
        ({"json_schema": {"type": "strin"}}, UnsupportedSchema, "strin"),
        ({"json_schema": "{"}, GrammarError, "json_schema is not valid JSON"),
        ({"regex": "a", "json_schema": {}}, InvalidRequest, "at most one"),
    ],
)
def test_what_cannot_be_enforced_is_refused_and_the_others_are_served(
    engine: Engine, params: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine.generate(prompt="so", sampling_params=params)
    assert engine.generate(prompt="so", sampling_params={"regex": "ab"})["text"] == "ab"


def test_without_a_tokenizer_a_constraint_is_refused(folder: Path) -> None:
    with (
        Engine(folder, skip_tokenizer_init=True, dtype="float32") as engine,
        pytest.raises(InvalidRequest, match="regex needs text"),
    ):
        engine.generate(input_ids=[5, 6], sampling_params={"regex": "a"})


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_checkpoint(tmp_path, vocab_size=8, bos_token_id=0, eos_token_id=1)
    letters = {token: token_id for token_id, token in enumerate(["<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    with Engine(tmp_path, dtype="float32") as engine:
        with pytest.raises(GrammarError, match="no token of the model's vocabulary"):
            engine.generate(input_ids=[2], sampling_params={"regex": "x"})
        # Some of them come upon the end of the text where anything may be sampled.
        for result in engine.generate(input_ids=[2], sampling_params={"regex": "abx", "n": 30}):
            assert result["meta_info"]["finish_reason"]["err_type"] == "GrammarError", result
        assert engine.generate(input_ids=[2], sampling_params={"regex": "abc"})["text"] == "abc"


def test_prompts_are_computed_while_constraints_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = {name: threading.Event() for name in ("ab", "abc", "(a", "abcd")}
    compile_now = CompileService._compile_in_time

    def compile_later(self: CompileService, constraint: Any) -> Any:
        assert gates[json.loads(constraint.source)].wait(PATIENCE)
        return compile_now(self, constraint)

    monkeypatch.setattr(CompileService, "_compile_in_time", compile_later)
    # Beside a GPU, processes close automata, and these never come to where they are compiled.
    with (
        Engine(folder, device="cpu", dtype="float32", check_ledger=True) as engine,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(regex: str, **options: Any) -> Future[Any]:
            params = {"regex": regex, "max_new_tokens": 20}
            return threads.submit(engine.generate, prompt="so much for that", sampling_params=params, **options)

        def until(running: int) -> None:
            end = time.monotonic() + PATIENCE
            while engine.get_server_info()["internal_states"][0]["num_running_reqs"] != running:
                assert time.monotonic() < end

        late = ask("ab", timeout=0.2)
        with pytest.raises(RequestTimeout):
            late.result()
        first = ask("ab")
        until(1)
        free = engine.generate("so much for that", {"max_new_tokens": 5, "ignore_eos": True})
        assert len(free["output_ids"]) == 5
        assert not first.done()
        second, wrong = ask("abc", rid="second"), ask("(a")
        until(3)
        gates["ab"].set()
        assert first.result()["text"] == "ab"
        gates["(a"].set()
        with pytest.raises(RegexSyntaxError):
            wrong.result()
        with pytest.raises(RegexSyntaxError):
            asyncio.run(engine.async_generate(["so", "so"], [{"regex": "ab"}, {"regex": "(a"}]))
        until(1)
        engine.abort("second")
        assert second.result()["meta_info"]["finish_reason"]["type"] == "abort"
        again = ask("abc")
        until(1)
        gates["abc"].set()
        assert again.result()["text"] == "abc"
        assert engine.check_ledger() == []
        stopped = [
            ask("abcd"),
            threads.submit(asyncio.run, engine.async_generate("so", {"regex": "abcd"})),
            ask("ab"),
        ]
        stopped.pop().result()
        until(2)
        engine.shutdown()
        for future in stopped:
            with pytest.raises(EngineDead):
                future.result()
        with pytest.raises(EngineDead):
            engine.generate("so", {"regex": "abcde"})
        gates["abcd"].set()


def test_jumps_give_the_same_texts_in_fewer_steps(folder: Path) -> None:
    fields = [
        "identifier",
        "surname",
        "street",
        "postcode",
        "country",
        "telephone",
        "birthday",
        "member",
        "rank",
        "ok",
    ]
    schema = {
        "type": "object",
        "properties": {field: {"enum": ["red", "green", "blue"]} for field in fields},
        "required": fields,
        "additionalProperties": False,
    }
    params = {"json_schema": schema, "max_new_tokens": 400, "temperature": 0.0}
    steps, texts = [], []
    for disabled in (True, False):
        with Engine(folder, dtype="float32", disable_jump_forward=disabled, check_ledger=True) as engine:
            result = engine.generate(prompt="a record:", sampling_params=params)
            assert_matches(result, params)
            steps.append(len(result["output_ids"]) - result["meta_info"]["forced_tokens"])
            texts.append(list(json.loads(result["text"])))
            streamed = list(engine.generate(prompt="a record:", sampling_params=params, stream=True))[-1]
            assert streamed["text"] == result["text"]
            stopped = engine.generate(prompt="a record:", sampling_params={**params, "stop": "surname"})
            assert result["text"].startswith(stopped["text"])
            assert stopped["text"].endswith(',"')
            for most in (1, 5, 30):
                cut = engine.generate(prompt="a record:", sampling_params={**params, "max_new_tokens": most})
                assert len(cut["output_ids"]) == most
                assert cut["meta_info"]["finish_reason"]["type"] == "length"
            scored = engine.generate(prompt="a record:", sampling_params=params, return_logprob=True)
            assert len(scored["meta_info"]["output_token_logprobs"]) == len(scored["output_ids"])
            assert not scored["meta_info"]["forced_tokens"]
    assert texts[0] == texts[1]
    assert steps[0] > 1.5 * steps[1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_token_that_another_could_stand_for_is_drafted_and_verified_within_the_step(
    tmp_path: Path, page_size: int
) -> None:
    """`":"` may not be appended where `":""` is allowed, but most often it is what the model samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [('"', ":"), ('":', '"'), ('":"', '"')]
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {token: token_id for token_id, token in enumerate(letters)}
    tiny_checkpoint(tmp_path, vocab_size=272, bos_token_id=0, eos_token_id=1)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    fields = [f"field {number}" for number in range(10)]
    schema = {
        "type": "object",
        "properties": {field: {"type": "string", "maxLength": 2} for field in fields},
        "required": fields,
        "additionalProperties": False,
    }
    bias = {str(vocab['":"']): 9.0}
    params = [
        {"json_schema": schema, "max_new_tokens": 300, "temperature": t, "seed": i, "logit_bias": bias}
        for i, t in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    outputs, steps, verified = [], [], []
    for disabled in (True, False):
        options: dict[str, Any] = {"disable_jump_forward": disabled, "page_size": page_size, "check_ledger": True}
        options |= {
            "device": "cpu",
            "speculative_algorithm": "off",
        }  # beside a GPU automata are closed, and nothing is drafted in those
        with Engine(tmp_path, dtype="float32", disable_overlap_schedule=True, **options) as engine:
            results = engine.generate(prompt=["a record"] * 4, sampling_params=params)
            [state] = engine.get_server_info()["internal_states"]
        for result, its in zip(results, params, strict=True):
            assert_matches(result, its)
        outputs.append([result["output_ids"] for result in results])
        steps.append(state["steps"])
        verified.append(state["verified_tokens"])
    assert outputs[0] == outputs[1]
    assert not verified[0]
    assert verified[1] > 20
    assert steps[0] > 1.5 * steps[1]


FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "maximum": 99},
        "surname": {"type": "string", "maxLength": 5},
        "telephone": {"enum": ["none", "nonesuch"]},
    },
    "required": ["identifier", "surname", "telephone"],
    "additionalProperties": False,
}


@pytest.mark.costly
@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_tokens_are_the_same_however_steps_overlap_and_runs_are_appended(
    folder: Path, temperature: float, tight: bool
) -> None:
    """Runs that follow for certain are appended where that pays, and sampled one by one where it does not."""
    base = {"temperature": temperature, "max_new_tokens": 70}
    kinds: list[dict[str, Any]] = [
        {"json_schema": FIELDS},
        {"json_schema": FIELDS, "max_new_tokens": 9},
        {"json_schema": FIELDS, "stop": "phone"},
        {"json_schema": FIELDS, "frequency_penalty": 0.5},
        {"regex": DATE},
        {"max_new_tokens": 25, "ignore_eos": True},
        {"json_schema": FIELDS, "max_new_tokens": 33},
    ]
    params = [{**base, **kinds[i % len(kinds)], "seed": i} for i in range(21)]
    prompts = [f"a record of {'very ' * (i % 5)}much:" for i in range(21)]
    options: dict[str, Any] = {"dtype": "float32", "check_ledger": True, "max_running_requests": 8, "page_size": 4}
    options["speculative_algorithm"] = "off"
    if tight:
        options |= {"max_total_tokens": 160, "schedule_conservativeness": 0.01}
    outputs, forced = [], []
    for overlap, jump_cost in ((False, 0.0), (True, 0.0), (True, 1.2), (True, 100.0), (False, 100.0)):
        with Engine(folder, disable_overlap_schedule=not overlap, **options) as engine:
            engine._loop.jumps.cost = jump_cost
            results = engine.generate(prompt=prompts, sampling_params=params)
            assert engine.check_ledger() == []
        outputs.append([result["output_ids"] for result in results])
        forced.append(sum(result["meta_info"]["forced_tokens"] for result in results))
        for result, its in zip(results, params, strict=True):
            if result["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}:
                assert_matches(result, its)
    assert all(output == outputs[0] for output in outputs[1:])
    assert forced[0] >= forced[1] >= forced[2] >= forced[3] == forced[4] == 0
    assert forced[1] > 0


def own_schema(number: int) -> dict[str, Any]:
    """One that no other request has, and whose documents have forced text in many places."""
    fields = [f"{name} {number}" for name in ("title", "author", "language", "edition")]
    return {
        "type": "object",
        "properties": {field: {"enum": [f"red {number}", f"green {number}", number]} for field in fields},
        "required": fields,
        "additionalProperties": False,
    }


def own_schemas(count: int) -> dict[str, Any]:
    params = [
        {"json_schema": own_schema(i), "max_new_tokens": 200, "seed": i, "temperature": 1.0} for i in range(count)
    ]
    return {"prompt": ["a record:"] * count, "sampling_params": params}


def test_forced_text_of_all_rows_of_a_step_is_encoded_in_one_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []  # of each group of requests that went on together, the texts of each call
    advance, encode_all = EngineLoop._advance, Tokenizer.encode_all

    def count_calls(loop: EngineLoop, requests: list[Request]) -> None:
        calls.append([])
        advance(loop, requests)

    def count_texts(tokenizer: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        if threading.current_thread().name == "sgl-engine":
            calls[-1].append(len(texts))
        return encode_all(tokenizer, texts, **options)

    asked = own_schemas(12)
    # Where they are compiled by then, all begin at once.
    one_token = [params | {"max_new_tokens": 1} for params in asked["sampling_params"]]
    engine.generate(prompt=asked["prompt"], sampling_params=one_token)
    monkeypatch.setattr(EngineLoop, "_advance", count_calls)
    monkeypatch.setattr(Tokenizer, "encode_all", count_texts)
    together = engine.generate(**asked)
    assert max(map(len, calls)) == 1
    assert max(map(sum, calls)) >= 6
    for prompt, params, result in zip(asked["prompt"], asked["sampling_params"], together, strict=True):
        assert_matches(result, params)
        assert result["output_ids"] == engine.generate(prompt=prompt, sampling_params=params)["output_ids"]


@pytest.mark.parametrize("phase", ["forced_text", "forced"])
def test_a_request_that_fails_where_it_jumps_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    asked = own_schemas(8)
    expected = engine.generate(**asked)
    matchers: list[RequestMatcher] = []
    unspoilt = getattr(RequestMatcher, phase)

    def fail_for_the_third(matcher: RequestMatcher, *arguments: Any) -> Any:
        if matcher not in matchers:
            matchers.append(matcher)
        if matchers.index(matcher) == 2:
            raise GrammarError("it grew too large")
        return unspoilt(matcher, *arguments)

    monkeypatch.setattr(RequestMatcher, phase, fail_for_the_third)
    results = engine.generate(**asked)
    failed = [i for i, result in enumerate(results) if result["meta_info"]["finish_reason"]["type"] == "abort"]
    assert len(failed) == 1
    assert results[failed[0]]["meta_info"]["finish_reason"]["err_type"] == "GrammarError"
    for i, result in enumerate(results):
        assert i in failed or result["output_ids"] == expected[i]["output_ids"]
    assert engine.check_ledger() == []


@pytest.mark.parametrize("most", [60, 90, 150])
def test_a_document_is_closed_before_its_tokens_run_out(engine: Engine, most: int) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    schema["required"] = ["text", "n"]
    params = {"json_schema": schema, "max_new_tokens": most, "n": 6, "seed": 2}
    for result in engine.generate(prompt="an essay:", sampling_params=params):
        jsonschema.validate(json.loads(result["text"]), schema)
        assert len(result["output_ids"]) <= most


@pytest.mark.costly
@pytest.mark.parametrize("num_texts", [30, pytest.param(60, marks=pytest.mark.slow)])
def test_texts_of_some_use_up_no_states_of_those_who_come_later(
    num_texts: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One schema's grammar is everybody's, and each number leads to remainders that nobody has met."""
    monkeypatch.setattr("sgl.grammar.compiler.MAX_STATES", 3000)
    schema = {"type": "integer", "multipleOf": 10**12 + 39}
    for seed in range(num_texts):
        params = {"json_schema": schema, "max_new_tokens": 24, "temperature": 2.0, "seed": seed}
        result = engine.generate("a", sampling_params=params)
        assert int(result["text"]) % schema["multipleOf"] == 0
