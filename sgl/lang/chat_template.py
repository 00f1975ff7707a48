"""The original language's module of chat templates: names of `sgl.lang.chat`."""

from __future__ import annotations

from sgl.lang.chat import ChatTemplate, PrefixTemplate, get_chat_template, register_chat_template

__all__ = ["ChatTemplate", "PrefixTemplate", "get_chat_template", "register_chat_template"]
