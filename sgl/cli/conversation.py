"""What is said in `sgl chat`: messages, the next answer, what answers must look like, files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl.errors import ConfigError, SglError
from sgl.lang.aio import io
from sgl.lang.backends.http import HttpClient

MAX_FILE_BYTES = 16_000_000  # of a conversation or a schema
CONSTRAINTS = ("json_schema", "regex")  # fields of a request; of these one at a time
ROLES = ("system", "user", "assistant")

Show = Callable[[str, bool], object]
"""Takes each piece of an answer, and whether it is reasoning. Called on the io thread."""


@dataclass
class Turn:
    """An answer so far, and what it cost."""

    text: str = ""
    finish_reason: str | None = None
    """As the server says it; None if the answer was stopped or failed."""
    error: SglError | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    begun: float = 0.0  # seconds of time.perf_counter
    first: float | None = None
    last: float = 0.0
    is_left: bool = False
    """Nobody waits any more: what still comes is not shown."""

    @property
    def is_kept(self) -> bool:
        """Whether it is part of the conversation: it came to its end, or as far as a text."""
        return self.finish_reason is not None or bool(self.text)

    def figures(self) -> str:
        """Tokens, their rate, the time to the first and the share of the prompt that was cached, as far as known."""
        parts = []
        if self.tokens is not None:
            parts.append(f"{self.tokens} token{'' if self.tokens == 1 else 's'}")
            if self.first is not None and self.tokens > 1 and self.last > self.first:
                parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first token after {1000 * (self.first - self.begun):.0f} ms")
        if self.cached_tokens is not None and self.prompt_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        return ", ".join(parts)


class Conversation:
    """Messages and what the next answer must look like. Nothing of a turn without an answer is kept."""

    def __init__(self, http: HttpClient, body: dict[str, Any], system: str | None) -> None:
        self._http = http
        self._body = body
        self.messages: list[dict[str, str]] = []
        self.constraint: dict[str, Any] = {}
        """One of `CONSTRAINTS` with its value, or none."""
        self._unanswered: str | None = None
        self._own_file: Path | None = None  # saved or loaded here: may be written over
        self.set_system(system or "")

    def ask(self, text: str, show: Show) -> Turn:
        """The answer to a text, shown as it comes. An interrupt stops it, on the server too, and keeps what came;
        an error is in the turn."""
        before = self.messages
        turn = Turn(begun=time.perf_counter())
        try:
            self.messages = [*before, {"role": "user", "content": text}]
            io.wait(self._answer(turn, show))
        except KeyboardInterrupt:
            turn.finish_reason = None
        except SglError as error:
            turn.finish_reason, turn.error = None, error
        turn.is_left = True
        if not turn.is_kept:
            self.messages, self._unanswered = before, text
        else:
            self.messages = [*self.messages, {"role": "assistant", "content": turn.text}]
            self._unanswered = None
        return turn

    def ask_again(self, show: Show) -> Turn:
        """Another answer to the last text; the old one stays if none comes. Raises ConfigError if there is none."""
        if self._unanswered is not None:
            return self.ask(self._unanswered, show)
        before = self.messages
        last = next((i for i in reversed(range(len(before))) if before[i]["role"] == "user"), None)
        if last is None:
            raise ConfigError("nothing was asked yet")
        self.messages = before[:last]
        turn = self.ask(before[last]["content"], show)
        if not turn.is_kept:
            self.messages, self._unanswered = before, None
        return turn

    async def _answer(self, turn: Turn, show: Show) -> None:
        """Raises BackendError and InvalidRequest."""
        body = {**self._body, **self.constraint, "messages": self.messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async for event in self._http.events("/v1/chat/completions", body):
            _count(turn, event.get("usage") or {})
            for choice in event["choices"]:  # none beside the usage
                turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
                delta = choice["delta"]
                for text, is_reasoning in (
                    (delta.get("reasoning_content"), True),
                    (delta.get("content"), False),
                ):
                    if text and not turn.is_left:
                        turn.last = time.perf_counter()
                        turn.first = turn.first or turn.last
                        turn.text += "" if is_reasoning else text
                        show(text, is_reasoning)
        if turn.finish_reason is None:
            turn.finish_reason = "stop"  # the stream came to its end

    def set_system(self, text: str) -> None:
        """The system prompt from here on; none if the text is empty."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    def reset(self) -> None:
        """Forget all but the system prompt and the constraint."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._unanswered = None

    def set_regex(self, pattern: str) -> None:
        """What answers match; anything if empty."""
        self.constraint = {"regex": pattern} if pattern else {}

    def set_schema(self, given: str) -> None:
        """The JSON Schema of answers, as JSON or the name of a file; none if empty. Raises ConfigError."""
        if not given:
            self.constraint = {}
            return
        schema = _parsed(given, "the schema") if given.startswith("{") else _parsed(_read(given), given)
        if not isinstance(schema, dict):
            raise ConfigError(f"{given} holds no JSON Schema: it must be an object")
        self.constraint = {"json_schema": schema}

    def save(self, name: str) -> None:
        """Write the conversation as JSON: fields of a chat request. Raises ConfigError; a file that was neither saved
        nor loaded here is left alone."""
        path = _path(name)
        text = json.dumps({**self.constraint, "messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            with path.open("w" if path == self._own_file else "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise ConfigError(f"{name} exists already; give another name") from None
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{name} cannot be written: {error}") from error
        self._own_file = path

    def load(self, name: str) -> None:
        """Go on with a saved conversation. Raises ConfigError, and nothing has changed."""
        data = _parsed(_read(name), name)
        messages = data.get("messages") if isinstance(data, dict) else None
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise ConfigError(
                f'{name} holds no conversation: it must be {{"messages": [{{"role": ..., "content": ...}}]}}, '
                f"texts of the roles {', '.join(ROLES)}"
            )
        kinds = {"json_schema": dict, "regex": str}
        constraint = {field: data[field] for field in CONSTRAINTS if data.get(field) is not None}
        if len(constraint) > 1 or not all(isinstance(value, kinds[field]) for field, value in constraint.items()):
            raise ConfigError(f"{name} must hold a json_schema (an object) or a regex (a text), or neither")
        self.messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        self.constraint, self._unanswered, self._own_file = constraint, None, _path(name)


def _count(turn: Turn, usage: dict[str, Any]) -> None:
    if usage:
        turn.prompt_tokens, turn.tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:  # of a home that is not known
        raise ConfigError(f"{name}: {error}") from error


def _read(name: str) -> str:
    try:
        with _path(name).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{name} is too long: up to {MAX_FILE_BYTES} bytes are read")
        return data.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from error
