"""What a call of a program may be given, for type checkers; nothing of this runs.

A program `f(s, *P)` is called with its arguments and, by keyword, the options of a run. No type says "P and these
keywords", so `Call` has overloads: the arguments alone; up to four by position, and options; all by name, and at least
one option, where the arguments go unchecked. `f.with_options(…)` leaves arguments alone, which are always checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, Unpack, overload

from sgl.lang.config import AnyBackend
from sgl.lang.ir.sampling import SamplingOptions

A = TypeVar("A", contravariant=True)
B = TypeVar("B", contravariant=True)
C = TypeVar("C", contravariant=True)
D = TypeVar("D", contravariant=True)
P = ParamSpec("P")
X = TypeVar("X")
X_co = TypeVar("X_co", covariant=True)


class SessionOptions(SamplingOptions, total=False):
    """The options of a session."""

    stream: bool
    chat_template: Any
    sampling: Mapping[str, Any] | None


class RunOptions(SessionOptions, total=False):
    """The options of a run."""

    backend: AnyBackend
    use_thread: bool


class BatchOptions(RunOptions, total=False):
    """The options of a batch of runs."""

    num_threads: int | Literal["auto"]
    progress_bar: bool


Row: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | list[Any]
Rows: TypeAlias = Sequence[Row]


class Parameters(Generic[P]):
    """Something whose calls take arguments P."""


class Method(Generic[X]):
    """A method of `Parameters[P]` that takes a call of a program and returns X."""

    def __get__(self, owner: Parameters[P], cls: Any = None) -> Call[P, X]:
        raise NotImplementedError  # for type checkers: `takes_call` puts no Method there


def takes_call(method: Callable[..., X]) -> Method[X]:
    """The method itself, which type checkers take for a `Method`."""
    return method  # type: ignore[return-value]


class _Returns(Protocol[X_co]):
    def _result(self) -> X_co: ...


class _None(_Returns[X_co], Protocol):
    def _takes(self) -> None: ...


class _One(_Returns[X_co], Protocol[A, X_co]):
    def _takes(self, a: A, /) -> None: ...


class _Two(_Returns[X_co], Protocol[A, B, X_co]):
    def _takes(self, a: A, b: B, /) -> None: ...


class _Three(_Returns[X_co], Protocol[A, B, C, X_co]):
    def _takes(self, a: A, b: B, c: C, /) -> None: ...


class _Four(_Returns[X_co], Protocol[A, B, C, D, X_co]):
    def _takes(self, a: A, b: B, c: C, d: D, /) -> None: ...


class Call(_Returns[X_co], Protocol[P, X_co]):
    """A call of a program with arguments P that returns X."""

    def _takes(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> X_co: ...
    @overload
    def __call__(self: _None[X_co], **options: Unpack[RunOptions]) -> X_co: ...
    @overload
    def __call__(self: _One[A, X_co], a: A, /, **options: Unpack[RunOptions]) -> X_co: ...
    @overload
    def __call__(self: _Two[A, B, X_co], a: A, b: B, /, **options: Unpack[RunOptions]) -> X_co: ...
    @overload
    def __call__(self: _Three[A, B, C, X_co], a: A, b: B, c: C, /, **options: Unpack[RunOptions]) -> X_co: ...
    @overload
    def __call__(
        self: _Four[A, B, C, D, X_co], a: A, b: B, c: C, d: D, /, **options: Unpack[RunOptions]
    ) -> X_co: ...
    @overload
    def __call__(self, *, backend: AnyBackend, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, stream: bool, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, use_thread: bool, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, chat_template: Any, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, sampling: Mapping[str, Any] | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, max_tokens: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, max_new_tokens: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, min_tokens: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, min_new_tokens: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, n: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, stop: str | Sequence[str] | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, stop_token_ids: Sequence[int] | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, stop_regex: str | Sequence[str] | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, temperature: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, top_p: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, top_k: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, min_p: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, frequency_penalty: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, presence_penalty: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, repetition_penalty: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, ignore_eos: bool | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, return_logprob: bool | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, logprob_start_len: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, top_logprobs_num: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, return_text_in_logprobs: bool | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, seed: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, logit_bias: Mapping[int, float] | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, priority: int | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, timeout: float | None, **arguments: Any) -> X_co: ...
    @overload
    def __call__(self, *, extra: Mapping[str, Any] | None, **arguments: Any) -> X_co: ...
