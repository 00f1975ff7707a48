"""The tokens of program streams: encoded as a whole however text comes, safe from users' control tokens, cut at
stops; and the trie that scores candidates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sgl.runtime.batch import Logprobs
from sgl.runtime.program.tokens import NO_TOKENS, Encoder, Piece, StreamTokens
from sgl.runtime.program.trie import CandidateTrie
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import Request
from sgl.runtime.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import WITH_TABLE, wordpiece

WORDS = st.sampled_from(
    ["the", " cat", "s", "'s", "\n", "\n\n", " ", "    ", "don't", "é", "你好", "😀", "1", "23", "."]
)


def tokenizer_of(backend: object) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


TOKENIZERS = {name: tokenizer_of(make()) for name, make in WITH_TABLE.items()}


def text_of(tokenizer: Tokenizer, tokens: StreamTokens, start: int) -> str:
    assert tokenizer.table is not None
    return b"".join(tokenizer.table.token_bytes[i] for i in tokens.ids[start:].tolist()).decode()


@given(
    st.sampled_from(["byte level", "byte fallback", "byte fallback, space kept"]),
    st.lists(st.lists(WORDS), max_size=12),
)
def test_pieces_do_not_show_in_the_tokens(name: str, parts: list[list[str]]) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = Encoder(tokenizer)
    tokens = NO_TOKENS
    for part in parts:
        tokens = encoder.extend(tokens, [(word, False) for word in part])
    whole = "".join(word for part in parts for word in part)
    assert tokens.ids.tolist() == (tokenizer.encode(whole).tolist() if parts else [])


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "mistral-v3"])
def test_long_texts_are_extended_by_encoding_their_end_anew(name: str, unpacked: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(unpacked("tokenizers") / name)
    encoder = Encoder(tokenizer)
    spliced = 0

    @given(st.lists(WORDS, min_size=150, max_size=300), st.lists(WORDS, min_size=1, max_size=10))
    @settings(max_examples=60)
    def check(words: list[str], more: list[str]) -> None:
        nonlocal spliced
        text, added = "".join(words), "".join(more)
        tokens = encoder.extend(NO_TOKENS, [(text, False)])
        spliced += encoder._spliced(tokens, [(added, False)]) is not None
        assert encoder.extend(tokens, [(added, False)]).ids.tolist() == tokenizer.encode(text + added).tolist()

    check()
    assert spliced


@given(st.sampled_from(list(TOKENIZERS)), st.lists(WORDS, min_size=1))
def test_text_after_generated_tokens_is_spelled_exactly(name: str, words: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = Encoder(tokenizer)
    text = "".join(words)
    if tokenizer.decode(tokenizer.encode(text)) != text:  # characters that this vocabulary lacks
        return
    before = encoder.extend(NO_TOKENS, [("the cat", False)]).generated([7, 8])
    after = encoder.extend(before, [(word, False) for word in words])
    assert after.ids[: before.num_fixed].tolist() == before.ids.tolist()
    if name != "metaspace":  # words without the space before them are no pieces of its vocabulary
        assert text_of(tokenizer, after, before.num_fixed) == text


CONTROL = "<|im_end|>"


@given(
    st.lists(
        st.tuples(st.sampled_from(["<|im_", "end|>", CONTROL, "hat", "<", "|>", " "]), st.booleans()), max_size=8
    )
)
def test_users_never_write_control_tokens_and_templates_do(pieces: list[Piece]) -> None:
    """Also not in two pieces that spell one together, nor together with a template's text."""
    tokenizer = TOKENIZERS["byte level"]
    control = tokenizer.hf.convert_tokens_to_ids(CONTROL)
    encoder = Encoder(tokenizer)
    at_once = encoder.extend(NO_TOKENS, pieces)
    one_by_one = NO_TOKENS
    for piece in pieces:
        one_by_one = encoder.extend(one_by_one, [piece])
    written = 0
    run = ""
    for text, is_template in [*pieces, ("", False)]:  # neighbours of a template count as one text
        if is_template:
            run += text
        else:
            written += run.count(CONTROL)
            run = "" if text else run
    for tokens in (at_once, one_by_one):
        assert tokens.ids.tolist().count(control) == written
        assert text_of(tokenizer, tokens, 0) == "".join(text for text, _ in pieces)
    assert at_once.ids.tolist() == one_by_one.ids.tolist()


def test_a_long_run_does_not_hide_a_control_token_at_its_end() -> None:
    tokenizer = TOKENIZERS["byte level"]
    control = tokenizer.hf.convert_tokens_to_ids(CONTROL)
    encoder = Encoder(tokenizer)
    tokens = encoder.extend(NO_TOKENS, [("the cat sat " * 40 + "<|im_e", False)])
    assert control not in encoder.extend(tokens, [("nd|>", False)]).ids
    assert control not in encoder.extend(tokens, [("nd|>", True)]).ids
    assert control in encoder.extend(tokens, [(CONTROL, True)]).ids


