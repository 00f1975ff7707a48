"""Which of several engines gets a request or a program: the one that would be done with it first, as far as is known.

Work is counted in tokens to compute, those to generate being worth several of a prompt. An engine's is what it was
given and has not finished; a new request adds what that engine has not computed before. So requests with the same
beginning meet, until it costs less to compute the beginning again elsewhere. What comes together is placed largest
first, so that the small ones even out what is left.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any

from sgl.errors import EngineDead
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.sampling import DEFAULTS
from sgl.runtime.sampling_params import CONSTRAINTS

GENERATED = 4.0
"""Prompt tokens whose computing takes as long as generating one. Llama-3.1-8B on an H200: 2 in a batch of 256, 4 in
one of 64."""
MOST_GENERATED = 256
"""Tokens that an output is expected to have at most, unless only its limit can end it: limits are often far above what
comes."""
CHARACTERS = 4  # of a token
MOST_BLOCKS = 256  # of a beginning
MOST_NODES = 256  # of a segment that are looked at
REMEMBERED = 200_000  # blocks of each engine
MOST_LOOKED_INTO = 4  # prompts of a bundle, for what they share
BLOCK_IDS = 16
_BLOCK_CHARACTERS = 64
_TOO_MANY = 1_000_000_000  # for a number that means anything
_STOPS = ("stop", "stop_token_ids", "stop_regex")
_ENDS = frozenset((*_STOPS, *CONSTRAINTS))


@dataclass(frozen=True, slots=True)
class Future:
    """What is known of the work to come."""

    blocks: Sequence[int]
    """Hashes of the beginning: each of one more block than the one before."""
    block_tokens: int
    prompt: float  # tokens to compute where nothing is cached
    generated: float  # tokens
    beginning: float = 0.0  # tokens of a program, before it generates any

    @property
    def work(self) -> float:
        """What it adds to an engine that has computed nothing of it."""
        return self.prompt + GENERATED * self.generated


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

    def place_all(self, futures: Sequence[Future], among: Collection[int]) -> list[tuple[int, float]]:
        """What `place` gives for each, the largest being placed first. Raises EngineDead if there is no engine."""
        largest_first = sorted(range(len(futures)), key=lambda i: -futures[i].work)
        placed = {i: self.place(futures[i], among) for i in largest_first}
        return [placed[i] for i in range(len(futures))]

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
        """Its cache is empty: it was restarted, or flushed."""
        self._known[engine].clear()


def future_of(prompt: Any, params: Any, extra_key: str | None = None, context: int | None = None) -> Future:
    """Of one prompt. `context`: tokens of a prompt and an output, at most. Malformed arguments are the engine's to
    refuse."""
    return future_of_prompts([prompt], params, [_number(params, "n", 1)], extra_key, context)


def future_of_prompts(
    prompts: Sequence[Any],
    params: Any,
    samples: Sequence[float],
    extra_key: str | None = None,
    context: int | None = None,
) -> Future:
    """Of prompts that run together, in this order; `params`: of all, or a list. Beginnings that neighbours share are
    computed once, as far as a few of the prompts show."""
    is_text = isinstance(prompts[0], str)
    size, tokens = (_BLOCK_CHARACTERS, _BLOCK_CHARACTERS // CHARACTERS) if is_text else (BLOCK_IDS, BLOCK_IDS)
    try:
        length = sum(map(len, prompts)) * tokens / size
    except TypeError:
        length = 0.0
    if isinstance(params, (list, tuple)):
        generated = float(sum(map(mul, map(_output, params), samples)))
    else:
        generated = _output(params) * sum(samples)
    room = max(0.0, (context or _TOO_MANY) - length / len(prompts)) * sum(samples)
    shared = min(length, _shared_by_neighbours(prompts, size) * tokens)
    return Future(_blocks(prompts[0], size, extra_key), tokens, length - shared, min(generated, room))


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
    first = sum(map(len, beginning)) / CHARACTERS
    return Future(blocks, _BLOCK_CHARACTERS // CHARACTERS, prompt, generated, first)


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


def _output(params: Any) -> float:
    """Tokens that an output is expected to have."""
    if type(params) is dict:  # most are: in a third of the time
        limit = params.get("max_new_tokens")
        if type(limit) is int and 0 <= limit < _TOO_MANY:
            if limit <= MOST_GENERATED:
                return limit
            if params.get("ignore_eos") is True and _ENDS.isdisjoint(params):
                return limit
    limit = _number(params, "max_new_tokens", DEFAULTS["max_tokens"])
    return limit if limit <= MOST_GENERATED or _only_a_limit_ends(params) else MOST_GENERATED


def _only_a_limit_ends(params: Any) -> bool:
    if not isinstance(params, Mapping):
        params = {name: getattr(params, name, None) for name in ("ignore_eos", *_ENDS)}
    if params.get("ignore_eos") is not True:
        return False
    return all(params.get(name) is None for name in CONSTRAINTS) and not any(params.get(name) for name in _STOPS)


def _number(params: Any, name: str, default: float) -> float:
    value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
    is_number = isinstance(value, (int, float)) and 0 <= value < _TOO_MANY
    return float(value) if is_number and value is not None else float(default)


def _shared_by_neighbours(prompts: Sequence[Any], size: int) -> int:
    """Blocks of all but the first prompt that the one before begins with, too: judged by a few prompts, evenly
    spaced."""
    last = len(prompts) - 1
    shared = _shared(prompts[0], prompts[last], size) if last else 0
    if last < 2 or 2 * shared * size >= len(prompts[0]):  # those between share it, too
        return last * shared
    places = [last * i // (MOST_LOOKED_INTO - 1) for i in range(MOST_LOOKED_INTO)]
    return sum((there - here) * _shared(prompts[here], prompts[there], size) for here, there in pairwise(places))


def _shared(one: Any, other: Any, size: int) -> int:
    """Blocks that both begin with."""
    if type(one) is not type(other) or not isinstance(one, (str, list, tuple)):
        return 0
    most = min(len(one) // size, len(other) // size, MOST_BLOCKS)
    number, step, has_failed = 0, 1, False
    while step and number < most:
        end = min(number + step, most)
        if one[number * size : end * size] == other[number * size : end * size]:
            number = end
        else:
            has_failed = True
        step = step // 2 if has_failed else step * 2
    return number


def _blocks(prompt: Any, size: int, namespace: object) -> list[int]:
    found: list[int] = []
    if not isinstance(prompt, (str, list, tuple)):
        return found
    state = first_name(size, namespace)
    pieces = prompt if isinstance(prompt, str) else tuple(prompt[: size * MOST_BLOCKS])
    with contextlib.suppress(TypeError):  # no token ids
        for start in range(0, min(len(prompt) - size + 1, size * MOST_BLOCKS), size):
            state = next_name(state, pieces[start : start + size])
            found.append(state)
    return found


def first_name(size: int, namespace: object = None) -> int:
    """Before the first block of so many characters or ids."""
    return hash((_number_of(namespace) if isinstance(namespace, str) else 0, size))


def next_name(before: int, piece: str | tuple[Any, ...]) -> int:
    """Of a block, by the one before it. Raises TypeError for what are no ids."""
    return hash((before, _number_of(piece) if isinstance(piece, str) else piece))


def _number_of(text: str) -> int:
    """A text as a number, whose hash is the same in each process."""
    return int.from_bytes(text.encode("utf-8", "surrogatepass"), "big")
