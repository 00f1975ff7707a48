"""The original's helpers: files, HTTP, processes."""

from __future__ import annotations

import html
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from sgl.lang.backends.http import with_scheme
from sgl.lang.backends.launch import free_port
from sgl.lang.backends.launch import terminate_process as terminate_process
from sgl.lang.backends.launch import wait_for_server as wait_for_server


def dump_state_text(filename: str | Path, states: Iterable[Any], mode: str = "w") -> None:
    """Write each state's text, or a failed row's error, under a numbered line."""
    with open(filename, mode, encoding="utf-8") as file:
        for i, state in enumerate(states):
            text = (
                state if isinstance(state, str) else repr(state) if isinstance(state, Exception) else state.text()
            )
            file.write(f"{'=' * 40} {i} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def read_jsonl(filename: str | Path) -> Iterator[Any]:
    """JSON of each line; skips empty lines and comments (#)."""
    with open(filename, encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def normalize_base_url(host: str, port: int | None = None) -> str:
    """`http://host:port` without trailing slash; host may have scheme and port."""
    url = with_scheme(host)
    return url if port is None or urlsplit(url).port is not None else f"{url}:{port}"


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: bool | None = None,
    method: str | None = None,
    timeout: float = 600.0,
) -> requests.Response:
    """POST `json`, or GET without; `timeout` in seconds. The response has `status_code`, `text` and `json()`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    method = method or ("GET" if json is None else "POST")
    return requests.request(
        method, url, json=json, stream=stream, headers=headers, verify=verify is not False, timeout=timeout
    )


def download_and_cache_file(url: str, filename: str | Path | None = None) -> str:
    """Download once; returns the path, by default in the temporary folder."""
    path = Path(filename) if filename else Path(tempfile.gettempdir()) / url.rstrip("/").rpartition("/")[2]
    if path.exists():
        return str(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with requests.get(url, stream=True, timeout=60) as response, partial.open("wb") as file:
            response.raise_for_status()
            for chunk in response.iter_content(1 << 20):
                file.write(chunk)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return str(path)


def print_highlight(content: Any) -> None:
    """Show text in bold in a notebook, else plainly."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) and hasattr(shell, "kernel"):
        from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

        text = html.escape(str(content)).replace("\n", "<br>")
        display(HTML(f"<strong style='color: #00008b;'>{text}</strong>"))
    else:
        sys.stdout.write(f"{content}\n")


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server by command line plus --host and --port; returns process and port."""
    chosen = free_port(host, 30000) if port is None else port
    words = shlex.split(command.replace("\\\n", " "))
    return subprocess.Popen([*words, "--host", host, "--port", str(chosen)]), chosen
