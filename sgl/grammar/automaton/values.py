"""A JSON value as a node: the threads at which a value of a schema may begin.

A value of several shapes begins at the threads of all of them. What happens inside the brackets is for `objects.py`
and `arrays.py`.
"""

from __future__ import annotations

from sgl.grammar.automaton.nfa import Builder, CountedText, Node, Opening, Thread
from sgl.grammar.regular.expr import literal
from sgl.grammar.shape import Array, CountedString, Object, Schema, Text
from sgl.grammar.text.json import QUOTE


class ValueNode(Node):
    """Where a value of `schema` begins, with `then` behind it."""

    def __init__(self, builder: Builder, schema: Schema, then: Node) -> None:
        self.builder = builder
        self.schema = schema
        self.then = then

    def _find_threads(self) -> tuple[Thread, ...]:
        builder = self.builder
        found: dict[Thread, None] = {}
        for shape in self.schema.alternatives():
            match shape:
                case Text(expr):
                    found.update(dict.fromkeys(builder.enter(expr, self.then)))
                case CountedString(char, low, high):
                    closing = builder.after(QUOTE, self.then)
                    found[builder.lexeme(QUOTE, builder.one(CountedText, builder, char, low, high, closing))] = None
                case Object():
                    found[builder.lexeme(literal(b"{"), Opening(self.schema, self.then))] = None
                case Array():
                    found[builder.lexeme(literal(b"["), Opening(self.schema, self.then))] = None
        return tuple(found)


def value_node(builder: Builder, schema: Schema, then: Node) -> Node:
    """The node of a value, one for each."""
    return builder.one(ValueNode, builder, schema, then)
