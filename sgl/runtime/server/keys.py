"""Whose request it is, by the key that it came with, and whether it may enter."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from sgl.runtime.server.errors import WrongKey
from sgl.runtime.server.history import note
from sgl.runtime.server.identity import ADMIN, Caller, current_caller
from sgl.runtime.server.service import Service


class Keys:
    """One server's."""

    def __init__(self, service: Service) -> None:
        self._service, config = service, service.config
        keys = config.api_key or ()
        are_several = len({key.name for key in keys}) > 1
        self._keys = [
            (_digest(key.key), Caller(key.name, False, key.name if are_several else None)) for key in keys
        ]
        if config.admin_api_key is not None:
            admin = Caller(ADMIN, is_admin=True, tenant=ADMIN if are_several else None)
            self._keys.append((_digest(config.admin_api_key), admin))
        # Only the admin has a key: everybody may enter. Nobody has one: everybody may do everything.
        self._stranger = None if config.api_key else Caller(None, is_admin=config.admin_api_key is None)

    def enter(self, headers: Mapping[str, str], *, is_open: bool, for_admin: bool) -> None:
        """Note whose the current request is. Raises WrongKey, unless it needs no key, and Forbidden."""
        caller = Caller(None, is_admin=False) if is_open else self._caller_of(headers)
        current_caller.set(caller)
        if (current := note.get()) is not None:
            current.owner = caller.name
        if for_admin:
            self._service.check_admin(caller)

    def _caller_of(self, headers: Mapping[str, str]) -> Caller:
        """The caller, by `Authorization` or `X-Api-Key`. Raises WrongKey."""
        kind, _, key = headers.get("Authorization", "").partition(" ")
        given = _digest(key if kind.lower() == "bearer" else headers.get("X-Api-Key", ""))
        found = self._stranger
        for expected, owner in self._keys:  # compare all: the time must not tell which key matched
            if hmac.compare_digest(given, expected):
                found = owner
        if found is None:
            raise WrongKey("the API key is missing or wrong: send Authorization: Bearer <key>")
        return found


def _digest(key: str) -> bytes:
    """A hash: keys of any length compare in the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
