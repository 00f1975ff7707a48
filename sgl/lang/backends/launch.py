"""A local server process, started and stopped by its program."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Unpack

import requests

from sgl import child
from sgl.errors import BackendError, MissingExtra, is_installed, needs_extra
from sgl.lang.backends.http import HttpClient, with_scheme
from sgl.lang.backends.server import RuntimeEndpoint as RuntimeEndpoint
from sgl.options import ServerOptions


class Runtime:
    """Start a server with options `server_args` on the first free port from `port`, and wait until it answers.
    `endpoint` is its backend. `shutdown` or exit stops it. Raises MissingExtra without sgl[engine]."""

    command: ClassVar[tuple[str, ...] | None] = None
    """Of another server, in place of `sgl serve`."""

    def __init__(
        self,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        *,
        host: str = "127.0.0.1",
        port: int = 30000,
        api_key: str | None = None,
        **server_args: Unpack[ServerOptions],
    ) -> None:
        if self.command is None and not is_installed("torch"):
            raise MissingExtra.of("engine", "sgl.Runtime", "torch")
        self.port = free_port(host, port)
        self.url = f"http://{host}:{self.port}"
        options = {"host": host, "port": self.port, "log_level": log_level, "api_key": api_key, **server_args}
        self._is_incremental = bool(server_args.get("incremental_streaming_output"))  # events hold new text only
        serve = self.command or [*child.command("from sgl.cli import main; main()"), "serve"]
        command = [*serve, *_flags(options)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # stdout is the program's
        self.pid: int | None = self._process.pid
        self._owner = os.getpid()
        atexit.register(self.shutdown)
        self._api_key = api_key
        try:
            wait_for_server(self.url, launch_timeout, self._process)
        except BaseException:
            self.shutdown()
            raise
        self.endpoint = RuntimeEndpoint(self.url, api_key=api_key)

    def shutdown(self) -> None:
        """Stop the server. Idempotent; no effect in a forked child."""
        if self.pid is not None and os.getpid() == self._owner:
            self.pid = None
            terminate_process(self._process)

    def generate(
        self, prompt: str | list[str], sampling_params: dict[str, Any] | None = None, **options: Any
    ) -> str:
        """The answer as JSON text."""
        body = {"text": prompt, "sampling_params": sampling_params, **options}
        return json.dumps(self.endpoint.request("/generate", body))

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None
    ) -> AsyncIterator[str]:
        """Pieces of text, on the caller's event loop. Raises SglError."""
        body = {"text": prompt, "sampling_params": sampling_params or {}, "stream": True}
        client = HttpClient(self.url, api_key=self._api_key)
        sent = 0
        try:
            async for event in client.events("/generate", body):
                yield event["text"][sent:]
                sent = 0 if self._is_incremental else len(event["text"])
        finally:
            await client.close()

    add_request = async_generate

    def encode(self, prompt: str | list[str]) -> str:
        """The embeddings as JSON text."""
        return json.dumps(self.endpoint.request("/encode", {"text": prompt}))

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        with needs_extra("engine", "get_tokenizer()"):
            from sgl.runtime.model.checkpoint import find_checkpoint
            from sgl.runtime.text.tokenizer import Tokenizer

        return Tokenizer.load(find_checkpoint(self.endpoint.get_model_name())).hf

    def cache_prefix(self, prefix: str) -> None:
        """Compute the KV of a common prefix."""
        self.endpoint.cache_prefix(prefix)

    async def get_server_info(self) -> dict[str, Any]:
        """The server's information about itself."""
        return self.endpoint.get_server_info()


def wait_for_server(base_url: str, timeout: float | None = None, process: Any = None) -> None:
    """Wait for the server's answer. Raises BackendError after `timeout` seconds or if `process` ends."""
    deadline = time.monotonic() + (timeout or float("inf"))
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise BackendError(f"the server ended with code {process.returncode} before it was ready")
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{with_scheme(base_url)}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise BackendError(f"{base_url} was not ready within {timeout:g} s")


def terminate_process(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, by force after ten seconds."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port(host: str, first: int) -> int:
    """The first free port from `first` on."""
    for port in range(first, first + 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise BackendError(f"no free port from {first} on")


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags
