"""How an assistant's turn begins: with what the program says, or with what the model may think first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sgl.lang.ir import nodes as ir


def is_said(nodes: Iterable[ir.Node], args: Mapping[str, str]) -> bool | None:
    """Whether a turn begins with the program's text, a choice, or a gen whose constraint leaves no room for thoughts.
    None: the nodes behind its begin do not tell yet."""
    for node in nodes:
        match node:
            case ir.ScopeBegin() | ir.ScopeEnd() | ir.SetVar():
                continue
            case ir.Text():
                if node.text:
                    return True
            case ir.Arg():
                if args[node.name]:
                    return True
            case ir.Gen():
                return node.reasoning is None and ir.constraint_of(node) is not None
            case ir.Fork() | ir.Join() | ir.ToolResults():
                return False  # the branches may differ
            case _:
                return True
    return None
