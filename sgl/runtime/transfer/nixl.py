"""Pages that a decode engine reads itself, through NIXL: over RDMA, shared memory or TCP, whichever UCX finds.

The connection of `wire` stays: by it the lease is named, and told where the pages lie. A read that NIXL has begun
writes to its pages until its state says that it has ended. Neither releasing it nor leaving the other engine ends it:
UCX over TCP wrote all pages of a released read once the other engine, which had been stopped, went on. So a read that
is given up is quiet only when it has ended, and the pages wait.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from sgl.errors import ConfigError, is_installed, needs_extra
from sgl.runtime.transfer.params import TransferParams
from sgl.runtime.transfer.reader import Read, TcpReader
from sgl.runtime.transfer.server import Remote
from sgl.runtime.transfer.wire import REMOTE, DeadlineSocket, description

Memory = npt.NDArray[np.uint8]
_OPTION: Final = "disaggregation_transport"
_PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
_SILENT_SECONDS: Final = 5.0
_SLOWEST: Final = 50e6  # bytes a second, below which a read is given up
_PATIENT_SECONDS: Final = 0.05  # where nobody reads


class _Described(msgspec.Struct, frozen=True):
    """What a reader needs to know."""

    agent: bytes  # of NIXL: its name, and how to reach it
    addresses: list[int]  # of the pages
    checksums: list[int]


class _Agent:
    """NIXL's, with one buffer."""

    def __init__(self, memory: Memory, name: str) -> None:
        """Raises MissingExtra and ConfigError."""
        package = next(filter(is_installed, _PACKAGES), _PACKAGES[0])
        with needs_extra("nixl", f"{_OPTION}='nixl'", _OPTION):
            api: Any = importlib.import_module(f"{package}._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent, on standard output
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        # Its own thread would turn without a pause: here, whoever waits for a read has it go on.
        about = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        self.nixl = api.nixl_agent(name, about)
        if "UCX" not in self.nixl.backends:
            raise ConfigError(f"{_OPTION}='nixl': its plug-in UCX does not load here", option=_OPTION)
        self._memory = memory
        num_bytes = (len(memory) - 1) * memory.strides[0] + memory.shape[1]  # with what may lie between rows
        self._registered = self.nixl.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")

    def addresses(self, pages: list[int]) -> list[int]:
        """Of rows of the buffer."""
        return [self._memory.ctypes.data + page * self._memory.strides[0] for page in pages]

    def regions(self, addresses: list[int]) -> Any:
        """Pages there, in NIXL's form."""
        return self.nixl.get_xfer_descs([(each, self._memory.shape[1], 0) for each in addresses], "DRAM")

    def close(self) -> None:
        """Nothing reads or writes the buffer any more. Idempotent."""
        self.nixl = None


class NixlRemote(Remote):
    """A prefill engine's end, see `Remote`. Whoever was described a page can reach all of the buffer."""

    kind = REMOTE

    def __init__(self, memory: Memory, name: str) -> None:
        """Raises MissingExtra and ConfigError. name: unlike other engines'."""
        self._agent = _Agent(memory, name)
        self._metadata: bytes = self._agent.nixl.get_agent_metadata()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="sgl-nixl", daemon=True)
        self._thread.start()

    def describe(self, pages: list[int], checksums: list[int]) -> bytes:
        return msgspec.msgpack.encode(_Described(self._metadata, self._agent.addresses(pages), checksums))

    def introduce(self, lease: bytes, proof: bytes) -> bytes | None:
        return b""  # who is described a page is told all

    def go_on(self) -> None:
        try:
            if (nixl := self._agent.nixl) is not None:
                nixl.get_new_notifs()
        except Exception as error:  # NIXL's own classes, of which there is no common one
            raise ConnectionError(f"NIXL cannot be read: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._agent.close()

    def _go_on(self) -> None:
        """Have reads end whose readers have given up."""
        while not self._is_closed.wait(_PATIENT_SECONDS):
            with contextlib.suppress(ConnectionError):  # which whoever waits for a read is told
                self.go_on()


@dataclass(slots=True)
class _Peer:
    """An engine that is read from."""

    name: str
    reads: int = 0
    is_broken: bool = False  # forgotten after its last read, to be met anew


class NixlReader(TcpReader):
    """A decode engine's end."""

    kind = REMOTE

    def __init__(self, memory: Memory, fit: Callable[[int, TransferParams], None], name: str) -> None:
        """Raises MissingExtra and ConfigError. fit: see `TcpReader`. name: unlike other engines'."""
        self._agent = _Agent(memory, name)
        super().__init__(memory, fit)
        self._peers: dict[bytes, _Peer] = {}
        self._begun: dict[Read, tuple[Any, bytes]] = {}  # NIXL's handles, and of whom
        self._calls = threading.Lock()

    def close(self) -> None:
        super().close()
        self._begun.clear()
        self._agent.close()

    def _receive(self, read: Read, peer: DeadlineSocket) -> None:
        told = description(peer, _Described)
        if not len(told.addresses) == len(told.checksums) == len(read.pages):
            raise ValueError("other pages are described than were asked for")
        if read.pages:
            self._begin(read, told)
            self._await(read, _SILENT_SECONDS + len(read.pages) * self.page_bytes / _SLOWEST)
        for page, checksum in zip(read.pages, told.checksums, strict=True):
            self._take(read, page, checksum)

    def _begin(self, read: Read, told: _Described) -> None:
        nixl, agent = self._agent.nixl, self._agent
        try:
            with self._calls:
                peer = self._peers.get(told.agent)
                if peer is None:
                    peer = self._peers[told.agent] = _Peer(nixl.add_remote_agent(told.agent))
                own, theirs = agent.regions(agent.addresses(read.pages)), agent.regions(told.addresses)
                handle = nixl.initialize_xfer("READ", own, theirs, peer.name)
                peer.reads += 1
                self._begun[read] = handle, told.agent
                nixl.transfer(handle)
        except Exception as error:  # NIXL's own classes, of which there is no common one
            self._is_lost(told.agent)
            raise ConnectionError(f"NIXL cannot read: {type(error).__name__}: {error}") from error

    def _has_ended(self, read: Read) -> bool:
        """Also once NIXL is closed: then its sockets and queues are gone."""
        handle, whose = self._begun.get(read, (None, b""))
        if handle is None:
            return True
        try:
            state: str = self._agent.nixl.check_xfer_state(handle)
        except Exception:  # as above: the other engine is gone, and the read with it
            state = "ERR"
        if state not in ("PROC", "DONE"):
            self._is_lost(whose)
            raise ConnectionError("NIXL lost the other engine")
        return state == "DONE"

    def _is_lost(self, whose: bytes) -> None:
        with self._calls:
            if (peer := self._peers.get(whose)) is not None:
                peer.is_broken = True
        self._forget(whose, 0)

    def _forget(self, whose: bytes, ended: int) -> None:
        """So many reads of it have ended."""
        with self._calls:
            peer = self._peers.get(whose)
            if peer is None:
                return
            peer.reads -= ended
            if peer.is_broken and not peer.reads:
                del self._peers[whose]
                with contextlib.suppress(Exception):  # it knows none of that name any more
                    self._agent.nixl.remove_remote_agent(peer.name)

    def _let_go(self, read: Read) -> None:
        handle, whose = self._begun.pop(read, (None, b""))
        if handle is not None:
            with contextlib.suppress(Exception):  # as above: it has ended in any case
                self._agent.nixl.release_xfer_handle(handle)
            self._forget(whose, 1)
        super()._let_go(read)
