"""Text comes out of tokens piece by piece as `decode` would give it at once, for every kind of tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from sgl.grammar.vocabulary.token_table import TokenTable
from sgl.runtime.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from sgl.runtime.text.tokenizer import token_table
from tests.tiny_tokenizers import WITH_TABLE, WITHOUT_TABLE, WORDS, byte_level, sentencepiece

TEXTS = st.lists(st.sampled_from(WORDS.split(" ")) | st.text(max_size=8), max_size=8).map(" ".join)


@cache
def made(name: str) -> Backend:
    return {**WITH_TABLE, **WITHOUT_TABLE}[name]()


@cache
def table_of(name: str) -> TokenTable:
    table = token_table(made(name))
    assert table is not None
    return table


def pieces(detokenizer: Detokenizer, output: Sequence[int]) -> list[str]:
    """One for each token, and what flush gives."""
    return [*[detokenizer.feed(token_id) for token_id in output], detokenizer.flush()]


def added_text(decode: Callable[[list[int]], str], prompt: list[int], output: list[int]) -> str:
    """What decode(prompt + output) adds to decode(prompt)."""
    before, after = decode(prompt), decode(prompt + output)
    return after[len(os.path.commonprefix([before, after])) :]  # noqa: RUF071  characters are meant


def windows(backend: Backend, prompt: Sequence[int], *, skip: bool = True) -> WindowDetokenizer:
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return WindowDetokenizer(
        lambda ids: backend.decode(ids, skip_special_tokens=skip),
        prompt,
        skipped_ids=special if skip else frozenset(),
    )


@st.composite
def split_texts(draw: Any, backend: Backend) -> tuple[list[int], list[int]]:
    """The tokens of a text, with control tokens here and there, cut between two characters into prompt and output."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    parts = draw(st.lists(TEXTS | st.sampled_from(added), max_size=4) if added else st.lists(TEXTS, max_size=2))
    ids = backend.encode("".join(parts)).ids
    cut = draw(st.integers(0, len(ids)))
    while cut and _has_partial_character(backend, ids[:cut]):
        cut -= 1
    return ids[:cut], ids[cut:]


def _has_partial_character(backend: Backend, ids: list[int]) -> bool:
    return backend.decode(ids, skip_special_tokens=False).count("\ufffd") > sum(
        "\ufffd" in (backend.id_to_token(token_id) or "") for token_id in ids
    )


def random_ids(backend: Backend) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=24)


@pytest.mark.parametrize("name", WITH_TABLE)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_what_the_output_adds_to_the_prompt(name: str, data: st.DataObject, skip: bool) -> None:
    backend = made(name)
    prompt, output = data.draw(split_texts(backend))
    detokenizer = ByteDetokenizer(table_of(name), prompt, None if skip else frozenset())
    expected = added_text(lambda ids: backend.decode(ids, skip_special_tokens=skip), prompt, output)
    assert "".join(pieces(detokenizer, output)) == expected


@pytest.mark.parametrize("name", ["byte level", "metaspace", "characters"])
@given(data=st.data(), skip=st.booleans())
def test_any_ids_whatever_decode_as_the_tokenizer_decodes_them(name: str, data: st.DataObject, skip: bool) -> None:
    backend = made(name)
    prompt, output = data.draw(random_ids(backend)), data.draw(random_ids(backend))
    detokenizer = ByteDetokenizer(table_of(name), prompt, None if skip else frozenset())
    expected = added_text(lambda ids: backend.decode(ids, skip_special_tokens=skip), prompt, output)
    assert "".join(pieces(detokenizer, output)) == expected


@given(data=st.data())
def test_only_the_invalid_bytes_of_a_run_of_byte_tokens_become_replacement_characters(data: st.DataObject) -> None:
    backend = made("byte fallback")
    byte_id = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    likely = st.sampled_from([*"é你😀".encode(), 0xFF, 0xC0, 0xED, 0xA0, 0x41])
    output = [byte_id[byte] for byte in data.draw(st.lists(likely | st.integers(0, 255), max_size=12))]
    output = [*output, backend.token_to_id("a"), *output[::2]]
    letter = "▁a" if backend.token_to_id("▁a") is not None else "a"
    prompt = [backend.token_to_id(letter)]
    whole = bytes(int(t[3:5], 16) if t.startswith("<0x") else ord(t) for t in map(backend.id_to_token, output))
    expected = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in whole.decode(errors="surrogateescape"))
    text = "".join(pieces(ByteDetokenizer(table_of("byte fallback"), prompt), output))
    assert text == expected
    if "\ufffd" not in backend.decode(output):
        assert text == added_text(backend.decode, prompt, output)


@pytest.mark.parametrize("name", WITH_TABLE)
@given(data=st.data())
def test_a_character_comes_with_its_last_byte_and_not_before(name: str, data: st.DataObject) -> None:
    backend, table = made(name), table_of(name)
    prompt = backend.encode("a").ids
    output = [i for i in backend.encode(data.draw(TEXTS)).ids if i not in table.special_ids]
    detokenizer, sent, so_far = ByteDetokenizer(table, prompt), "", b""
    for token_id in output:
        sent += detokenizer.feed(token_id)
        so_far += table.token_bytes[token_id]
        assert sent == so_far.decode(errors="ignore")
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_what_is_left_of_a_character_at_the_end_is_flushed(make: Callable[[], Backend]) -> None:
    backend = make()
    table = token_table(backend)
    assert table is not None
    by_bytes = {data: token_id for token_id, data in enumerate(table.token_bytes)}
    first_two = [by_bytes[bytes([byte])] for byte in "😀".encode()[:2]]
    detokenizer = ByteDetokenizer(table, [by_bytes[b"a"]])
    assert [detokenizer.feed(token_id) for token_id in first_two] == ["", ""]
    assert detokenizer.flush() == backend.decode([by_bytes[b"a"], *first_two])[1:]
    assert detokenizer.flush() == ""


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    backend, table = made("byte level"), table_of("byte level")
    first, *others = [backend.get_vocab()[token] for token in "ðŁĺĢ"]  # the bytes of 😀
    detokenizers = ByteDetokenizer(table, [5, first]), windows(backend, [5, first])
    for detokenizer in detokenizers:
        assert pieces(detokenizer, others) == ["", "", "😀", ""]
    for detokenizer in ByteDetokenizer(table, [5, first]), windows(backend, [5, first]):
        assert pieces(detokenizer, backend.encode("hm").ids)[-2:] == ["m", ""]
    for detokenizer in ByteDetokenizer(table, [5, first]), windows(backend, [5, first]):
        assert pieces(detokenizer, []) == [""]


