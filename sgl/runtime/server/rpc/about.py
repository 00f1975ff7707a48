"""What the gRPC service tells of the model, the server and its load."""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.server.encoding import json_bytes
from sgl.runtime.server.errors import NotThere
from sgl.runtime.server.loads import Loads
from sgl.runtime.server.service import VERSION, Service

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
        self._loads = Loads(service)

    async def model(self) -> Any:
        """The served model. It takes images, if at all, over HTTP only."""
        service = self._service
        config, tokenizer = service.engine.config, service.engine.tokenizer
        info = await service.info()
        ids = {} if tokenizer is None else {"pad": tokenizer.hf.pad_token_id, "bos": tokenizer.hf.bos_token_id}
        context = service.context_length
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
        info = await service.info()
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
            is_paused=any(its["is_paused"] for its in states),
            last_receive_timestamp=now - service.engine.silence(),
            uptime_seconds=now - service.started,
            sglang_version=VERSION,
            server_type="grpc",
            start_time=started,
            max_total_num_tokens=total,
        )

    async def loads(self, rank: int | None, include: Sequence[str]) -> Any:
        """See `Loads.look`."""
        return pb.GetLoadsResponse(**await self._loads.look(rank, include))

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
