"""Images in every turn of a conversation, through every protocol: what transformers makes of them, or a reason."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import sgl
from sgl.runtime.engine import Engine
from tests.live_server import LiveServer
from tests.test_vision_doors import QWEN, chat_ids, png
from tests.tiny_vision import PLACE, Oracle, picture, tiny_vision

A, B, C = picture(1), picture(2, 16, 64), picture(3, 80, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("turns"), QWEN)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, QWEN)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with Engine(str(folder), device="cpu", max_total_tokens=4096, check_ledger=True) as engine:
        server = LiveServer(engine)
        yield server
        server.close()
        assert engine.check_ledger() == []


def base(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base(image)}"


def part(given: Image.Image | str) -> dict[str, Any]:
    """Of OpenAI's chats."""
    if isinstance(given, str):
        return {"type": "text", "text": given}
    return {"type": "image_url", "image_url": {"url": url(given)}}


def expected(oracle: Oracle, turns: list[str], images: list[Image.Image]) -> tuple[str, int]:
    """The text of an answer, and how long its prompt is. turns: with an @ for each image."""
    ids = chat_ids(oracle, *(turn.replace("@", PLACE) for turn in turns))
    said = oracle.tokenizer.decode(oracle.greedy(ids, images, 5), skip_special_tokens=True)
    return said, oracle.inputs(ids, images)["input_ids"].shape[1]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS: dict[str, tuple[list[dict[str, Any]], list[str], list[Image.Image]]] = {
    "a tool's result": (
        [
            {"role": "user", "content": [part("a"), part(A)]},
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [part(B), part("r")]},
            {"role": "user", "content": "now?"},
        ],
        ["user\na@", "assistant\nx", "tool\n@r", "user\nnow?"],
        [A, B],
    ),
    "examples": (
        [
            {"role": "system", "content": [part("s"), part(C)]},
            {"role": "user", "content": [part(A), part("q")]},
            {"role": "assistant", "content": [part("it"), part(B)]},
            {"role": "user", "content": [part(A), part(A), part(C)]},
        ],
        ["system\ns@", "user\n@q", "assistant\nit@", "user\n@@@"],
        [C, A, B, A, A, C],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_images_of_any_turn_of_a_chat_are_seen(server: LiveServer, oracle: Oracle, name: str) -> None:
    messages, turns, images = CHATS[name]
    reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0}).json()
    found = reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]
    assert found == expected(oracle, turns, images)


def test_results_of_tools_have_images_in_other_protocols(server: LiveServer, oracle: Oracle) -> None:
    def block(image: Image.Image) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base(image)}}

    result = {"type": "tool_result", "tool_use_id": "c", "content": [block(B), part("r")]}
    turns = [
        {"role": "user", "content": [block(A), part("q")]},
        {"role": "assistant", "content": [part("x"), {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [result, block(C), part("n")]},
    ]
    reply = server.post("/v1/messages", {"messages": turns, "max_tokens": 5, "temperature": 0}).json()
    usage = reply["usage"]
    found = reply["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert found == expected(oracle, ["user\n@q", "assistant\nx", "tool\n@r", "user\n@n"], [A, B, C])

    def seen(image: Image.Image, text: str) -> list[dict[str, Any]]:
        return [{"type": "input_image", "image_url": url(image)}, {"type": "input_text", "text": text}]

    items = [
        {"role": "user", "content": seen(A, "q")},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": seen(B, "r")},
        {"role": "user", "content": seen(A, "n")},
    ]
    asked = {"input": items, "max_output_tokens": 5, "temperature": 0, "store": False}
    reply = server.post("/v1/responses", asked).json()
    found = reply["output"][0]["content"][0]["text"], reply["usage"]["input_tokens"]
    assert found == expected(oracle, ["user\n@q", "assistant\n", "tool\n@r", "user\n@n"], [A, B, A])

    messages = [
        {"role": "user", "content": "q", "images": [base(A), base(B)]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "r", "images": [base(C)]},
    ]
    options = {"num_predict": 5, "temperature": 0}
    reply = server.post("/api/chat", {"messages": messages, "stream": False, "options": options}).json()
    found = reply["message"]["content"], reply["prompt_eval_count"]
    assert found == expected(oracle, ["user\n@@q", "assistant\nx", "tool\n@r"], [A, B, C])


def test_a_final_message_is_continued_behind_its_images(server: LiveServer, oracle: Oracle) -> None:
    def ask(*content: Image.Image | str) -> Any:
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [part(each) for each in content]},
        ]
        body = {"messages": messages, "max_tokens": 5, "temperature": 0, "continue_final_message": True}
        return server.post(
            "/v1/chat/completions", {**body, "add_generation_prompt": False, "return_token_ids": True}
        )

    text = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{PLACE}go"
    ids = oracle.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ask(A, "go").json()["choices"][0]["token_ids"] == oracle.greedy(ids, [A], 5)
    for content in (("go", A), (A,)):
        reply = ask(*content)
        assert reply.status_code == 400
        assert "the final message ends with an image" in reply.json()["error"]["message"]


def test_a_part_that_is_text_and_image_loses_neither_silently(server: LiveServer) -> None:
    for kind in ("text", "image_url"):
        both = {**part(A), "type": kind, "text": "a"}
        reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [both]}]})
        assert reply.status_code == 400
        assert "not both" in reply.json()["error"]["message"]
    for kind in ("input_text", "input_image"):
        item = {"role": "user", "content": [{"type": kind, "text": "a", "image_url": url(A)}]}
        reply = server.post("/v1/responses", {"input": [item], "store": False})
        assert reply.status_code == 400
        assert "not both" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"].startswith("input")
    for fields in ({"text": "a", "image_url": {"url": ""}}, {"text": "a", "image_url": ""}):
        content = [{"type": "text", **fields}, part(A)]
        assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}).ok
    unknown = {**part(A), "type": "imageurl"}
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [unknown]}]})
    assert "texts and images, not 'imageurl'" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("data", "said"), [("", "it is empty"), ("bm9uZQ==", "another format")])
def test_what_is_no_image_is_described_without_an_address(server: LiveServer, data: str, said: str) -> None:
    reply = server.post("/generate", {"text": PLACE, "image_data": data})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert said in message
    assert "0x" not in message


@sgl.function
def looks(s: Any) -> None:
    s += sgl.user_begin() + "look " + sgl.image(A)
    forks = s.fork(3)
    for fork, more in zip(forks, ([sgl.image(B), "b"], ["none"], [sgl.image(A), sgl.image(C)]), strict=True):
        for each in more:
            fork += each
        fork += sgl.user_end() + sgl.assistant_begin() + sgl.gen("said", max_tokens=5, temperature=0)
    forks.join()
    s["branches"] = [fork["said"] for fork in forks]
    s += "end" + sgl.user_end() + sgl.assistant(sgl.gen("said", max_tokens=5, temperature=0))


def test_an_image_of_one_branch_is_seen_there_only(server: LiveServer, oracle: Oracle) -> None:
    found = looks.run(backend=sgl.RuntimeEndpoint(server.url))
    branches = (("@b", [A, B]), ("none", [A]), ("@@", [A, A, C]))
    assert found["branches"] == [expected(oracle, [f"user\nlook @{more}"], images)[0] for more, images in branches]
    assert found["said"] == expected(oracle, ["user\nlook @end"], [A])[0]
