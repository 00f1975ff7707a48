"""Options of a server that name a format: they are checked before anything starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sgl.errors import ConfigError, InvalidRequest
from sgl.formats.calls import formats_of
from sgl.lang.ir.chat_template import jinja_template
from sgl.lang.ir.reasoning import reasoning_format
from sgl.runtime.config import ServerConfig


def checked_template(config: ServerConfig) -> str | None:
    """The source of its chat template; None: the model's own. Raises ConfigError for that, and for parsers that do not
    exist."""
    if config.tool_call_parser is not None:
        with _as_option("tool_call_parser"):
            formats_of(config.tool_call_parser)
    if config.reasoning_parser is not None:
        with _as_option("reasoning_parser"):
            reasoning_format(config.reasoning_parser)
    if config.chat_template is None:
        return None
    try:
        source = Path(config.chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template cannot be read: {error}", option="chat_template") from error
    with _as_option("chat_template"):
        jinja_template(source)
    return source


@contextlib.contextmanager
def _as_option(name: str) -> Iterator[None]:
    """Report errors inside as the option's."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}", option=name) from error
