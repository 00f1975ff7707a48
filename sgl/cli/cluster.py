"""`sgl cluster`: replicas of a server on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from sgl.cli.exits import end_with
from sgl.cli.logs import announce, configure_logging
from sgl.cli.options import options_of_file, ray_address
from sgl.errors import ConfigError, EngineDead, ServerUnreachable, needs_extra
from sgl.runtime.cluster.config import Options
from sgl.runtime.cluster.running import (
    Running,
    Signals,
    found,
    is_starting,
    running,
    starting,
    starting_processes,
    sweep,
    sweep_start,
)
from sgl.runtime.server.serve import listen

_POLL_SECONDS = 0.1
_ENDING_SECONDS = 120.0
_KILLED_SECONDS = 30.0
_COMMAND_SECONDS = 60.0
_JOINING_SECONDS = 20.0


def up(options: SimpleNamespace) -> int:
    """Run a cluster until a signal or `sgl cluster down`."""
    address = ray_address()  # the file's comes first
    given = Options.of(options_of_file(Path(options.file)), options.file, is_on_own_ray=address is None)
    signals = Signals()
    with needs_extra("dist", "sgl cluster"):
        from sgl.runtime.cluster.cluster import Cluster
        from sgl.runtime.cluster.serve_app import RayCluster
    configure_logging(given.server.log_level, given.server.log_format)
    for each in running():
        if not each.is_alive() and each.ray_address is None:
            _clear(each)
    began = time.monotonic()
    bound = listen(given.server.host, given.server.port)

    def on_ready(url: str) -> None:
        seconds = time.monotonic() - began
        announce(f"sgl serves {given.engine.model_name} at {url} (ready in {seconds:.1f} s)")

    async def run(ray: RayCluster) -> None:
        cluster = Cluster(given, bound, ray)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the rest does
                loop.call_soon_threadsafe(cluster.stop)

        signals.tell(stop)
        await cluster.run(on_ready)

    def serve() -> int:
        with starting(bound.getsockname()[1]):  # until it says more itself
            signals.check()
            ray = RayCluster(given.cluster.ray_address or address, signals.check)
            try:
                signals.take()
                signals.check()
                asyncio.run(run(ray))
            finally:
                ray.close()
        return 0

    end_with(serve)


def _alive(port: int | None) -> Running:
    known = found(port)
    if not known.is_alive():
        raise EngineDead(
            f"the process of the cluster on port {known.port} was killed: `sgl cluster down` clears up"
        )
    return known


def status(options: SimpleNamespace) -> int:
    """Show what runs."""
    known = _alive(options.port)
    facts = known.link().get("/status")
    console = Console(soft_wrap=True, highlight=False)
    if options.json:
        console.print(json.dumps(facts, indent=2), markup=False)
        return 0
    pids = ", ".join(f"{name} {pid}" for name, pid in facts["pids"].items())
    console.print(
        f"{facts['model']} at {facts['url']}: {facts['serving']} of {facts['replicas']} replicas", markup=False
    )
    console.print(f"processes: {pids}\nlogs: {facts['logs']}", markup=False)
    if facts["undone"] is not None:
        console.print("update {generation} was undone: {reason}".format(**facts["undone"]), markup=False)
    rows = [("WORKER", "STATE", "MODE", "URL", "RUNNING", "WAITING", "KV", "PROCESSES")]
    for its in facts["workers"]:
        numbers = str(its["running"]), str(its["waiting"]), f"{its['kv_usage']:.0%}"
        mode = (its["capabilities"] or {}).get("mode") or "-"
        rows.append((its["id"], its["state"], mode, its["url"] or "-", *numbers, " ".join(map(str, its["pids"]))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), markup=False)
    reasons = [f"{its['id']}: {its['reason']}" for its in facts["workers"] if its["reason"]]
    if not reasons and facts.get("last_failure") and facts["serving"] < facts["replicas"]:
        reasons = [f"the last replica that did not start: {facts['last_failure']}"]
    for reason in reasons:
        console.print(reason, markup=False)
    return 0


def scale(options: SimpleNamespace) -> int:
    """Have so many replicas; returns once they serve."""
    known = _alive(options.port)
    asked = {"replicas": options.replicas, "kind": "prefill" if options.prefill else "worker"}
    known.link().post("/scale", asked, seconds=_COMMAND_SECONDS)

    def is_done(facts: dict[str, Any]) -> bool:
        failed = [its for its in facts["workers"] if its["state"] in ("failed", "refused")]
        if facts["is_updating"]:  # which is undone where a replica fails
            return False
        if failed and facts["serving"] < facts["replicas"] and failed[0]["generation"] == facts["generation"]:
            raise EngineDead(f"a replica does not serve: {failed[0]['reason']}")
        return bool(facts["serving"] == facts["replicas"] == len(facts["workers"]))

    return _until(known, is_done)


def update(options: SimpleNamespace) -> int:
    """Replace the replicas one by one by ones with a file's options; returns once they serve."""
    given = options_of_file(Path(options.file))
    # YAML has values that JSON, in which the cluster is asked, has not; what its hosts have the cluster knows
    Options.of(given, options.file, is_on_own_ray=False)
    known = _alive(options.port)
    asked = known.link().post("/update", {"options": given, "source": options.file}, seconds=_COMMAND_SECONDS)

    def is_done(facts: dict[str, Any]) -> bool:
        if facts["undone"] is not None and facts["undone"]["generation"] >= asked["generation"]:
            raise EngineDead(
                f"{options.file}: a replica does not start with it, so the options of before hold: "
                f"{facts['undone']['reason']}"
            )
        return (
            all(its["generation"] == facts["generation"] for its in facts["workers"])
            and facts["serving"] == facts["replicas"]
        )

    return _until(known, is_done)


