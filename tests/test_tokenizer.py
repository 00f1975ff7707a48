"""Text to token ids: equal to the tokenizer's own, never control tokens from a user's text, and typed errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sgl.errors import InvalidRequest, TokenizerError
from sgl.runtime.text.known_texts import KnownTexts
from sgl.runtime.text.tokenizer import Tokenizer
from tests import tiny_tokenizers

KINDS: dict[str, Callable[[], Any]] = {**tiny_tokenizers.WITH_TABLE, **tiny_tokenizers.WITHOUT_TABLE}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|file|>", "<s>", "</s>", "[SEP]"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def wrap(kind: str, **options: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **options))


TOKENIZERS = {kind: wrap(kind) for kind in KINDS}
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL, " the cat", "é", "    "]))).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_ids_are_those_of_the_library(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.encode(text).tolist() == tokenizer.hf.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == tokenizer.hf.encode(
        text, add_special_tokens=False
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_a_users_text_never_becomes_a_control_token(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()
    control = {tokenizer.hf.convert_tokens_to_ids(token) for token in CONTROL if token in tokenizer.hf.get_vocab()}
    assert not control & set(ids)


@given(text=texts)
def test_literal_control_tokens_come_back_as_they_were_written(text: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
@given(many=st.lists(texts, max_size=5), allow_special=st.booleans())
def test_texts_are_encoded_together_as_each_alone(kind: str, many: list[str], allow_special: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    together = tokenizer.encode_all(many, allow_special=allow_special)
    assert together == [tokenizer.encode(text, allow_special=allow_special).tolist() for text in many]


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is half of a surrogate pair"):
        TOKENIZERS["byte level"].encode("a\ud800")
    with pytest.raises(InvalidRequest, match="not text that can be encoded"):
        TOKENIZERS["byte level"].encode_all(["a", "a\ud800"])


def test_more_tokens_than_the_model_has_embeddings_for_is_refused() -> None:
    tokenizer = TOKENIZERS["byte level"]
    tokenizer.check_fits(tokenizer.vocab_size)
    with pytest.raises(TokenizerError, match=rf"largest token id is {tokenizer.vocab_size - 1}.*ids 0 to 99"):
        tokenizer.check_fits(100)


def test_added_tokens_without_embeddings_are_text(tmp_path: Path) -> None:
    """As Gemma 3 1B's for images is; not one that ends texts."""
    hf = wrap("byte level", chat_template="{{ messages[0].content }}").hf
    rows = max(hf.get_vocab().values()) + 1
    hf.add_tokens(["<image_soft_token>", "<pad>"], special_tokens=True)
    hf.pad_token = "<pad>"
    hf.save_pretrained(tmp_path)
    whole, tokenizer = Tokenizer.load(tmp_path), Tokenizer.load(tmp_path, vocab_size=rows)
    assert (whole.vocab_size, tokenizer.vocab_size) == (rows + 2, rows)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a <image_soft_token> b"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids < rows).all()
    assert tokenizer.decode(ids) == text
    assert tokenizer.control_tokens == whole.control_tokens - {"<image_soft_token>", "<pad>"}
    hf.eos_token = "<pad>"
    hf.save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=f"largest token id is {rows + 1}"):
        Tokenizer.load(tmp_path, vocab_size=rows)


def test_templates_render_and_refuse() -> None:
    tokenizer = wrap("byte level", chat_template=TEMPLATE)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>hi<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    with pytest.raises(InvalidRequest, match="has no chat template"):
        TOKENIZERS["byte level"].apply_chat_template([{"role": "user", "content": "hi"}])
    refusing = wrap("byte level", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        refusing.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is empty"):
        Tokenizer.load(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(TokenizerError, match=r"has no tokenizer: expected a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded"):
        Tokenizer.load(tmp_path)


TURNS = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("files", "with_tools"),
    [
        ({"chat_template.jinja": TURNS}, ""),
        ({"chat_template.json": json.dumps({"chat_template": TURNS})}, ""),
        (
            {
                "chat_template.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "default", "template": TURNS},
                            {"name": "tool_use", "template": "tools" + TURNS},
                        ]
                    }
                )
            },
            "tools",
        ),
        ({"chat_template.json": json.dumps({"chat_template": {"default": TURNS}})}, ""),
        ({"chat_template.jinja": TURNS, "additional_chat_templates/tool_use.jinja": "tools" + TURNS}, "tools"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "default", "template": TURNS},
                            {"name": "tool_use", "template": "tools" + TURNS},
                        ]
                    }
                )
            },
            "tools",
        ),
    ],
)
def test_templates_come_from_each_file_that_models_have_them_in(
    tmp_path: Path, files: dict[str, str], with_tools: str
) -> None:
    TOKENIZERS["byte level"].hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    tokenizer = Tokenizer.load(tmp_path)
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_template == TURNS
    assert tokenizer.apply_chat_template(turns) == "<user>hi"
    assert tokenizer.apply_chat_template(turns, tools=TOOLS) == f"{with_tools}<user>hi"


