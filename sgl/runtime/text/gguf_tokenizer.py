"""The tokenizer of a GGUF file, equal to the one that the model was published with.

The file has tokens, merges or scores, and names the way in which texts are cut into words. Names that are not known
here are refused: a similar way gives other tokens, and nobody notices. (transformers' own conversion takes GPT-2's way
instead, also for SmolLM, and leaves out Qwen's normalisation.)
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sgl.errors import ModelError, TokenizerError
from sgl.runtime.gguf import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MAX_CUTS = 1 << 28  # sum of the squares of the tokens' lengths

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), behavior="isolated")


_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_WAYS: dict[str, list[Any]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "qwen2": [_words(_LETTERS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"), _BYTES],
    "llama-bpe": [_words(_LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"), _BYTES],
    "tekken": [_words("|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"), _BYTES],
    "gpt-4o": [
        _words("|".join(f"{its}{_SHORTENED}?" for its in _CASED) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        _BYTES,
    ],
}
_WITH_BOS = ("llama-bpe", "tekken")
_WHOLE_WORDS = (*_WITH_BOS, "gpt-4o")  # a word that is a token is not merged from parts


def load_gguf_tokenizer(path: str) -> Any:
    """A transformers tokenizer, with the file's chat template. Raises TokenizerError and WeightsError."""
    from transformers import PreTrainedTokenizerFast

    its = _Vocabulary(GgufFile(path))
    kind = its.get("ggml.model", str, "nothing")
    if kind not in ("gpt2", "llama"):
        raise its.error(f"a tokenizer of the kind {kind!r:.100} is not supported; supported: gpt2, llama")
    try:
        special = {name: its.token(key) for name, key in _SPECIAL.items()}
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=its.byte_level() if kind == "gpt2" else its.sentencepiece(),
            chat_template=its.get("chat_template", str, None),
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in special.items() if token is not None},
        )
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise its.error(f"no tokenizer can be made of it: {error}") from error


class _Vocabulary:
    """What a file says of its tokens."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._tokens: list[str] = self.get("ggml.tokens", list)
        self._types: list[int] = self.get("ggml.token_type", list, [_NORMAL] * len(self._tokens))
        if len(self._types) != len(self._tokens) or not all(isinstance(token, str) for token in self._tokens):
            raise self.error(
                f"it has {len(self._tokens)} tokens, not all texts, or {len(self._types)} types of them"
            )
        used = [i for i, kind in enumerate(self._types) if kind != _UNUSED]
        self._ids = {self._tokens[i]: i for i in used}
        if len(self._ids) != len(used):
            raise self.error("it has a token twice")
        self._pairs = list(zip(self._tokens, self._types, strict=True))

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self._file.metadata.get(f"tokenizer.{key}", default)
        if value is ... or (value is not default and not isinstance(value, kind)):
            raise self.error(f"tokenizer.{key} is missing, or no {kind.__name__}")
        return value

    def error(self, message: str) -> TokenizerError:
        path = self._file.path
        return TokenizerError(
            f"{path}: {message} (tokenizer_path= may name a folder with tokenizer.json)", path=path
        )

    def token(self, name: str) -> str | None:
        token_id = self.get(f"ggml.{name}_token_id", int, None)
        if token_id is not None and not 0 <= token_id < len(self._tokens):
            raise self.error(f"its {name} token is {token_id}, and it has {len(self._tokens)} tokens")
        return None if token_id is None else self._tokens[token_id]

    def byte_level(self) -> Tokenizer:
        """BPE over bytes, which are written as letters."""
        way = self.get("ggml.pre", str, "default")
        if way not in _WAYS:
            raise self.error(f"it cuts texts into words in the way {way!r:.100}; supported: {', '.join(_WAYS)}")
        merges = [tuple(merge.split(" ")) for merge in self.get("ggml.merges", list)]
        tokenizer = Tokenizer(models.BPE(vocab=self._ids, merges=merges, ignore_merges=way in _WHOLE_WORDS))
        if way == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_WAYS[way])
        tokenizer.decoder = decoders.ByteLevel()
        return self._finished(tokenizer, adds_bos=way in _WITH_BOS)

    def sentencepiece(self) -> Tokenizer:
        """BPE over characters, with a token for each byte: those two merge that make the token with the best score."""
        scores, ids = self.get("ggml.scores", list), self._ids
        if len(scores) != len(self._tokens) or sum(len(token) ** 2 for token in ids) > _MAX_CUTS:
            raise self.error(
                f"it has {len(self._tokens)} tokens and {len(scores)} scores, or tokens that are too long"
            )
        cuts = ((token, token[:cut], token[cut:]) for token in ids for cut in range(1, len(token)))
        merges = [(-scores[ids[token]], ids[a], ids[b], a, b) for token, a, b in cuts if a in ids and b in ids]
        tokenizer = Tokenizer(
            models.BPE(
                vocab=ids,
                merges=[(a, b) for *_, a, b in sorted(merges)],
                unk_token=self.token("unknown")
                or next((its for its, kind in self._pairs if kind == _UNKNOWN), None),
                fuse_unk=True,
                byte_fallback=_BYTE in self._types,
            )
        )
        before = self.get("ggml.add_space_prefix", bool, True)
        steps = [*([normalizers.Prepend("▁")] if before else []), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        undone = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if before else [])])
        return self._finished(tokenizer, adds_bos=True)

    def _finished(self, tokenizer: Tokenizer, *, adds_bos: bool) -> Tokenizer:
        """With its added tokens, and what stands around each text."""
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
                for token, kind in self._pairs
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ]
        )
        before = self.token("bos") if self.get("ggml.add_bos_token", bool, adds_bos) else None
        after = self.token("eos") if self.get("ggml.add_eos_token", bool, False) else None
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[token for token in (before, "$A", after) if token],
                special_tokens=[(token, self._ids[token]) for token in {before, after} if token],
            )
        return tokenizer
