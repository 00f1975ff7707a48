"""GGUF files that are damaged or made to harm end in a typed error, before memory is taken for what they claim."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import ConfigError, ModelError, WeightsError
from sgl.runtime.gguf import GgufFile, is_gguf
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.text.tokenizer import Tokenizer
from tests.tiny_gguf import finish, tiny_gguf
from tests.tiny_models import byte_tokenizer

HUGE = [1 << 20, 1 << 31, 1 << 40, 10**12, (1 << 62) - 1, (1 << 64) - 1]


@pytest.fixture(scope="module", params=["llama", "gpt-oss"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer(384).backend_tokenizer
    options = {"num_hidden_layers": 1, "experts": "MXFP4"}
    file, _ = tiny_gguf(tmp_path_factory.mktemp("good"), request.param, tokenizer=tokenizer, **options)
    return file


def load(path: Path) -> None:
    config = ModelConfig.from_pretrained(path)
    Tokenizer.load(path, vocab_size=config.vocab_size)
    load_decoder(config, max_positions=16)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def head(num_tensors: int, num_values: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_values)


def file_of(
    path: Path, values: bytes = b"", num_values: int = 0, tensors: bytes = b"", num_tensors: int = 0
) -> Path:
    path.write_bytes(head(num_tensors, num_values) + values + tensors + bytes(64))
    return path


def tensor(sides: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(sides) if num_dims is None else num_dims
    return text(b"t") + struct.pack(f"<I{len(sides)}QIQ", count, *sides, kind, offset)


@given(data=st.data())
def test_a_file_cut_anywhere_is_named(good: Path, data: st.DataObject) -> None:
    whole = good.read_bytes()
    path = good.with_name("cut.gguf")
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WeightsError, match=r"cut\.gguf"):
        GgufFile(path)


@given(data=st.data())
def test_any_damage_to_the_header_ends_in_a_typed_error_or_loads(good: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    length = min(its.start for its in GgufFile(good).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, length - 1))
        number = data.draw(st.sampled_from([*HUGE, 0, 1, 2, 255]) | st.integers(0, (1 << 64) - 1))
        damage = data.draw(
            st.binary(min_size=1, max_size=9)
            | st.just(struct.pack("<I", number & 0xFFFFFFFF))
            | st.just(struct.pack("<Q", number))
        )
        content[at : at + len(damage)] = damage
    path = good.with_name("damaged.gguf")
    path.write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(ModelError, ConfigError):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


@given(data=st.data())
def test_any_numbers_of_tensors_load_or_are_named(good: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    tensors = GgufFile(good).tensors
    name = data.draw(st.sampled_from(sorted(name for name, its in tensors.items() if its.type == "F32")))
    its = tensors[name]
    at = its.start + 4 * data.draw(st.integers(0, its.row_bytes // 4 - 1))
    number = data.draw(st.floats(width=32))
    content[at : at + 4] = struct.pack("<f", number)
    path = good.with_name("numbers.gguf")
    path.write_bytes(content)
    if np.isfinite(number):
        load(path)
        return
    with pytest.raises(WeightsError, match=f"numbers in {name} that are infinite or none") as caught:
        load(path)
    assert caught.value.tensor == name


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_are_refused_before_memory_is_taken(count: int, tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = text(b"k")
    files = {
        "tensors; at most 65536": lambda: file_of(path, num_tensors=count),
        "metadata values; at most 65536": lambda: file_of(path, num_values=count),
        "bytes should follow byte": lambda: file_of(path, struct.pack("<Q", count) + b"k", 1),
        "bytes should follow byte 45": lambda: file_of(path, key + struct.pack("<IQ", 8, count), 1),
        "truncated|arrays of over": lambda: file_of(path, key + struct.pack("<IIQ", 9, 0, count), 1),
        "is truncated|arrays of over": lambda: file_of(path, key + struct.pack("<IIQ", 9, 8, count), 1),
        "truncated: t would end at": lambda: file_of(path, tensors=tensor([count] * 4), num_tensors=1),
        "places t at byte": lambda: file_of(path, tensors=tensor([1], offset=count), num_tensors=1),
    }
    for words, write in files.items():
        with pytest.raises(WeightsError, match=words):
            GgufFile(write())
    if count < 1 << 32:
        with pytest.raises(WeightsError, match=r"dimensions, not 1 to 4"):
            GgufFile(file_of(path, tensors=tensor([1], num_dims=count), num_tensors=1))
        with pytest.raises(WeightsError, match=f"has t in the type {count}; these are read"):
            GgufFile(file_of(path, tensors=tensor([1], kind=count), num_tensors=1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"GGUF", "is truncated: 24 bytes should follow byte 0"),
        (b"GGML" + bytes(60), "not GGUF 2 or 3"),
        (struct.pack("<4sI", b"GGUF", 1) + bytes(60), "version 1: not GGUF 2 or 3"),
        (struct.pack(">4sI", b"GGUF", 3) + bytes(60), "not GGUF 2 or 3, little-endian"),
        (head(0, 1) + text(b"\xff") + bytes(60), "a text that is no UTF-8"),
        (head(0, 1) + text(b"k") + struct.pack("<I", 13), "unknown type 13 at 'k'"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "unknown type 9 at 'k'"),
        (head(0, 2) + (text(b"k") + struct.pack("<IB", 0, 0)) * 2, "has 'k' twice"),
        (head(2, 0) + tensor([1]) * 2, "has 't' twice"),
        (head(1, 0) + tensor([33], kind=2) + bytes(99), r"shape \[33\]: Q4_0 has rows of 32"),
        (head(1, 0) + tensor([4, 0]) + bytes(99), r"gives t the shape \[0, 4\]"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert is_gguf(path)
    with pytest.raises(WeightsError, match=words) as caught:
        ModelConfig.from_pretrained(path)
    assert caught.value.path == str(path)


def test_a_file_that_nobody_may_read_or_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "folder.gguf")
    for path in (tmp_path / "folder.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match=path.name):
            ModelConfig.from_pretrained(path)


def test_tokens_of_any_length_take_bounded_time(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "long.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["▁" * length for length in range(1, 2000)])
    writer.add_token_scores([0.0] * 1999)
    finish(writer)
    with pytest.raises(ModelError, match="tokens that are too long"):
        Tokenizer.load(tmp_path / "long.gguf")
