"""Structural tags as XGrammar writes them: a `format` made of other formats, as nodes.

    {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {…}, "end": "</a>"}}

`format_check.py` says which formats there are, and checks them. Text of no certain end goes up to the end tag around
it, but for that of a dispatch. Where a byte may be text in one reading and a bracket of JSON in another, `brackets.py`
has the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sgl.errors import GrammarError
from sgl.grammar.automaton.format_check import bounds_of, ends_of, grammar_expr, name_of
from sgl.grammar.automaton.nfa import Builder, Node
from sgl.grammar.automaton.spelling import Spelling
from sgl.grammar.automaton.structural_tag import (
    Loop,
    Structure,
    Tag,
    TaggedText,
    Tags,
    UpToFirst,
    ended,
    may_hold_end,
    tagged_text_node,
    text_without,
)
from sgl.grammar.regular.charset import EVERY_CHAR, utf8
from sgl.grammar.regular.expr import intersect, literal, repeat
from sgl.time_limit import check_time

Body = Callable[[Structure, Node], Node]


class TagFormats:
    """The formats of one structural tag. `body` makes the node of a schema or regex before another node, and counts no
    characters: where formats may be empty or begin alike, no place is one that starts a count."""

    def __init__(self, builder: Builder, body: Body, spelling: Spelling) -> None:
        self._builder = builder
        self._body = body
        self._spelling = spelling

    def node(self, source: Any, then: Node, ends: tuple[str, ...] = ()) -> Node:
        """Where text of a checked format begins, with `then` behind it. `ends` are the end tags around it, which text
        of no certain end does not hold."""
        check_time()
        match source["type"]:
            case "const_string":
                return self._literal(source["value"], then)
            case "token":
                return self._literal(source["token"], then)
            case "json_schema":
                return self._body(
                    Structure("", "", source["json_schema"], None, source.get("style") or "json"), then
                )
            case "qwen_xml_parameter":
                return self._body(Structure("", "", source["json_schema"], None, "qwen_xml"), then)
            case "regex":
                return self._body(Structure("", "", None, source["pattern"]), then)
            case "grammar":
                return self._builder.after(grammar_expr(source["grammar"]), then)
            case "any_text":
                return self._any_text(source, then, ends)
            case "sequence":
                for element in reversed(source["elements"]):
                    then = self.node(element, then, ends)
                return then
            case "or":
                return Tags([self.node(each, then, ends) for each in source["elements"]])
            case "optional":
                return Loop(then, self.node(source["content"], then, ends))
            case "star" | "plus" | "repeat":
                return self._repeated(source, then, ends)
            case "tag":
                return self._literal(source["begin"], self._inside(source, then), is_before=True)
            case "tags_with_separator":
                return self._separated(source, then)
            case "triggered_tags" | "token_triggered_tags":
                return self._tagged(source, then, ends)
        return self._dispatched(source, then)

    def _literal(self, text: Any, then: Node, *, is_before: bool = False) -> Node:
        """A text or token before a node. One that ends the text leaves nothing behind it."""
        data, is_end = self._spelling.read(name_of(text))
        if is_end and is_before:
            raise GrammarError(f"{name_of(text)!r} ends the text in this model's vocabulary: it begins nothing")
        return self._builder.after(literal(data), self._builder.end if is_end else then)

    def _any_text(self, source: Any, then: Node, ends: tuple[str, ...]) -> Node:
        text = text_without([each.encode() for each in (*source.get("excludes", ()), *ends)])
        if (most := source.get("max_chars")) is not None:
            text = intersect(text, repeat(utf8(EVERY_CHAR), 0, most))
        return self._builder.after(text, then)

    def _repeated(self, source: Any, then: Node, ends: tuple[str, ...]) -> Node:
        content, low, high = source["content"], *bounds_of(source)
        node = then
        if high is None:
            loop = Loop(then)
            loop.more = self.node(content, loop, ends)
            node = loop
        else:
            for _ in range(low, high):
                node = Loop(then, self.node(content, node, ends))
        for _ in range(low):
            node = self.node(content, node, ends)
        return node

    # ── tags ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _inside(self, source: Any, then: Node) -> Node:
        """The node behind a begin tag."""
        ends = ends_of(source)
        return self.node(
            source["content"], Tags([self._literal(end, then) for end in ends]), tuple(filter(None, ends))
        )

    def _behind_trigger(self, source: Any, is_followed: bool, behind: Node) -> Node:
        """As `_inside`; where JSON may follow, the text of a regex goes to the first end that completes it, else a
        bracket might be text of the one or open the other."""
        content, ends = source["content"], ends_of(source)
        if is_followed and content["type"] == "regex" and len(ends) == 1:
            end, is_last = self._spelling.read(ends[0])
            if not is_last and may_hold_end(content["pattern"], end):
                return self._builder.one(UpToFirst, self._builder, ended(content["pattern"], end), behind)
        return self._inside(source, behind)

    def _separated(self, source: Any, then: Node) -> Node:
        behind: Node = then
        if not source.get("stop_after_first"):
            loop = Loop(then)
            loop.more = self._literal(source["separator"], Tags([self.node(tag, loop) for tag in source["tags"]]))
            behind = loop
        first = [self.node(tag, behind) for tag in source["tags"]]
        return Tags(first) if source.get("at_least_one") else Loop(then, Tags(first))

    def _tagged(self, source: Any, then: Node, ends: tuple[str, ...]) -> Node:
        is_followed = not source.get("stop_after_first") and any(
            tag["content"]["type"] != "regex" for tag in source["tags"]
        )
        tags = [
            Tag(self._spelling.trigger(name_of(tag["begin"])), partial(self._behind_trigger, tag, is_followed))
            for tag in source["tags"]
        ]
        triggers = list(map(name_of, source.get("triggers") or source["trigger_tokens"]))
        text = TaggedText(
            tuple(map(self._spelling.trigger, triggers)),
            tuple(tags),
            stop_after_first=bool(source.get("stop_after_first")),
            begins_with_tag=bool(source.get("at_least_one")),
            excludes=self._excludes(source, triggers, ends),
        )
        return tagged_text_node(self._builder, text, then)

    def _dispatched(self, source: Any, then: Node) -> Node:
        triggers = [name_of(begin) for begin, _ in source["rules"]]
        spelled = tuple(map(self._spelling.trigger, triggers))
        contents = [partial(self.node, content) for _, content in source["rules"]]
        text = TaggedText(
            spelled,
            tuple(map(Tag, spelled, contents)),
            stop_after_first=not source.get("loop", True),
            excludes=self._excludes(source, triggers, ()),
        )
        return tagged_text_node(self._builder, text, then)

    def _excludes(self, source: Any, triggers: list[str], ends: tuple[str, ...]) -> tuple[bytes, ...]:
        given = source.get("excludes") or map(name_of, source.get("exclude_tokens", ()))
        return (*(each.encode() for each in (*given, *ends)), *self._spelling.mistakable(triggers))
