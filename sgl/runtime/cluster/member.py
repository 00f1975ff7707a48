"""A process that serves (host 0 of a replica) or follows (another host of it), and ends with the process that started
it. It is `sgl serve`, told what to do by a line of JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from sgl.child import command
from sgl.errors import EngineDead
from sgl.runtime.cluster.spares import AdoptedProcess, SpareAddress

Process = subprocess.Popen[bytes] | AdoptedProcess
_CODE = (
    "from sgl.cli.member import main; from sgl.runtime.cluster.spares import SpareAddress; main({spare_address!r})"
)


def tell(process: Process, options: Mapping[str, Any]) -> None:
    """Tell a process a line of JSON. Its standard input stays open, whose end tells that this process is gone."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended
        process.stdin.write(json.dumps(options).encode() + b"\n")
        process.stdin.flush()


def end(process: Process, timeout: float) -> None:
    """Have a process finish what runs, for up to so many seconds, and end it. Idempotent."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Member:
    """One such process."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        spare_address: SpareAddress | None = None,
        process: AdoptedProcess | None = None,
    ) -> None:
        """Start it. options: of `Options.for_replicas`; None: a spare one, which imports what it needs
        and waits. spare_address: where a spare one waits when this process has ended. process: a spare one
        that waited so, in place of a new one."""
        self._process: Process = process or subprocess.Popen(
            command(_CODE.format(spare_address=spare_address)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._facts: dict[str, Any] = {}
        self._told = threading.Event()
        threading.Thread(target=self._read, name="sgl-member", daemon=True).start()
        if options is not None:
            self.begin(options)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Tell a spare one its options, once."""
        tell(self._process, options)

    @property
    def pid(self) -> int:
        """The process's."""
        return self._process.pid

    def ready(self, timeout: float | None = None) -> dict[str, Any] | None:
        """What it says when it serves; None if `timeout` seconds passed. Raises EngineDead, with its reason."""
        if not self._told.wait(timeout):
            return None
        if "url" not in self._facts:
            code = self._process.wait()
            raise EngineDead(self._facts.get("failed") or f"the server ended while it was starting (code {code})")
        return self._facts

    def ended(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._process.poll()

    def stop(self, timeout: float) -> None:
        """See `end`."""
        end(self._process, timeout)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._facts = json.loads(line)
                break
        self._told.set()
