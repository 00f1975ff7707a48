"""What a finished variable stands for besides its text: an object, plain data, meta info, a cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

from sgl.errors import ProgramError
from sgl.lang.aio import Wait
from sgl.lang.ir import nodes as ir
from sgl.lang.record.cell import Cell, Lazy
from sgl.lang.record.expr import parser_of
from sgl.lang.record.place import place_text, with_place
from sgl.lang.record.stream import Stream
from sgl.lang.typed import tools
from sgl.lang.typed.schema import typed


class _Streams(Protocol):
    """The part of `Run` used here."""

    def stream(self, index: int) -> Stream: ...


def object_of(
    run: _Streams, stream: Stream, variable: Any, name: str, *, schema: Any = None, is_plain: bool = False
) -> Generator[Wait, None, Any]:
    """Steps that wait for a variable and return its text as an object: of `schema`, else of what its gen asked for
    (`is_plain`: as JSON has it). A list for a join's variable or several samples. Raises ProgramError if the text is no
    such object."""
    if isinstance(variable, Lazy) and variable.items is not None:
        objects = []
        for item in variable.items:
            objects.append((yield from object_of(run, stream, item, name, schema=schema, is_plain=is_plain)))
        return objects
    if not isinstance(variable, Cell) or variable.address is None:
        value = yield from stream.value(variable)
        return value if schema is None or not isinstance(value, str) else _parsed(typed(schema).parse, value, name)
    home, index = run.stream(variable.address[0]), variable.address[1]
    node = home.nodes[index]
    yield from stream.ready((variable,))
    if schema is None and isinstance(node, ir.Gen) and node.tools:
        yield from stream.ready(home.tool_cells(index))
        calls = tools.calls_of(variable.text, variable.meta)
        return [call.to_dict() for call in calls] if is_plain else calls
    parse = parser_of(node, is_plain=is_plain) if schema is None else typed(schema).parse
    path, place = ir.node_path(home.path, index), place_text(home.places[index])
    return _parsed(parse, variable.value, name, variable.meta.get("finish_reason"), path, place)


def _parsed(
    parse: Callable[[str], Any],
    value: Any,
    name: str,
    finish: Any = None,
    node: str | None = None,
    place: str | None = None,
) -> Any:
    try:
        return [parse(text) for text in value] if isinstance(value, list) else parse(value)
    except (ValueError, LookupError) as error:
        message = f"the text of {name!r} does not match its schema (finish reason: {finish}): {error}"
        failed = ProgramError(with_place(message, place), node=node, variable=name)
        failed.place = place
        raise failed from error


def meta_of(variable: Any) -> Any:
    """A finished variable's meta info: a dict, a list for samples and branches, None for text."""
    if isinstance(variable, Cell):
        return variable.meta.get("samples", variable.meta)
    if not isinstance(variable, Lazy):
        return None
    if variable.items is not None:
        return [meta_of(item) for item in variable.items]
    return meta_of(variable.source)


_DRAFTS = ("drafted_tokens", "accepted_tokens")
_COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens", *_DRAFTS)


def cost_of(meta: Mapping[str, Any]) -> Counter[str]:
    """A node's cost, from `usage` or the meta info of single calls."""
    cost = Counter[str]()
    usage = meta.get("usage")
    if usage is None:
        for sample in meta.get("samples", (meta,)):
            cost.update({key: sample[key] for key in _COUNTED if isinstance(sample.get(key), int)})
        return cost
    cost.update({"prompt_tokens": usage["new_tokens"] + usage["cached_tokens"]})
    cost.update({"completion_tokens": usage["generated_tokens"] + usage["forced_tokens"]})
    cost.update({key: usage[key] for key in ("cached_tokens", "forced_tokens", "queue_seconds", "compute_seconds")})
    cost.update({key: usage[key] for key in _DRAFTS if key in usage})
    return cost
