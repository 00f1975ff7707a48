"""How an assistant's turn begins: with what the program says, or with what the model may think first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, RenderedTemplate, TurnBegin
from sgl.lang.ir.reasoning import begun_by


def first_of(nodes: Iterable[ir.Node], args: Mapping[str, str]) -> ir.Node | None:
    """The node that tells how a turn begins, of those behind its begin. None: none of them does."""
    for node in nodes:
        match node:
            case ir.ScopeBegin() | ir.ScopeEnd() | ir.SetVar():
                continue
            case ir.Text() if not node.text:
                continue
            case ir.Arg() if not args[node.name]:
                continue
        return node
    return None


def begin_of(
    template: ChatTemplate, roles: tuple[str, ...], role: str, nodes: Iterable[ir.Node], args: Mapping[str, str]
) -> tuple[TurnBegin, str]:
    """A turn's opening before these nodes, and the thought that the model begins beside it if only its answer stays."""
    begin = template.begin(roles, role)
    if role != "assistant" or not isinstance(template, RenderedTemplate):
        return begin, ""
    format = begun_by(begin.text)
    if format is None:
        return begin, ""
    first = first_of(nodes, args)
    if _is_said(first):
        return template.begin_said(roles), ""
    if not isinstance(first, ir.Gen) or first.reasoning is None:
        return begin, ""
    at = begin.text.rindex(format.begin)
    return TurnBegin(begin.text[:at], begin.system), begin.text[at:]


def _is_said(first: ir.Node | None) -> bool:
    """Whether it is the program's text, a choice, or a gen whose constraint leaves no room for thoughts."""
    if isinstance(first, ir.Gen):
        return first.reasoning is None and ir.constraint_of(first) is not None
    return not isinstance(first, ir.Fork | ir.Join | ir.ToolResults | None)  # branches may differ
