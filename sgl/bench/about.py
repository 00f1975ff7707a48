"""A report's subject: model, machine, load and date, as JSON values; None if unknown. `lines` puts them in words."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import aiohttp

from sgl.bench.datasets import Source
from sgl.bench.load import Load
from sgl.lang.backends.http import with_scheme

_PATIENCE = 5.0  # seconds per answer
_ENGINE_KEYS = ("device", "device_name", "dtype", "torch_version")


async def server_facts(load: Load) -> dict[str, Any]:
    """Model and server at a URL, as far as it tells by our, the original's or OpenAI's protocol. Raises nothing for a
    silent one."""
    told: dict[str, Any] = {}
    with contextlib.suppress(aiohttp.ClientConnectionError, TimeoutError, OSError):
        told = await _asked(load)
    model = told.get("model") if load.model == "default" else load.model
    server = {"url": with_scheme(load.url), "engine": told.get("engine"), "version": told.get("version")}
    return {"model": model, "server": server | {key: told.get(key) for key in _ENGINE_KEYS}}


async def _asked(load: Load) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_PATIENCE)
    url = with_scheme(load.url)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
        model_info = await _told(client, f"{url}/get_model_info")
        info = await _told(client, f"{url}/server_info") or await _told(client, f"{url}/get_server_info")
        model = model_info.get("model_path")
        if model is None:
            listed = (await _told(client, f"{url}/v1/models")).get("data")
            first = listed[0] if isinstance(listed, list) and listed else {}
            model = first.get("id") if isinstance(first, dict) else None
        version = model_info.get("version") or info.get("version") or info.get("sglang_version")
        if version is None:
            version = (await _told(client, f"{url}/version")).get("version")
    return {"model": model, "engine": model_info.get("engine"), "version": version} | {
        key: info.get(key) for key in _ENGINE_KEYS
    }


async def _told(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The server's JSON object, or an empty one. Raises if there is no answer."""
    try:
        async with client.get(url) as answer:
            told = await answer.json(content_type=None) if answer.status == 200 else None
    except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def engine_facts(model: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """The same of an engine here; `info`: its own."""
    server = {"url": None, "engine": "sgl", "version": importlib.metadata.version("sgl")}
    return {"model": model, "server": server | {key: info.get(key) for key in _ENGINE_KEYS}}


def facts(kind: str, subject: Mapping[str, Any], source: Source, load: Load | None = None) -> dict[str, Any]:
    """A report's head. `subject`: from `server_facts` or `engine_facts`."""
    client = {"sgl": importlib.metadata.version("sgl"), "python": platform.python_version()}
    begin = {"kind": kind, "date": datetime.now().astimezone().isoformat(timespec="seconds"), "client": client}
    return {**begin, **subject, "load": _load(load) if load else None, "dataset": _dataset(source)}


def _load(load: Load) -> dict[str, Any]:
    """Without key, and without fields unused by the arrivals."""
    told = {
        name: value for name, value in dataclasses.asdict(load).items() if name not in ("url", "api_key", "model")
    }
    if load.arrivals != "trace":
        del told["trace_speed"]
    return told


def _dataset(source: Source) -> dict[str, Any]:
    """What shapes this kind of dataset."""
    told: dict[str, Any] = {"name": source.kind, "num_prompts": source.num_prompts}
    if source.kind == "file":
        told["path"] = source.dataset_path
    else:
        told["input_len"] = source.input_len
    told["output_len"] = source.output_len
    if source.kind == "random":
        told["spread"] = source.spread
    if source.kind == "generated-shared-prefix":
        told |= {"groups": source.groups, "prefix_len": source.prefix_len}
    limits = {"max_input_len": source.max_input_len, "max_output_len": source.max_output_len}
    return told | {name: limit for name, limit in limits.items() if limit is not None} | {"seed": source.seed}


def lines(report: Mapping[str, Any]) -> dict[str, str]:
    """The subject in words, by title; empty if it has figures alone."""
    if "kind" not in report:
        return {}
    server, client = report["server"], report["client"]
    version = (
        f"{server['engine'] or 'version'} {server['version']}" if server["version"] else "of an unknown version"
    )
    parts = [version, f"torch {server['torch_version']}" if server["torch_version"] else None, server["dtype"]]
    device = server["device_name"] or server["device"]
    said = {
        "model": report["model"] or "of an unknown name",
        "server" if server["url"] else "engine": ", ".join([part for part in [*parts, device] if part]),
        "dataset": _dataset_line(report["dataset"]),
    }
    if server["url"]:
        said["server"] = f"{server['url']}, {said['server']}"
    if report["load"] is not None:
        said["load"] = _load_line(report["load"], report.get("slo_ms") or {})
    said["measured"] = f"{report['date']}, by sgl {client['sgl']} on Python {client['python']}"
    return said


def _dataset_line(dataset: Mapping[str, Any]) -> str:
    words = [dataset.get("path") or dataset["name"], f"{dataset['num_prompts']:,} requests"]
    if "prefix_len" in dataset:
        words.append(f"{dataset['groups']} prefixes of {dataset['prefix_len']} words")
    if "input_len" in dataset:
        words.append(f"{dataset['input_len']} words in")
    words.append(f"{dataset['output_len']} tokens out{'' if 'input_len' in dataset else ' where it does not say'}")
    if dataset.get("spread"):
        words.append(f"lengths spread by {dataset['spread']:g}")
    words += [
        f"{name.replace('_', ' ')} {dataset[name]}"
        for name in ("max_input_len", "max_output_len")
        if name in dataset
    ]
    return ", ".join([*words, f"seed {dataset['seed']}"])


def _load_line(load: Mapping[str, Any], slo_ms: Mapping[str, float]) -> str:
    if load["arrivals"] == "trace":
        words = [f"when the trace says, {load['trace_speed']:g} times as fast"]
    elif load["request_rate"]:
        words = [f"{load['request_rate']:g} requests a second ({load['arrivals']})"]
    else:
        words = ["all requests at once"]
    words.append(
        f"at most {load['max_concurrency']} in flight" if load["max_concurrency"] else "no limit in flight"
    )
    words += [f"api {load['api']}", f"temperature {load['temperature']:g}", f"{load['warmup']} to warm up"]
    words.append("to the full length" if load["ignore_eos"] else "to the end of text")
    words += [f"{name} within {bound:g} ms" for name, bound in slo_ms.items()]
    return ", ".join(words)