def down(options: SimpleNamespace) -> int:
    """End a cluster; returns once no process of it is left."""
    try:
        known = found(options.port)
    except EngineDead:  # it only starts
        for port, pid in starting_processes().items():
            if options.port not in (None, port):
                continue
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGTERM)
            if _ended(pid, functools.partial(is_starting, pid)):
                for each in running():
                    if each.pid == pid:  # it had just started
                        _clear(each)
                sweep_start(port, pid)
        return 0
    was_killed = not known.is_alive()
    if not was_killed:
        with contextlib.suppress(ServerUnreachable):
            known.link().post("/down", {})
    if _ended(known.pid, known.is_alive) or was_killed:
        _clear(known)
    return 0


def _ended(pid: int, is_alive: Callable[[], bool]) -> bool:
    """Wait for a process to end. Returns whether it had to be killed. Raises EngineDead if even that does not help."""
    end, is_killed = time.monotonic() + _ENDING_SECONDS, False
    while is_alive():
        if time.monotonic() > end:
            if is_killed:
                raise EngineDead(
                    f"process {pid} was killed and does not end: the kernel waits for a device or disk"
                )
            end, is_killed = time.monotonic() + _KILLED_SECONDS, True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its own Ray, router and replicas end with it
        time.sleep(_POLL_SECONDS)
    return is_killed


def _clear(running: Running) -> None:
    """End what a cluster's process that was killed left behind. Raises EngineDead if it cannot."""
    if running.ray_address is not None:
        _delete(running)
    if running.folder is not None:
        sweep(running.folder)
    running.forget()


def _delete(running: Running) -> None:
    """End the replicas on a Ray cluster of others whose cluster's process was killed. Raises EngineDead."""
    if running.ray_auth is not None:
        os.environ.setdefault("RAY_AUTH_MODE", running.ray_auth)  # read when Ray is imported
    with needs_extra("dist", "sgl cluster"):
        from sgl.runtime.cluster.serve_app import RayCluster, ServeApp
    where = f"the Ray at {running.ray_address}"
    try:
        ray = RayCluster(running.ray_address, seconds=_JOINING_SECONDS)
    except ConfigError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            announce(f"{where} is gone, and what ran there")
            return
        why = f"{where} cannot be asked: {error.__cause__}"
    else:
        try:
            why = "" if ServeApp(running.app).delete() else f"{where} has a Ray Serve that does not answer"
        finally:
            ray.close()
    if why:
        message = f"{why}. Replicas may run there yet: `sgl cluster down` ends them once it answers"
        raise EngineDead(f"{message}; if it never will, remove {running.path}")


def _until(known: Running, is_done: Any) -> int:
    link, before, since = known.link(), None, time.monotonic()
    while True:
        facts = link.get("/status")
        if is_done(facts):
            return 0
        now = [(its["id"], its["state"], its["generation"]) for its in facts["workers"]]
        if now != before:
            before, since = now, time.monotonic()
        if time.monotonic() - since > facts["patience"]:
            raise EngineDead(
                f"{facts['serving']} of {facts['replicas']} replicas serve, and nothing has changed for "
                f"{facts['patience']:g} s, in which one starts and one ends: {facts['logs']} say why"
            )
        time.sleep(_POLL_SECONDS)
