"""A program's text in spans: what its nodes wrote, and how the tokens of it came about.

Everything that shows a program (a notebook, the server's page, `sgl trace`, a terminal) reads one shape, the timeline:
`nodes` as `sgl.lang.ir` writes them, each with its stream `st`; `events` that answered them, with the seconds `at`
which they came if known; and `args`, the texts of holes. A timeline may be of any size, so what is made of it is
bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

from sgl.lang.ir import nodes as ir

MAX_SPANS = 4_000
MAX_CHARACTERS = 400_000  # of all spans
MAX_TOKENS = 20_000  # told apart in all spans
MAX_BRANCHES = 64  # of a fork
MAX_DEPTH = 12  # of forks inside of forks
MAX_CHOICES = 12  # of a select: the likeliest, and the one that was chosen

Kind: TypeAlias = Literal["given", "template", "generated", "chosen", "repeated", "tool"]
State: TypeAlias = Literal["done", "pending", "failed"]
_KINDS: dict[str, Kind] = {
    "gen": "generated",
    "select": "chosen",
    "ref": "repeated",
    "role_begin": "template",
    "role_end": "template",
    "tool_results": "tool",
}
_SILENT = ("scope_begin", "scope_end", "set")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a span's text: with a log-probability one token; `is_forced`: no other could have come."""

    text: str
    logprob: float | None = None
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds since the program opened: when the node could start, was started, had its prompt computed, was done."""

    start: float
    started: float
    computed: float
    done: float


@dataclass(slots=True)
class Span:
    """A node and what it wrote; a fork writes nothing and has branches."""

    stream: int
    index: int
    path: str
    op: str
    kind: Kind
    name: str | None
    state: State
    pieces: list[Piece]
    choices: list[tuple[str, float]] = field(default_factory=list)  # with probabilities, the likeliest first
    num_choices: int = 0
    facts: list[tuple[str, str]] = field(default_factory=list)
    stages: Stages | None = None
    branches: list[Branch] = field(default_factory=list)
    num_branches: int = 0

    @property
    def text(self) -> str:
        """What it wrote."""
        return "".join([piece.text for piece in self.pieces])


@dataclass(slots=True)
class Branch:
    """A stream: the program's own, or one that a fork started."""

    stream: int
    path: str
    depth: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """A program's text. `shortened`: how many nodes and characters are not in it."""

    name: str
    root: Branch
    is_running: bool
    error: str | None
    shortened: tuple[int, int] = (0, 0)

    def spans(self) -> Iterator[Span]:
        """All of them, stream by stream."""
        for branch in self.branches():
            yield from branch.spans

    def branches(self) -> Iterator[Branch]:
        """All streams, each after the one that it came from."""
        waiting = [self.root]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += [child for span in reversed(branch.spans) for child in reversed(span.branches)]


def view_of(timeline: Mapping[str, Any]) -> View:
    """The spans of a timeline."""
    return _Reader(timeline).view()


