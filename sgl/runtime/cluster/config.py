"""The options of a cluster, from one YAML file that engine, server and cluster share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from sgl.errors import ConfigError, MissingExtra, nearest_name
from sgl.runtime.config import (
    EMBEDDED,
    EngineConfig,
    PositiveFloat,
    Seconds,
    ServerConfig,
    check_needed,
    checked_options,
)
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.option_checks import check_options
from sgl.runtime.server.option_checks import checked_template

_OURS = (
    *("worker_api_key", "node_rank", "dist_init_addr", "dist_key_file", "dp_rank"),
    *("disaggregation_mode", "disaggregation_host", "disaggregation_port"),
)
"""What the cluster decides for each process."""
_SHARED = (
    *("model_path", "model_impl", "device", "dtype", "quantization", "kv_cache_dtype", "page_size"),
    *("deterministic", "disaggregation_transport", "disaggregation_key_file"),
)
"""Without which no replica could read another's pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Options of a cluster beside those of its replicas; `from_options` checks them."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies of the model, each in tp_size times pp_size processes."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """More replicas are started under load, up to so many. None: `replicas` stays as it is."""
    min_replicas: PositiveInt | None = None
    """Replicas are stopped without load, down to so many. None: as many as `replicas`."""
    target_queue: PositiveFloat = 4.0
    """Waiting requests a replica at which another one is started."""
    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The part of all KV pages in use at which another one is started."""
    prefill_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Further replicas that compute long prompts for the others, which pull their KV pages and generate."""
    prefill_engine: dict[str, Any] | None = None
    """Options of the engine that are those replicas' own: the file's others are of both kinds."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where replicas and `sgl cluster` reach the cluster. 0: any free port."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster that runs already, or "auto". None: that of $RAY_ADDRESS, or one of its own on this
    machine."""
    start_timeout: Seconds = 1800.0
    """Seconds until all replicas must be ready."""
    unhealthy_timeout: Seconds = 120.0
    """Seconds that the engine of a replica may be gone before the whole replica is replaced."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ClusterConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**checked_options(cls, options))
        option = "min_replicas" if config.least > config.replicas else "max_replicas"
        text = f"replicas={config.replicas} must lie between min_replicas and max_replicas"
        is_between = config.least <= config.replicas <= config.most
        refuse(not is_between, option, f"{option}={getattr(config, option)}: {text}")
        text = "prefill_engine needs prefill_replicas, of which there are none"
        refuse(config.prefill_engine is not None and not config.prefill_replicas, "prefill_engine", text)
        for option in ("target_queue", "target_kv_usage"):
            if config.min_replicas is None:
                check_needed(config, option, "max_replicas")
        return config

    @property
    def is_automatic(self) -> bool:
        """Whether load decides how many replicas there are."""
        return self.least < self.most

    @property
    def least(self) -> int:
        """Replicas without load."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Replicas under load."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Options:
    """All that a file says."""

    cluster: ClusterConfig
    engine: EngineConfig
    server: ServerConfig
    gateway: GatewayConfig
    prefill: EngineConfig | None = None
    """Of the replicas that compute prompts for the others, where there are any."""

    @classmethod
    def of(cls, given: Mapping[str, Any], source: str, *, is_on_own_ray: bool = True) -> Options:
        """Of a file's names and values. Raises ConfigError. is_on_own_ray: where it says nothing of that, replicas run
        on this machine; elsewhere they have other files and packages."""
        kinds = (ClusterConfig, EngineConfig, ServerConfig, GatewayConfig)
        known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
        every = set().union(*known) - {*_OURS}
        for name in given:
            if name in _OURS:
                raise ConfigError(f"{source}: {name} is the cluster's to say: leave it out", option=name)
            if name not in every:
                raise ConfigError(f"{source}: there is no option {name!r}{nearest_name(name, every)}", option=name)
        parts = [{name: given[name] for name in given if name in names} for names in known]
        cluster = ClusterConfig.from_options(parts[0])
        engine, prefill = {"model_path": "embedded", **parts[1]}, None
        if cluster.prefill_replicas:
            own = cluster.prefill_engine or {}
            theirs = known[1] - {*_OURS, *_SHARED}
            for name in own.keys() - theirs:
                why = f"has options of an engine, and {name!r} is none{nearest_name(name, theirs)}"
                if name in known[1]:
                    whose = "the cluster's to say" if name in _OURS else "the same for all replicas"
                    why = f"has {name}, which is {whose}"
                raise ConfigError(f"{source}: prefill_engine {why}", option="prefill_engine")
            prefill = EngineConfig.from_options({**engine, **own, "disaggregation_mode": "prefill"})
            engine["disaggregation_mode"] = "decode"
        options = cls(
            cluster,
            EngineConfig.from_options(engine),
            ServerConfig.from_options(parts[2]),
            GatewayConfig.from_options(parts[3]),
            prefill,
        )
        options._check(has_their_files=is_on_own_ray and cluster.ray_address is None)
        return options

    def _check(self, *, has_their_files: bool) -> None:
        """Raises ConfigError where options do not go together."""
        engine, port, control, grpc = (
            self.engine,
            self.server.port,
            self.cluster.control_port,
            self.server.grpc_port,
        )
        for its in (engine, self.prefill) if self.prefill is not None else ():
            one_host = "with prefill_replicas, each replica's processes are on one host"
            refuse(its.nnodes > 1, "nnodes", f"nnodes={its.nnodes}: {one_host}")
            why = "in deterministic mode it is the same for all replicas, since sums of other parts round otherwise"
            text = f"tp_size={engine.tp_size}, and {its.tp_size} in prefill_engine: {why}"
            refuse(its.deterministic and its.tp_size != engine.tp_size, "tp_size", text)
        why = "Ray gives each replica its GPUs, so a cluster's device is cpu or cuda"
        refuse(engine.device not in (None, "cpu", "cuda"), "device", f"device={engine.device!r}: {why}")
        text = f"control_port={control} is port={port} as well: give one that is free, or 0"
        refuse(0 < control == port, "control_port", text)
        why = "several replicas may share a host, so each takes a free port: give 0, and each replica's "
        text = f"grpc_port={grpc}: {why}/get_server_info names its own"
        refuse(bool(grpc and self.cluster.most > 1), "grpc_port", text)
        text = f"dp_size={engine.dp_size}: several engines of a replica run on one host, so nnodes is 1"
        refuse(engine.nnodes > 1 < engine.dp_size, "dp_size", text)
        text = f"tp_size={engine.tp_size} times pp_size={engine.pp_size} is no multiple of it"
        refuse(engine.num_ranks % engine.nnodes > 0, "nnodes", f"nnodes={engine.nnodes}: {text}")
        for its in self.engines.values():  # as a replica's server does, before Ray starts
            with contextlib.suppress(*() if has_their_files else (MissingExtra,)):
                check_options(its)
        if has_their_files:
            checked_template(self.server)

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """Of replicas, by kind."""
        return {"worker": self.engine} | ({} if self.prefill is None else {"prefill": self.prefill})

    @property
    def own_key(self) -> str | None:
        """With which the cluster asks its replicas."""
        keys = self.server.api_key or ()
        return self.server.admin_api_key or (keys[0].key if keys else None)

    @property
    def counts(self) -> dict[str, int]:
        """The replicas that a file asks for, by kind."""
        return {"worker": self.cluster.replicas, "prefill": self.cluster.prefill_replicas}

    def for_replicas(self) -> dict[str, Any]:
        """The options of a replica's server, as plain data for `from_options`: "engines" by kind, and "server". Where
        it listens is its own to say."""
        engines = self.engines
        for kind, engine in engines.items():
            if engine.model_path == str(EMBEDDED):  # lies elsewhere on other hosts
                engines[kind] = replace(engine, model_path="embedded")
        return {
            "engines": {
                kind: {**_changed(engine), "model_path": engine.model_path} for kind, engine in engines.items()
            },
            "server": _changed(self.server, but=("host", "port")),
        }


def refuse(is_wrong: bool, option: str, text: str) -> None:
    """Raises ConfigError of what is wrong."""
    if is_wrong:
        raise ConfigError(text, option=option)


def _changed(config: EngineConfig | ServerConfig, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """What differs from the defaults."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in but and value != field.default:
            found[field.name] = _plain(field.name, value)
    return found


def _plain(name: str, value: Any) -> Any:
    if name == "api_key":  # keys without a name were given one that nobody can write
        return [key.key if key.name.startswith("#") else f"{key.name}={key.key}" for key in value]
    if isinstance(value, tuple):
        return [dataclasses.asdict(each) if dataclasses.is_dataclass(each) else each for each in value]  # type: ignore[arg-type]
    return value
