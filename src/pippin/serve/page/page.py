"""Routes of the web page: `/` and its files under `/page/`.

Notable here:
- the files are read once, and each has its own route: no path of a request ever reaches the disk
- the Content-Security-Policy allows only this server's own scripts, styles and responses: injected scripts can neither
  load nor send anything
- a browser revalidates each time and gets 304 Not Modified, so an upgraded server never serves an old page
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""The page's Content-Security-Policy."""

HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), clipboard-write=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response with a file of the page."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file of the page by its path below `/page/`.

    >>> assets()["app.js"].media_type
    'text/javascript; charset=utf-8'
    """
    page, found = files("pippin.serve.page"), {}
    for folder, paths in (("", page), ("vendor/", page / "vendor")):
        for path in paths.iterdir():
            suffix = "." + path.name.rpartition(".")[2]
            if suffix in _TYPES:
                content = path.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
                found[f"{folder}{path.name}"] = Asset(content, _TYPES[suffix], etag)
    return found


def _routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    for name, asset in assets().items():
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.add_api_route(path, _endpoint(asset), methods=["GET", "HEAD"], name=name)
    return routes


def _endpoint(asset: Asset) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answer(request: Request) -> Response:
        return _answer(request, asset)

    return answer


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {asset.etag, "*"}:
        return Response(status_code=304, headers=headers)
    content = b"" if request.method == "HEAD" else asset.content
    length = {"Content-Length": str(len(asset.content))}
    return Response(content, media_type=asset.media_type, headers=headers | length)


router: Final = _routes()
"""The routes of the page, one for each file; they need no key, since they contain only the page itself."""
