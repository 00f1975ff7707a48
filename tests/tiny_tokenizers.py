"""Tokenizers of a few hundred tokens, one for each way in which tokenizers turn tokens into text."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = (
    "the cat sat on a mat, and the dog ate the hat. don't stop 'til the café is naïve — "
    '你好世界 😀 {"key": [1, 2]}\n'
)
CORPUS = [WORDS, WORDS.upper(), *WORDS.split()] * 4
BOS, EOS = "<s>", "</s>"


def byte_level() -> Tokenizer:
    """GPT-2's kind: BPE over an alphabet of bytes, with a control token, a marker that is not special, and spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<|file|>", special=False), AddedToken("    ", special=False)])
    return tokenizer


def sentencepiece(*, byte_fallback: bool = True, strip: bool = True) -> Tokenizer:
    """Llama's kind: BPE over characters and ▁ for spaces, with a token for each byte, text beginning with a space."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learnt = trained.get_vocab()
    merges = [
        (left, right)
        for token in sorted(learnt, key=learnt.__getitem__)
        for left, right in [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        if left in learnt and right in learnt
    ]
    special = ["<unk>", BOS, EOS]
    single = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    tokens = [*special, *single, *sorted(learnt, key=learnt.__getitem__)]
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " ")]
    steps += [decoders.ByteFallback()] if byte_fallback else []
    steps += [decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's kind: a unigram model, whose vocabulary holds the control tokens as ordinary pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", BOS, EOS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "</s>"], trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind: words continue with ##, and the decoder cleans up spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=160, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_suffix() -> Tokenizer:
    """CLIP's kind: the last token of a word says so, and becomes a space unless it is the last of all."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def whole_words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces. The control token is a word like any other."""
    vocabulary = {word: token_id for token_id, word in enumerate(dict.fromkeys(["<unk>", EOS, *WORDS.split()]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", EOS])
    return tokenizer


WITH_TABLE = {
    "byte level": byte_level,
    "byte fallback": sentencepiece,
    "byte fallback, space kept": lambda: sentencepiece(strip=False),
    "characters": lambda: sentencepiece(byte_fallback=False),
    "metaspace": metaspace,
}
WITHOUT_TABLE = {"word pieces": wordpiece, "word suffix": word_suffix, "whole words": whole_words}
