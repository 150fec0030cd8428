"""POST /v1/extractions: a JSON Schema, filled in from a text, with the place of every value. Not in OpenAI's API.

Notable here:
- it is `Session.extract`, as one request of the caller: what the text does not say cannot be written
- offsets count characters (code points) of the text, as in Python; a browser counts otherwise beyond U+FFFF
- the adapter for extraction that comes with Pippin is used unless the model is named with another (NAME:ADAPTER)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from pippin.core.errors import InvalidInput, InvalidRequest
from pippin.serve import guardrails
from pippin.serve.api.common import errors
from pippin.serve.api.common.body import JSONRoute, RequestPart
from pippin.serve.api.common.provider_requests import about, check_size, closed
from pippin.session.session import Session
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.serve.service import Service
    from pippin.session.extraction import Extraction
    from pippin.session.providers.local import LocalModel

_EXAMPLE: Any = {
    "model": "smollm2-135m",
    "input": "Dear Ms Roe, your order 4711 of 3 May costs 12.50 EUR.",
    "schema": {"type": "object", "properties": {"order": {"type": "string"}, "total": {"type": "number"}}},
}


class ExtractionRequest(RequestPart):
    """A text and what to find in it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    model: str = Field("", description="A model, or NAME:ADAPTER; the server's default without it.")
    input: str = Field(description="The text, of any length; a long one is read in parts.", min_length=1)
    schema_: dict[str, Any] = Field(alias="schema", description="JSON Schema of what to find.")
    question: str = Field("", description="What to look for, where the schema does not say it.")
    language: str | None = Field(None, description="Tag of the text's language; detected without it.")
    region: str | None = Field(None, description="Country such as US, for dates and numbers that can be read two ways.")
    user: str | None = None


class ExtractionSpan(BaseModel):
    """The part of the text that a value came from."""

    path: list[str | int]
    text: str
    start: int
    end: int
    value: Any
    confidence: float | None
    ambiguous: bool


class ExtractionUsage(BaseModel):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ExtractionObject(BaseModel):
    """The value, and the places of its parts."""

    object: Literal["extraction"]
    model: str
    value: Any
    spans: list[ExtractionSpan]
    notes: list[str]
    usage: ExtractionUsage


def router(service: Service) -> APIRouter:
    """The route over a service."""
    routes = APIRouter(route_class=JSONRoute, tags=["extractions"])
    guard = guardrails.guardrails(service.settings.guardrails)

    @routes.post(
        "/v1/extractions",
        operation_id="createExtraction",
        summary="Fill in a JSON Schema from a text",
        response_model=ExtractionObject,
        responses=errors.responses(*errors.ALL),
    )
    async def create(request: Request, body: ExtractionRequest) -> Any:
        check_size("schema", body.schema_)
        with about("schema"):
            schema: Schema[Any] = Schema(closed(body.schema_))

        def work(provider: LocalModel) -> Extraction[Any]:
            session = Session(provider, guardrails=guard)
            return session.extract(
                body.input, schema, question=body.question, language=body.language, region=body.region
            )

        try:
            found = await service.task(body.model, work, request.state.caller)
        except InvalidInput as error:
            raise InvalidRequest(f"input: {error}", param="input", code="invalid_value") from error
        return JSONResponse(_response(body.model or service.settings.default, found))

    return routes


def _response(model: str, found: Extraction[Any]) -> dict[str, Any]:
    usage = found.usage
    spans = [
        {
            "path": list(span.path),
            "text": span.text,
            "start": span.start,
            "end": span.end,
            "value": span.value,
            "confidence": span.confidence,
            "ambiguous": span.ambiguous,
        }
        for span in found.spans
    ]
    return {
        "object": "extraction",
        "model": model,
        "value": found.content,
        "spans": spans,
        "notes": list(found.notes),
        "usage": {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }
