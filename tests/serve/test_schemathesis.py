"""Requests made from our own OpenAPI document, right and wrong ones: no 5xx, and answers as the document says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from pippin.language import Decoder, LanguageModel

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
MODELS = {"/v1/embeddings": "tiny-encoder"}


def shallow(case):
    """The same request to a model that is there, for few and short answers, so that it gets far and ends soon."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODELS.get(case.operation.path, "tiny")
        for name, most in (("n", 2), ("best_of", 2)):
            if isinstance(body.get(name), int) and body[name] > most and not isinstance(body[name], bool):
                body[name] = most
    return case


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/extractions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
]


@pytest.fixture(scope="module")
def document(build_app, start_app, tiny):
    """The document of a server whose model has room for 100 tokens."""
    small = Decoder(replace(tiny.config, max_position_embeddings=100)).initialize(seed=0).eval()
    model = LanguageModel("tiny", small, tiny.tokenizer, tiny.template)
    running = start_app(build_app(load=lambda name: model, page=False))
    found = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    found.config.update(headers=running.headers)
    found.config.checks.negative_data_rejection.expected_statuses.append("413")  # too large is refused too
    yield found
    running.stop()


def test_no_operation_of_the_interface_is_left_out(document):
    named = [(found.ok().method.upper(), found.ok().path) for found in document.get_all_operations()]
    kept = ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/extractions", "/v1/models")
    assert [one for one in named if one[1].startswith(kept)] == OPERATIONS


CASES = [(*one, GenerationMode.POSITIVE) for one in OPERATIONS] + [
    (method, path, GenerationMode.NEGATIVE) for method, path in OPERATIONS if method == "POST"
]  # any text is a name of something that may or may not be there, so the others have no wrong requests


# the server's threads, in this process, may draw random numbers while a request is made up
@pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_the_server_does_what_its_document_says(document, method, path, mode):
    @given(document[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=15 if settings.get_current_profile_name() == "default" else settings.default.max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        shallow(case).call_and_validate(checks=CHECKS)

    run()
