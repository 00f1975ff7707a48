"""Structural tags as XGrammar writes them: a `format` made of other formats, as nodes.

    {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {…}, "end": "</a>"}}

Formats: `const_string` (value), `json_schema` (json_schema), `regex` (pattern), `any_text` (excludes), `sequence` and
`or` (elements), `tag` (begin, content, end), and `triggered_tags` (triggers, tags, at_least_one, stop_after_first),
whose tags hold a schema or a regex. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl.errors import GrammarError
from sgl.grammar.automaton.nfa import Builder, Node
from sgl.grammar.automaton.structural_tag import (
    StructuralTag,
    Structure,
    Tags,
    read_structural_tag,
    structural_tag_node,
)
from sgl.grammar.regular.charset import EVERY_CHAR, utf8
from sgl.grammar.regular.expr import ANYTHING, concat, difference, literal, repeat, words

Body = Callable[[Structure, Node], Node]
_KEYS: dict[str, tuple[set[str], set[str]]] = {  # needed, and known besides
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style"}),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), {"excludes"}),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
}
MAX_DEPTH = 32


def format_node(builder: Builder, source: Any, body: Body, then: Node, depth: int = 0) -> Node:
    """Where text of the format begins, with `then` behind it. `body` is as for `structural_tag_node`, and counts no
    characters by itself: where formats may be empty or begin alike, no place is one that starts a count. Raises
    GrammarError where the format is malformed or of a kind that is not known."""
    kind = _checked(source, depth)
    match kind:
        case "const_string":
            return builder.after(literal(_text(source, "value").encode()), then)
        case "json_schema" | "regex":
            return body(_structure("", source, ""), then)
        case "any_text":
            return _any_text(builder, _texts(source, "excludes"), then)
        case "sequence":
            _check_sequence(_list(source, "elements"))
            for element in reversed(source["elements"]):
                then = format_node(builder, element, body, then, depth + 1)
            return then
        case "or":
            _check_ways(_list(source, "elements"))
            return Tags([format_node(builder, each, body, then, depth + 1) for each in _list(source, "elements")])
        case "tag":
            begin, end = _text(source, "begin"), _text(source, "end")
            content = source["content"]
            behind = builder.after(literal(end.encode()), then)
            if _checked(content, depth + 1) == "any_text" and end:  # it goes to the first end
                inside = _any_text(builder, [*_texts(content, "excludes"), end], behind)
            else:
                inside = format_node(builder, content, body, behind, depth + 1)
            return builder.after(literal(begin.encode()), inside)
    return structural_tag_node(builder, _triggered(source, depth), body, then)


def _triggered(source: Any, depth: int) -> StructuralTag:
    """As the other way to write structural tags has it."""
    if source.get("excludes"):
        raise GrammarError("excludes of triggered_tags is not supported")
    structures = []
    for tag in _list(source, "tags"):
        if _checked({"type": "tag", **tag} if isinstance(tag, dict) else tag, depth + 1) != "tag":
            raise GrammarError("tags of triggered_tags are of type 'tag'")
        structures.append(_structure(_text(tag, "begin"), tag["content"], _text(tag, "end")))
    flags = {name: source.get(name) or False for name in ("at_least_one", "stop_after_first")}
    described: list[dict[str, Any]] = [
        {
            "begin": each.begin,
            "end": each.end,
            **({"schema": each.schema} if each.regex is None else {"regex": each.regex}),
        }
        for each in structures
    ]
    return read_structural_tag({"triggers": source["triggers"], "structures": described, **flags})


def _structure(begin: str, content: Any, end: str) -> Structure:
    match _checked(content, 0):
        case "json_schema":
            if content.get("style", "json") != "json":
                raise GrammarError(f"json_schema of style {content['style']!r} is not supported, only 'json'")
            return Structure(begin, end, content["json_schema"], None)
        case "regex":
            return Structure(begin, end, None, _text(content, "pattern"))
        case kind:
            raise GrammarError(f"tags of triggered_tags hold a json_schema or a regex, not {kind!r}")


def _check_sequence(elements: list[Any]) -> None:
    """A bracket after text of no certain end may belong to that text or begin a value, and no byte decides."""
    loose: str | None = None
    for element in elements:
        if loose is not None and _holds(element, {"json_schema"}):
            raise GrammarError(f"in a sequence, no json_schema may follow a format of type {loose!r}")
        if _holds(element, {"regex", "any_text", "triggered_tags"}):
            loose = element["type"]


def _check_ways(elements: list[Any]) -> None:
    if any(_holds(each, {"json_schema"}) for each in elements) and any(
        _checked(each, 0) != "json_schema" for each in elements
    ):
        raise GrammarError("the elements of an or are all of type json_schema, or none holds one")


def _holds(source: Any, kinds: set[str], depth: int = 0) -> bool:
    """Whether a format is of one of these types, or is made of one that is. Text up to the end of a tag has an end."""
    kind = _checked(source, depth)
    if kind == "tag":
        is_ended = bool(source["end"]) and _checked(source["content"], depth + 1) == "any_text"
        return not is_ended and _holds(source["content"], kinds, depth + 1)
    if kind == "triggered_tags":
        return kind in kinds or any(
            _holds(tag["content"], kinds, depth + 1)
            for tag in _list(source, "tags")
            if isinstance(tag, dict) and "content" in tag
        )
    if kind in ("sequence", "or"):
        return any(_holds(each, kinds, depth + 1) for each in _list(source, "elements"))
    return kind in kinds


def _any_text(builder: Builder, excludes: list[str], then: Node) -> Node:
    text = repeat(utf8(EVERY_CHAR), 0, None)
    if excludes:
        text = difference(text, concat(ANYTHING, words(each.encode() for each in excludes), ANYTHING))
    return builder.after(text, then)


def _checked(source: Any, depth: int) -> str:
    """The format's type."""
    if depth > MAX_DEPTH:
        raise GrammarError(f"formats of a structural tag are nested more than {MAX_DEPTH} deep")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise GrammarError(f"a format of a structural tag has a type of {', '.join(_KEYS)}, not {kind!r}")
    needed, known = _KEYS[kind]
    given = source.keys() - {"type"}
    if not needed <= given or not given <= needed | known:
        raise GrammarError(f"a format of type {kind!r} has {', '.join(sorted(needed | known))}")
    return kind


def _text(source: Any, name: str) -> str:
    value = source[name]
    if not isinstance(value, str):
        raise GrammarError(f"{name} of a format is a string, not {value!r}")
    return value


def _list(source: Any, name: str) -> list[Any]:
    value = source[name]
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name} of a format is a list of at least one")
    return value


def _texts(source: Any, name: str) -> list[str]:
    value = source.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise GrammarError(f"{name} of a format is a list of strings, none of them empty")
    return value
