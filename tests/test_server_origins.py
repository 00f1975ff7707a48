"""Pages of strangers in a browser beside the server: they neither drive it nor read what it says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from sgl.runtime.config import ServerConfig
from sgl.runtime.server.errors import Forbidden
from sgl.runtime.server.origins import Origins
from tests.live_server import LiveServer
from tests.patience import PATIENCE

BODY = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}


def test_a_foreign_page_is_refused_everywhere(another: Callable[..., LiveServer]) -> None:
    """With or without a key, for every method, also where the page hides its origin (null)."""
    for options in ({}, {"api_key": "k"}):
        server = another(**options)
        port = server.url.rpartition(":")[2]
        foreign = [
            "https://evil.example",
            "null",
            f"http://evil.example:{port}",
            "http://127.0.0.1:1",
            "file://",
            "x",
        ]
        for origin in foreign:
            headers = {"Origin": origin, "Authorization": "Bearer k"}
            for answer in (
                server.post("/generate", BODY, headers=headers),
                server.get("/v1/programs", headers=headers),
                server.get("/health", headers=headers),
                requests.options(
                    server.url + "/generate",
                    headers={**headers, "Access-Control-Request-Method": "POST"},
                    timeout=PATIENCE,
                ),
            ):
                assert answer.status_code == 403, origin
                assert "--cors-origins" in answer.json()["error"]["message"]
                assert "Access-Control-Allow-Origin" not in answer.headers
        for origin in (server.url, server.url.upper().replace("HTTP", "http")):
            headers = {"Origin": origin, "Authorization": "Bearer k"}
            assert server.post("/generate", BODY, headers=headers).status_code == 200, "its own page"


def test_listed_origins_may_call_and_read(another: Callable[..., LiveServer]) -> None:
    server = another(cors_origins="https://a.example, https://b.example")
    answer = server.post("/generate", BODY, headers={"Origin": "https://b.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://b.example"
    assert server.post("/generate", BODY, headers={"Origin": "https://c.example"}).status_code == 403
    server = another(cors_origins="*")
    answer = server.post("/generate", BODY, headers={"Origin": "https://c.example"})
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://c.example")


def test_a_name_that_was_pointed_here_is_refused(another: Callable[..., LiveServer]) -> None:
    """DNS rebinding: the page's own name leads to this machine, and its origin is the same as the server's."""
    server = another()
    for host in (
        "evil.example",
        "evil.example:30000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[",
        "a b",
    ):
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            answer = server.post("/generate", BODY, headers=headers)
            assert answer.status_code in (400, 403), host
            if host[0] != "[":
                assert "--allowed-hosts" in answer.text or answer.status_code == 400
    for host in (
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.9.9.9:80",
        "[::1]:30000",
        "me.localhost",
        "192.168.1.5",
    ):
        assert server.post("/generate", BODY, headers={"Host": host}).status_code == 200, host
    server = another(allowed_hosts="box.example, Other.example")
    for host in ("box.example", "other.example:30000"):
        assert server.post("/generate", BODY, headers={"Host": host}).status_code == 200
    assert server.post("/generate", BODY, headers={"Host": "evil.example"}).status_code == 403
    server = another(api_key="k")  # which a stranger's page does not know
    headers = {"Host": "evil.example", "Authorization": "Bearer k"}
    assert server.post("/generate", BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("options", "is_checked"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.0.0.2"}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "::1", "admin_api_key": "a"}, True),
        ({"host": "127.0.0.1", "api_key": "k"}, False),
        ({"host": "127.0.0.1", "allowed_hosts": "*"}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "box.example"}, False),
    ],
)
def test_names_are_checked_on_a_loopback_address_without_a_key(options: dict[str, Any], is_checked: bool) -> None:
    request: Any = SimpleNamespace(headers={"Host": "evil.example:30000"})
    origins = Origins(ServerConfig.from_options(options))
    if is_checked:
        with pytest.raises(Forbidden):
            origins.check(request)
    else:
        origins.check(request)


def test_a_get_changes_nothing(another: Callable[..., LiveServer]) -> None:
    """Any page may have a browser send one, without an Origin."""
    server = another()
    for path in ("/start_profile", "/stop_profile", "/abort_request", "/generate"):
        answer = server.get(path)
        assert answer.status_code == 405, path
        assert "POST" in answer.headers["Allow"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for path, methods in server.get("/openapi.json").json()["paths"].items():
        if "get" in methods:
            assert not {"post", "put"} & set(methods) or path in ("/v1/programs", "/flush_cache"), path


def test_a_browser_empties_no_cache_by_a_get(another: Callable[..., LiveServer]) -> None:
    """Trainers do; a page's image would, too, without an Origin."""
    server = another()
    assert server.get("/flush_cache").text == "Cache flushed.\n"
    for headers in ({"Sec-Fetch-Site": "same-origin"}, {"User-Agent": "Mozilla/5.0 (X11)"}, {"Origin": "http://a"}):
        answer = requests.get(server.url + "/flush_cache", headers=headers, timeout=PATIENCE)
        assert answer.status_code == 403, headers


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_any_content_type_is_taken_where_no_page_asks(another: Callable[..., LiveServer], kind: str | None) -> None:
    """`curl -d` calls its JSON a form."""
    headers = {} if kind is None else {"Content-Type": kind}
    server = another()
    data = b'{"text": "hello", "sampling_params": {"max_new_tokens": 2}}'
    assert requests.post(server.url + "/generate", data=data, headers=headers, timeout=PATIENCE).status_code == 200
