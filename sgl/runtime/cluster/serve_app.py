"""The replicas as an application of Ray Serve: which are there, how many, of which options.

Ray Serve's own HTTP proxies are not started. `ServeDeploySchema` is its public form of a configuration; the client that
takes one is not public (the public door is HTTP, on Ray's dashboard), which is why sgl[dist] names the releases that
this was tested with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from sgl.errors import BackendError, ConfigError, needs_extra
from sgl.machine_limits import num_processors
from sgl.runtime.cluster.config import Options
from sgl.runtime.cluster.placement import Host, Placement
from sgl.runtime.cluster.running import MARK, new_folder, sweep

with needs_extra("dist", "a cluster"):
    import ray
    from ray import serve
    from ray._private import ray_constants
    from ray.experimental import internal_kv as _kv
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

logger = logging.getLogger(__name__)

_STORE_BYTES = 100 << 20  # the least that Ray takes is 75 MiB; no tensor and no token goes there
_OWN_CPUS = 256  # of a Ray on one machine: a replica counts its processes, and the machine's cores bound nothing
_IMPORT = "sgl.runtime.cluster.replica:app"
_PREFIX = "sgl-token-"
_WITHIN = "r"  # Ray opens its own folder, with its sockets, to everybody; the one around it is the user's alone
_DEPLOYMENT, _PREFILL = "worker", "prefill"
_ENDING_SECONDS = 30.0  # of Ray Serve
_HEALTH_SECONDS = 1.0
_REACHING_SECONDS = 10.0
_STARTING_SECONDS = 180.0  # ten times what Ray takes; it waits itself for eleven minutes where a port stays mute
_RIGHT = "give HOST:PORT of one that runs, or auto"
_AUTH = "RAY_AUTH_MODE"
_TURN_SECONDS = 0.1
_GIVING_UP_SECONDS = 10.0, 1.0
_MARGIN_SECONDS = 30.0


def keep_token(key: str, token: str) -> None:
    """Keep it where only processes of the Ray cluster find it; arguments of replicas are shown and logged."""
    _kv._internal_kv_put(_PREFIX + key, token)


def token(key: str) -> str:
    """A token that was kept."""
    return bytes(_kv._internal_kv_get(_PREFIX + key)).decode()


class RayCluster:
    """The Ray cluster that the replicas run on: this machine's own, which ends with this process, or another's."""

    def __init__(
        self, address: str | None, check: Callable[[], object] = bool, seconds: float | None = None
    ) -> None:
        """Start or join it. check: called while that goes on, which it ends by what it raises; seconds: that it may
        take, if not as usual. Raises ConfigError."""
        self.folder: str | None = None  # of one's own
        self._start: Future[Any] = Future()
        self._ended = threading.Event()
        if address not in (None, "auto"):
            _reach(address)
        about: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "sgl"}
        if address is None:
            _keep_to_this_machine()
            self.folder = os.environ[MARK] = new_folder()
            about |= {
                "num_cpus": max(_OWN_CPUS, num_processors()),
                "object_store_memory": _STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": f"{self.folder}/{_WITHIN}",
            }
        for name in ("ray", "ray.serve"):  # whose news are for those who know that Ray is there
            logging.getLogger(name).setLevel(logging.ERROR)
        about["address"] = "local" if address is None else address
        group = os.getpgrp()
        try:
            # On the main thread, Ray would handle SIGTERM itself. The end of the process waits for no daemon.
            threading.Thread(target=self._run, args=(about,), name="sgl-ray", daemon=True).start()
            self._wait(check, seconds)
            if os.getpgrp() != group:  # Ray's own: a terminal's Ctrl-C would not come here any more
                with contextlib.suppress(OSError):  # all others of that group have ended
                    os.setpgid(0, group)
            self.is_own = address is None
            self.address = str(ray.get_runtime_context().gcs_address)
            self.host = "127.0.0.1" if self.is_own else str(ray.util.get_node_ip_address())
        except BaseException as error:
            self.close()
            if isinstance(error, (ConnectionError, RuntimeError, TimeoutError, ValueError)):
                is_told = self.folder is not None or _AUTH in os.environ
                right = _RIGHT if is_told else f"{_RIGHT}, and set {_AUTH}=token if it asks for a token"
                raise ConfigError(f"ray_address={address!r}: {error}; {right}", option="ray_address") from error
            raise

    def _run(self, about: dict[str, Any]) -> None:
        try:
            self._start.set_result(ray.init(**about))
        except BaseException as error:  # raised where it is waited for
            self._start.set_exception(error)
        self._ended.wait()  # Ray's processes end with the thread that starts them

    def _wait(self, check: Callable[[], object], seconds: float | None) -> None:
        began = time.monotonic()
        while not wait([self._start], _TURN_SECONDS).done:
            check()
            if time.monotonic() - began > (most := _STARTING_SECONDS if seconds is None else seconds):
                what = "no Ray has answered" if self.folder is None else "Ray has not started on this machine"
                raise TimeoutError(f"{what} within {most:g} s")
        self._start.result()

    def hosts(self) -> list[Host]:
        """All that are there."""
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [Host(each.get("CPU", 0), each.get("GPU", 0)) for each in found]

    def is_there(self) -> bool:
        """Whether its head can be reached: one's own may have ended by the signal that ended this process."""
        try:
            _reach(self.address)
        except ConfigError:
            return False
        return True

    @property
    def logs(self) -> str:
        """The folder of the processes' logs."""
        return f"{'/tmp/ray' if self.folder is None else f'{self.folder}/{_WITHIN}'}/session_latest/logs"

    def close(self) -> None:
        """End one's own; another's notices that this process ends. Idempotent. Without ray.shutdown(), whose C++ code
        has SIGTERM kill this process from its middle on: the process has to end by os._exit, which calls none."""
        self._ended.set()
        if self.folder is not None:
            for seconds in _GIVING_UP_SECONDS:  # what still starts would start more behind the sweep
                wait([self._start], seconds)
                sweep(self.folder)


