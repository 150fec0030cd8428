"""POST /v1/embeddings.

Notable here:
- vectors are sent as numbers or as base64 of little-endian float32, which OpenAI's clients request by default
- fewer dimensions are the first ones, scaled to length 1 again
- token ids are refused: they belong to another tokenizer than the encoder's, and would mean nothing
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from pippin.core.errors import InvalidRequest
from pippin.serve.api.common import errors
from pippin.serve.api.common.body import JSONRoute, RequestPart
from pippin.serve.api.common.fields import Positive, Several, TokenIds

if TYPE_CHECKING:
    from pippin.serve.service import Service

MOST_TEXTS = 2048


class EmbeddingRequest(RequestPart):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "all-minilm-l6-v2", "input": ["cat", "dog"]}]})

    model: str = Field(description="The name of an encoder.")
    input: (
        str
        | Annotated[Several[str], Field(min_length=1, max_length=MOST_TEXTS)]
        | TokenIds
        | Annotated[Several[TokenIds], Field(min_length=1, max_length=MOST_TEXTS)]
    ) = Field(description="One text or several. Token ids are refused.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = Field(
        None, description="Keep so many of the dimensions. Only encoders trained for it keep their quality."
    )
    user: str | None = None


class EmbeddingObject(BaseModel):
    """One vector, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Input tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


def texts(given: Any) -> list[str]:
    """The texts of a request.

    Raises:
        InvalidRequest: token ids, or an empty text.
    """
    found = [given] if isinstance(given, str) else given
    if not isinstance(found[0], str):
        raise InvalidRequest(
            "input: token ids are of another tokenizer than this encoder's; send texts (in langchain-openai: "
            "check_embedding_ctx_length=False)",
            param="input",
            code="unsupported_value",
        )
    for index, text in enumerate(found):
        if not text:
            raise InvalidRequest(f"input[{index}]: the text is empty", param="input", code="invalid_value")
    return found


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` elements, scaled to length 1 again.

    Raises:
        InvalidRequest: the vector has fewer.

    >>> shortened([0.6, 0.0, 0.8], 1), shortened([0.0, 1.0], None)
    ([1.0], [0.0, 1.0])
    """
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise InvalidRequest(
            f"dimensions: {dimensions} are more than the {len(vector)} that this encoder has",
            param="dimensions",
            code="invalid_value",
        )
    shortened_vector = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in shortened_vector))
    return [x / length for x in shortened_vector] if length else shortened_vector


def encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    """A vector in the requested encoding.

    >>> encoded([1.0], "base64"), encoded([1.0], None)
    ('AACAPw==', [1.0])
    """
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if encoding == "base64" else vector


def router(service: Service) -> APIRouter:
    """The route over a service."""
    routes = APIRouter(route_class=JSONRoute, tags=["embeddings"])

    @routes.post(
        "/v1/embeddings",
        operation_id="createEmbedding",
        summary="Turn texts into vectors",
        response_model=Embeddings,
        responses=errors.responses(*errors.ALL),
    )
    async def create(request: Request, body: EmbeddingRequest) -> Any:
        found = texts(body.input)
        vectors, count = await service.embed(body.model, found, request.state.caller)
        data = []
        for index, vector in enumerate(vectors):
            shown = encoded(shortened(vector, body.dimensions), body.encoding_format)
            data.append({"object": "embedding", "index": index, "embedding": shown})
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "model": body.model, "data": data, "usage": usage})

    return routes