class _Reader:
    def __init__(self, timeline: Mapping[str, Any]) -> None:
        self._timeline = timeline
        self._args: Mapping[str, str] = timeline.get("args", {})
        self._nodes: dict[int, list[Mapping[str, Any]]] = {}
        self._answers: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._error: str | None = None
        self._characters, self._tokens, self._spans = MAX_CHARACTERS, MAX_TOKENS, MAX_SPANS
        self._left_out = [0, 0]

    def view(self) -> View:
        timeline = self._timeline
        for node in timeline["nodes"]:
            self._nodes.setdefault(node["st"], []).append(node)
        for event in timeline["events"]:
            if event["type"] in ("node_done", "node_failed", "delta"):
                if event.get("stream") is None:
                    self._error = _message(event)
                else:
                    self._answers[event["stream"], event["index"]] = event
        root = Branch(0, "")
        waiting = [root]
        while waiting:
            waiting += self._fill(waiting.pop())
        error, left_out = self._error, (self._left_out[0], self._left_out[1])
        return View(str(timeline.get("name", "")), root, bool(timeline.get("is_running")), error, left_out)

    def _fill(self, branch: Branch) -> list[Branch]:
        """Add the branch's spans. Returns the branches that they start."""
        started: list[Branch] = []
        is_stopped = False
        for index, node in enumerate(self._nodes.get(branch.stream, ())):
            if node["op"] in _SILENT or (node["op"] == "join" and node.get("mode") != "append"):
                continue
            if not self._spans:
                self._left_out[0] += 1
                continue
            span = self._span(branch, index, node, is_stopped=is_stopped)
            is_stopped = is_stopped or span.state == "failed"
            if span.op == "fork" or span.text or span.state != "done":
                self._spans -= 1
                branch.spans.append(span)
                started += span.branches
        return started

    def _span(self, branch: Branch, index: int, node: Mapping[str, Any], *, is_stopped: bool) -> Span:
        op, path = node["op"], ir.node_path(branch.path, index)
        span = Span(branch.stream, index, path, op, _KINDS.get(op, "given"), node.get("name"), "done", [])
        match op:
            case "text":
                span.pieces = [Piece(self._shortened(node["text"]))]
            case "arg":
                span.pieces = [Piece(self._shortened(self._args.get(node["name"], "{" + node["name"] + "}")))]
            case "media":
                span.pieces = [Piece(f"[{node.get('kind', 'image')}]")]
            case "join":
                span.pieces = [Piece("[the branches' texts]")]
            case "fork":
                children = node["children"]
                span.num_branches = len(children)
                span.branches = [
                    Branch(child, ir.branch_path(branch.path, index, i), branch.depth + 1)
                    for i, child in enumerate(children[: MAX_BRANCHES if branch.depth < MAX_DEPTH else 0])
                ]
            case _:
                self._answer(span, node, is_stopped=is_stopped)
        return span

    def _answer(self, span: Span, node: Mapping[str, Any], *, is_stopped: bool) -> None:
        event = self._answers.get((span.stream, span.index))
        if event is None or event["type"] == "delta":
            is_over = is_stopped or not self._timeline.get("is_running")
            span.state = "failed" if is_over else "pending"
            if event is not None:
                span.pieces = [Piece(self._shortened(event["text"]))]
            return
        span.stages = _stages(event)
        if event["type"] == "node_failed":
            span.state, span.facts = "failed", [("error", _message(event))]
            return
        meta = event.get("meta") or {}
        text = self._shortened(event["text"])
        span.pieces = self._pieces(text, meta) if span.op == "gen" else [Piece(text)]
        span.facts = list(_facts(meta))
        if span.op == "select":
            choices = list(zip(node.get("choices", ()), meta.get("probabilities", ()), strict=False))
            span.num_choices = len(choices)
            likeliest = sorted(choices, key=lambda choice: -choice[1])
            likeliest = [each for i, each in enumerate(likeliest) if i < MAX_CHOICES or each[0] == event["text"]]
            span.choices = [(self._shortened(choice), probability) for choice, probability in likeliest]
        if isinstance(event.get("value"), list):
            span.facts.append(("samples", f"{len(event['value'])}, of which the first goes on"))

    def _pieces(self, text: str, meta: Mapping[str, Any]) -> list[Piece]:
        """A gen's text by tokens if their texts are known, else by what was forced."""
        entries = (meta.get("samples") or [meta])[0].get("output_token_logprobs") or ()
        pieces = []
        at = 0
        for logprob, _, token in islice(entries, self._tokens):
            if not token or not text.startswith(token, at):  # such as part of a character, or a stop
                break
            pieces.append(Piece(token, logprob))
            at += len(token)
        self._tokens -= len(pieces)
        if pieces:
            return [*pieces, Piece(text[at:])] if at < len(text) else pieces
        data, end = text.encode(errors="surrogatepass"), 0
        for first, last in islice(meta.get("forced_bytes") or (), self._tokens):
            if not end <= first < last <= len(data):
                break
            pieces += [Piece(_decoded(data[end:first])), Piece(_decoded(data[first:last]), is_forced=True)]
            end = last
        self._tokens -= len(pieces)
        return [piece for piece in [*pieces, Piece(_decoded(data[end:]))] if piece.text]

    def _shortened(self, text: str) -> str:
        kept = text[: self._characters]
        self._characters -= len(kept)
        self._left_out[1] += len(text) - len(kept)
        return kept


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


def _message(event: Mapping[str, Any]) -> str:
    error = event.get("error") or {}
    return str(error.get("message", error))


def _stages(event: Mapping[str, Any]) -> Stages | None:
    if "at" not in event:
        return None
    meta = event.get("meta") or {}
    waited, computed, took = _durations(meta)
    start = event["at"] - took
    return Stages(start, start + waited, start + computed, event["at"])


def _durations(meta: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds from when a node could start: until it was, until its prompt was computed, until it was done. A select
    scores its choices with its prompt."""
    usage = meta.get("usage") or {}
    waited = _seconds(meta.get("queue_time"), usage.get("queue_seconds"))
    took = max(waited, _seconds(meta.get("e2e_latency"), waited + _seconds(usage.get("compute_seconds"))))
    return waited, min(took, waited + _seconds(meta.get("prefill_time"))), took


def _seconds(*values: Any) -> float:
    """The first that is known, else 0."""
    return next((float(value) for value in values if isinstance(value, int | float)), 0.0)


def _facts(meta: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    usage = meta.get("usage") or {}
    waited, computed, took = _durations(meta)
    generated = usage.get("generated_tokens", meta.get("completion_tokens"))
    counts: Sequence[tuple[str, Any]] = (
        ("tokens", generated),
        ("forced", usage.get("forced_tokens", meta.get("forced_tokens"))),
        ("drafted", usage.get("drafted_tokens", meta.get("drafted_tokens"))),
        ("of them accepted", usage.get("accepted_tokens", meta.get("accepted_tokens"))),
        ("cached", usage.get("cached_tokens", meta.get("cached_tokens"))),
        ("new in the prompt", usage.get("new_tokens")),
    )
    yield from ((label, str(count)) for label, count in counts if count)
    times = (("waited", waited), ("prompt", computed - waited), ("in all", took))
    yield from ((label, duration(seconds)) for label, seconds in times if seconds >= 1e-4)
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type"):
        yield "ended by", str(reason["type"])


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
