"""Turns a caller's arguments into requests for the loop. Every mistake raises InvalidRequest with the parameter's
name, before anything is queued."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from sgl.errors import ContextTooLong, InvalidRequest, QueueFull
from sgl.grammar import Vocabulary
from sgl.grammar.automaton.finished import Configuration
from sgl.lang.ir.sampling import shown
from sgl.runtime.batch import Int32Array
from sgl.runtime.config import EngineConfig
from sgl.runtime.constraints.request_matcher import FEW_CONSTRAINTS, Constraints
from sgl.runtime.loop.submission import Submission
from sgl.runtime.media.config import MediaConfig
from sgl.runtime.media.item import MediaItem, MediaKind
from sgl.runtime.media.layout import ImageNumbers, Layout, lay_out
from sgl.runtime.media.read import MediaReader
from sgl.runtime.requests.adapters import Adapters
from sgl.runtime.requests.arguments import GenerateRequest, Params, is_list, requests_of, too_many
from sgl.runtime.requests.results import Header, NativeResult
from sgl.runtime.requests.transfers import offers, pulls
from sgl.runtime.sampling_params import SamplingParams, checked_seconds, integer
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.text.output import TextOutput
from sgl.runtime.text.stop import StopMatcher
from sgl.runtime.text.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 1024
MAX_TOKEN_IDS_LOGPROB = 1024
MAX_LOGPROBS = 1 << 19
"""Of one request, or of all requests of one HTTP call: 16 MB of JSON."""
MAX_PRIORITY = 2**31
_BEGINNING = 32  # tokens: prompts that share so many are of one kind
_LONG_TEXT = 256  # characters
MAX_NAME_CHARACTERS = 1024
"""Of a rid or an extra_key."""


class RequestBuilder:
    """Makes submissions for one engine. Safe from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        media: MediaConfig | None = None,
        is_launching: Callable[[], bool],
        adapters: Adapters,
        transfers: Transfers | None = None,
    ) -> None:
        """media: how the model takes images, if it does. transfers: to or from other engines. is_launching: see
        `ModelRunner`."""
        assert config.context_length is not None, "options were resolved"
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._adapters = adapters
        self._transfers = transfers
        self._context_length = config.context_length
        self._seed = secrets.randbits(63) if config.random_seed is None else config.random_seed
        self._constraints = Constraints(
            config,
            tokenizer,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            on_device=self.masks_on_device,
            is_launching=is_launching,
        )
        self.reader = None if media is None else MediaReader(media, config.image_urls, self._context_length)
        self._numbers = ImageNumbers()
        self._latest_stops: tuple[SamplingParams, frozenset[int]] | None = None
        self._uids = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def masks_on_device(self) -> bool:
        """Whether the device computes token masks."""
        from sgl.runtime.platform.registry import platform_of  # with torch, which servers do not load

        is_there = platform_of(self._config.device).is_gpu
        return self._tokenizer is not None and is_there and self._config.grammar_backend == "sgl"

    @property
    def max_requests(self) -> int:
        """Of one call, or of a program at once."""
        return self._config.max_requests_per_call

    def warm_up_masks(self) -> tuple[Vocabulary, Configuration]:
        """See `Constraints.warm_up`."""
        return self._constraints.warm_up()

    def requests(self, arguments: Mapping[str, Any]) -> list[GenerateRequest]:
        """One request for each prompt. Raises InvalidRequest for more than a call may have, QueueFull for more than
        may ever wait."""
        params = arguments.get("sampling_params")
        if isinstance(params, Mapping):
            arguments = {**arguments, "sampling_params": self._params(params)}  # checked once for all
        most, number = self._config.max_requests_per_call, 0
        wanted = requests_of(arguments, most)
        for each in wanted:
            each.sampling_params = params = self._params(each.sampling_params)
            number += params.n
        if number > most:
            raise too_many(number, most, "n" if number > len(wanted) else "prompt")
        queued = self._config.max_queued_requests
        if queued is not None and number > queued:
            message = f"this call asks for {number} requests (prompts x n), and max_queued_requests is {queued}"
            raise QueueFull(message, limit=queued)
        return wanted

    def submissions(self, wanted: GenerateRequest) -> list[tuple[Submission, NativeResult]]:
        """A submission and an empty result for each sample. Starts compiling the constraint, whose GrammarError
        ends the request."""
        params = self._params(wanted.sampling_params)
        prompt_ids, layout = self.prompt(wanted)
        logprob_start = _logprob_start(wanted, len(prompt_ids))
        scored = None if logprob_start is None else prompt_ids[logprob_start:]
        top_logprobs = self._top_logprobs(wanted)
        given = self._given(wanted)
        timeout = self._config.request_timeout
        if wanted.timeout is not None:
            timeout = checked_seconds("timeout", wanted.timeout)
        priority = integer("priority", wanted.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name, value in (("extra_key", wanted.extra_key), ("rid", wanted.rid)):
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string, not {value!r}", param=name)
            if value is not None and len(value) > MAX_NAME_CHARACTERS:
                raise InvalidRequest(f"{name} may have {MAX_NAME_CHARACTERS} characters at most", param=name)
        if wanted.pooling == "mean" and self._config.deterministic:
            message = "deterministic=True: means over tokens depend on how prompts are cut: take pooling='last'"
            raise InvalidRequest(message, param="pooling")
        adapter = self._adapters.number_of(wanted.lora_path)
        matchers = self._constraints.matchers(params)
        namespace = (adapter, wanted.extra_key) if adapter else wanted.extra_key
        extra = None if wanted.extra_key is None else _short(wanted.extra_key)
        names = map(_short, wanted.origin or ())
        origin = wanted.owner, adapter, extra, *names, _kind(wanted, params, prompt_ids)
        now = time.monotonic()
        key = prompt_ids.tobytes() if layout is None else layout.key_ids.tobytes()
        offered = offers(wanted, params, self._transfers)
        pulled = pulls(wanted, self._transfers, namespace, key)
        room = self._context_length - len(prompt_ids) - (0 if layout is None else max(0, layout.offset))
        known = self._latest_stops  # the same of all prompts of a call, since it may have many of both
        if known is None or known[0] is not params:
            ends = frozenset() if params.ignore_eos else self._eos_ids
            known = self._latest_stops = params, ends | frozenset(params.stop_token_ids)
        stop_ids = known[1]
        token_text = None
        if wanted.return_text_in_logprobs and self._tokenizer is not None:
            token_text = self._tokenizer.token_text
        made = []
        for sample in range(params.n):
            with self._lock:
                uid = next(self._uids)
            request = Request(
                uid=uid,
                prompt_ids=prompt_ids,
                params=params,
                seed=_mix_seed(params.seed if params.seed is not None else self._seed + uid, sample),
                max_new_tokens=min(params.max_new_tokens, room),
                pooling=wanted.pooling,
                layout=layout,
                stop_ids=stop_ids,
                priority=priority,
                namespace=namespace,
                origin=origin,
                adapter=adapter,
                deadline=None if timeout is None else wanted.arrived + timeout,
                queue_deadline=None if self._config.queue_timeout is None else now + self._config.queue_timeout,
                logprob_start=logprob_start,
                top_logprobs=top_logprobs,
                token_ids_logprob=given,
                known=key,
                transfer=pulled,
                offers_transfer=offered,
            )
            if wanted.limits_logprobs:
                check_num_logprobs(params.n * num_logprobs(request, streams=bool(wanted.stream)))
            rid = wanted.rid if wanted.rid is not None else f"sgl-{secrets.token_hex(12)}"  # not guessable
            if params.n > 1:
                rid = f"{rid}-{sample}"
            text = self._text_output(params, prompt_ids)
            submission = Submission(request, text, matcher=matchers[sample], stream=bool(wanted.stream))
            header = Header(uid, rid, len(prompt_ids), scored, top_logprobs, given, token_text is not None)
            made.append((submission, NativeResult(header, token_text)))
        return made

    def close(self) -> None:
        """End compiling."""
        self._constraints.close()

    def prompt(self, wanted: GenerateRequest) -> tuple[Int32Array, Layout | None]:
        """The prompt's tokens, int32 [n >= 1], and its images, checked against vocabulary and context."""
        if (wanted.prompt is None) == (wanted.input_ids is None):
            what = "both" if wanted.prompt is not None else "neither"
            raise InvalidRequest(f"give either prompt or input_ids, not {what}", param="prompt")
        if wanted.prompt is not None:
            ids, param = self.encode(wanted.prompt), "prompt"
        else:
            ids, param = _token_ids("input_ids", wanted.input_ids, self._vocab_size), "input_ids"
        if not len(ids):
            raise InvalidRequest("the prompt is empty: it needs at least one token", param=param)
        layout = wanted.layout
        if layout is None and (wanted.image_data is not None or wanted.video_data is not None):
            layout = self.lay_out(ids, self._items(wanted))
        elif layout is None and self.reader is not None and wanted.prompt is not None:
            layout = self.lay_out(ids, [])  # which says what is missing
        num_places = len(ids)
        if layout is not None:
            ids, num_places = layout.ids, len(layout.ids) + max(0, layout.offset)
        if num_places >= self._context_length + (self._params(wanted.sampling_params).max_new_tokens == 0):
            raise ContextTooLong.of(num_places, self._context_length, param=param)
        return ids, layout

    def lay_out(self, ids: Int32Array, items: Sequence[MediaItem]) -> Layout | None:
        """Put items into a prompt; None without any. Raises InvalidRequest if placeholders and items differ."""
        if self.reader is None:
            if items:
                raise no_images(items[0].kind, "image_data")
            return None
        return lay_out(
            self.reader.config, ids, items, self._numbers, partial(self._encoded, add_special_tokens=False)
        )

    def placeholder(self, kind: MediaKind) -> str:
        """The text that stands for an image or a video in a prompt."""
        assert self.reader is not None and self._tokenizer is not None, "programs need both"  # noqa: PT018
        config = self.reader.config
        token = config.image_token_id if kind == "image" else config.video_token_id
        ids = [config.vision_start_token_id, token, config.vision_end_token_id]
        return "".join(map(str, self._tokenizer.hf.convert_ids_to_tokens(ids)))

    def _items(self, wanted: GenerateRequest) -> list[MediaItem]:
        if self.reader is not None:
            return self.reader.items(wanted.image_data, wanted.video_data)
        if _is_nothing(wanted.image_data) and _is_nothing(wanted.video_data):
            return []
        kind = "image" if wanted.image_data is not None else "video"
        raise no_images(kind, f"{kind}_data")

    def _encoded(self, text: str, **options: Any) -> Int32Array:
        if self._tokenizer is None:
            raise InvalidRequest("this model writes times between a video's frames, which needs a tokenizer")
        return self._tokenizer.encode(text, **options)

    def encode(self, text: str) -> Int32Array:
        """Tokens of a text prompt. Raises InvalidRequest if it is empty or there is no tokenizer."""
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt must be a string or a list of strings, not {text!r}", param="prompt")
        if self._tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer: send input_ids", param="prompt")
        if not text:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        return self._tokenizer.encode(text, limit=self._context_length)

    def _params(self, given: Params | None) -> SamplingParams:
        if given is None:
            params = SamplingParams()
        elif isinstance(given, SamplingParams):
            params = given
        else:
            params = SamplingParams.from_dict(given)
        if self._tokenizer is None and (params.stop or params.stop_regex):
            name = "stop" if params.stop else "stop_regex"
            raise InvalidRequest(f"{name} needs text, and this engine runs without a tokenizer", param=name)
        params.check_token_ids(self._vocab_size)
        return params

    def _text_output(self, params: SamplingParams, prompt_ids: Int32Array) -> TextOutput | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer(
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=params.shown_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        stops = StopMatcher(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        return TextOutput(detokenizer, stops, keep_match=params.no_stop_trim, min_tokens=params.min_new_tokens)

    def _top_logprobs(self, wanted: GenerateRequest) -> int:
        if not isinstance(wanted.return_logprob, bool):
            raise InvalidRequest(
                f"return_logprob must be true or false, not {wanted.return_logprob!r}", param="return_logprob"
            )
        most = min(self._vocab_size, MAX_TOP_LOGPROBS)
        number = integer("top_logprobs_num", wanted.top_logprobs_num or 0, 0, most)
        return number if wanted.return_logprob else -1

    def _given(self, wanted: GenerateRequest) -> Int32Array | None:
        ids = wanted.token_ids_logprob
        if ids is None or not wanted.return_logprob:
            return None
        if wanted.limits_logprobs and is_list(ids) and len(ids) > MAX_TOKEN_IDS_LOGPROB:
            raise InvalidRequest(
                f"token_ids_logprob may hold {MAX_TOKEN_IDS_LOGPROB} token ids, got {len(ids)}",
                param="token_ids_logprob",
            )
        return _token_ids("token_ids_logprob", wanted.token_ids_logprob, self._vocab_size)


def _kind(wanted: GenerateRequest, params: SamplingParams, prompt_ids: Int32Array) -> Hashable:
    """What requests of one caller have in common whose outputs may be alike. Small: it outlives the request."""
    if params.constraint is None:
        return None if wanted.origin else prompt_ids[:_BEGINNING].tobytes()
    name, text = params.constraint
    return name, _short(text)


def _short(text: str) -> str | bytes:
    """A text, or what tells a long one from others."""
    return text if len(text) <= _LONG_TEXT else _digest(text)


@lru_cache(maxsize=FEW_CONSTRAINTS)
def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()


def no_images(kind: str, param: str) -> InvalidRequest:
    """The error of images for a model that takes texts only."""
    return InvalidRequest(f"this model takes no {kind}s", param=param)


def _is_nothing(given: Any) -> bool:
    return given is None or (isinstance(given, list | tuple) and all(each is None for each in given))


def num_logprobs(request: Request, *, streams: bool = False) -> int:
    """The most log-probabilities a result carries at once; streams send the output's as they come. Those of output
    tokens themselves do not count."""
    if request.top_logprobs < 0:
        return 0
    others = request.top_logprobs + (0 if request.token_ids_logprob is None else len(request.token_ids_logprob))
    num_scored = 0 if request.logprob_start is None else request.prompt_len - request.logprob_start
    return num_scored * (1 + others) + (0 if streams else max(request.max_new_tokens, 1) * others)


def check_num_logprobs(number: int, limit: int = MAX_LOGPROBS) -> None:
    """Raise InvalidRequest above the limit."""
    if number > limit:
        raise InvalidRequest(
            f"this asks for up to {number} log-probabilities, and an answer holds {limit}: each scored token of "
            "the prompt, and each output token where others are told beside it, has one and one for each of "
            "top_logprobs_num and token_ids_logprob, n times. Lower one of these, ask for fewer tokens, or raise "
            "logprob_start_len",
            param="top_logprobs_num",
        )


def _token_ids(param: str, given: Any, vocab_size: int) -> Int32Array:
    """A copy as int32, checked against the vocabulary."""
    try:
        ids = np.array(given)
    except ValueError:
        ids = np.array(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"{param} must be a list of token ids (integers)", param=param)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise InvalidRequest(
            f"{param}: token id {ids[outside.argmax()]} is out of range; the vocabulary has ids 0 to "
            f"{vocab_size - 1}",
            param=param,
        )
    return ids.astype(np.int32)


def _logprob_start(wanted: GenerateRequest, prompt_len: int) -> int | None:
    start = wanted.logprob_start_len
    if start is None or (isinstance(start, int) and start == -1):
        return None
    if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start < prompt_len:
        raise InvalidRequest(
            f"logprob_start_len must be -1 or lie in the prompt, 0 to {prompt_len - 1}, not {shown(start)}",
            param="logprob_start_len",
        )
    return start if wanted.return_logprob else None


def _mix_seed(seed: int, sample: int) -> int:
    """A 63-bit seed for one sample (splitmix64, Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + (sample + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
