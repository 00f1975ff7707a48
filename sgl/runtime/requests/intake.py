"""From what a caller asks for to requests that the loop can run: defaults, checks, tokens.

Everything a caller can get wrong is found here, before anything is queued, and raised as InvalidRequest with the
parameter's name. Knows the model's limits; knows no thread and no queue.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl.errors import ContextTooLong, InvalidRequest, QueueFull, RequestTimeout
from sgl.grammar import Vocabulary
from sgl.grammar.automaton.closure import Standing
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.runtime.batch import Int32Array
from sgl.runtime.config import EngineConfig
from sgl.runtime.constraints.guides import Constraints
from sgl.runtime.loop.submission import Submission
from sgl.runtime.requests.native import Header, NativeResult
from sgl.runtime.sampling_params import SamplingParams, short
from sgl.runtime.scheduler.request import Request
from sgl.runtime.text.output import TextOutput
from sgl.runtime.text.stop import StopMatcher
from sgl.runtime.text.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 1024
MAX_TOKEN_IDS_LOGPROB = 1024
MAX_LOGPROBS = 1 << 19
"""Log-probabilities of one request, or of all requests of one call of a server: 16 MB of JSON."""
MAX_PRIORITY = 2**31
MAX_NAME_CHARACTERS = 1024
"""Of a rid or an extra_key."""


@dataclass(slots=True)
class GenerateRequest:
    """One prompt and what is wanted of it, as the caller put it; see Engine.generate."""

    prompt: str | None = None
    input_ids: Any = None
    sampling_params: SamplingParams | Mapping[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: Sequence[int] | None = None
    return_text_in_logprobs: bool = False
    rid: str | None = None
    priority: int = 0
    extra_key: str | None = None
    timeout: float | None = None
    stream: bool = False
    limits_logprobs: bool = True
    """False where they are not told to anyone one by one: of candidates that are only scored."""
    arrived: float = field(default_factory=time.monotonic)  # from when on the timeout counts


class RequestBuilder:
    """Makes submissions for one engine. Safe from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        is_launching: Callable[[], bool],
    ) -> None:
        """is_launching: see `ModelRunner`."""
        assert config.context_length is not None, "options were resolved"
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._context_length = config.context_length
        self._seed = secrets.randbits(63) if config.random_seed is None else config.random_seed
        self._constraints = Constraints(
            tokenizer,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            whitespace=config.json_whitespace,
            additional_properties=config.json_additional_properties,
            backend=config.grammar_backend,
            deadline=config.constraint_timeout,
            on_device=self.walks_masks,
            is_launching=is_launching,
        )
        self._uids = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def walks_masks(self) -> bool:
        """Whether token masks are worked out on the device."""
        on_gpu = str(self._config.device).startswith("cuda")
        return self._tokenizer is not None and on_gpu and self._config.grammar_backend == "sgl"

    @property
    def max_requests(self) -> int:
        """That one call, or a program at once, may ask for."""
        return self._config.max_requests_per_call

    def warm_up_masks(self) -> tuple[Vocabulary, Standing]:
        """See `Constraints.warm_up`."""
        return self._constraints.warm_up()

    def asks(self, arguments: Mapping[str, Any]) -> tuple[list[GenerateRequest], bool]:
        """What a call of Engine.generate with these arguments asks for, and whether it asked for a list. Raises
        InvalidRequest before it makes more than a call may have, and QueueFull for more than may ever wait."""
        most = self._config.max_requests_per_call
        arguments = dict(arguments)
        if isinstance(arguments.get("sampling_params"), Mapping):
            arguments["sampling_params"] = self._params(arguments["sampling_params"])  # checked once for all
        asks, is_list = asks_of(arguments, most)
        number = sum(self._samples(ask) for ask in asks)
        if number > most:
            raise _too_many(number, most, "n" if number > len(asks) else "prompt")
        queued = self._config.max_queued_requests
        if queued is not None and number > queued:
            message = f"this call asks for {number} requests (prompts x n), and max_queued_requests is {queued}"
            raise QueueFull(message, limit=queued)
        return asks, is_list

    def _samples(self, ask: GenerateRequest) -> int:
        """How many requests an ask will be. What is no number is refused later."""
        params = ask.sampling_params
        number = params.get("n") if isinstance(params, Mapping) else getattr(params, "n", None)
        return number if isinstance(number, int) else 1

    def announce(self, ask: GenerateRequest) -> Future[Any] | None:
        """Compile the constraint of an ask, if it has one; see `Constraints.announce`."""
        ask.sampling_params = params = self._params(ask.sampling_params)  # checked once
        return self._constraints.announce(params)

    def submissions(self, ask: GenerateRequest, *, waits: bool = True) -> list[tuple[Submission, NativeResult]]:
        """A submission for each of the n samples, and the empty result that will collect its outputs. `waits` until the
        constraint is compiled, and raises the GrammarError in which that ends; else the request ends in it."""
        ask.sampling_params = params = self._params(ask.sampling_params)  # checked once
        prompt_ids = self.prompt_ids(ask)
        logprob_start = self._logprob_start(ask, len(prompt_ids))
        top_logprobs = self._top_logprobs(ask)
        given = self._given(ask)
        timeout = _seconds("timeout", ask.timeout, self._config.request_timeout)
        priority = ask.priority
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
            wanted = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise InvalidRequest(f"priority must be {wanted}, not {short(priority)}", param="priority")
        for name, value in (("extra_key", ask.extra_key), ("rid", ask.rid)):
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string, not {value!r}", param=name)
            if value is not None and len(value) > MAX_NAME_CHARACTERS:
                raise InvalidRequest(f"{name} may have {MAX_NAME_CHARACTERS} characters at most", param=name)
        guides = self._constraints.guides(params)
        deadline = None if timeout is None else ask.arrived + timeout
        if waits and guides[0] is not None:
            _wait(guides[0].flight, deadline, timeout)
        now = time.monotonic()
        key = prompt_ids.tobytes()
        made = []
        for sample in range(params.n):
            with self._lock:
                uid = next(self._uids)
            request = Request(
                uid=uid,
                prompt_ids=prompt_ids,
                params=params,
                seed=_mix_seed(params.seed if params.seed is not None else self._seed + uid, sample),
                max_new_tokens=min(params.max_new_tokens, self._context_length - len(prompt_ids)),
                stop_ids=(frozenset() if params.ignore_eos else self._eos_ids) | frozenset(params.stop_token_ids),
                priority=ask.priority,
                namespace=ask.extra_key,
                deadline=deadline,
                queue_deadline=None if self._config.queue_timeout is None else now + self._config.queue_timeout,
                logprob_start=logprob_start,
                top_logprobs=top_logprobs,
                token_ids_logprob=given,
                known=key,
            )
            rid = ask.rid if ask.rid is not None else f"sgl-{secrets.token_hex(12)}"  # nobody else's to guess
            if params.n > 1:
                rid = f"{rid}-{sample}"
            if ask.limits_logprobs:
                check_num_logprobs(params.n * num_logprobs(request, streams=bool(ask.stream)))
            token_text = None
            if ask.return_text_in_logprobs and self._tokenizer is not None:
                token_text = self._tokenizer.token_text
            made.append(
                (
                    Submission(
                        request,
                        self._text_output(params, prompt_ids),
                        guide=guides[sample],
                        stream=bool(ask.stream),
                    ),
                    NativeResult(Header.of(request, rid, with_text=token_text is not None), token_text),
                )
            )
        return made

    def close(self) -> None:
        """End what works for the intake."""
        self._constraints.close()

    def prompt_ids(self, ask: GenerateRequest) -> Int32Array:
        """The prompt's tokens, int32 [n >= 1], checked against vocabulary and context."""
        if (ask.prompt is None) == (ask.input_ids is None):
            what = "both" if ask.prompt is not None else "neither"
            raise InvalidRequest(f"give either prompt or input_ids, not {what}", param="prompt")
        if ask.prompt is not None:
            ids, param = self.encode(ask.prompt), "prompt"
        else:
            ids, param = _token_ids("input_ids", ask.input_ids, self._vocab_size), "input_ids"
        if not len(ids):
            raise InvalidRequest("the prompt is empty: it needs at least one token", param=param)
        if len(ids) >= self._context_length + (self._max_new(ask) == 0):
            raise ContextTooLong.of(len(ids), self._context_length, param=param)
        return ids

    def encode(self, text: str) -> Int32Array:
        """Tokens of a text prompt. Raises InvalidRequest for an empty one, and without a tokenizer."""
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt must be a string or a list of strings, not {text!r}", param="prompt")
        if self._tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer: send input_ids", param="prompt")
        if not text:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        return self._tokenizer.encode(text, limit=self._context_length)

    def _max_new(self, ask: GenerateRequest) -> int:
        return self._params(ask.sampling_params).max_new_tokens

    def _params(self, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
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
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        stops = StopMatcher(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        return TextOutput(detokenizer, stops, keep_match=params.no_stop_trim, min_tokens=params.min_new_tokens)

    def _logprob_start(self, ask: GenerateRequest, prompt_len: int) -> int | None:
        """The first prompt position whose logprob is wanted; None: none is."""
        start = ask.logprob_start_len
        if start is None or (isinstance(start, int) and start == -1):
            return None
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start < prompt_len:
            raise InvalidRequest(
                f"logprob_start_len must be -1 or lie in the prompt, 0 to {prompt_len - 1}, not {short(start)}",
                param="logprob_start_len",
            )
        return start if ask.return_logprob else None

    def _top_logprobs(self, ask: GenerateRequest) -> int:
        if not isinstance(ask.return_logprob, bool):
            raise InvalidRequest(
                f"return_logprob must be true or false, not {ask.return_logprob!r}", param="return_logprob"
            )
        number = ask.top_logprobs_num or 0
        most = min(self._vocab_size, MAX_TOP_LOGPROBS)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
            raise InvalidRequest(
                f"top_logprobs_num must be an integer from 0 to {most}, not {short(number)}",
                param="top_logprobs_num",
            )
        return number if ask.return_logprob else -1

    def _given(self, ask: GenerateRequest) -> Int32Array | None:
        ids = ask.token_ids_logprob
        if ids is None or not ask.return_logprob:
            return None
        if ask.limits_logprobs and _is_list(ids) and len(ids) > MAX_TOKEN_IDS_LOGPROB:
            raise InvalidRequest(
                f"token_ids_logprob may hold {MAX_TOKEN_IDS_LOGPROB} token ids, got {len(ids)}",
                param="token_ids_logprob",
            )
        return _token_ids("token_ids_logprob", ask.token_ids_logprob, self._vocab_size)


def num_logprobs(request: Request, *, streams: bool = False) -> int:
    """The most log-probabilities that a request's result can tell at once: a stream tells those of the prompt with its
    first event, and those of the output as they come. One for each output token is no more than the tokens themselves
    and does not count."""
    if request.top_logprobs < 0:
        return 0
    others = request.top_logprobs + (0 if request.token_ids_logprob is None else len(request.token_ids_logprob))
    num_scored = 0 if request.logprob_start is None else request.prompt_len - request.logprob_start
    return num_scored * (1 + others) + (0 if streams else max(request.max_new_tokens, 1) * others)


def check_num_logprobs(number: int, limit: int = MAX_LOGPROBS) -> None:
    """Raise InvalidRequest if so many log-probabilities are more than an answer holds."""
    if number > limit:
        raise InvalidRequest(
            f"this asks for up to {number} log-probabilities, and an answer holds {limit}: each scored token of "
            "the prompt, and each output token where others are told beside it, has one and one for each of "
            "top_logprobs_num and token_ids_logprob, n times. Lower one of these, ask for fewer tokens, or raise "
            "logprob_start_len",
            param="top_logprobs_num",
        )


def asks_of(arguments: Mapping[str, Any], most: int) -> tuple[list[GenerateRequest], bool]:
    """What a call of Engine.generate with these arguments asks for, at most so many prompts, and whether it asked for a
    list."""
    options = dict(arguments)
    prompts, inputs = options.pop("prompt"), options.pop("input_ids")
    is_list = _is_list(prompts) or (_is_list(inputs) and any(_is_list(ids) for ids in inputs))
    count = len(prompts if _is_list(prompts) else inputs) if is_list else 1
    if is_list and prompts is not None and inputs is not None:
        raise InvalidRequest("give either prompt or input_ids, not both", param="prompt")
    if not count:
        raise InvalidRequest("the list of prompts is empty", param="prompt")
    if count > most:
        raise _too_many(count, most, "prompt")
    asks = []
    for i in range(count):
        chosen = {name: _one_of(name, value, i, count, is_list) for name, value in options.items()}
        prompt = prompts[i] if is_list and prompts is not None else prompts
        ids = inputs[i] if is_list and inputs is not None else inputs
        asks.append(GenerateRequest(prompt=prompt, input_ids=ids, **chosen))
    return asks, is_list


def _too_many(number: int, most: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"this call asks for {number} requests (prompts x n), and max_requests_per_call is {most}: send several calls",
        param=param,
    )


def _is_list(value: Any) -> bool:
    return value is not None and not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "__len__")


_PER_PROMPT = {"sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid"}


def _one_of(name: str, value: Any, index: int, count: int, is_list: bool) -> Any:
    """The value of an option for one prompt of a list."""
    nested = name == "token_ids_logprob" and _is_list(value) and len(value) > 0 and _is_list(value[0])
    if not is_list or not (nested or (name in _PER_PROMPT and _is_list(value))):
        if is_list and name == "rid" and value is not None:
            raise InvalidRequest("for a list of prompts, rid must be a list too", param="rid")
        return value
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} values for {count} prompts", param=name)
    return value[index]


def _token_ids(param: str, given: Any, vocab_size: int) -> Int32Array:
    """Token ids as an int32 array of its own, each in the vocabulary."""
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


def _seconds(param: str, value: float | None, default: float | None) -> float | None:
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_SECONDS:
        wanted = f"a positive number of seconds, at most {MAX_SECONDS:.0f}"
        raise InvalidRequest(f"{param} must be {wanted}, not {short(value)}", param=param)
    return float(value)


def _wait(flight: Future[Any], deadline: float | None, timeout: float | None) -> None:
    """Until a constraint is compiled; raises what that ends in, and RequestTimeout at the deadline."""
    try:
        flight.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if timeout is None or flight.done():
            raise
        message = f"the request timed out after {timeout:g} s, while its constraint was being compiled"
        raise RequestTimeout(message, seconds=timeout) from None


def _mix_seed(seed: int, sample: int) -> int:
    """A 63-bit seed for one of a request's samples (splitmix64, Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + (sample + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
