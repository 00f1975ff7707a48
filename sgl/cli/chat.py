"""`sgl chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from sgl.lang.aio import io
from sgl.lang.backends.http import HttpClient


def chat(options: SimpleNamespace) -> int:
    """Talk until an empty line or end of input."""
    console = Console(soft_wrap=True, highlight=False)
    show = partial(console.print, end="", markup=False)
    http = HttpClient(options.url, api_key=options.api_key)
    body: dict[str, Any] = {"temperature": options.temperature, "stream": True}
    body |= {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if sys.stdin.isatty():
        console.print(f"Talking with {options.url}; an empty line ends it.", style="dim", markup=False)
    while True:
        try:
            line = console.input("[bold]> [/]" if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        written = io.wait(_answer(http, body | {"messages": messages}, show))
        console.print()
        messages.append({"role": "assistant", "content": written})


async def _answer(http: HttpClient, body: dict[str, Any], show: Callable[[str], None]) -> str:
    """The next turn, shown as it comes. Raises BackendError and InvalidRequest."""
    written = ""
    async for event in http.events("/v1/chat/completions", body):
        for choice in event["choices"]:  # none if only usage is told
            piece = choice["delta"].get("content") or ""
            show(piece)
            written += piece
    return written
