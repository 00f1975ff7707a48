"""A replica as a deployment of Ray Serve: it starts a server beside itself, watches it, and tells the cluster of it.
No request passes through Ray."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import ray
import requests
from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica as _replica
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sgl.errors import EngineDead, SglError
from sgl.runtime.cluster.link import Link
from sgl.runtime.cluster.member import Member
from sgl.runtime.cluster.registry import Capabilities, Report
from sgl.runtime.cluster.serve_app import token
from sgl.runtime.cluster.spares import SpareAddress, adopted, name_of
from sgl.runtime.gateway.reports import Load, load_of
from sgl.runtime.server.probe import PROBE

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_PROBE_SECONDS = 5.0
_FIRST_SECONDS = 30.0
_PARTING_SECONDS = 1.0  # until the router has heard that a replica takes no more
_SPARE_SECONDS = 10.0  # until a server that serves gets a spare one beside it
_SPARE_LATEST = 120.0  # also while others are starting, whom it takes half of two cores
_ENDING_SECONDS = 10.0  # beyond the server's own drain_timeout


class Follower:
    """Another host of a replica: an actor whose process's child runs this host's ranks. Ray starts it again."""

    def __init__(self, options: Mapping[str, Any], secret: str) -> None:
        """Start the child. options: see Member; secret: of the ranks' connections."""
        self._member = Member({**options, "secret": secret})
        threading.Thread(target=self._watch, daemon=True).start()

    def pids(self) -> tuple[int, int]:
        """This actor's process, and its child."""
        return os.getpid(), self._member.pid

    def _watch(self) -> None:
        while self._member.ended() is None:
            time.sleep(BEAT_SECONDS)
        os._exit(1)


