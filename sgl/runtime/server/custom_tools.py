"""Custom tools take a text instead of arguments. Models call them like functions with one argument, the text; a grammar
holds for it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import regex

from sgl.runtime.server.protocol import CustomTool, Function, Tool

_ARGUMENT = "input"


def function_of(tool: Tool | CustomTool) -> Function:
    """A tool as the function that models know."""
    if isinstance(tool, Tool):
        return tool.function
    custom = tool.custom
    schema: dict[str, Any] = {"type": "string"}
    about = [custom.description] if custom.description else []
    if (grammar := custom.grammar) is not None:
        about.append(f"The input matches this {grammar.syntax} grammar:\n{grammar.definition}")
        if grammar.syntax == "regex":
            schema["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {
        "type": "object",
        "properties": {_ARGUMENT: schema},
        "required": [_ARGUMENT],
        "additionalProperties": False,
    }
    return Function(name=custom.name, description="\n".join(about) or None, parameters=parameters, strict=True)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments with which a custom tool's function is called."""
    return {_ARGUMENT: text}


class CustomCalls:
    """Turns one answer's calls of functions to calls of custom tools, delta by delta."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._inputs: dict[int, _Input] = {}  # by the call's index

    def converted(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The next deltas, each of a custom tool's in its own form."""
        return [changed for call in calls if (changed := self._converted(call)) is not None]

    def _converted(self, call: dict[str, Any]) -> dict[str, Any] | None:
        index, function = call["index"], call.get("function", {})
        if function.get("name") in self._names:
            self._inputs[index] = _Input()
        if not function or index not in self._inputs:
            return call
        text = self._inputs[index].feed(function["arguments"])
        if "id" in call:
            custom = {"name": function["name"], "input": text}
            return {"index": index, "id": call["id"], "type": "custom", "custom": custom}
        return {"index": index, "custom": {"input": text}} if text else None


_HEAD = regex.compile(rf'\s*\{{\s*"{_ARGUMENT}"\s*:\s*"')
_HIGH, _LOW = "[dD][89abAB][0-9a-fA-F]{2}", "[dD][c-fC-F][0-9a-fA-F]{2}"  # halves of a character
_WHOLE_CHARACTERS = re.compile(
    rf'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?!{_HIGH})[0-9a-fA-F]{{4}}|u{_HIGH}(?:\\u{_LOW}|(?=[^\\]|\\[^u]|\\u(?!{_LOW}).{{4}}))))*',
    re.DOTALL,
)


class _Input:
    """Finds the text in arguments fed in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._has_begun = self._is_other = False

    def feed(self, text: str) -> str:
        """What is new of it. Arguments of another form, which nothing but a constraint excludes, are it themselves."""
        if self._is_other:
            return text
        self._text += text
        if not self._has_begun:
            head = _HEAD.match(self._text, partial=True)
            if head is None:
                self._is_other = True
                return self._text
            if head.partial:
                return ""
            self._has_begun = True
            self._text = self._text[head.end() :]
        found = _WHOLE_CHARACTERS.match(self._text)
        assert found is not None, "it matches nothing too"
        self._text = self._text[found.end() :]
        decoded: str = json.loads(f'"{found.group()}"', strict=False)
        return decoded
