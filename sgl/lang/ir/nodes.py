"""The intermediate representation of programs: recorded by `sgl.lang.record`, checked by `sgl.lang.ir.check`, executed
by `sgl.lang.backends.steps` and the runtime, and JSON on a wire. Here are nodes, segments, events and what all
executors share: node paths, seeds, sampling parameters.

A run is a tree of *streams*, append-only texts. Stream 0 is the root; `Fork` creates others. A node's address is
(stream, index in the stream); a `Ref` or `Join` only points at earlier nodes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import DEFAULTS

T = TypeVar("T", default=Any)
VERSION = 1
MAX_LEASE_S = 3600.0
MAX_HELD_CHARACTERS = 16_000_000  # of one program, in streams and values
MAX_COPIED_CHARACTERS = 256_000_000  # copied by branches or read by text functions, in all
MAX_HELD_TOKENS = 32_000_000  # in all streams; each branch counts its prefix
MAX_CHARACTERS_TOGETHER = 64_000_000  # of all programs of an engine
MAX_TOKENS_TOGETHER = 64_000_000  # in all their streams
MAX_PARTS = 1_000_000  # of a split
MAX_REF_CHARACTERS = 1_000_000  # made by a ref's text functions

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]+\.?[0-9]*[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[\w\d\s]*"'
DTYPE_REGEX = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
DTYPE_STOPS = {"int": (" ", "\n"), "float": (" ", "\n")}

REASONING_SUFFIX = "_reasoning_content"


class Node:
    """A step of a program, and an expression: `"text" + node + node` is an `Exprs`."""

    __slots__ = ()
    op: ClassVar[str]

    def __add__(self, other: Node | str) -> Exprs:
        return Exprs((*nodes_of(self), *nodes_of(other)))

    def __radd__(self, other: str) -> Exprs:
        return Exprs((*nodes_of(other), *nodes_of(self)))

    def __format__(self, spec: str) -> str:
        raise TypeError("an expression has no text yet: append it with `+`, not inside an f-string")


@dataclass(frozen=True, slots=True)
class Exprs(Node):
    """Nodes to append in order. Never sent: a stream records its items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Text(Node):
    """Text; never becomes control tokens."""

    op: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class Arg(Node):
    """The text of argument `name`: a hole in a compiled program."""

    op: ClassVar[str] = "arg"
    name: str


@dataclass(frozen=True, slots=True)
class RoleBegin(Node):
    """Open a turn. Turns do not nest."""

    op: ClassVar[str] = "role_begin"
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Node):
    """Close the turn."""

    op: ClassVar[str] = "role_end"
    role: str


@dataclass(frozen=True, slots=True)
class Media(Node):
    """An image, or frames of a video; `data` is base64, or an image's http URL. `fps`: frames a second, if known."""

    op: ClassVar[str] = "media"
    kind: Literal["image", "video"]
    data: str
    fps: float | None = None

    def bytes(self) -> bytes:
        """The decoded data."""
        return base64.b64decode(self.data)


@dataclass(frozen=True, slots=True)
class Gen(Node, Generic[T]):
    """Generate text; to type checkers, of a T. `params`: this node's overrides. `constraint`: {kind: value}, kind one
    of regex, json, ebnf. `client` (parser, tools) stays with the recorder."""

    op: ClassVar[str] = "gen"
    name: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    constraint: Mapping[str, Any] | None = None
    dtype: Literal["int", "float", "bool", "str"] | None = None
    reasoning: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    client: Any = field(default=None, compare=False, metadata={"local": True})


@dataclass(frozen=True, slots=True)
class Select(Node):
    """Append the choice that `method` (see `sgl.lang.ir.choices`) prefers."""

    op: ClassVar[str] = "select"
    name: str | None
    choices: tuple[str, ...]
    method: str = "token_length_normalized"


