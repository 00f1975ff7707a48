"""What a scheduler may know of a program's requests (`scheduler.programs`): that they are of one program, which of them
begin the branches of a fork, and which are on its critical path: a fork's last branch, and nodes whose value somebody
waits for."""

from __future__ import annotations

from sgl.runtime.program.stream import NodeRequests, Stream
from sgl.runtime.scheduler.programs import GENERATED, ProgramService, Unit
from sgl.runtime.scheduler.request import Request


class ProgramOrder:
    """Of one program. Forks are named by the beginning of their branches' paths; "" has all streams."""

    def __init__(self) -> None:
        self._service = ProgramService()
        self._units: dict[str, Unit] = {}  # by fork
        self._have_begun: set[int] = set()  # branches, by id
        self._under_way: dict[int, NodeRequests] = {}  # by their stream's id
        self._in_fork: dict[str, dict[NodeRequests, None]] = {}  # of those, at or below its branches
        self._wanted: dict[int, int] = {}  # the last node of a stream whose value somebody waits for
        self._candidates: dict[NodeRequests, None] = {}  # that may be critical, and were not looked at

    def expect(self, tokens: int) -> None:
        """Nodes were recorded that may generate so many, each as many as `scheduler.programs` expects at most."""
        self._service.future += GENERATED * tokens

    def begin(self, call: NodeRequests) -> None:
        """A node's requests are about to be submitted."""
        stream = call.stream
        self._under_way[stream.id] = call
        self._candidates[call] = None
        forks = _forks(stream)
        for fork in forks:
            self._in_fork.setdefault(fork, {})[call] = None
        unit = None
        if stream.parent is not None and stream.id not in self._have_begun:
            self._have_begun.add(stream.id)
            unit = self._units.setdefault(forks[-1], Unit())
        for request in call.requests:
            self._service.arrives(request)
            request.program, request.unit, request.is_critical = self._service, unit, False

    def end(self, call: NodeRequests) -> None:
        """They are over."""
        del self._under_way[call.stream.id]
        self._candidates.pop(call, None)
        for fork in _forks(call.stream):
            left = self._in_fork[fork]
            del left[call]
            if len(left) == 1:
                self._candidates.update(left)

    def want(self, stream: int, index: int) -> None:
        """Somebody waits for that node's value."""
        self._wanted[stream] = max(index, self._wanted.get(stream, -1))
        if stream in self._under_way:
            self._candidates[self._under_way[stream]] = None

    def became_critical(self) -> list[Request]:
        """Requests that are on the critical path now and were not."""
        candidates, self._candidates = self._candidates, {}
        return [request for call in candidates if self._is_critical(call) for request in call.requests]

    def _is_critical(self, call: NodeRequests) -> bool:
        stream = call.stream
        return len(self._in_fork[_forks(stream)[-1]]) == 1 or self._wanted.get(stream.id, -1) >= stream.position


def _forks(stream: Stream) -> list[str]:
    """Those that a stream is in, the outermost first."""
    return ["", *(stream.path[:place] for place, character in enumerate(stream.path) if character == ".")]