class Replica:
    """A replica. Raises what its server raises while it starts."""

    def __init__(self, control: str, key: str, generation: int, hosts: int, kind: str) -> None:
        """Serve. control: the cluster's process; key: see `token`; hosts: that share its ranks; kind: whose engine's
        options are its own."""
        _replica.add_port_to_grpc_server = _add_port  # type: ignore[attr-defined]  # before it is called
        self._id = serve.get_replica_context().replica_id.unique_id
        self._generation = generation
        secret = token(key)
        self._link = Link(control, secret)
        there: Any = urlsplit(control)  # with a host and a port
        self._spare_address = SpareAddress(name_of(secret, generation), (there.hostname, there.port))
        given = self._link.get("/options", generation=generation)
        self._host = ray.util.get_node_ip_address()
        self._drain_seconds = given["drain_timeout"] + _ENDING_SECONDS
        self._patience = given["unhealthy_timeout"]
        self._is_over = threading.Event()
        self._state: Any = "starting"
        self._reason = ""
        self._url: str | None = None
        self._capabilities: Capabilities | None = None
        self._up = time.monotonic()  # when the server was last seen well
        self._began = math.inf  # when it began to serve
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["User-Agent"] = PROBE
        if given["key"]:
            self._session.headers["Authorization"] = f"Bearer {given['key']}"
        host, engine = given["bind"] or self._host, given["engines"][kind]
        if engine.get("disaggregation_mode") == "prefill":
            engine["disaggregation_host"] = host
        options = {"engine": engine, "server": {**given["server"], "host": host, "port": 0}}
        if "disaggregation_mode" in engine and "disaggregation_key_file" not in engine:
            options["transfer_secret"] = given["transfer_secret"]
        self._followers: list[Any] = []
        self._follower_pids: tuple[int, ...] = ()
        if hosts > 1:
            options = self._with_followers(options, hosts)
        self._options = options
        self._spare: Member | None = None
        self._is_calm = False
        self._member = Member(options, process=adopted(self._spare_address.name))
        threading.Thread(target=self._beat, name="sgl-beats", daemon=True).start()
        try:
            self._await_server()
        except Exception as error:
            self._reason = str(error)
            self._leave("failed")
            raise
        self._tell()

    def check_health(self) -> None:
        """What Ray Serve asks. Raises EngineDead when the replica must be replaced: it starts a server that has ended
        again by itself, and the server its engine."""
        if self._state != "draining" and time.monotonic() - self._up > self._patience:
            raise EngineDead(f"the server has not been well for {self._patience:g} s")

    def __del__(self) -> None:
        """What Ray Serve calls at the end: let go of requests, finish those that run, and end."""
        if getattr(self, "_member", None) is None or self._is_over.is_set():
            return
        self._leave("draining")
        time.sleep(_PARTING_SECONDS)
        if self._spare is not None:
            self._spare.stop(_PARTING_SECONDS)
        self._member.stop(self._drain_seconds)

    def _leave(self, state: str) -> None:
        self._is_over.set()
        self._state = state
        self._tell()

    def _with_followers(self, options: dict[str, Any], hosts: int) -> dict[str, Any]:
        secret = secrets.token_hex(32)
        engine = {**options["engine"], "nnodes": hosts, "dist_init_addr": f"{self._host}:{_free_port(self._host)}"}
        group = ray.util.get_current_placement_group()
        assert group is not None, "Ray Serve places replicas in one"
        resources = group.bundle_specs[1]
        actor: Any = ray.remote(Follower)
        for host in range(1, hosts):
            self._followers.append(
                actor.options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, host),
                ).remote({**options, "engine": {**engine, "node_rank": host}}, secret)
            )
        return {**options, "engine": engine, "secret": secret}

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            if self._member.ended() is not None and self._state in ("ready", "restarting"):
                self._restart()
            elif self._spare is None:
                seconds = _SPARE_SECONDS if self._is_calm else _SPARE_LATEST
                if time.monotonic() - self._began > seconds:
                    self._spare = Member(spare_address=self._spare_address)
            self._tell()

    def _await_server(self) -> None:
        facts = self._member.ready()
        assert facts is not None
        self._url = facts["url"]
        self._look(_FIRST_SECONDS)
        self._began = self._up = time.monotonic()
        self._state = "ready"

    def _restart(self) -> None:
        """Put a new server in the place of one that has ended."""
        logger.error("the server ended with code %s: it is started again", self._member.ended())
        self._state = "restarting"
        self._tell()
        spare, self._spare = self._spare, None
        self._member = member = Member() if spare is None or spare.ended() is not None else spare
        member.begin(self._options)
        while not self._is_over.is_set():
            try:
                if member.ready(BEAT_SECONDS) is not None:
                    self._await_server()
                    return
            except (SglError, requests.RequestException) as error:
                logger.error("the server did not start again: %s", error)
                os._exit(1)  # Ray Serve tries it with a new replica
            self._tell()

    def _tell(self) -> None:
        load = Load()
        if self._url is not None and self._member.ended() is None and self._state in ("ready", "restarting"):
            load = self._probed()
        report = Report(
            id=self._id,
            generation=self._generation,
            state=self._state,
            host=self._host,
            url=self._url,
            pids=(os.getpid(), self._member.pid, *self._of_followers()),
            capabilities=self._capabilities,
            reason=self._reason,
            load=load,
        )
        try:
            self._is_calm = self._link.post("/beat", msgspec.to_builtins(report))["is_calm"]
        except SglError:  # it may be back later; meanwhile the server serves
            return

    def _probed(self) -> Load:
        """The server's load. Notes whether it is well: it answers while it is busy, and says when its engine is
        dead."""
        try:
            info = self._look(_PROBE_SECONDS)
        except requests.RequestException:
            if self._state == "ready":
                self._state = "restarting"
            return Load()
        self._up = time.monotonic()
        if self._state == "restarting":
            self._state = "ready"
        return load_of(info)

    def _look(self, seconds: float) -> dict[str, Any]:
        """What the server says of itself. Notes what it serves. Raises RequestException."""
        answer = self._session.get(f"{self._url}/get_server_info", timeout=seconds)
        answer.raise_for_status()
        info: dict[str, Any] = answer.json()
        self._capabilities = Capabilities(
            model=info["served_model_name"],
            context_length=info["context_length"],
            max_total_tokens=info["max_total_tokens"],
            adapters=tuple(adapter["lora_name"] for adapter in info["lora_paths"]),
            grammar_backend=info["grammar_backend"],
            takes_images=info["has_image_understanding"],
            device=info["device_name"],
            ranks=info["tp_size"] * info["pp_size"],
            version=info["version"],
            mode=info["disaggregation_mode"],
        )
        return info

    def _of_followers(self) -> tuple[int, ...]:
        if self._followers:
            asked = [follower.pids.remote() for follower in self._followers]
            done, _ = ray.wait(asked, num_returns=len(asked), timeout=0.1)
            found = []
            for each in done:
                try:
                    found.extend(ray.get(each))
                except ray.exceptions.RayError:  # it is being started again
                    continue
            self._follower_pids = tuple(found) or self._follower_pids
        return self._follower_pids


def app(arguments: dict[str, Any]) -> serve.Application:
    """What Ray Serve builds; arguments: of Replica."""
    deployment: Any = serve.deployment(name="worker")(Replica)
    return deployment.bind(**arguments)  # type: ignore[no-any-return]  # untyped


def _add_port(server: Any, address: str) -> int:
    """Where Ray Serve is asked for calls of other deployments, of which there are none: not on all addresses."""
    return int(add_port_to_grpc_server(server, address.replace("[::]", "127.0.0.1")))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as bound:
        return int(bound.getsockname()[1])
