"""What the gRPC service tells of the model, the server and its load."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from sgl.errors import InvalidRequest, nearest_name
from sgl.runtime.metrics import Throughput
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.server.encoding import json_bytes
from sgl.runtime.server.errors import NotThere
from sgl.runtime.server.service import VERSION, Service

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_FILES: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
)
_FILES += ("special_tokens_map.json", "merges.txt", "chat_template.json")
_KINDS = ("*.model", "*.tiktoken", "*.jinja")
_TEMPLATE = "chat_template.jinja"
_CHUNK_BYTES = 64 << 10
_MOST_BYTES = 200 << 20  # of a tokenizer that gateways take


class About:
    """Of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rates: defaultdict[int, Throughput] = defaultdict(Throughput)

    async def model(self) -> Any:
        """The served model. It takes images, if at all, over HTTP only."""
        service = self._service
        config, tokenizer = service.engine.config, service.engine.tokenizer
        info = await service.engine.call("get_server_info")
        ids = {} if tokenizer is None else {"pad": tokenizer.hf.pad_token_id, "bos": tokenizer.hf.bos_token_id}
        context = config.context_length or 0
        return pb.GetModelInfoResponse(
            model_path=config.model_path,
            tokenizer_path=config.tokenizer_path or config.model_path,
            is_generation=True,
            served_model_name=service.model_name,
            max_context_length=context,
            vocab_size=info["vocab_size"],
            model_type=str(self._checkpoint.get("model_type", "")),
            eos_token_ids=info["eos_token_ids"],
            pad_token_id=ids.get("pad") or 0,
            bos_token_id=ids.get("bos") or 0,
            max_req_input_len=context - 1,
            architectures=[info["architecture"]],
        )

    async def server(self) -> Any:
        """Options, and what runs."""
        service = self._service
        info = await service.engine.call("get_server_info")
        states = info.pop("internal_states")
        arguments, state = Struct(), Struct()
        arguments.update(json.loads(json_bytes({**info, "server": "sgl"})))
        now = time.time()
        total = service.max_total_tokens
        state.update({"max_total_num_tokens": total, "num_engines": len(states), "is_generation": True})
        started = Timestamp()
        started.FromNanoseconds(round(1e9 * service.started))
        return pb.GetServerInfoResponse(
            server_args=arguments,
            scheduler_info=state,
            active_requests=sum(its["num_running_reqs"] + its["num_queue_reqs"] for its in states),
            is_paused=False,
            last_receive_timestamp=now - service.engine.silence(),
            uptime_seconds=now - service.started,
            sglang_version=VERSION,
            server_type="grpc",
            start_time=started,
            max_total_num_tokens=total,
        )

    async def loads(self, rank: int | None, include: Sequence[str]) -> Any:
        """What each engine has to do; rank: of one alone. Raises InvalidRequest."""
        for name in include:
            if name not in _SECTIONS:
                raise InvalidRequest(
                    f"include has no section {name!r}{nearest_name(name, _SECTIONS)}", param="include"
                )
        info = await self._service.engine.call("get_server_info")
        states = info["internal_states"]
        if rank is not None and not 0 <= rank < len(states):
            raise InvalidRequest(f"dp_rank={rank}: there are {len(states)} engines, from 0", param="dp_rank")
        wanted = range(len(states)) if rank is None else [rank]
        sections = set(include) - {"all"} if include and "all" not in include else {*_SECTIONS}
        loads = [self._load(i, info, states[i], sections) for i in wanted]
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=VERSION,
            dp_rank_count=len(states),
            loads=loads,
            aggregate=pb.AggregateMetrics(
                total_running_reqs=sum(its.num_running_reqs for its in loads),
                total_waiting_reqs=sum(its.num_waiting_reqs for its in loads),
                total_reqs=sum(its.num_total_reqs for its in loads),
                avg_token_usage=_mean([its.token_usage for its in loads]),
                avg_throughput=_mean([its.gen_throughput for its in loads]),
                avg_utilization=_mean([its.utilization for its in loads]),
            ),
        )

    def _load(self, rank: int, info: Mapping[str, Any], state: Mapping[str, Any], sections: set[str]) -> Any:
        total, most = info["max_total_tokens"], info["max_running_requests"]
        used = total - state["kv_available_tokens"] - state["kv_evictable_tokens"]
        running, waiting = state["num_running_reqs"], state["num_queue_reqs"]
        load = pb.SchedulerLoad(
            dp_rank=rank,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / total,
            gen_throughput=self._rates[rank].of(state["generated_tokens"]),
            cache_hit_rate=state["cache_hit_rate"],
            utilization=running / most,
            max_running_requests=most,
        )
        if "memory" in sections:
            load.memory.weight_gb = info["weight_bytes"] / 1e9
            load.memory.kv_cache_gb = info["kv_bytes"] / 1e9
            load.memory.token_capacity = total
        if "spec" in sections and state["drafted_tokens"]:
            load.speculative.accept_rate = state["verified_tokens"] / state["drafted_tokens"]
        if "queues" in sections:
            load.queues.waiting = waiting
        return load

    def tokenizer(self) -> list[Any]:
        """The files of the tokenizer as a zip archive in chunks, the last with its SHA-256. Reads them. Raises
        NotThere."""
        folder = self._folder
        if self._service.engine.tokenizer is None or not folder.is_dir():
            raise NotThere("this server has no folder with a tokenizer: give the gateway one")
        found = [folder / name for name in _FILES]
        found += [path for kind in _KINDS for path in sorted(folder.glob(kind)) if path not in found]
        template = self._service.chat_template  # in the place of the model's own
        found = [path for path in found if template is None or path.name != _TEMPLATE]
        archive = io.BytesIO()
        size = 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
            for path in found:
                if path.is_file():
                    size += path.stat().st_size
                    if size > _MOST_BYTES:
                        raise NotThere(f"the tokenizer has more than {_MOST_BYTES} bytes")
                    files.write(path, path.name)
            if template is not None:
                files.writestr(_TEMPLATE, template)
        data = archive.getvalue()
        chunks = [
            common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES])
            for start in range(0, len(data), _CHUNK_BYTES)
        ]
        chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
        return chunks

    @property
    def _folder(self) -> Path:
        config = self._service.engine.config
        return Path(find_checkpoint(config.tokenizer_path or config.model_path))

    @cached_property
    def _checkpoint(self) -> Mapping[str, Any]:
        """Of its config.json; empty without one."""
        path = Path(find_checkpoint(self._service.engine.config.model_path)) / "config.json"
        found: Any = json.loads(path.read_text()) if path.is_file() else {}
        return found if isinstance(found, dict) else {}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
