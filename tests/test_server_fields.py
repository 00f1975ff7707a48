"""Which fields of requests the OpenAI API takes: OpenAI's own, SGLang's and vLLM's, each decided in one table.

HONOURED fields have an effect, which other tests show. TAKEN ones have none, whatever they hold. Of HARMLESS ones only
the values that change nothing pass; REFUSED ones pass only as null.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.live_server import LiveServer

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": None, "strict": None, "description": None}}
TAG = {"triggers": ["<a>"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
GRAMMAR = "root ::= [ab]+"

SHARED: dict[str, list[tuple[str, Any]]] = {
    "HONOURED": [
        ("model", "tiny"),
        ("max_tokens", 2),
        ("n", 1),
        ("stop", "x"),
        ("stop", ["x", "y"]),
        ("stop", []),
        ("temperature", 1),
        ("top_p", 0.5),
        ("top_p", 0),
        ("frequency_penalty", 1),
        ("presence_penalty", -1.0),
        ("logit_bias", {"5": -100}),
        ("logit_bias", {}),
        ("seed", 7),
        ("seed", -7),
        ("seed", 2**63 - 1),
        ("stream", False),
        ("stream_options", None),
        ("response_format", {"type": "text"}),
        ("response_format", {"type": "json_object", "json_schema": None}),
        ("response_format", {"type": "json_object", "schema": {"type": "object"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": False}}),
        ("response_format", {"type": "structural_tag", **TAG}),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 0),
        ("min_tokens", 0),
        ("repetition_penalty", 1),
        ("ignore_eos", True),
        ("stop_token_ids", []),
        ("stop_regex", "[xy]"),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", True),
        ("no_stop_trim", True),
        ("include_stop_str_in_output", True),
        ("return_token_ids", True),
        ("return_tokens_as_token_ids", True),
        ("regex", "a*"),
        ("ebnf", GRAMMAR),
        ("json_schema", "{}"),
        ("structural_tag", TAG),
        ("structural_tag", json.dumps(TAG)),
        ("choices", ["a", "b"]),
        ("guided_json", {}),
        ("guided_json", "{}"),
        ("guided_regex", "a*"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", GRAMMAR),
        ("guided_json_object", True),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": {}}),
        ("structured_outputs", {"json": "{}"}),
        ("structured_outputs", {"regex": "a*"}),
        ("structured_outputs", {"choice": ["a", "b"]}),
        ("structured_outputs", {"grammar": GRAMMAR}),
        ("structured_outputs", {"json_object": True, "disable_any_whitespace": True}),
        ("structured_outputs", {"structural_tag": json.dumps(TAG), "whitespace_pattern": None}),
        ("structured_outputs", {"json_object": False, "backend": None, "disable_additional_properties": False}),
        ("priority", 0),
        ("cache_salt", "pepper"),
        ("extra_key", "pepper"),
        ("rid", "mine"),
        ("request_id", "mine"),
        ("timeout", 60),
    ],
    "TAKEN": [
        ("user", "somebody"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {"ttl": "30m"}),
        ("session_id", "x"),
        ("guided_decoding_backend", "xgrammar"),
        ("return_token_offsets", True),
        ("return_mm_kwargs", False),
    ],
    "HARMLESS": [
        ("session_params", {}),
        ("custom_params", {}),
        ("custom_logit_processor", ""),
        ("custom_labels", {}),
        ("images_config", {}),
        ("return_hidden_states", False),
        ("return_routed_experts", False),
        ("return_cached_tokens_details", False),
        ("routed_experts_start_len", 0),
        ("use_beam_search", False),
        ("watermarking", False),
        ("detokenize", True),
        ("length_penalty", 1.0),
        ("stream_interval", 1),
        ("routed_experts_prompt_start", 0),
        ("thinking_token_budget", -1),
        ("bad_words", []),
        ("logits_processors", []),
        ("mm_processor_kwargs", {}),
        ("media_io_kwargs", {}),
        ("kv_transfer_params", {}),
        ("ec_transfer_params", {}),
        ("vllm_xargs", {}),
        ("guided_whitespace_pattern", ""),
    ],
    "REFUSED": [
        ("bootstrap_host", "x"),
        ("bootstrap_port", 1),
        ("bootstrap_room", 1),
        ("routed_dp_rank", 1),
        ("disagg_prefill_dp_rank", 1),
        ("data_parallel_rank", 1),
        ("ngram_corpus_id", "x"),
        ("truncate_prompt_tokens", 5),
        ("truncation_side", "left"),
        ("prompt_logprobs", 1),
        ("logprob_token_ids", [1]),
        ("allowed_token_ids", [1]),
        ("repetition_detection", {}),
        ("no_such_field", 1),
    ],
}
COMPLETIONS: dict[str, list[tuple[str, Any]]] = {
    "HONOURED": [
        ("prompt", "hello"),
        ("prompt", [5, 6]),
        ("echo", True),
        ("logprobs", 1),
        ("best_of", 1),
        ("suffix", ""),
        ("add_special_tokens", False),
    ],
    "TAKEN": [],
    "HARMLESS": [],
    "REFUSED": [("prompt_embeds", "x"), ("suffix", "x"), ("best_of", 2), ("logprobs", -1), ("logprobs", 1025)],
}
CHATS: dict[str, list[tuple[str, Any]]] = {
    "HONOURED": [
        ("messages", HELLO),
        ("max_completion_tokens", 2),
        ("logprobs", True),
        ("top_logprobs", 0),
        ("tools", [TOOL]),
        ("tools", []),
        ("functions", [TOOL["function"]]),
        ("functions", []),
        ("function_call", "none"),
        ("function_call", "auto"),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("parallel_tool_calls", True),
        ("reasoning_effort", "none"),
        ("reasoning_effort", "xhigh"),
        ("reasoning_effort", 0.5),
        ("modalities", ["text"]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("enable_thinking", False),
        ("thinking", {"type": "enabled", "budget_tokens": 5}),
        ("thinking", {"type": "auto"}),
        ("documents", [{"title": "a", "text": "b"}]),
        ("add_generation_prompt", True),
        ("add_generation_prompt", False),
        ("continue_final_message", False),
        ("separate_reasoning", True),
        ("include_reasoning", False),
        ("stream_reasoning", False),
        ("return_prompt_token_ids", True),
    ],
    "TAKEN": [("verbosity", "low"), ("prediction", {"type": "content", "content": "x"})],
    "HARMLESS": [
        ("echo", False),
        ("add_special_tokens", False),
        ("return_meta_info", False),
        ("return_prompt_text", False),
        ("use_audio_in_video", False),
    ],
    "REFUSED": [
        ("web_search_options", {}),
        ("audio", {"voice": "ash", "format": "wav"}),
        ("modalities", ["audio"]),
        ("moderation", {"model": "x"}),
        ("chat_template", "{{ 1 }}"),
        ("task", "query"),
        ("input_ids", [1]),
        ("max_dynamic_patch", 1),
        ("min_dynamic_patch", 1),
    ],
}
ENDPOINTS = {
    "/v1/completions": ({"prompt": "hello", "max_tokens": 2}, COMPLETIONS),
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 2}, CHATS),
}


def cases(*kinds: str) -> list[tuple[str, str, Any]]:
    """(endpoint, field, value) of those kinds."""
    return [
        (path, name, value)
        for path, (_, own) in ENDPOINTS.items()
        for kind in kinds
        for name, value in [*SHARED[kind], *own[kind]]
    ]


SERVED = {"served_model_name": "tiny", "reasoning_parser": "qwen3"}


@pytest.mark.parametrize(("path", "name", "value"), cases("HONOURED", "TAKEN", "HARMLESS"))
def test_fields_that_are_known_pass(server: LiveServer, path: str, name: str, value: Any) -> None:
    answer = server.post(path, {**ENDPOINTS[path][0], name: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ENDPOINTS)
def test_any_field_may_be_null_where_a_request_needs_none(server: LiveServer, path: str) -> None:
    body, own = ENDPOINTS[path]
    names = {name for table in (SHARED, own) for kind in table.values() for name, _ in kind}
    nulls = dict.fromkeys(names - body.keys())
    assert len(nulls) > 70
    answer = server.post(path, {**nulls, **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "name", "value"), cases("HARMLESS"))
def test_what_is_not_done_is_refused_by_its_name(server: LiveServer, path: str, name: str, value: Any) -> None:
    is_flag, is_number = isinstance(value, bool), isinstance(value, (int, float))
    other = not value if is_flag else value + 4 if is_number else {"x": "y"}
    answer = server.post(path, {**ENDPOINTS[path][0], name: other})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert "not supported" in error["message"]


@pytest.mark.parametrize(("path", "name", "value"), cases("REFUSED"))
def test_what_is_not_known_is_refused_by_its_name(server: LiveServer, path: str, name: str, value: Any) -> None:
    answer = server.post(path, {**ENDPOINTS[path][0], name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].split(".")[0] == name
    assert name in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("name", "near"), [("max_token", "max_tokens"), ("guided_jsn", "guided_json")])
def test_a_misspelt_field_is_told_its_neighbour(server: LiveServer, path: str, name: str, near: str) -> None:
    error = server.post(path, {**ENDPOINTS[path][0], name: 3}).json()["error"]
    assert error["message"] == f"unrecognized request argument '{name}' (did you mean '{near}'?)"


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        ("/v1/completions", "max_completion_tokens", "called max_tokens"),
        ("/v1/completions", "max_new_tokens", "called max_tokens"),
        ("/v1/chat/completions", "max_new_tokens", "called max_completion_tokens"),
        ("/v1/completions", "extra_body", "beside the others"),
        ("/v1/responses", "extra_body", "beside the others"),
        ("/v1/chat/completions", "system", "role system"),
    ],
)
def test_a_field_of_another_api_is_told_its_name_here(server: LiveServer, path: str, name: str, hint: str) -> None:
    """The nearest name is another field: min_tokens, extra_key, stream."""
    body = ENDPOINTS[path][0] if path in ENDPOINTS else {"input": "hello"}
    error = server.post(path, {**body, name: 1}).json()["error"]
    assert (error["param"], hint in error["message"]) == (name, True), error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True, "no_such": 1}}, "stream_options.no_such"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs.jsno"),
        ({"tools": [{**TOOL, "no_such": 1}]}, "tools.0.no_such"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"messages": [*HELLO, {"role": "user", "contents": "x"}]}, "messages.1.content"),
        ({"messages": [{"role": "system", "content": None}, *HELLO]}, "messages.0.content"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(server: LiveServer, fields: Any, param: str) -> None:
    body = {"messages": HELLO, "stream": True, **fields}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == param


def test_every_field_of_the_openai_package_is_decided() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    for theirs, own in (
        (completion_create_params.CompletionCreateParamsBase, COMPLETIONS),
        (chat_params.CompletionCreateParamsBase, CHATS),
    ):
        decided = {name for table in (SHARED, own) for kind in table.values() for name, _ in kind}
        assert set(theirs.__annotations__) <= decided


@pytest.mark.parametrize("name", ["", None, "default", "tiny"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_whoever_names_no_model_gets_the_one_that_is_served(server: LiveServer, path: str, name: Any) -> None:
    assert server.post(path, {**ENDPOINTS[path][0], "model": name}).json()["model"] == "tiny"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_another_model_is_404(server: LiveServer, path: str) -> None:
    answer = server.post(path, {**ENDPOINTS[path][0], "model": "gpt-4o"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "developer", "content": "hello", "name": "me"},
        {"role": "system", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": "no",
            "audio": None,
            "annotations": [],
            "tool_calls": None,
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "index": 0, "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": "x", "function_call": None, "reasoning": "because"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "function", "name": "f", "content": "4"},
    ],
)
def test_messages_of_every_form_are_read(server: LiveServer, message: Any) -> None:
    body = {"messages": [*HELLO, message, *HELLO], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
