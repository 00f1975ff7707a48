"""A conversation outside a function: `with sgl.session(backend) as s: s += …`."""

from __future__ import annotations

import asyncio
from typing import Any, Unpack

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.config import AnyBackend
from sgl.lang.ir.sampling import sampling_params
from sgl.lang.record.call import SessionOptions
from sgl.lang.record.open_runs import Hold
from sgl.lang.record.opening import opened, take_sampling
from sgl.lang.record.run import Run
from sgl.lang.record.state import AsyncProgramState, ProgramState

_OPTIONS = SessionOptions.__annotations__.keys()


def session(backend: AnyBackend = None, **options: Unpack[SessionOptions]) -> Session:
    """A program whose body is a `with` block: `s` records, and reading waits, as in a function. `async with` gives the
    state of an `async def` program. `options`: a run's. Raises InvalidRequest."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name!r} is no option of a session{nearest_name(name, _OPTIONS)}")
    return Session(backend, **options)


class Session:
    """See `session`. Each `with` begins another conversation; programs that its block calls are runs of their own."""

    def __init__(
        self, backend: AnyBackend, *, stream: bool = False, chat_template: Any = None, **options: Any
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._chat_template = chat_template
        self._sampling = sampling_params(**{**take_sampling(options), **options})
        self._run: Run | None = None

    def __enter__(self) -> ProgramState:
        run = self._opened()
        return ProgramState(run, run.root, hold=Hold(run))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run, self._run = self._run, None
        assert run is not None, "a block is left once"
        run.body_ended(error)

    async def __aenter__(self) -> AsyncProgramState:
        run = self._opened()
        run.user_loop = asyncio.get_running_loop()
        return AsyncProgramState(run, run.root, hold=Hold(run))

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _opened(self) -> Run:
        if self._run is not None:
            raise InvalidRequest("this session is under way: make another with sgl.session(…)", param="session")
        self._run = opened(
            "session",
            self._sampling,
            backend=self._backend,
            chat_template=self._chat_template,
            stream=self._stream,
        )
        return self._run
