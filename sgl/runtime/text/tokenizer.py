"""Text → token ids and back: wraps a Hugging Face tokenizer, keeps control tokens out of users' text, and applies
the chat template. Safe from any thread."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl.errors import ContextTooLong, InvalidRequest, TokenizerError, nearest_name
from sgl.grammar.vocabulary.special import is_control
from sgl.grammar.vocabulary.token_table import TokenTable, read_tokens
from sgl.runtime.gguf import is_gguf
from sgl.runtime.text.detokenizer import ByteDetokenizer, Detokenizer, TokenIds, WindowDetokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)

_BEGINNINGS = (
    "tokeniz",
    "vocab",
    "merges",
    "spiece",
    "sentencepiece",
    "tekken",
    "tiktoken",
    "bpe",
    "qwen.tiktoken",
)
"""Of the names of files that transformers may read a tokenizer of."""


class Tokenizer:
    """A `transformers` tokenizer as the runtime uses it."""

    def __init__(self, hf: Any, *, path: str | None = None) -> None:
        """`hf`: a transformers tokenizer; fast ones are set never to truncate or pad."""
        self.hf = hf
        self.path = path
        self._backend: Backend | None = getattr(hf, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.table: TokenTable | None = token_table(self._backend) if self._backend is not None else None
        vocabulary = hf.get_vocab()
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        """The largest token id + 1; smaller ids may be missing."""
        if not self.vocab_size:
            raise TokenizerError(f"the tokenizer of {path or hf!r} has no tokens", path=path)
        self.eos_id: int | None = hf.eos_token_id
        added = hf.added_tokens_decoder.items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        """The ids that skip_special_tokens omits."""
        self._token_texts: dict[int, str] = {}  # bounded by the vocabulary

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a model's folder, GGUF file or hub id and check it against the model's embedding rows.

        tokenizer.json takes precedence over the class in tokenizer_config.json or config.json, which may encode
        differently. Raises TokenizerError.
        """
        name = os.fspath(path)
        hf = _load_hf(name)
        if vocab_size is not None:
            _drop_added(hf, vocab_size)
        tokenizer = cls(hf, path=name)
        if vocab_size is not None:
            tokenizer.check_fits(vocab_size)
        return tokenizer

    def check_fits(self, vocab_size: int) -> None:
        """Raise TokenizerError if a token id has no embedding among `vocab_size` rows."""
        if self.vocab_size > vocab_size:
            raise TokenizerError(
                f"the tokenizer of {self.path or type(self.hf).__name__} does not match the model: its largest "
                f"token id is {self.vocab_size - 1}, and the model has embeddings for ids 0 to {vocab_size - 1}",
                path=self.path,
            )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True, limit: int | None = None
    ) -> npt.NDArray[np.int32]:
        """Token ids of `text`, int32 [n]. Long texts release the GIL.

        `add_special_tokens` adds what the tokenizer puts around a text (usually BOS). `allow_special`: "<|im_end|>"
        in the text is the control token, as in a rendered chat template; otherwise characters, as in users' text.
        With a `limit`, a text whose beginning has more than twice as many tokens is not read further: megabytes
        cost no more than what fits. Raises InvalidRequest for lone surrogates, and ContextTooLong.
        """
        if limit is not None:
            self._check_beginnings(text, limit)
        [ids] = self.encode_all([text], add_special_tokens=add_special_tokens, allow_special=allow_special)
        return np.array(ids, dtype=np.int32)

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """Token ids of each text as by `encode`, on all cores and without the GIL. Raises InvalidRequest."""
        try:
            if self._backend is None:
                options = {"add_special_tokens": add_special_tokens, "split_special_tokens": not allow_special}
                return [list(self.hf.encode(text, **options)) for text in texts]
            backend = self._backend if allow_special else self._literal_backend
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        except (TypeError, UnicodeEncodeError) as error:
            lone = next((char for text in texts for char in text if "\ud800" <= char <= "\udfff"), None)
            said = error if lone is None else f"{lone!r} is half of a surrogate pair, and no character"
            raise InvalidRequest(f"the prompt is not text that can be encoded: {said}", param="prompt") from error

    def _check_beginnings(self, text: str, limit: int) -> None:
        """Encode ever longer beginnings, together a third of the last one's cost. A cut changes only the tokens
        around it."""
        length = 16 * limit
        while length < len(text):
            found = len(self.encode(text[:length], add_special_tokens=False))
            if found > 2 * limit:
                raise ContextTooLong.of(found, limit, seen=f"the first {length} of its {len(text)} characters")
            length *= 4

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of a whole sequence; ids without a token have none. spaces_between_special_tokens works only
        without a Rust backend, as in transformers."""
        ids = [int(token_id) for token_id in token_ids]
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(
            self.hf.decode(
                [token_id for token_id in ids if token_id < self.vocab_size],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token, control tokens included. Cached."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def detokenizer(
        self,
        prompt_ids: TokenIds,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_special_tokens: Collection[str] = (),
    ) -> Detokenizer:
        """The detokenizer of an output that follows `prompt_ids`. Raises InvalidRequest where shown_special_tokens
        names one that is none."""
        skipped = self.special_ids - self._ids_of(shown_special_tokens) if skip_special_tokens else frozenset()
        if self.table is not None:
            return ByteDetokenizer(self.table, prompt_ids, skipped)
        return WindowDetokenizer(
            lambda ids: self.decode(
                ids,
                skip_special_tokens=skipped == self.special_ids,
                spaces_between_special_tokens=spaces_between_special_tokens,
            ),
            prompt_ids,
            skipped_ids=skipped,
        )

    def special_tokens_in(self, texts: Iterable[str]) -> tuple[str, ...]:
        """The names of the special tokens that texts hold: those that skip_special_tokens would omit."""
        text = "\n".join(texts)
        return tuple(sorted(name for name in self._special if name in text))

    @cached_property
    def _special(self) -> dict[str, int]:
        return {str(token): token_id for token_id, token in self.hf.added_tokens_decoder.items() if token.special}

    def _ids_of(self, names: Collection[str]) -> frozenset[int]:
        for name in names:
            if name not in self._special:
                hint = nearest_name(name, self._special)
                message = f"{name!r:.80} is no special token of this model{hint}"
                raise InvalidRequest(message, param="shown_special_tokens")
        return frozenset(self._special[name] for name in names)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return self.hf.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The one that the model came with; of several, the one for turns without tools."""
        its = self.hf.chat_template
        return its.get("default") if isinstance(its, dict) else its

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render messages with the model's Jinja template and `options`; encode the result without special tokens.
        Raises InvalidRequest without a template, or if it refuses the messages."""
        if not self.has_chat_template and "chat_template" not in options:
            raise InvalidRequest(
                f"{self.path or 'the model'} has no chat template: send a prompt instead of messages",
                param="messages",
            )
        try:
            if any(value is None for message in messages for value in message.values()):
                return _rendered_with_nulls(self.hf, messages, options)
            return str(self.hf.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts that `encode` makes control tokens of, unless `allow_special` is off."""
        added = self.hf.added_tokens_decoder.values()
        return frozenset(str(token) for token in added if is_control(str(token), is_special=token.special))

    @cached_property
    def _literal_backend(self) -> Backend:
        assert self._backend is not None, "only a tokenizer with a Rust backend has another"
        return _without_control_tokens(self._backend)