def test_the_first_word_keeps_its_space_only_behind_text() -> None:
    backend, table = made("byte fallback"), table_of("byte fallback")
    _, word = backend.encode("the").ids
    assert backend.id_to_token(word) == "▁the"
    bos = 1
    assert ByteDetokenizer(table, [bos, word]).feed(word) == " the"
    assert ByteDetokenizer(table, [bos]).feed(word) == "the"
    assert ByteDetokenizer(table, []).feed(word) == "the"
    assert ByteDetokenizer(table, [bos], frozenset()).feed(word) == " the"


def test_ids_without_a_token_have_no_text() -> None:
    backend = made("byte level")
    beyond = backend.get_vocab_size() + 100
    word = backend.encode("cat").ids
    for detokenizer in ByteDetokenizer(table_of("byte level"), word), windows(backend, word):
        assert "".join(pieces(detokenizer, [*word, beyond, *word])) == "catcat"


@pytest.mark.parametrize("name", [*WITHOUT_TABLE, *WITH_TABLE])
@given(data=st.data(), skip=st.booleans())
def test_windows_give_the_same_text_for_any_tokenizer(name: str, data: st.DataObject, skip: bool) -> None:
    backend = made(name)
    prompt, output = data.draw(split_texts(backend))
    expected = added_text(lambda ids: backend.decode(ids, skip_special_tokens=skip), prompt, output * 3)
    assert "".join(pieces(windows(backend, prompt, skip=skip), output * 3)) == expected


@given(data=st.data())
def test_windows_never_show_a_replacement_character_too_early(data: st.DataObject) -> None:
    backend = made("byte level")
    text = data.draw(TEXTS)
    assert "\ufffd" in text or not any(
        "\ufffd" in piece for piece in pieces(windows(backend, []), backend.encode(text).ids)
    )


@given(ids=st.lists(st.integers(0, 255), min_size=60, max_size=120))
def test_windows_survive_a_long_run_of_invalid_bytes(ids: list[int]) -> None:
    """No text is lost: as much as 64 bytes of rubbish may come together, later text still comes at once."""
    backend = made("byte level")
    rubbish = [token_id for token_id in ids if table_of("byte level").pieces[token_id] is None]
    word = backend.encode(" cat and dog").ids
    detokenizer = windows(backend, word)
    text = "".join(pieces(detokenizer, [*rubbish, *word, *word]))
    assert text.endswith(" cat and dog cat and dog")
    assert text == added_text(backend.decode, word, [*rubbish, *word, *word])


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_a_decoder_that_does_more_than_join_has_no_table(name: str) -> None:
    assert token_table(made(name)) is None


def test_a_table_that_the_tokenizer_contradicts_is_refused() -> None:
    class Shouting:
        """A tokenizer whose decode does what its decoder does not say."""

        def __init__(self, backend: Backend) -> None:
            self.backend, self.decoder = backend, backend.decoder

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens)).upper()

    assert token_table(Shouting(made("byte level"))) is None


REAL = ["gpt2", "qwen2.5", "mistral-v3", "stories260K", "stories260K-qwen2", "babyllama-105"]


@pytest.fixture(scope="module", params=REAL)
def real(
    request: pytest.FixtureRequest, unpacked: Callable[[str], Path], checkpoint: Callable[[str], Path]
) -> tuple[Backend, TokenTable]:
    name = str(request.param)
    folder = unpacked("tokenizers") / name if "-v3" in name or name in REAL[:2] else checkpoint(name)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    table = token_table(backend)
    assert table is not None
    return backend, table


@given(data=st.data(), skip=st.booleans())
def test_real_tokenizers_stream_what_they_decode(
    real: tuple[Backend, TokenTable], data: st.DataObject, skip: bool
) -> None:
    backend, table = real
    prompt, output = data.draw(split_texts(backend))
    expected = added_text(lambda ids: backend.decode(ids, skip_special_tokens=skip), prompt, output)
    byte_wise = ByteDetokenizer(table, prompt, None if skip else frozenset())
    assert "".join(pieces(byte_wise, output)) == expected
    assert "".join(pieces(windows(backend, prompt, skip=skip), output)) == expected


@given(data=st.data())
def test_real_tokenizers_stream_any_ids_whatever(real: tuple[Backend, TokenTable], data: st.DataObject) -> None:
    backend, table = real
    output = data.draw(random_ids(backend))
    text = "".join(pieces(ByteDetokenizer(table, []), output))
    expected = backend.decode(output)
    if table.invalid == "surrogateescape" and "\ufffd" in expected:  # runs of byte tokens go bad as a whole there
        expected = table.decode(output, skip_special_tokens=True)
    assert text == expected
