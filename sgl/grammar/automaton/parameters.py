"""Arguments of a call one by one: keys as they are, each before its value, written in one style or another.

`xml_arguments.py` and `literal_arguments.py` say how values are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sgl.errors import GrammarError
from sgl.grammar.automaton.nfa import Builder, Node, Thread
from sgl.grammar.automaton.objects import ObjectPlan, Seen
from sgl.grammar.automaton.spelling import Spelling
from sgl.grammar.automaton.structural_tag import Tags
from sgl.grammar.regular.expr import Expr, concat, intersect, is_empty, literal, matches
from sgl.grammar.shape import Object, Schema


class Style(Protocol):
    """How parameters are written."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens among that which is written around them."""

    def in_bytes(self, spelling: Spelling) -> Style:
        """The style with its marks as a vocabulary spells them."""

    @property
    def key(self) -> Expr:
        """What may be a key, nothing of which is escaped."""

    @property
    def escapes(self) -> tuple[tuple[str, str], ...]:
        """Characters, and what stands for each in a key."""

    def before(self, *, is_first: bool) -> Expr:
        """What stands before a parameter's key."""

    def parameter(self, builder: Builder, key: Expr, schema: Schema, then: Node) -> Node:
        """Where a key begins, with its value behind it, and `then` behind that."""


def parameters_node(builder: Builder, schema: Schema, style: Style, then: Node) -> Node:
    """Where the parameters of an object of the schema begin. Raises GrammarError where they cannot be written so."""
    shapes = [shape for shape in schema.alternatives() if isinstance(shape, Object)]
    if not shapes:
        raise GrammarError("what stands as parameters is an object, which the schema does not allow")
    for shape in shapes:
        check_bare(shape, style.key, dict(style.escapes))
    plans = [builder.one(ObjectPlan, builder, shape) for shape in shapes]
    return Tags(
        [builder.one(Parameters, plan, plan.start, style, style.before(is_first=True), then) for plan in plans]
    )


def check_bare(shape: Object, key: Expr, escaped: Iterable[str] = ()) -> None:
    """Raise GrammarError where keys of an object cannot stand without quotes. escaped: characters that can."""
    letters = str.maketrans(dict.fromkeys(escaped, "x"))
    if shape.exists or shape.min_properties > len(shape.required):
        raise GrammarError("keys without quotes are no fewer than are required: there is no minProperties")
    for name, _ in shape.properties:
        if not matches(key, name.translate(letters).encode()):
            raise GrammarError(f"a key without quotes cannot be named {name!r}")


class Parameters(Node):
    """Where another parameter of an object may begin, or the end. `before` is what stands before it."""

    def __init__(self, plan: ObjectPlan, seen: Seen, style: Style, before: Expr, then: Node) -> None:
        self.plan = plan
        self.seen = seen
        self.style = style
        self.before = before
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, seen = self.plan, self.seen
        ways = [self._declared(index) for index in plan.declared_at(seen)]
        for key, schema, met in plan.undeclared_at(seen):
            bare = intersect(key, self.style.key)
            if not is_empty(bare):
                ways.append(self._parameter(bare, schema, plan.with_undeclared(seen, met)))
        if plan.may_close(seen):
            ways.append(self.then)
        return tuple(dict.fromkeys(thread for way in ways for thread in way.threads()))

    def ahead(self) -> Node:
        """What brings the parameters to their end soonest."""
        plan, seen = self.plan, self.seen
        if plan.may_close(seen):
            return self.then
        shape = plan.shape
        index = next(i for i in plan.declared_at(seen) if shape.properties[i][0] in shape.required)
        return self._declared(index)

    def _declared(self, index: int) -> Node:
        name, schema = self.plan.shape.properties[index]
        escapes = dict(self.style.escapes)
        key = "".join(escapes.get(each, each) for each in name)
        return self._parameter(literal(key.encode()), schema, self.plan.with_declared(self.seen, index))

    def _parameter(self, key: Expr, schema: Schema, seen: Seen) -> Node:
        builder, style = self.plan.builder, self.style
        behind = builder.one(Parameters, self.plan, seen, style, style.before(is_first=False), self.then)
        return style.parameter(builder, concat(self.before, key), schema, behind)