def _rendered_with_nulls(hf: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """For templates that tell turns by `content is none`, as DeepSeek's do: transformers 5.24 leaves nulls out."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = hf.get_chat_template(options.get("chat_template"), options.get("tools"))
    variables = {**hf.special_tokens_map, **options, "chat_template": source}
    return str(render_jinja_template([[dict(message) for message in messages]], **variables)[0][0])


def _drop_added(hf: Any, vocab_size: int) -> None:
    """Take away added tokens for which a model has no embeddings, such as Gemma 3 1B's for images, or padding."""
    from tokenizers import Tokenizer as Backend

    backend, end = getattr(hf, "backend_tokenizer", None), hf.eos_token_id
    if backend is None or (end is not None and end >= vocab_size):
        return
    spec = json.loads(backend.to_str())
    dropped = [token["content"] for token in spec["added_tokens"] if token["id"] >= vocab_size]
    if dropped:
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < vocab_size]
        hf._tokenizer = Backend.from_str(json.dumps(spec))
        logger.info("added tokens for which the model has no embeddings are text: %s", ", ".join(dropped[:8]))


def token_table(backend: Backend) -> TokenTable | None:
    """The detokenizer's table, checked against `decode` (about 100 ms); None if the decoder does more than join
    tokens."""
    try:
        return read_tokens(backend)
    except TokenizerError as error:
        logger.warning("text is decoded in windows: %s", error)
        return None


