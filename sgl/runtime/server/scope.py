"""Whose request a rid names: each key has rids of its own, so that two may use the same one and neither can abort what
is the other's. The engine sees a key's name and its rid as one; without keys it sees the rid as it came.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.config import ServerConfig
from sgl.runtime.server.identity import Caller, caller

ADMIN = "#admin"
"""The name that requests of the admin's key have; no other can be given it."""


class Scopes:
    """The rids of one server's keys."""

    def __init__(self, config: ServerConfig) -> None:
        names = {key.name for key in config.api_key or ()}
        self._names = [*sorted(names), ADMIN, ""] if names or config.admin_api_key else []
        self._open: dict[str, set[str]] = {}  # the rids of each name's unfinished requests

    @contextlib.contextmanager
    def entered(self, arguments: dict[str, Any]) -> Iterator[Scope]:
        """The scope in which a call of generate is made; its rids are known while the context lasts."""
        if not self._names:
            yield Scope("", arguments)
            return
        name = caller.get().name or ""
        scope = Scope(f"{name}:", arguments)
        mine = self._open.setdefault(name, set())
        mine |= scope.rids
        try:
            yield scope
        except InvalidRequest as error:
            if error.param == "rid":
                raise InvalidRequest(str(error).replace(scope.prefix, "", 1), param="rid") from None
            raise
        finally:
            mine -= scope.rids

    def named(self, rid: str, asks: Caller) -> list[str]:
        """As what the engine knows the requests that this caller means by a rid."""
        if not self._names:
            return [rid]
        return [f"{name}:{rid}" for name in (self._names if asks.is_admin else [asks.name or ""])]

    def unfinished(self, asks: Caller) -> list[str]:
        """As what the engine knows all that a caller has asked for."""
        return list(self._open.get(asks.name or "", ()))


class Scope:
    """One call's."""

    def __init__(self, prefix: str, arguments: dict[str, Any]) -> None:
        self.prefix = prefix
        self.arguments = arguments
        self.rids: set[str] = set()
        if prefix:
            rid = self._in_scope(_rids_of(arguments))
            self.arguments = {**arguments, "rid": rid}
            self.rids = {each for each in (rid if isinstance(rid, list) else [rid]) if isinstance(each, str)}

    def _in_scope(self, rid: Any) -> Any:
        if isinstance(rid, list):
            return [self._in_scope(each) for each in rid]
        return self.prefix + rid if isinstance(rid, str) else rid

    def shown(self, result: dict[str, Any]) -> None:
        """Have a result say its rid as its caller knows it."""
        if self.prefix:
            meta = result["meta_info"]
            meta["id"] = meta["id"].removeprefix(self.prefix)


def _rids_of(arguments: dict[str, Any]) -> Any:
    """The rids that a call of generate brings, or new ones."""
    if (rid := arguments.get("rid")) is not None:
        return rid
    prompt, ids = arguments.get("prompt"), arguments.get("input_ids")
    several = ids if prompt is None and isinstance(ids, list) and any(isinstance(i, list) for i in ids) else prompt
    return [_new_rid() for _ in several] if isinstance(several, list) else _new_rid()


def _new_rid() -> str:
    return f"sgl-{secrets.token_hex(12)}"
