"""OpenAI's HTTP API over a `Service`: chat, completions, responses, embeddings, models; and extractions from texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from pippin.serve.api import embeddings, extractions, models
from pippin.serve.api.chat import endpoint as chat
from pippin.serve.api.common import errors
from pippin.serve.api.completions import endpoint as completions
from pippin.serve.api.responses import endpoint as responses

if TYPE_CHECKING:
    from pippin.serve.service import Service


def install(app: FastAPI, service: Service) -> None:
    """Add all routes and the error handlers to an app.

    ``request.state.caller`` must hold the `Caller` of each request; a middleware sets it and checks the keys.
    """
    routers = [part.router(service) for part in (chat, completions, responses, embeddings, extractions, models)]
    errors.install(app, routers)
    key = Security(HTTPBearer(auto_error=False, scheme_name="API key", description="A key of this server."))
    guards = [key] if service.settings.api_keys else []
    for router in routers:
        app.include_router(router, dependencies=guards)
    _document(app)


def _document(app: FastAPI) -> None:
    """Remove FastAPI's own error schema, which this server never sends, from the OpenAPI document."""
    written = app.openapi

    def openapi() -> dict[str, Any]:
        document = written()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
