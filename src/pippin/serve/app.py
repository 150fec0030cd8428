"""The server's ASGI app: OpenAI's API, the web page, health, metrics, and optional parts.

Notable here:
- the app has no state of its own: everything is in its `Service`, so a test, Ray or another program can mount it
- every path needs a key unless it is listed as open
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from pippin.serve import api, metrics
from pippin.serve.middleware import RequestMiddleware
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings

OPEN = ("/health", "/ready", "/openapi.json")
_RATES = tuple(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
_EXPOSED = ("x-request-id", "x-pippin-notes", "retry-after", "x-should-retry", *_RATES)


def create_app(settings: ServerSettings, *, service: Service | None = None, middleware: bool = True) -> FastAPI:
    """The server as an ASGI app; ``app.state.service`` is its `Service`.

    Args:
        settings: the server's settings.
        service: an existing service, with its own loaders; None makes one from the settings.
        middleware: False leaves keys, limits, logs and CORS to the caller of the app, who puts a `Caller` into the
            state of each request.

    Raises:
        MissingDependency: an enabled part needs a library that is not installed.
    """
    service = service or Service(settings)
    app = FastAPI(
        title="Pippin",
        summary="Private foundation models, through the interface that programs already speak.",
        version=version("pippin"),
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.service, app.state.settings = service, settings
    app.state.lifespans = []
    api.install(app, service)
    app.include_router(operations(service))
    _install_parts(app, settings, service)
    if middleware:
        app.add_middleware(RequestMiddleware, service=service, open_paths=open_paths(settings))
        if settings.cors_origins:
            app.add_middleware(CORSMiddleware, **_cors(settings))
    return app


def with_middleware(app: ASGIApp, service: Service) -> ASGIApp:
    """Wrap another app in the same middleware, with the same CORS settings."""
    wrapped = RequestMiddleware(app, service, open_paths(service.settings))
    return CORSMiddleware(wrapped, **_cors(service.settings)) if service.settings.cors_origins else wrapped


def _cors(settings: ServerSettings) -> dict[str, Any]:
    """The CORS settings; any header is allowed, since OpenAI's client adds a dozen of its own."""
    return {
        "allow_origins": list(settings.cors_origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": list(_EXPOSED),
    }


def open_paths(settings: ServerSettings) -> set[str]:
    """The paths that need no key."""
    found = set(OPEN)
    if settings.page:
        from pippin.serve.page import page

        found |= {route.path for route in page.router.routes if isinstance(route, Route)}
    if settings.seal_key is not None:
        found.add("/v1/attestation")
    return found


def _install_parts(app: FastAPI, settings: ServerSettings, service: Service) -> None:
    """Mount the optional parts."""
    if settings.page:
        from pippin.serve.page import page

        app.include_router(page.router)
    if settings.mcp:
        from pippin.serve import mcp

        mcp.install(app, service)
    if settings.seal_key is not None:
        from pippin.core.trust.attestation import SoftwareRoot, TransparencyLog
        from pippin.serve import attestation, sealing

        log = None if settings.seal_log is None else TransparencyLog.read(settings.seal_log)
        node = attestation.AttestedNode.of(settings, SoftwareRoot.load(settings.seal_key), log)
        app.include_router(sealing.router(node))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the default model in the background; free all resources at the end."""
    service: Service = app.state.service
    loading = asyncio.create_task(service.prepare())
    async with AsyncExitStack() as stack:
        for part in app.state.lifespans:
            await stack.enter_async_context(part())
        yield
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    service.close()


def operations(service: Service) -> APIRouter:
    """Health, readiness and metrics."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", summary="Whether requests should be sent here now", responses={503: {}})
    async def ready(response: Response) -> dict[str, str]:
        reason = service.ready()
        if reason:
            response.status_code = 503
            response.headers["retry-after"] = "5"
        return {"status": "not ready", "reason": reason} if reason else {"status": "ready"}

    @router.get("/metrics", summary="Counters for Prometheus", response_class=Response)
    async def figures(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @router.get("/v1/stats", summary="What the server is doing now")
    async def stats() -> dict[str, Any]:
        return service.stats()

    return router