@dataclass(frozen=True, slots=True)
class Ref(Node):
    """An earlier node's text through `functions` (see `apply_functions`)."""

    op: ClassVar[str] = "ref"
    stream: int
    index: int
    functions: tuple[tuple[Any, ...], ...] = ()

    def _then(self, *function: Any) -> Ref:
        return Ref(self.stream, self.index, (*self.functions, function))

    def strip(self) -> Ref:
        """Strip white space at both ends."""
        return self._then("strip")

    def lower(self) -> Ref:
        """Convert to lower case."""
        return self._then("lower")

    def upper(self) -> Ref:
        """Convert to upper case."""
        return self._then("upper")

    def split(self, separator: str | None = None, *, take: int = 0) -> Ref:
        """Part number `take` of the text split at `separator`, or empty."""
        return self._then("split", separator, take)

    def slice(self, start: int | None = None, stop: int | None = None) -> Ref:
        """The characters from `start` to `stop`."""
        return self._then("slice", start, stop)

    def replace(self, old: str, new: str) -> Ref:
        """Replace every `old` with `new`."""
        return self._then("replace", old, new)


@dataclass(frozen=True, slots=True)
class ScopeBegin(Node):
    """Text from here on also goes into variable `name`."""

    op: ClassVar[str] = "scope_begin"
    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Node):
    """Set variable `name` to the text since its `ScopeBegin`."""

    op: ClassVar[str] = "scope_end"
    name: str


@dataclass(frozen=True, slots=True)
class Fork(Node):
    """Start streams `children`, which continue from here."""

    op: ClassVar[str] = "fork"
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(Node):
    """Wait for streams `children` and close them; mode "append" adds what each wrote since its fork. The client makes
    lists of their variables for "gather", and takes them as they are for "absorb"."""

    op: ClassVar[str] = "join"
    children: tuple[int, ...]
    mode: Literal["gather", "append", "absorb"] = "gather"


@dataclass(frozen=True, slots=True)
class SetVar(Node):
    """Set variable `name`; appends nothing."""

    op: ClassVar[str] = "set"
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ToolResults(Node):
    """Wait for the client's answer to the tool calls of the gen at `index`."""

    op: ClassVar[str] = "tool_results"
    index: int


_ALL = Text, Arg, RoleBegin, RoleEnd, Media, Gen, Select, Ref, ScopeBegin, ScopeEnd, Fork, Join, SetVar, ToolResults
NODES: dict[str, type[Node]] = {cls.op: cls for cls in _ALL}
ANSWERED = Gen, Select, RoleBegin, RoleEnd, Media, Ref, ToolResults  # a NodeDone brings their text


@dataclass(frozen=True, slots=True)
class Turn:
    """A tool call's answer as a turn; without a role, plain text."""

    role: str | None
    content: str
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A run's header. `args` fill holes; `lease_s`: how long pages stay locked between segments; `chat_template`: a
    registered name or Jinja source, in one process also a template or render function."""

    name: str
    seed: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    lease_s: float = 30.0
    deadline_s: float | None = None  # from opening
    chat_template: Any = None
    speculate_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Newly recorded (stream, node) pairs, and (stream, index, turns) answers to `Need`s."""

    nodes: tuple[tuple[int, Node], ...] = ()
    answers: tuple[tuple[int, int, tuple[Turn, ...]], ...] = ()
    final: bool = False


@dataclass(slots=True)
class Delta:
    """A streamed gen's new text. Joined, deltas are a prefix of the final text (or reasoning)."""

    stream: int
    index: int
    text: str
    meta: dict[str, Any] | None = None
    reasoning: bool = False


@dataclass(slots=True)
class NodeDone:
    """The node appended `text` and set its variable to `value`. Sent for nodes whose text the client cannot know: gen,
    select, role_begin, role_end, media, ref, tool_results."""

    stream: int
    index: int
    text: str
    value: str | list[str]
    meta: dict[str, Any]


@dataclass(slots=True)
class Need:
    """A tool_results node waits for an answer in a later segment."""

    stream: int
    index: int


@dataclass(slots=True)
class NodeFailed:
    """A node failed, or without an address the program. What depends on it fails silently; other streams go on."""

    stream: int | None
    index: int | None
    error: Exception


@dataclass(slots=True)
class Done:
    """Every stream is drained; nothing follows."""


