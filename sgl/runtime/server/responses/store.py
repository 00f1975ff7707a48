"""Stored responses: what can be read again and gone on from, in bounded memory. The oldest of a tenant go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from sgl.errors import InvalidRequest
from sgl.lang.ir.pool import Pool
from sgl.runtime.server.bodies import MAX_OBJECTS
from sgl.runtime.server.encoding import json_bytes
from sgl.runtime.server.errors import NotThere
from sgl.runtime.server.identity import Caller

MAX_STORED = 1 << 27
"""Bytes of stored responses, as JSON."""
OVERHEAD = 1 << 11
"""Bytes that each counts besides."""


class Stored:
    """A response with its own input as JSON; `earlier` is the one that it goes on from."""

    __slots__ = ("_data", "earlier", "id", "num_items", "num_users", "outputs", "owner", "size")

    def __init__(
        self, response: dict[str, Any], own_input: list[dict[str, Any]], earlier: Stored | None, owner: Caller
    ) -> None:
        output = response["output"]
        self.id: str = response["id"]
        self.earlier = earlier
        self.owner = owner
        self.num_items: int = len(own_input) + len(output) + (0 if earlier is None else earlier.num_items)
        self.num_users = 1  # the store, and those that go on from it
        self._data = json_bytes({"response": response, "input": own_input})
        self.outputs: list[str] = [item["id"] for item in output]
        self.size = len(self._data) + OVERHEAD

    def response(self) -> dict[str, Any]:
        """The response."""
        response: dict[str, Any] = json.loads(self._data)["response"]
        return response

    def inputs(self) -> list[dict[str, Any]]:
        """All items that were its input, those of earlier responses first."""
        own: list[dict[str, Any]] = json.loads(self._data)["input"]
        return own if self.earlier is None else [*self.earlier.items(), *own]

    def items(self) -> list[dict[str, Any]]:
        """All items until its end. Raises InvalidRequest if there are too many."""
        if self.num_items > MAX_OBJECTS:
            message = (
                f"the conversation has {self.num_items} items, and {MAX_OBJECTS} are the most that one may have"
            )
            raise InvalidRequest(message, param="previous_response_id")
        chain: list[Stored] = [self]
        while (earlier := chain[-1].earlier) is not None:
            chain.append(earlier)
        loaded = [json.loads(each._data) for each in reversed(chain)]
        return [item for each in loaded for item in (*each["input"], *each["response"]["output"])]


class ResponseStore:
    """The responses of one server, on its event loop."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._responses: dict[str, Stored] = {}
        self._of: dict[str | None, OrderedDict[str, Stored]] = {}  # by tenant, oldest first
        self._with: dict[str, Stored] = {}  # by the ids of its output

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._pool.taken

    def add(self, stored: Stored) -> None:
        """Keep a response, instead of the tenant's oldest where there is no room. One too large for it is not kept."""
        tenant = stored.owner.tenant
        own = self._of.setdefault(tenant, OrderedDict())
        while self._pool.room(MAX_STORED, tenant) < stored.size and own:
            self._forget(next(iter(own)))
        if self._pool.room(MAX_STORED, tenant) < stored.size:
            return
        self._pool.take(stored.size, tenant)
        if stored.earlier is not None:
            stored.earlier.num_users += 1
        own[stored.id] = self._responses[stored.id] = stored
        self._with.update(dict.fromkeys(stored.outputs, stored))

    def find(self, identity: str, caller: Caller) -> Stored:
        """The caller's response. Raises NotThere."""
        return self._reachable(self._responses.get(identity), "response", identity, caller)

    def with_item(self, identity: str, caller: Caller) -> Stored:
        """The caller's response that answered an item. Raises NotThere."""
        return self._reachable(self._with.get(identity), "item", identity, caller)

    def delete(self, identity: str, caller: Caller) -> None:
        """Forget the caller's response; those that go on from it stay. Raises NotThere."""
        self._forget(self.find(identity, caller).id)

    def _reachable(self, stored: Stored | None, what: str, identity: str, caller: Caller) -> Stored:
        if stored is None or not caller.may_reach(stored.owner.name):
            message = f"there is no {what} {identity!r:.80}: it was not stored, or it was forgotten since"
            raise NotThere(message, param="id")
        if stored.id in self._responses:
            self._of[stored.owner.tenant].move_to_end(stored.id)
        return stored

    def _forget(self, identity: str) -> None:
        stored: Stored | None = self._responses.pop(identity)
        assert stored is not None
        del self._of[stored.owner.tenant][identity]
        while stored is not None:
            stored.num_users -= 1
            if stored.num_users:
                return
            self._pool.take(-stored.size, stored.owner.tenant)
            for item in stored.outputs:
                del self._with[item]
            stored = stored.earlier
