"""Structural tags as nodes: free text until a trigger, then a constrained body between two tags, then free text again.

    {"triggers": ["<function="],
     "structures": [{"begin": "<function=add>", "schema": {…}, "end": "</function>"}, …],
     "at_least_one": false, "stop_after_first": false}

A structure's body is a JSON value of `schema`, or text that matches `regex` in full. Its begin tag starts with one of
the triggers; whoever writes a trigger goes on with one of the begin tags. `at_least_one` keeps the text from ending
before a structure is complete, `stop_after_first` lets nothing follow one. Where a schema may come behind a regex, the
regex's body goes to the first end tag that completes it: else a bracket might be text of the one or open the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, AnyStr

from sgl.errors import GrammarError
from sgl.grammar.automaton.nfa import PLAIN, Builder, Moves, Node, Stay, Thread
from sgl.grammar.automaton.spelling import Spelling
from sgl.grammar.regular.byteset import ALL_BYTES
from sgl.grammar.regular.charset import ANY_TEXT
from sgl.grammar.regular.expr import (
    ANYTHING,
    ByteSet,
    Complement,
    Concat,
    Expr,
    Intersection,
    Repeat,
    Union,
    Words,
    complement,
    concat,
    difference,
    intersect,
    literal,
    words,
)
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.vocabulary.special import is_text
from sgl.time_limit import check_time

_KEYS = {"type", "triggers", "structures", "at_least_one", "stop_after_first"}
_STRUCTURE_KEYS = {"begin", "schema", "regex", "end"}


@dataclass(frozen=True, slots=True)
class Structure:
    """One kind of structure: its tags, and its body as it was given."""

    begin: str
    end: str
    schema: Any
    regex: str | None
    style: str = "json"
    """How the schema's values are written."""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A structural tag, checked."""

    triggers: tuple[str, ...]
    structures: tuple[Structure, ...]
    at_least_one: bool
    stop_after_first: bool


