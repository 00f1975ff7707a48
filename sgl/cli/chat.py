"""`sgl chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from rich.console import Console

from sgl.cli.conversation import Conversation
from sgl.lang.backends.http import HttpClient


def chat(options: SimpleNamespace) -> int:
    """Talk until the end of input. Lines from a pipe are sent as they are, up to an empty one, and the first error is
    the end; in a terminal there are commands, and the chat outlasts errors and Ctrl-C."""
    body = {"temperature": options.temperature}
    body |= {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    http = HttpClient(options.url, api_key=options.api_key)
    conversation = Conversation(http, body, options.system)
    console = Console(soft_wrap=True, highlight=False)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _answer_lines(conversation, console)
    from sgl.cli.chat_terminal import talk  # a prompt has no use elsewhere

    return talk(conversation, console, http.base_url)


def _answer_lines(conversation: Conversation, console: Console) -> int:
    def show(text: str, is_reasoning: bool) -> None:
        if not is_reasoning:
            console.print(text, end="", markup=False)

    for line in sys.stdin:
        text = line.removesuffix("\n")
        if not text:
            break
        turn = conversation.ask(text, show)
        console.print()
        if turn.error is not None:
            raise turn.error
        if turn.finish_reason is None:
            raise KeyboardInterrupt
    return 0
