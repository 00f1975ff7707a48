"""What a prefill engine answers, and a decode engine takes: `kv_transfer_params`.

They are signed with a secret that engines share, so that a client can neither make a decode engine connect to an
address of its choice nor change what it is told. They name no tokens: a hash tells whether they are of a request's
prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from sgl.errors import InvalidRequest
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace

PARAM: Final = "kv_transfer_params"
VERSION: Final = 3
MAX_CHARACTERS: Final = 512
"""Of a text in them."""
_MAX_INT: Final = 1 << 53  # what any JSON reader keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """What pages of two engines must have in common, for one to read the other's."""

    model: str
    """A hash of the model's config, weights and quantisation."""
    dtype: str
    kv_cache_dtype: str
    page_size: int  # tokens
    page_bytes: int  # of all heads
    tp_size: int  # which may differ, as pp_size: see `PageShape.fit`
    pp_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParams(PageLayout):
    """Who has which pages of which prompt, and until when."""

    version: int
    engine: str  # the prefill engine's random name
    host: str
    port: int
    lease: str  # 32 hexadecimal digits, random; empty: there is nothing to pull
    lease_seconds: int
    lease_end: int  # seconds since 1970, by the prefill engine's clock
    num_tokens: int  # of the prompt's first, in whole pages
    num_pages: int
    prompt: str  # 64 hexadecimal digits: `prompt_hash` of these

    @property
    def layout(self) -> PageLayout:
        """That of its pages."""
        return PageLayout(**{each.name: getattr(self, each.name) for each in fields(PageLayout)})

    def to_dict(self, secret: bytes) -> dict[str, Any]:
        """As JSON, signed."""
        content = asdict(self)
        return {**content, "signature": _signature(content, secret)}

    @classmethod
    def read(cls, given: Any, secret: bytes) -> TransferParams:
        """From JSON. Raises InvalidRequest unless an engine with the same secret made them."""
        if not isinstance(given, Mapping):
            raise _wrong("is an object, as a prefill engine answers it")
        content = {name: given[name] for name in given if name != "signature"}
        types = {each.name: int if each.type == "int" else str for each in fields(cls)}
        if content.keys() != types.keys():
            odd = sorted(map(str, content.keys() ^ types.keys()))
            raise _wrong(f"has other fields than a prefill engine answers: {', '.join(odd)[:MAX_CHARACTERS]}")
        for name, value in content.items():
            if type(value) is not types[name]:
                raise _wrong(f"has a {name} that is no {types[name].__name__}")
            if (len(value) > MAX_CHARACTERS) if isinstance(value, str) else not 0 <= value < _MAX_INT:
                raise _wrong(f"has a {name} out of bounds")
        signature = given.get("signature")
        if not isinstance(signature, str) or not hmac.compare_digest(
            signature.encode(errors="replace"), _signature(content, secret).encode()
        ):
            raise _wrong(
                "is not signed by a prefill engine with this engine's secret: pass on what it answered, unchanged, and "
                "give both the same disaggregation_key_file"
            )
        if content["version"] != VERSION:
            raise _wrong(f"is of version {content['version']}, and this engine reads version {VERSION}")
        return cls(**content)

    def check(self, own: PageLayout, namespace: Namespace, key: bytes) -> None:
        """Raises InvalidRequest unless the pages fit an engine with this layout and a prompt with this key."""
        if wrong := mismatch(self.layout, own):
            raise _wrong(wrong)
        if self.num_pages * self.page_size != self.num_tokens or self.num_tokens * TOKEN_BYTES > len(key):
            raise _wrong(f"is of {self.num_tokens} tokens, and this prompt has {len(key) // TOKEN_BYTES}")
        if self.prompt != prompt_hash(own, namespace, key[: self.num_tokens * TOKEN_BYTES]).hex():
            raise _wrong("is of another prompt, or of another extra_key")


def mismatch(theirs: PageLayout, own: PageLayout) -> str | None:
    """How their pages differ from the engine's own, for its client; None: not at all."""
    for name in ("page_size", "dtype", "kv_cache_dtype"):
        its, ours = getattr(theirs, name), getattr(own, name)
        if its != ours:
            return f"is of an engine with {name}={its!r}, and this one has {name}={ours!r}"
    if replace(theirs, tp_size=own.tp_size, pp_size=own.pp_size) != own:
        return "is of another model, other weights or another quantisation of it, or deterministic differs"
    return None


def prompt_hash(layout: PageLayout, namespace: Namespace, key: bytes) -> bytes:
    """32 bytes that differ for other tokens, namespaces and models."""
    whose = hashlib.blake2b(f"{layout.model}\0{namespace!r}".encode(errors="surrogatepass"), digest_size=32)
    return hashlib.blake2b(key, digest_size=32, key=whose.digest()).digest()


def _signature(content: Mapping[str, Any], secret: bytes) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM} {what}", param=PARAM)