def _without_control_tokens(backend: Backend) -> Backend:
    """A copy that never turns text into a special token, or one written <|like this|>.

    Other added tokens (runs of spaces, HTML tags) stay text. Control tokens get unguessable names, also in the
    model's vocabulary, where whole-word and unigram models would find them; those that merges need keep theirs. All
    keep their places, which determine the other ids.
    """
    from tokenizers import Tokenizer as Backend

    spec = json.loads(backend.to_str())
    model = spec["model"]
    control = {
        token["content"]: uuid.uuid4().hex
        for token in spec["added_tokens"]
        if is_control(token["content"], is_special=token["special"])
    }
    kept = {part for merge in model.get("merges", ()) for part in _parts(merge)} | {model.get("unk_token")}
    if model["type"] == "Unigram":
        kept |= {model["vocab"][model["unk_id"]][0]} if model.get("unk_id") is not None else set()
        model["vocab"] = [[_renamed(piece, control, kept), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {_renamed(piece, control, kept): token_id for piece, token_id in model["vocab"].items()}
    # tokens kept in the vocabulary have their id from there
    spec["added_tokens"] = [
        {**token, "content": control.get(token["content"], token["content"])}
        for token in spec["added_tokens"]
        if token["content"] not in control or token["content"] not in kept
    ]
    return Backend.from_str(json.dumps(spec))


def _renamed(piece: str, names: Mapping[str, str], kept: Collection[str | None]) -> str:
    return piece if piece in kept else names.get(piece, piece)


def _parts(merge: str | list[str]) -> list[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [left, right, left + right]


def _load_hf(name: str) -> Any:
    if is_gguf(name):
        from sgl.runtime.text.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(name)
    if os.path.isdir(name) and not os.listdir(name):
        raise TokenizerError(f"the folder {name} is empty: expected a tokenizer.json", path=name)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if _file(name, "tokenizer.json") is not None:
            hf = PreTrainedTokenizerFast.from_pretrained(name)
        else:
            _check_readers(name)
            hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # None asks on the terminal
        if hf.chat_template is None and (beside := _file(name, "chat_template.json")) is not None:
            hf.chat_template = _templates(beside)
        return hf
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises plain Exception; transformers' readers raise anything
        raise TokenizerError(
            f"no tokenizer can be loaded from {name}: {error} (expected a folder or hub id with a tokenizer.json, "
            f"or another format that transformers reads)",
            path=name,
        ) from error


def _templates(path: str) -> str | dict[str, str]:
    """Of a processor's file, where transformers looks only for images: a template, or several by name. Raises
    TokenizerError."""
    with open(path, encoding="utf-8") as file:
        its = json.load(file)
    found: Any = its.get("chat_template") if isinstance(its, dict) else None
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):  # as in tokenizer_config.json
        found = {each.get("name"): each.get("template") for each in found}
    named: dict[str, str] = found if isinstance(found, dict) and found else {"default": found}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        wrong = f"{path}: chat_template must be a text, or a list of objects with a name and a template"
        raise TokenizerError(wrong, path=path)
    return found if isinstance(found, str) else named


def _check_readers(name: str) -> None:
    """Raise TokenizerError where there is no tokenizer, or packages are missing with which transformers reads a
    tokenizer.model."""
    if os.path.isdir(name) and not any(file.lower().startswith(_BEGINNINGS) for file in os.listdir(name)):
        message = f"{name} has no tokenizer: expected a tokenizer.json (tokenizer_path names another folder)"
        raise TokenizerError(message, path=name)
    path = _file(name, "tokenizer.model")
    if path is None:
        return
    with open(path, "rb") as file:
        is_protobuf = file.read(1) == b"\n"  # tiktoken's files are text
    needed = ("sentencepiece", "google.protobuf") if is_protobuf else ("tiktoken",)
    if missing := [module.removeprefix("google.") for module in needed if not _is_there(module)]:
        raise TokenizerError(
            f"{name} has no tokenizer.json, and its tokenizer.model is read with packages that are missing: "
            f"pip install {' '.join(missing)}",
            path=name,
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it lies in is missing
        return False


def _file(name: str, file: str) -> str | None:
    """The path of a folder's or hub id's file, if it has it."""
    if os.path.isdir(name):
        path = os.path.join(name, file)
        return path if os.path.isfile(path) else None
    from transformers.utils.hub import cached_file

    try:
        return cached_file(name, file)
    except OSError:
        return None
