"""The files of the dashboard, which hold no data: a browser gets them without a key.

Read once, when the application is built. The policy lets a page run scripts of these files only
and talk to this daemon only.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from aiohttp import web

from service.http.routes.route import Route

FOLDER = Path(__file__).parents[1] / "static"
TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
    ".txt": "text/plain",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Name -> bytes, type and tag of every file."""
    found: dict[str, tuple[bytes, str, str]] = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            data = path.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            found[path.name] = data, TYPES[path.suffix], tag
    return found


def _answer(request: web.Request, name: str) -> web.Response:
    known = _files().get(name)
    if known is None:
        raise web.HTTPNotFound
    data, kind, tag = known
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=data, headers=headers, content_type=kind, charset="utf-8")


async def _page(request: web.Request) -> web.Response:
    return _answer(request, "index.html")


async def _static(request: web.Request) -> web.Response:
    return _answer(request, request.match_info["name"])


ROUTES = (
    Route(
        "GET", "/", _page, "The dashboard.", "dashboard", content=("text/html",), needs_key=False
    ),
    Route(
        "GET", "/static/{name}", _static, "A file of the dashboard.", "dashboard",
        content=("text/javascript", "text/css"), needs_key=False,
    ),
)  # fmt: skip