Event: TypeAlias = Delta | NodeDone | Need | NodeFailed | Done
EVENTS: dict[str, type[Any]] = {  # names on the wire
    "delta": Delta,
    "node_done": NodeDone,
    "need": Need,
    "node_failed": NodeFailed,
    "done": Done,
}
Sink: TypeAlias = Callable[[Event], None]


def node_path(fork_path: str, index: int) -> str:
    """A node's path: `7.0/3` is node 3 of branch 0 of the fork at root node 7."""
    return f"{fork_path}{index}"


def branch_path(fork_path: str, index: int, branch: int) -> str:
    """The path that starts those of a branch's nodes; the fork is node `index`."""
    return f"{fork_path}{index}.{branch}/"


def node_seed(seed: int, path: str, sample: int = 0) -> int:
    """A sample's seed: 63 bits of BLAKE2 over program seed, path and sample index."""
    digest = hashlib.blake2b(f"{seed}/{path}#{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def turn_problem(op: str, role: str, open_role: str | None) -> str | None:
    """Why the turn cannot begin or end (`op`) while `open_role`'s is open, or None."""
    if op == RoleBegin.op and open_role is not None:
        return f"the {role} turn cannot begin inside the open {open_role} turn"
    if op == RoleEnd.op and open_role != role:
        return f"no {role} turn is open here" + (f": the {open_role} turn is" if open_role else "")
    return None


def params_and_seeds(
    program: Program, gen: Gen, path: str, template_stops: Iterable[str] = ()
) -> tuple[dict[str, Any], list[int]]:
    """A gen's sampling parameters (a fresh dict) and its samples' seeds; its own seed is the first. `stop` adds those
    of its dtype, then of the template."""
    params = {**DEFAULTS, **program.defaults, **gen.params}
    stops = (*params["stop"], *DTYPE_STOPS.get(gen.dtype or "", ()), *template_stops)
    params["stop"] = list(dict.fromkeys(stops))
    params["stop_token_ids"] = list(params["stop_token_ids"])
    params["stop_regex"] = list(params["stop_regex"])
    own = params["seed"]
    if own is None:
        return params, [node_seed(program.seed, path, i) for i in range(params["n"])]
    return params, [own if i == 0 else node_seed(own, "", i) for i in range(params["n"])]


def constraint_of(gen: Gen) -> tuple[str, Any] | None:
    """The gen's constraint as (kind, value), dtype included."""
    if gen.dtype is not None:
        return "regex", DTYPE_REGEX[gen.dtype]
    return next(iter(gen.constraint.items()), None) if gen.constraint else None


def apply_functions(text: str, functions: Iterable[tuple[Any, ...]]) -> str:
    """Apply a `Ref`'s strip, lower, upper, split(separator, take), slice(start, stop), replace. Raises InvalidRequest
    before making over `MAX_REF_CHARACTERS`."""
    for name, *args in functions:
        match name:
            case "strip" | "lower" | "upper":
                text = getattr(text, name)()
            case "replace":
                length = len(text) + text.count(args[0]) * (len(args[1]) - len(args[0]))
                if length > max(MAX_REF_CHARACTERS, len(text)):
                    raise InvalidRequest(f"replace() would make a text of {length} characters", param="functions")
                text = text.replace(*args)
            case "slice":
                text = text[args[0] : args[1]]
            case "split":
                if args[0] == "" or (text.count(args[0]) if args[0] else len(text) // 2) > MAX_PARTS:
                    message = f"split() needs a separator, and makes {MAX_PARTS} parts at most"
                    raise InvalidRequest(message, param="functions")
                parts = text.split(args[0])
                text = parts[args[1]] if -len(parts) <= args[1] < len(parts) else ""
            case _:
                raise AssertionError(f"unknown text function {name!r}")
    return text


def nodes_of(value: object) -> tuple[Node, ...]:
    """The nodes of text or an expression. Raises TypeError for anything else."""
    if isinstance(value, Exprs):
        return value.items
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, str):
        return (Text(value),)
    raise TypeError(f"only text and expressions can be added to an expression, not {type(value).__name__}")
