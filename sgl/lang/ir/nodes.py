"""The intermediate representation: what a program records, a backend executes and a file can hold as JSON.

It knows the nodes, the segments that carry them, the events that answer, and the rules that every executor shares
(node paths, seeds, sampling parameters), but neither Python programs nor tokens. `sgl.lang.record` records it,
`sgl.lang.backends.steps` and the runtime execute it, and `sgl.lang.ir.check` validates it.

A run is a tree of *streams*, append-only texts. Stream 0 is the root; a `Fork` node creates others. A node's
address is (stream, index in the stream); a `Ref` or `Join` only ever points at nodes recorded before it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import DEFAULTS

VERSION = 1
MAX_LEASE_S = 3600.0
MAX_HELD_CHARACTERS = 16_000_000  # that a program may hold in all
MAX_COPIED_CHARACTERS = 256_000_000  # that its branches copy and its text functions read, in all
MAX_HELD_TOKENS = 32_000_000  # of its streams, what a branch begins with counted in each
MAX_CHARACTERS_TOGETHER = 64_000_000  # that all programs of one engine may hold
MAX_TOKENS_TOGETHER = 64_000_000  # of all their streams
MAX_PARTS = 1_000_000  # of a split
MAX_REF_CHARACTERS = 1_000_000  # that the text functions of a ref may make

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]+\.?[0-9]*[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[\w\d\s]*"'
DTYPE_REGEX = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
DTYPE_STOPS = {"int": (" ", "\n"), "float": (" ", "\n")}

REASONING_SUFFIX = "_reasoning_content"


class Node:
    """One step of a program; also an expression: `"text" + node + node` is an `Exprs`."""

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
    """Nodes to append in order. Never shipped: a stream records its items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Text(Node):
    """Text of the program or its user. It never becomes control tokens."""

    op: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class Arg(Node):
    """The text of the program argument `name`: a hole in a compiled program."""

    op: ClassVar[str] = "arg"
    name: str


@dataclass(frozen=True, slots=True)
class RoleBegin(Node):
    """Open a turn; turns do not nest."""

    op: ClassVar[str] = "role_begin"
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Node):
    """Close the open turn."""

    op: ClassVar[str] = "role_end"
    role: str


@dataclass(frozen=True, slots=True)
class Media(Node):
    """An image, or the sampled frames of a video; `data` is base64."""

    op: ClassVar[str] = "media"
    kind: Literal["image", "video"]
    data: str

    def bytes(self) -> bytes:
        """The decoded data."""
        return base64.b64decode(self.data)


@dataclass(frozen=True, slots=True)
class Gen(Node):
    """Generate text. `params` holds only what this node overrides; `constraint` is {kind: value} with kind one of
    regex, json, ebnf; `client` (parser, tool functions) stays with whoever recorded the node."""

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
    """Append the choice that `method` (of `sgl.lang.ir.choices`) prefers by its log-probabilities."""

    op: ClassVar[str] = "select"
    name: str | None
    choices: tuple[str, ...]
    method: str = "token_length_normalized"


@dataclass(frozen=True, slots=True)
class Ref(Node):
    """The text of an earlier node, through `functions` of a closed set (see `apply_functions`)."""

    op: ClassVar[str] = "ref"
    stream: int
    index: int
    functions: tuple[tuple[Any, ...], ...] = ()

    def _then(self, *function: Any) -> Ref:
        return Ref(self.stream, self.index, (*self.functions, function))

    def strip(self) -> Ref:
        """Without white space at both ends."""
        return self._then("strip")

    def lower(self) -> Ref:
        """In lower case."""
        return self._then("lower")

    def upper(self) -> Ref:
        """In upper case."""
        return self._then("upper")

    def split(self, separator: str | None = None, *, take: int = 0) -> Ref:
        """The part number `take` of the text split at `separator`; empty if there is no such part."""
        return self._then("split", separator, take)

    def slice(self, start: int | None = None, stop: int | None = None) -> Ref:
        """The characters from `start` up to `stop`."""
        return self._then("slice", start, stop)

    def replace(self, old: str, new: str) -> Ref:
        """With each `old` replaced by `new`."""
        return self._then("replace", old, new)


@dataclass(frozen=True, slots=True)
class ScopeBegin(Node):
    """From here on, text also goes into variable `name`."""

    op: ClassVar[str] = "scope_begin"
    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Node):
    """Variable `name` is the text since the matching `ScopeBegin`."""

    op: ClassVar[str] = "scope_end"
    name: str


@dataclass(frozen=True, slots=True)
class Fork(Node):
    """Start streams `children`, each continuing from here."""

    op: ClassVar[str] = "fork"
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(Node):
    """Wait for streams `children` and close them; mode "append" adds what each wrote after its fork point."""

    op: ClassVar[str] = "join"
    children: tuple[int, ...]
    mode: Literal["gather", "append"] = "gather"


@dataclass(frozen=True, slots=True)
class SetVar(Node):
    """Python gave variable `name` a text; no text is appended."""

    op: ClassVar[str] = "set"
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ToolResults(Node):
    """Wait for the client to run the tool calls of the gen at `index` of this stream and to answer with turns."""

    op: ClassVar[str] = "tool_results"
    index: int


