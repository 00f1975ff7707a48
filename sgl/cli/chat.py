"""`sgl chat`: lines in, answers out as they are written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import requests
from rich.console import Console

from sgl.errors import BackendError
from sgl.lang.backends.http import with_scheme


def chat(options: argparse.Namespace) -> int:
    """Talk until an empty line or the end of the input."""
    console = Console(soft_wrap=True, highlight=False)
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
        written = ""
        for piece in _answer(options, messages):
            written += piece
            console.print(piece, end="", markup=False)
        console.print()
        messages.append({"role": "assistant", "content": written})


def _answer(options: argparse.Namespace, messages: list[dict[str, str]]) -> Iterator[str]:
    """The pieces of the next turn. Raises BackendError."""
    body: dict[str, Any] = {"messages": messages, "temperature": options.temperature, "stream": True}
    body |= {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        url = with_scheme(options.url) + "/v1/chat/completions"
        with requests.post(url, json=body, headers=headers, stream=True, timeout=600) as answer:
            if answer.status_code != 200:
                raise BackendError(f"the server refused: {_message(answer.text)}", status=answer.status_code)
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise BackendError(f"the server failed: {event['error']['message']}")
                    yield event["choices"][0]["delta"].get("content") or ""
    except requests.RequestException as error:
        message = f"{options.url} cannot be reached (is `sgl serve` running?): {error}"
        raise BackendError(message, retryable=True) from error


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
