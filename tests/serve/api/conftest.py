"""OpenAI's own client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    """The official client; it does not try again, so that every error is seen."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def post(server) -> Iterator[Any]:
    """POST a body, as JSON or as raw bytes, to an address below /v1."""
    with server.client() as http:

        def send(path: str, body: Any, **headers: str) -> Any:
            if isinstance(body, bytes):
                return http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"} | headers)
            return http.post(f"/v1/{path}", json=body, headers=headers)

        yield send
