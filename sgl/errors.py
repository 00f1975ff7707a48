"""Every exception a user of sgl can meet, in one tree.

    SglError(Exception)             .place: file and line of the program, if one is to blame
    ├─ ProgramError                 a program cannot go on: an unset variable, a foreign fork   .node .variable
    ├─ BackendError                 what the program runs on failed or cannot be reached        .status .retryable
    │  ├─ RequestAborted            the request was cancelled before it finished
    │  ├─ RequestTimeout            the request, or its wait in the queue, took too long        .seconds
    │  └─ ServerUnreachable         there is no server where one was looked for                 .url
    ├─ GrammarError(ValueError)     a constraint cannot be compiled
    │  ├─ RegexSyntaxError          .pattern .position
    │  ├─ UnsupportedSchema         .path .keyword
    │  └─ GrammarTooLarge           .states .limit
    ├─ InvalidRequest(ValueError)   a request that no server could serve                        .param
    │  └─ ContextTooLong            .tokens .limit
    ├─ ConfigError(ValueError)      an option that does not exist or cannot be honoured         .option
    │  └─ MissingExtra(ImportError) an optional part of sgl is not installed                    .extra
    ├─ ModelError                   the checkpoint or its tokenizer cannot be loaded            .path
    │  ├─ UnsupportedModel          .architecture .supported
    │  ├─ WeightsError              a weight file is missing, truncated or of the wrong shape   .tensor
    │  ├─ AdapterError              a LoRA adapter cannot be loaded                             .tensor
    │  └─ TokenizerError            the tokenizer does not fit the model
    ├─ QueueFull                    too many requests are waiting already                       .limit
    └─ EngineDead(RuntimeError)     the engine loop stopped; the cause is chained

A caller's mistake is never an assertion: assertions guard what only sgl itself can get wrong.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar


class SglError(Exception):
    """The base of every error that sgl raises on purpose. All of them travel between processes by pickle. `place`:
    the file and line of the program that it comes from, if it comes from one; the message ends with it. A server
    answers with `http_status`, and with `code` in the body."""

    place: str | None = None
    http_status: ClassVar[int] = 500
    code: ClassVar[str | None] = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class ProgramError(SglError):
    """A program cannot go on; `node` is the path of the node and `variable` the name it concerns, if any."""

    http_status, code = 400, "program_error"

    def __init__(self, message: str, *, node: str | None = None, variable: str | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.variable = variable


class BackendError(SglError):
    """The backend failed; `status` is its HTTP status, if any, `retryable` says whether trying again may help."""

    def __init__(self, message: str, *, status: int | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class RequestAborted(BackendError):
    """The request was cancelled before it finished."""

    http_status, code = 499, "request_aborted"


class RequestTimeout(BackendError):
    """The request did not finish within `seconds`."""

    http_status, code = 408, "request_timeout"

    def __init__(self, message: str, *, seconds: float) -> None:
        super().__init__(message, retryable=True)
        self.seconds = seconds


class ServerUnreachable(BackendError):
    """There is no server at `url`, or no way to it."""

    def __init__(self, message: str, *, url: str, retryable: bool = True) -> None:
        super().__init__(message, retryable=retryable)
        self.url = url


class GrammarError(SglError, ValueError):
    """A constraint cannot be compiled."""

    http_status, code = 400, "invalid_grammar"


class RegexSyntaxError(GrammarError):
    """The regular expression is malformed or uses what a byte automaton cannot express."""

    def __init__(self, message: str, *, pattern: str, position: int | None = None) -> None:
        super().__init__(message)
        self.pattern = pattern
        self.position = position


class UnsupportedSchema(GrammarError):
    """A keyword that cannot be enforced; `path` is its JSON pointer as the user wrote the schema."""

    def __init__(self, message: str, *, path: str, keyword: str) -> None:
        super().__init__(message)
        self.path = path
        self.keyword = keyword


class GrammarTooLarge(GrammarError):
    """The automaton would have more than `limit` states (or took too long: `states` is how far it came)."""

    def __init__(self, message: str, *, states: int, limit: int) -> None:
        super().__init__(message)
        self.states = states
        self.limit = limit


class InvalidRequest(SglError, ValueError):
    """A request that cannot be served as it stands; `param` names the offending parameter."""

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """The prompt has `tokens` tokens and the model's context holds `limit`."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int, limit: int, param: str | None = "prompt") -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit

    @classmethod
    def of(cls, tokens: int, limit: int, *, param: str = "prompt", seen: str = "") -> ContextTooLong:
        """The error, in the words by which clients know it and fall back to another model or a shorter prompt. If
        only the part `seen` of the prompt was counted, the whole has more than `tokens`."""
        message = (
            f"the prompt is too long: it has {'more than ' if seen else ''}{tokens} tokens and this model's maximum "
            f"context length is {limit} tokens"
        )
        if seen:
            message += f" ({seen} were counted)"
        message += f". Shorten it to at most {limit - 1} tokens, which leaves room for one of output"
        return cls(message, tokens=tokens, limit=limit, param=param)


class ConfigError(SglError, ValueError):
    """An option that does not exist, cannot be parsed, or cannot be honoured on this machine."""

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class MissingExtra(ConfigError, ImportError):
    """A part of sgl that only `pip install 'sgl[extra]'` brings."""

    def __init__(self, message: str, *, extra: str, option: str | None = None) -> None:
        super().__init__(message, option=option)
        self.extra = extra

    @classmethod
    def of(cls, extra: str, what: str, package: str | None, option: str | None = None) -> MissingExtra:
        """The error for `what`, which `package` is missing for."""
        message = f"{what} needs {package}, which is not installed: pip install 'sgl[{extra}]'"
        return cls(message, extra=extra, option=option)


class ModelError(SglError):
    """The checkpoint at `path` cannot be loaded."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class UnsupportedModel(ModelError):
    """The checkpoint's architecture, or a feature its config.json asks for, is not supported."""

    def __init__(
        self,
        message: str,
        *,
        architecture: str | None = None,
        supported: tuple[str, ...] = (),
        path: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.architecture = architecture
        self.supported = supported


class WeightsError(ModelError):
    """A weight file is missing, truncated, or holds a tensor of an unexpected name or shape."""

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class AdapterError(ModelError):
    """The LoRA adapter at `path` cannot be loaded: its files are missing or wrong, ask for what is not supported, or do
    not fit the model or the engine's options."""

    http_status, code = 400, "invalid_adapter"

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class TokenizerError(ModelError):
    """The tokenizer is missing or does not fit the model."""


class QueueFull(SglError):
    """`limit` requests are waiting already; try again later."""

    http_status, code = 429, "queue_full"

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class EngineDead(SglError, RuntimeError):
    """The engine is shut down, or its loop stopped on an error, which is chained."""

    http_status, code = 503, "engine_unavailable"


def _rebuilt(cls: type[SglError], args: tuple[Any, ...], data: dict[str, Any]) -> SglError:
    """An error as it was: without __init__, whose keyword arguments pickle does not know."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(data)
    return error


@contextlib.contextmanager
def needs_extra(extra: str, what: str, option: str | None = None) -> Iterator[None]:
    """Import what `extra` brings, for `what`. Raises MissingExtra if one of others' modules is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "sgl":
            raise
        raise MissingExtra.of(extra, what, package, option) from error


def is_installed(package: str) -> bool:
    """Whether a package could be imported; it is not."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a finder refuses it, or it is half loaded
        return False


def nearest_name(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """` (did you mean 'x'?)` for the known name most like `name`, whatever their case, or an empty string. least: from
    0.0, nothing in common, to 1.0, equal."""
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=least)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""
