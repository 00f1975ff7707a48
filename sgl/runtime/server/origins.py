"""Which web pages may call the server, by Origin and Host."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from sgl.runtime.config import ServerConfig
from sgl.runtime.server.errors import Forbidden

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """One server's rules."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = _listed(config.cors_origins)
        self._hosts = {"localhost", config.host.lower(), *(name.lower() for name in _listed(config.allowed_hosts))}
        # otherwise a key keeps strangers out, or the names are not ours to know
        self._checks_hosts = _is_loopback(config.host) and not config.api_key and "*" not in self._hosts

    def check(self, request: web.Request) -> None:
        """Raise Forbidden for a request from a foreign page."""
        host = request.headers.get("Host", "")
        if self._checks_hosts and host and not self._is_known(host):
            raise Forbidden(
                f"this server is not known as {host!r}: it listens on this machine only, without a key. Call it as "
                "localhost or by an IP address, or name the host in --allowed-hosts",
                param="Host",
            )
        origin = request.headers.get("Origin")
        if origin is not None and not self.is_allowed(origin) and not _is_same(origin, host):
            raise Forbidden(f"pages of {origin!r} may not call this server: see --cors-origins", param="Origin")

    def is_allowed(self, origin: str) -> bool:
        """Whether pages of that origin may call and read answers."""
        return origin in self._origins or "*" in self._origins

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        # nobody can repoint an address to this machine
        return name in self._hosts or name.endswith(".localhost") or _address(name) is not None


def check_no_browser(request: web.Request) -> None:
    """Raise Forbidden for what a browser sends. A page's image needs no leave and brings no Origin, and over HTTP no
    Sec-Fetch-Site from another machine; but browsers name themselves, and such a page cannot change that."""
    if "Sec-Fetch-Site" in request.headers or "Mozilla/" in request.headers.get("User-Agent", ""):
        raise Forbidden("browsers call this by POST: any page may have one GET it", param="User-Agent")


def _listed(text: str) -> set[str]:
    return {item.strip() for item in text.split(",") if item.strip()}


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _is_same(origin: str, host: str) -> bool:
    """Whether the page's host is the one it calls; a proxy may change the scheme."""
    try:
        page = urlsplit(origin)
        called = urlsplit(f"{page.scheme}://{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return page.hostname is not None and (page.hostname, page.port or default) == (
            called.hostname,
            called.port or default,
        )
    except ValueError:
        return False