class ServeApp:
    """The application."""

    def __init__(self, name: str) -> None:
        """name: of the application, one for each cluster of replicas on a Ray cluster; replicas of another kind than
        "worker" have one beside it."""
        self.name = name
        self._applied: dict[str, Any] = {}
        self.failure: str | None = None
        """Why Ray Serve gave up starting replicas, when `states` was last asked for."""

    def deploy(
        self,
        options: Options,
        placements: Mapping[str, Placement],
        counts: Mapping[str, int],
        arguments: dict[str, Any],
        *,
        surge: bool,
    ) -> None:
        """Have so many replicas, by kind, with these arguments (see `replica.Replica`): the same as before are kept,
        others are replaced one by one, each drained before it ends. surge: each new one starts before its old one
        stops, for which there must be room."""
        serve.start(proxy_location="Disabled")
        self._applied = {
            "name": _DEPLOYMENT,
            "placement_group_strategy": "PACK",
            "health_check_period_s": _HEALTH_SECONDS,
            "graceful_shutdown_timeout_s": options.server.drain_timeout + _MARGIN_SECONDS,
            "graceful_shutdown_wait_loop_s": 0.1,
            "max_surge_percent": 1 if surge else 0,  # rounded up: one replica
        }
        self._arguments, self._placements = arguments, placements
        self.scale(counts)

    def scale(self, counts: Mapping[str, int]) -> None:
        """Have so many replicas, by kind; those that there are, are kept."""
        applications = [
            {
                "name": name,
                "route_prefix": None,
                "import_path": _IMPORT,
                "args": {**self._arguments, "kind": kind},
                "deployments": [
                    {
                        **self._applied,
                        "num_replicas": counts[kind],
                        "placement_group_bundles": [placement.resources] * placement.hosts,
                        "ray_actor_options": placement.actor,
                    }
                ],
            }
            for name, (kind, placement) in zip(self._names, self._placements.items(), strict=False)
        ]
        schema = ServeDeploySchema.model_validate({"proxy_location": "Disabled", "applications": applications})
        _client().deploy_apps(schema)

    def states(self) -> dict[str, str] | None:
        """The replicas' states, by id; None while Ray Serve reads what it was told and lists none of those that there
        are. Raises BackendError while its controller is away."""
        try:
            details = _details()
        except Exception as error:  # any of Ray's: its controller is being started again
            raise BackendError(f"Ray Serve's controller does not answer: {error}", retryable=True) from error
        found = [each for name, each in details["applications"].items() if name in self._names]
        deployments = [each["deployments"][_DEPLOYMENT] for each in found if each["deployments"]]
        failed = [each for each in (*deployments, *found) if _text(each.get("status")) == "DEPLOY_FAILED"]
        self.failure = failed[0].get("message", "").split("\n")[-1] if failed else None  # of a traceback, mostly
        if any(not each["deployments"] and _text(each["status"]) == "DEPLOYING" for each in found):
            return None
        replicas = [each for deployment in deployments for each in deployment.get("replicas", [])]
        return {each["replica_id"]: _text(each["state"]) for each in replicas}

    def controller_pid(self) -> int | None:
        """The process of Ray Serve's controller."""
        with contextlib.suppress(Exception):  # of any class: it is shown to people alone
            return int(ray.get(_client()._controller.get_pid.remote(), timeout=2.0))
        return None

    def delete(self) -> bool:
        """Drain and end all replicas, and Ray Serve if nobody else uses it. Whether it did not have to be left."""
        ours = set(self._names)
        try:
            there = set(_details()["applications"])
        except serve.exceptions.RayServeException:  # there is none
            return True
        except Exception as error:  # any of Ray's: its raylet was killed, say
            logger.error("Ray Serve does not answer, and drains nothing: %s", error)
            return False
        if there <= ours:
            # as serve.shutdown(), but not to be tried again once it has ended: Ray would print that
            ending = _client()._controller.graceful_shutdown.options(max_task_retries=0)
            with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                ray.get(ending.remote(), timeout=_ENDING_SECONDS)
        else:
            for name in ours & there:
                serve.delete(name)
        return True

    @property
    def _names(self) -> list[str]:
        return [self.name, f"{self.name}-{_PREFILL}"]


def _keep_to_this_machine() -> None:
    """Have a Ray that starts listen on the loopback address alone, which outlives a change of networks, and to whom
    knows a token of its own alone, not that of a file in the home folder, which may not be there."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # read when this module was imported
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # of its processes
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _reach(address: str) -> None:
    """Raises ConfigError where nothing listens: Ray itself asks there for two minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHING_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        message = f"ray_address={address!r}: no Ray answers there ({error}); {_RIGHT}"
        raise ConfigError(message, option="ray_address") from error


def _client() -> Any:
    return _get_global_client()


def _details() -> Any:
    """As the client's get_serve_details, which waits without end for a controller that nobody starts again."""
    return ray.get(_client()._controller.get_serve_instance_details.remote(), timeout=_ENDING_SECONDS)


def _text(value: Any) -> str:
    """Of what may be an enum's member."""
    return str(getattr(value, "value", value))
