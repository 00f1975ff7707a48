"""A finished text as chat messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl.lang.ir import nodes as ir
from sgl.lang.ir.media import url_of
from sgl.lang.record.cell import Cell, Part, text_of


def messages_of(chain: Iterable[tuple[ir.Node, Part]]) -> list[dict[str, Any]]:
    """The closed turns as messages, with the template's default system turn; contents are left-stripped."""
    messages: list[dict[str, Any]] = []
    turn: list[str] = []
    images: list[ir.Media] = []
    for node, part in chain:
        if isinstance(node, ir.RoleBegin):
            assert isinstance(part, Cell)
            if system := part.meta.get("system"):
                messages.append({"role": "system", "content": system})
            turn, images = [], []
        elif isinstance(node, ir.RoleEnd):
            messages.append({"role": node.role, "content": _content("".join(turn).lstrip(), images)})
        elif isinstance(node, ir.ToolResults):
            assert isinstance(part, Cell)
            messages += part.meta.get("messages", [])
        elif isinstance(node, ir.Media):
            images.append(node)
        else:
            turn.append(text_of((part,)))
    return messages


def _content(text: str, images: list[ir.Media]) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    return [{"type": "text", "text": text}, *parts]