def read_structural_tag(source: Any) -> StructuralTag:
    """Raises GrammarError where the tag is malformed."""
    if not isinstance(source, dict) or not source.keys() <= _KEYS:
        raise GrammarError(f"a structural tag is an object with {', '.join(sorted(_KEYS))}")
    if source.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"type is 'structural_tag', not {source['type']!r}")
    triggers = source.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("triggers is a list of at least one string, none of them empty")
    structures = source.get("structures")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structures is a list of at least one structure")
    flags = [source.get(name, False) for name in ("at_least_one", "stop_after_first")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise GrammarError("at_least_one and stop_after_first are true or false")
    found = tuple(_structure(item) for item in structures)
    begins = sorted(structure.begin for structure in found)
    behind = {trigger: begins[beginning_with(begins, trigger)] for trigger in triggers}
    triggered = set(chain(*behind.values()))
    for begin in begins:
        if begin not in triggered:
            raise GrammarError(f"the begin tag {begin!r} starts with none of the triggers")
    for trigger in triggers:
        if not behind[trigger]:
            raise GrammarError(f"no begin tag starts with the trigger {trigger!r}")
    return StructuralTag(tuple(dict.fromkeys(triggers)), found, *flags)


def _structure(item: Any) -> Structure:
    if not isinstance(item, dict) or not item.keys() <= _STRUCTURE_KEYS or ("schema" in item) == ("regex" in item):
        raise GrammarError("a structure is an object with begin, end, and either schema or regex")
    begin, end, regex = item.get("begin"), item.get("end"), item.get("regex")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(regex, str | None):
        raise GrammarError("begin, end and regex of a structure are strings")
    return Structure(begin, end, item.get("schema"), regex)


def beginning_with(texts: Sequence[AnyStr], beginning: AnyStr) -> slice:
    """Where those of sorted texts are that begin so."""
    check_time()
    first = last = bisect_left(texts, beginning)
    while last < len(texts) and texts[last].startswith(beginning):
        last += 1
    return slice(first, last)


class FreeText(Node):
    """Text up to and with the next trigger, or, where the text may end, without one."""

    def __init__(self, builder: Builder, then: Node | None) -> None:
        """then: what follows the text where it may end."""
        self.builder = builder
        self.then = then
        self.ways: list[tuple[Expr, Node]] = []
        """Up to a trigger, and what follows it; set once the bodies are built, which lead back here."""
        self.last: Expr | None = None

    def _find_threads(self) -> tuple[Thread, ...]:
        found: list[Thread] = []
        if self.then is not None and self.last is not None:
            found += self.builder.enter(self.last, self.then)
        for expr, then in self.ways:
            found += self.builder.enter(expr, then)
        return tuple(dict.fromkeys(found))


class FirstEnd(Thread):
    """Inside text that ends where `expr`, what is left of it, is complete for the first time."""

    __slots__ = ("builder", "expr", "then")

    def __init__(self, builder: Builder, expr: Expr, then: Node) -> None:
        super().__init__()
        self.builder = builder
        self.expr = expr
        self.then = then

    def _find_moves(self) -> Moves:
        return tuple(
            (mask, Stay(self.then.threads() if rest.nullable else (self._with(rest),), PLAIN))
            for mask, rest in self.expr.arcs()
        )

    def _with(self, rest: Expr) -> Thread:
        return self.builder.one(FirstEnd, self.builder, rest, self.then)


class UpToFirst(Node):
    """Text of an expression, none of which begins with another, before `then`."""

    def __init__(self, builder: Builder, expr: Expr, then: Node) -> None:
        self.builder = builder
        self.expr = expr
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        if self.expr.nullable:
            return self.then.threads()
        return (self.builder.one(FirstEnd, self.builder, self.expr, self.then),)


class Tags(Node):
    """Behind a trigger: what is left of the begin tags that it may become, each with its body."""

    def __init__(self, ways: Sequence[Node]) -> None:
        self.ways = ways

    def _find_threads(self) -> tuple[Thread, ...]:
        return tuple(dict.fromkeys(thread for way in self.ways for thread in way.threads()))


class Loop(Node):
    """Where a text may come, or come once more, or `then` follows at once."""

    def __init__(self, then: Node, more: Node | None = None) -> None:
        self.then = then
        self.more = then if more is None else more
        """May be set later: it may lead back here."""

    def _find_threads(self) -> tuple[Thread, ...]:
        return tuple(dict.fromkeys((*self.more.threads(), *self.then.threads())))


@dataclass(frozen=True, slots=True)
class Tag:
    """A begin tag, and the node behind it, given what follows the whole."""

    begin: bytes
    inside: Callable[[Node], Node]


@dataclass(frozen=True, slots=True)
class TaggedText:
    """Free text with tags. What starts with a trigger goes on with one of the tags that start so."""

    triggers: tuple[bytes, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    begins_with_tag: bool = False
    """No text comes before the first tag, which must come."""
    excludes: tuple[bytes, ...] = ()
    """What no free text holds."""


def tagged_text_node(builder: Builder, source: TaggedText, then: Node) -> Node:
    """Where the text begins, with `then` behind it."""
    at_least_one = source.at_least_one or source.begins_with_tag
    first = FreeText(builder, None if at_least_one else then)
    again = FreeText(builder, then) if at_least_one else first
    behind = then if source.stop_after_first else again
    some_trigger = words(source.triggers)
    free = text_without((*source.triggers, *source.excludes))
    some_byte = complement(literal(b""))
    started = complement(concat(ANYTHING, some_trigger, some_byte))  # no trigger before the last byte
    excluded = concat(ANYTHING, words(source.excludes), ANYTHING)
    inside = {tag: tag.inside(behind) for tag in source.tags}
    ordered = sorted(source.tags, key=lambda tag: tag.begin)
    begins = [tag.begin for tag in ordered]
    builder.may_clash |= any(other.startswith(one) for one, other in pairwise(begins))
    for trigger in dict.fromkeys(source.triggers):
        check_time()
        if is_text(trigger):
            text = difference(concat(ANY_TEXT, literal(trigger)), excluded)
        else:  # whose name may be excluded
            text = concat(difference(ANY_TEXT, excluded), literal(trigger))
        text = intersect(text, started)
        matching = ordered[beginning_with(begins, trigger)]
        ways = [builder.after(literal(tag.begin.removeprefix(trigger)), inside[tag]) for tag in matching]
        for node in {first, again}:
            node.ways.append((text, Tags(ways)))
            node.last = free
    if source.begins_with_tag:
        return Tags([builder.after(literal(tag.begin), inside[tag]) for tag in ordered])
    return first


def text_without(excludes: Sequence[bytes]) -> Expr:
    """Any text that holds none of these."""
    if not excludes:
        return ANY_TEXT
    return difference(ANY_TEXT, concat(ANYTHING, words(excludes), ANYTHING))


def structural_tag_node(
    builder: Builder,
    tag: StructuralTag,
    body: Callable[[Structure, Node], Node],
    then: Node,
    spelling: Spelling,
) -> Node:
    """Where the text begins, with `then` behind it. `body` makes the node of a structure's body before another node."""
    is_followed = not tag.stop_after_first and any(structure.regex is None for structure in tag.structures)

    def inside(structure: Structure, behind: Node) -> Node:
        end, is_last = spelling.read(structure.end)
        if is_followed and not is_last and may_hold_end(structure.regex, end):
            return builder.one(UpToFirst, builder, ended(structure.regex, end), behind)
        return body(structure, builder.after(literal(end), builder.end if is_last else behind))

    tags = [Tag(spelling.trigger(structure.begin), partial(inside, structure)) for structure in tag.structures]
    text = TaggedText(
        tuple(map(spelling.trigger, tag.triggers)),
        tuple(tags),
        tag.at_least_one,
        tag.stop_after_first,
        excludes=spelling.mistakable(tag.triggers),
    )
    return tagged_text_node(builder, text, then)


def may_hold_end(regex: str | None, end: bytes) -> bool:
    """Whether a text of the regex may go on where another one of it and the end tag end; False is certain."""
    if regex is None:
        return False
    # with a byte that the regex has not, the texts before it are equally long
    return not end or not _bytes_within(literal(end)) & ~_bytes_within(_regex(regex))


def ended(regex: str | None, end: bytes) -> Expr:
    """The texts of a regex, each with the end tag."""
    assert regex is not None, "a schema's values end by themselves"
    return concat(_regex(regex), literal(end))


def _regex(source: str) -> Expr:
    return compile_regex(source, dialect="python", search=False)


def _bytes_within(expr: Expr) -> int:
    """A set of bytes that has all those of an expression's texts."""
    found, left = 0, [expr]
    while left:
        match left.pop():
            case ByteSet() as one:
                found |= one.mask
            case Words() as some:
                for word in some.words[some.low : some.high]:
                    for byte in word:
                        found |= 1 << byte
            case Concat() as pair:
                left += (pair.head, pair.tail)
            case Union() as ways:
                left += ways.members
            case Intersection() as all_of:
                left.append(all_of.members[0])
            case Repeat() as many:
                left.append(many.body)
            case Complement():
                return ALL_BYTES
    return found
