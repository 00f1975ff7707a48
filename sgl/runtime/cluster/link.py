"""How replicas, the router and `sgl cluster` reach the process that runs a cluster: HTTP with a secret token."""

from __future__ import annotations

from typing import Any

import requests

from sgl.errors import BackendError, ConfigError, ServerUnreachable

_SECONDS = 10.0
TOKEN_HEADER = "Authorization"


class Link:
    """One end."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy lies between
        self._session.headers[TOKEN_HEADER] = f"Bearer {token}"

    def get(self, path: str, **query: Any) -> Any:
        """Raises ServerUnreachable, ConfigError and BackendError."""
        return self._call("GET", path, params=query)

    def post(self, path: str, body: Any, *, seconds: float = _SECONDS) -> Any:
        """Raises ServerUnreachable, ConfigError and BackendError."""
        return self._call("POST", path, json=body, timeout=seconds)

    def _call(self, method: str, path: str, *, timeout: float = _SECONDS, **about: Any) -> Any:
        try:
            answer = self._session.request(method, self.url + path, timeout=timeout, **about)
        except requests.RequestException as error:
            raise ServerUnreachable(f"the cluster does not answer at {self.url}: {error}", url=self.url) from error
        if answer.status_code == 400:
            raise ConfigError(answer.json()["error"], option=answer.json().get("option"))
        if answer.status_code == 503:
            raise BackendError(answer.json()["error"], status=503)
        if not answer.ok:
            raise BackendError(f"{path}: {answer.status_code} {answer.text[:500]}", status=answer.status_code)
        return answer.json()
