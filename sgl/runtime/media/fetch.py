"""Fetches images from URLs: few bytes, little time, few redirects, and by default from public addresses only."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal
from urllib.parse import SplitResult, urljoin, urlsplit

from sgl.errors import InvalidRequest

UrlPolicy = Literal["public", "any", "none"]

FETCH_SECONDS = 10.0  # for all images of a prompt
_MAX_REDIRECTS = 3
_PIECE = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


def fetch(url: str, policy: UrlPolicy, max_bytes: int, end: float) -> bytes:
    """What is at an http or https URL. policy: public refuses addresses of this host and of private networks, any
    refuses none, none refuses URLs. end: monotonic seconds at which to give up. Raises InvalidRequest."""
    if policy == "none":
        raise _refused(url, "images are not fetched from URLs here (image_urls): send them as data: URLs")
    for _ in range(_MAX_REDIRECTS + 1):
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise _refused(url, "only http and https URLs are fetched")
            connected = _connected(parts, policy, end)
            timer = threading.Timer(_left(end), _interrupt, [connected])  # a server may send a byte now and then
            timer.daemon = True
            timer.start()
            try:
                found = _get(parts, connected, max_bytes)
                _left(end)
                found = found if isinstance(found, bytes) else urljoin(url, found)
            finally:
                timer.cancel()
                connected.close()
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() >= end
            said = f"it takes more than {FETCH_SECONDS:g} s" if late else f"{type(error).__name__}: {error}"
            raise _refused(url, said) from error
        if isinstance(found, bytes):
            return found
        url = found
    raise _refused(url, f"it is redirected more than {_MAX_REDIRECTS} times")


def _connected(parts: SplitResult, policy: UrlPolicy, end: float) -> socket.socket:
    """A connection to an address that is allowed: the one that was looked at, not one that a second look-up gives."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _addresses(host, port, end)
    for address in addresses if policy == "public" else ():
        if not _is_public(address):
            raise _refused(parts.geturl(), f"{host} is at {address}, which is not public (see image_urls)")
    connected = socket.create_connection((addresses[0], port), timeout=_left(end))
    if parts.scheme == "http":
        return connected
    try:
        return ssl.create_default_context().wrap_socket(connected, server_hostname=host)
    except BaseException:
        connected.close()
        raise


def _addresses(host: str, port: int, end: float) -> list[str]:
    """Of a name, whose look-up has no time limit of its own: past ours, its thread is left alone until it ends."""
    found: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            found.set_result([str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except BaseException as error:  # the future raises it
            found.set_exception(error)

    threading.Thread(target=look_up, name="sgl-image-name", daemon=True).start()
    return found.result(_left(end))


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    return ip.is_global and inner.is_global and not ip.is_multicast


def _get(parts: SplitResult, connected: socket.socket, max_bytes: int) -> bytes | str:
    """The body, or where else it is."""
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.sock = connected
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", target, headers={"Host": parts.netloc.rpartition("@")[2], "User-Agent": "sgl"})
    answer = connection.getresponse()
    if answer.status in _REDIRECTS and (location := answer.getheader("Location")):
        return location
    if answer.status != 200:
        raise _refused(parts.geturl(), f"its server answers {answer.status}")
    pieces, length = [], 0
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        length += len(piece)
        if length > max_bytes:
            raise _refused(parts.geturl(), f"it has more than {max_bytes} bytes")
    return b"".join(pieces)


def _interrupt(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it takes more than {FETCH_SECONDS:g} s")
    return left


def _refused(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"no image is fetched from {url[:200]!r}: {why}", param="image_data")