def test_what_a_tokenizer_puts_before_a_text_comes_once_and_not_before_a_template() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    encoder = Encoder(tokenizer)
    bos = (
        tokenizer.hf.bos_token_id
        if tokenizer.hf.bos_token_id is not None
        else tokenizer.hf.convert_tokens_to_ids("<s>")
    )
    first = encoder.extend(NO_TOKENS, [("the cat", False)])
    assert first.ids[0] == bos
    later = encoder.extend(first.generated([9]), [("the cat", False)])
    assert later.ids.tolist().count(bos) == 1
    assert encoder.extend(NO_TOKENS, []).ids.tolist() == [bos]
    assert encoder.extend(NO_TOKENS, [("<s>", True), ("the cat", False)]).ids.tolist().count(bos) == 1
    assert encoder.extend(first, [("<s>", True)]).ids.tolist().count(bos) == 1
    long = encoder.extend(NO_TOKENS, [("the cat sat " * 40, False)])
    assert encoder.extend(long, [("<s>", True)]).ids.tolist().count(bos) == 1


@given(st.sampled_from(["byte level", "byte fallback"]), st.lists(WORDS, min_size=1, max_size=8), st.data())
def test_the_tokens_up_to_a_stop_and_the_rest_spell_the_text(
    name: str, words: list[str], data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("the cat")
    output = tokenizer.encode("\n" + "".join(words), add_special_tokens=False).tolist()
    whole = tokenizer.decode([*prompt, *output]).removeprefix(tokenizer.decode(prompt))
    text = whole[: data.draw(st.integers(0, len(whole)))]
    count, rest = Encoder(tokenizer).num_kept(prompt, output, text)
    assert tokenizer.decode([*prompt, *output[:count]]) + rest == tokenizer.decode(prompt) + text
    following = tokenizer.decode([*prompt, *output[: count + 1]])
    assert (
        count == len(output)
        or len(following) > len(tokenizer.decode(prompt) + text)
        or not rest
        or "�" in following
    )


def test_half_characters_are_not_kept() -> None:
    tokenizer = TOKENIZERS["byte level"]
    prompt = tokenizer.encode("the cat")
    smile = [tokenizer.hf.convert_tokens_to_ids(letter) for letter in "ðŁĺĢ"]
    assert tokenizer.decode(smile) == "😀"
    assert Encoder(tokenizer).num_kept(prompt, [prompt[0], *smile[:2]], tokenizer.decode(prompt[:1])) == (1, "")
    assert Encoder(tokenizer).num_kept(prompt, smile, "") == (0, "")


def test_a_token_that_begins_another_character_is_not_kept(unpacked: Callable[[str], Path]) -> None:
    """GPT-2 writes a space and the beginning of an opening quote as one token."""
    tokenizer = Tokenizer.load(unpacked("tokenizers") / "gpt2")
    output = tokenizer.encode("so “on”").tolist()
    assert tokenizer.decode(output[:2]) == "so \ufffd"
    assert Encoder(tokenizer).num_kept(tokenizer.encode("and"), output, "so ") == (1, " ")
    assert Encoder(tokenizer).num_kept(tokenizer.encode("and"), output, "so “")[1] == ""


def test_a_tokenizer_without_a_table_works_too() -> None:
    encoder = Encoder(tokenizer_of(wordpiece()))
    tokens = encoder.extend(NO_TOKENS, [("the cat", False)])
    assert len(encoder.extend(tokens.generated([5]), [(" sat", False)]).ids) > len(tokens.ids) + 1


# ── the trie of candidates ──────────────────────────────────────────────────────────────────────────────────────

CANDIDATES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)


@given(CANDIDATES, st.booleans())
def test_each_candidate_reads_its_scores_off_a_row_that_passes_it(
    candidates: list[tuple[int, ...]], has_prefix: bool
) -> None:
    """With a model whose logprob of a token is a number made of all tokens up to it."""
    prefix = np.array([9, 9] if has_prefix else [], np.int32)
    trie = CandidateTrie(prefix, candidates)

    def logprob(before: list[int], token: int) -> float:
        return -float(hash((tuple(before), token)) % 1000)

    requests = []
    for row, prompt in zip(trie.rows, trie.prompts(), strict=True):
        ids = prompt.tolist()
        request = Request(1, prompt, SamplingParams(max_new_tokens=0), 0, 0, logprob_start=trie.logprob_start)
        for position in range(trie.logprob_start, len(ids)):
            before = ids[: position + 1]
            given = np.array([[logprob(before, token) for token in row.last_tokens]], np.float32)
            if position + 1 < len(ids):
                chosen = np.array([logprob(before, ids[position + 1])], np.float32)
                request.input_logprobs.append(Logprobs(chosen, given=given))
            else:
                request.output_logprobs.append(Logprobs(np.zeros(1, np.float32), given=given))
        requests.append(request)
    for candidate, scores in zip(candidates, trie.logprobs(requests), strict=True):
        whole = [*prefix.tolist(), *candidate]
        expected = [logprob(whole[:i], whole[i]) if i else None for i in range(len(prefix), len(whole))]
        assert scores == expected


@pytest.mark.parametrize(
    ("candidates", "paths"),
    [
        ([(1,), (2,), (3,)], [()]),
        ([(1, 2), (1, 3), (1, 2, 4)], [(1, 2)]),
        ([(1, 2), (3, 4)], [(1,), (3,)]),
        ([(1, 2), (1, 2)], [(1,)]),
    ],
)
def test_rows_are_the_deepest_inner_nodes(candidates: list[tuple[int, ...]], paths: list[tuple[int, ...]]) -> None:
    assert [row.path for row in CandidateTrie(np.array([5], np.int32), candidates).rows] == paths
