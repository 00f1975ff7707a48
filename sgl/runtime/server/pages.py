"""Pages of HTML that load nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib import resources

from aiohttp import web

from sgl.lang.view.html import filled


def page(package: str, name: str) -> web.Response:
    """A page that is a file of a package, with the parts that it names."""
    html = filled(resources.files(package).joinpath(name).read_text(encoding="utf-8"), {})
    headers = {"Content-Security-Policy": _policy(html), "X-Frame-Options": "DENY"}
    return web.Response(text=html, content_type="text/html", headers=headers)


def _policy(html: str) -> str:
    """The page's content security policy: only its own script, style and server."""

    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
