"""GET /v1/models and /v1/models/{id}: the available models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from pippin.core.errors import ModelNotFound
from pippin.serve.api.common import errors

if TYPE_CHECKING:
    from pippin.serve.service import ModelInfo, Service


class Model(BaseModel):
    """A model, an encoder, or a model with an adapter (NAME:ADAPTER). The last three fields are not OpenAI's."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "smollm2-135m",
                    "object": "model",
                    "created": 1767225600,
                    "owned_by": "pippin",
                    "kind": "chat",
                    "loaded": True,
                    "context_size": 8192,
                }
            ]
        }
    )

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: Literal["chat", "base", "encoder", "adapter"]
    loaded: bool
    context_size: int | None


class Models(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[Model]


def shown(info: ModelInfo) -> dict[str, Any]:
    """A model in the format of the API."""
    return {
        "id": info.id,
        "object": "model",
        "created": info.created,
        "owned_by": info.owned_by,
        "kind": info.kind,
        "loaded": info.loaded,
        "context_size": info.context_size,
    }


def router(service: Service) -> APIRouter:
    """The routes over a service."""
    routes = APIRouter(tags=["models"])
    refusals = errors.responses(401, 403, 429, 500)

    @routes.get(
        "/v1/models", operation_id="listModels", summary="List models", response_model=Models, responses=refusals
    )
    async def list_models() -> Any:
        return JSONResponse({"object": "list", "data": [shown(info) for info in service.models()]})

    @routes.get(
        "/v1/models/{model:path}",
        operation_id="retrieveModel",
        summary="Show a model",
        response_model=Model,
        responses=refusals | errors.responses(404),
    )
    async def retrieve_model(model: str) -> Any:
        for info in service.models():
            if info.id == model:
                return JSONResponse(shown(info))
        raise ModelNotFound(f"the model {model[:100]!r} is not served here; /v1/models lists those that are")

    return routes