@pytest.mark.parametrize(
    "content",
    [[], {}, {"chat_template": None}, {"chat_template": [TURNS]}, {"chat_template": [{"name": "default"}]}],
)
def test_a_file_with_no_template_in_it_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    TOKENIZERS["byte level"].hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text(json.dumps(content))
    with pytest.raises(
        TokenizerError, match=r"chat_template.json: chat_template must be a text, or a list of objects"
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "packages"), [(b"\n\x0e\n\x05<unk>", "sentencepiece protobuf"), (b"IQ== 0\nIg== 1\n", "tiktoken")]
)
def test_packages_that_read_a_tokenizer_model_are_named(
    tmp_path: Path, content: bytes, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr("sgl.runtime.text.tokenizer.find_spec", lambda module: None)
    with pytest.raises(TokenizerError, match=f"tokenizer.model is read with .* missing: pip install {packages}$"):
        Tokenizer.load(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded"):
        Tokenizer.load(tmp_path)
    assert not asked
    assert not (tmp_path / "was-run").exists()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "mistral-v3"])
def test_real_tokenizers_encode_as_the_library_does(name: str, unpacked: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(unpacked("tokenizers") / name)
    for text in [
        "Hello, world!",
        " two  spaces",
        "naïve café 😀 你好",
        "def f(x):\n    return x ** 2\n",
        "<|endoftext|> </s>",
    ]:
        assert tokenizer.encode(text).tolist() == tokenizer.hf.encode(text)
        literal = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        assert not set(literal.tolist()) & tokenizer.special_ids
        assert tokenizer.decode(literal) == text
    for token_id, added in tokenizer.hf.added_tokens_decoder.items():
        if not added.special and not added.content.startswith("<|"):
            assert tokenizer.encode(added.content, add_special_tokens=False, allow_special=False) == [token_id]


def test_other_added_tokens_keep_their_ids_when_control_tokens_are_literal() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("<|im_end|>    x", add_special_tokens=False, allow_special=False)
    assert tokenizer.hf.convert_tokens_to_ids("    ") in ids


def test_known_texts_are_encoded_once_and_the_new_ones_together() -> None:
    calls: list[list[str]] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        calls.append(list(texts))
        return [list(text.encode()) for text in texts]

    known = KnownTexts(encode, 3)
    assert list(map(list, known(["a", "b", "a"]))) == [[97], [98], [97]]
    known(["a", "c"])
    known(["c", "a", "b"])
    assert calls == [["a", "b"], ["c"]]
    known(["d"])  # for which the one met longest ago is forgotten
    known(["a", "b", "d"])
    known(["c"])
    assert calls[2:] == [["d"], ["c"]]
    assert list(map(list, known(list("abcdefgh")))) == [[byte] for byte in b"abcdefgh"]


def test_known_texts_are_no_longer_than_so_many_characters_together() -> None:
    known = KnownTexts(lambda texts: [list(text.encode()) for text in texts], 100, most_characters=10)
    known(["a" * 4, "b" * 4])
    known(["c" * 4, "a" * 4])
    assert list(known._known) == ["a" * 4, "c" * 4], "the one met longest ago is forgotten"
    assert list(map(len, known(["d" * 11, "e"]))) == [11, 1]
    assert sum(map(len, known._known)) <= 10


def test_known_texts_stay_right_and_few_where_threads_share_them() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        if "bad" in texts:
            raise InvalidRequest("bad", param="prompt")
        return [list(text.encode()) for text in texts]

    known = KnownTexts(encode, 6)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            texts = rng.choices([*"abcdefghijkl", "bad"], k=rng.randrange(5))
            if "bad" in texts:
                with pytest.raises(InvalidRequest):
                    known(texts)
            else:
                assert list(map(list, known(texts))) == [list(text.encode()) for text in texts]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    assert len(known._known) <= 6
