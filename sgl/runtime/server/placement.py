"""Which of several engines gets a request or a program: the one that would be done with it first, as far as is known.

Work is counted in tokens to compute, those to generate being worth several of a prompt. An engine's is what it was
given and has not finished; a new request adds what that engine has not computed before. So requests with the same
beginning meet, until it costs less to compute the beginning again elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl.errors import EngineDead
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.sampling import DEFAULTS

GENERATED = 4.0
"""Prompt tokens whose computing takes as long as generating one. Llama-3.1-8B on an H200: 2 in a batch of 256, 4 in
one of 64."""
MOST_GENERATED = 256
"""Tokens that an output is expected to have at most: limits are often far above what comes."""
CHARACTERS = 4  # of a token
MOST_BLOCKS = 256  # of a beginning
MOST_NODES = 256  # of a segment that are looked at
REMEMBERED = 200_000  # blocks of each engine
_BLOCK_CHARACTERS, _BLOCK_IDS = 64, 16


@dataclass(frozen=True, slots=True)
class Future:
    """What is known of the work to come."""

    blocks: Sequence[int]
    """Hashes of the beginning: each of one more block than the one before."""
    block_tokens: int
    prompt: float  # tokens
    generated: float  # tokens


class Placement:
    """The engines' work and what they have computed."""

    def __init__(self, number: int) -> None:
        self._work = [0.0] * number
        self._placed = [0] * number
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(number)]

    def place(self, future: Future, among: Collection[int]) -> tuple[int, float]:
        """The engine, and its added work, for `end`. Raises EngineDead if there is none."""
        if not among:
            raise EngineDead("no engine is running: they are starting, or being restarted")
        generated = GENERATED * future.generated
        added = {i: max(0.0, future.prompt - self.found(i, future)) + generated for i in among}
        chosen = min(among, key=lambda i: (self._work[i] + added[i], self._placed[i], i))
        self._work[chosen] += added[chosen]
        self._placed[chosen] += 1
        known = self._known[chosen]
        for block in future.blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        return chosen, added[chosen]

    def found(self, engine: int, future: Future) -> int:
        """Tokens of the beginning that an engine has computed."""
        known, number = self._known[engine], 0
        for block in future.blocks:
            if block not in known:
                break
            number += future.block_tokens
        return number

    def end(self, engine: int, work: float) -> None:
        """What was placed there has ended."""
        self._work[engine] = max(0.0, self._work[engine] - work)

    def forget(self, engine: int) -> None:
        """It was restarted: its cache is empty."""
        self._known[engine].clear()


def future_of(prompt: str | Sequence[int] | None, params: Any, extra_key: str | None = None) -> Future:
    """Of one prompt. Malformed arguments are the engine's to refuse."""
    generated, samples = _number(params, "max_new_tokens", MOST_GENERATED), _number(params, "n", 1)
    generated = min(generated, MOST_GENERATED) * samples
    if isinstance(prompt, str):
        blocks = _blocks(prompt, _BLOCK_CHARACTERS, extra_key)
        return Future(blocks, _BLOCK_CHARACTERS // CHARACTERS, len(prompt) / CHARACTERS, generated)
    ids = prompt if isinstance(prompt, (list, tuple)) else []
    return Future(_blocks(ids, _BLOCK_IDS, extra_key), _BLOCK_IDS, len(ids), generated)


def future_of_program(program: ir.Program, segment: ir.Segment) -> Future:
    """Of a program and what it has recorded: its text up to the first gen, and all that it is going to compute."""
    beginning: list[str] = []
    has_begun, prompt, generated = True, 0.0, 0.0
    for stream, node in segment.nodes[:MOST_NODES]:
        text = _text(node, program.args)
        if text is None:
            has_begun = False
        elif has_begun and stream == 0:
            beginning.append(text)
        prompt += len(text or "") / CHARACTERS
        if isinstance(node, ir.Gen):
            params = {**program.defaults, **node.params}
            limit = _number(params, "max_tokens", DEFAULTS["max_tokens"])
            generated += min(limit, MOST_GENERATED) * _number(params, "n", 1)
        elif isinstance(node, ir.Select):
            prompt += sum(map(len, node.choices)) / CHARACTERS
    blocks = _blocks("".join(beginning), _BLOCK_CHARACTERS, program.chat_template)
    return Future(blocks, _BLOCK_CHARACTERS // CHARACTERS, prompt, generated)


def _text(node: ir.Node, args: Mapping[str, str]) -> str | None:
    """What a node appends, as far as it is known before it runs."""
    match node:
        case ir.Text(text):
            return text
        case ir.Arg(name):
            return args.get(name, "")
        case ir.RoleBegin(role) | ir.RoleEnd(role):
            return f"<{role}>"
        case ir.ScopeBegin() | ir.ScopeEnd() | ir.SetVar() | ir.Fork():
            return ""
    return None


def _number(params: Any, name: str, default: float) -> float:
    value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
    is_number = isinstance(value, (int, float)) and 0 <= value < 1e9
    return float(value) if is_number and value is not None else float(default)


def _blocks(prompt: str | Sequence[int], size: int, namespace: object) -> list[int]:
    found: list[int] = []
    state = hash((namespace if isinstance(namespace, str) else None, size))
    for start in range(0, min(len(prompt) - size + 1, size * MOST_BLOCKS), size):
        piece = prompt[start : start + size]
        try:
            state = hash((state, piece if isinstance(piece, str) else tuple(piece)))
        except TypeError:  # no token ids
            break
        found.append(state)
    return found