_ALL = Text, Arg, RoleBegin, RoleEnd, Media, Gen, Select, Ref, ScopeBegin, ScopeEnd, Fork, Join, SetVar, ToolResults
NODES: dict[str, type[Node]] = {cls.op: cls for cls in _ALL}


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that answers a tool call; without a role the content is appended as it is."""

    role: str | None
    content: str
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """How a run is opened. `args` fill its holes; `lease_s`: how long its pages stay locked between segments;
    `chat_template`: a registered name or Jinja source, in one process also a template or a function that renders."""

    name: str
    seed: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    lease_s: float = 30.0
    deadline_s: float | None = None  # from its opening
    chat_template: Any = None
    speculate_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """What was recorded since the last one: (stream, node) in order, and (stream, index, turns) for each `Need`."""

    nodes: tuple[tuple[int, Node], ...] = ()
    answers: tuple[tuple[int, int, tuple[Turn, ...]], ...] = ()
    final: bool = False


@dataclass(slots=True)
class Delta:
    """New text of a gen, in stream mode. Joined deltas are a prefix of the node's final text (or reasoning)."""

    stream: int
    index: int
    text: str
    meta: dict[str, Any] | None = None
    reasoning: bool = False


@dataclass(slots=True)
class NodeDone:
    """The node appended `text` and gave its variable `value`. Due for each node whose text the client cannot
    know: gen, select, role_begin, role_end, media, ref, tool_results."""

    stream: int
    index: int
    text: str
    value: str | list[str]
    meta: dict[str, Any]


@dataclass(slots=True)
class Need:
    """The tool_results node waits for the client's answer in a later segment."""

    stream: int
    index: int


@dataclass(slots=True)
class NodeFailed:
    """The node failed; without an address, the whole program did. Later nodes of its stream, streams forked from
    it afterwards and streams that join it fail with it, without further events; the others go on."""

    stream: int | None
    index: int | None
    error: Exception


@dataclass(slots=True)
class Done:
    """The program ended and every stream is drained; nothing follows."""


Event: TypeAlias = Delta | NodeDone | Need | NodeFailed | Done
EVENTS: dict[str, type[Any]] = {  # by their names on a wire
    "delta": Delta,
    "node_done": NodeDone,
    "need": Need,
    "node_failed": NodeFailed,
    "done": Done,
}
Sink: TypeAlias = Callable[[Event], None]


def node_path(fork_path: str, index: int) -> str:
    """A node's address, whatever the batch or timing: `7.0/3` is node 3 of branch 0 of the fork at root node 7."""
    return f"{fork_path}{index}"


def branch_path(fork_path: str, index: int, branch: int) -> str:
    """The path of branch number `branch` of the fork at node `index`; its nodes follow it."""
    return f"{fork_path}{index}.{branch}/"


def node_seed(seed: int, path: str, sample: int = 0) -> int:
    """The sampling seed of one sample of one node: 63 bits of BLAKE2 over program seed, path and sample index."""
    digest = hashlib.blake2b(f"{seed}/{path}#{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def turn_problem(op: str, role: str, open_role: str | None) -> str | None:
    """Why a turn cannot begin or end (`op`) where that of `open_role` is open, if it cannot."""
    if op == RoleBegin.op and open_role is not None:
        return f"the {role} turn cannot begin inside the open {open_role} turn"
    if op == RoleEnd.op and open_role != role:
        return f"no {role} turn is open here" + (f": the {open_role} turn is" if open_role else "")
    return None


def resolve(
    program: Program, gen: Gen, path: str, template_stops: Iterable[str] = ()
) -> tuple[dict[str, Any], list[int]]:
    """All sampling parameters of a gen (never shared, so free to change) and the seeds of its n samples: the gen's own
    seed, if it has one, is the first. In `stop`, those of its dtype and then those of the open role's template follow
    the gen's."""
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
    """(kind, value) of what the gen's text must match, dtype included."""
    if gen.dtype is not None:
        return "regex", DTYPE_REGEX[gen.dtype]
    return next(iter(gen.constraint.items()), None) if gen.constraint else None


def apply_functions(text: str, functions: Iterable[tuple[Any, ...]]) -> str:
    """The text functions of a `Ref`: strip, lower, upper, split(separator, take), slice(start, stop), replace. Raises
    `InvalidRequest` before it makes more than `MAX_REF_CHARACTERS`: a few characters could ask for any amount."""
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


def to_json(value: Any) -> Any:
    """A node, program, segment or event as JSON values. Fields at their default are left out."""
    if isinstance(value, Segment):
        data: dict[str, Any] = {"nodes": [{"st": st, **to_json(node)} for st, node in value.nodes]}
        if value.answers:
            data["answers"] = [
                {"st": st, "index": index, "turns": [to_json(turn) for turn in turns]}
                for st, index, turns in value.answers
            ]
        return {**data, "final": True} if value.final else data
    data = {"op": value.op} if isinstance(value, Node) else {}
    if isinstance(value, Program):
        data["v"] = VERSION
        if not isinstance(value.chat_template, str | None):
            raise InvalidRequest("only a chat template's name or Jinja source can be sent", param="chat_template")
    for item in fields(value):
        content = getattr(value, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if not item.metadata.get("local") and content != default:
            data[item.name] = _plain(content)
    return data


def node_from_json(data: Mapping[str, Any]) -> Node:
    """The inverse of `to_json` for a node that has been validated."""
    return NODES[data["op"]](**{key: _frozen(value) for key, value in data.items() if key not in ("op", "st")})


def segment_from_json(data: Mapping[str, Any]) -> Segment:
    """The inverse of `to_json` for a segment that has been validated."""
    return Segment(
        tuple((item["st"], node_from_json(item)) for item in data["nodes"]),
        tuple((a["st"], a["index"], tuple(Turn(**turn) for turn in a["turns"])) for a in data.get("answers", ())),
        data.get("final", False),
    )


def nodes_of(value: object) -> tuple[Node, ...]:
    """The nodes of text or an expression, in order. Raises TypeError for anything else."""
    if isinstance(value, Exprs):
        return value.items
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, str):
        return (Text(value),)
    raise TypeError(f"only text and expressions can be added to an expression, not {type(value).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
