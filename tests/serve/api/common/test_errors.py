"""Every class of error has its place in the table, and OpenAI's client understands what is sent."""

import json

import httpx2
import openai
import pytest

from pippin.core import errors as core
from pippin.serve.api.common.errors import ALL, TABLE, _path, failure, responses
from pippin.session.providers.openai_messages import context_numbers

EXTRA = {
    core.ContextOverflow: {"context_size": 1, "token_count": 2},
    core.AnswerTruncated: {"partial": ""},
    core.InvalidAnswer: {"value": 1, "text": "1", "reason": "odd"},
    core.UnsupportedLanguage: {"language": "xx"},
    core.GuardrailViolation: {"verdict": None},
    core.Refusal: {"explanation": ""},
    core.ToolCallError: {"tool": "t"},
    core.InvalidRecord: {"path": "notes.jsonl"},
    core.NonFiniteLoss: {"step": 3},
    core.NewtonDivergence: {"iterations": 3, "residual": 0.5},
    core.NonFiniteSample: {"step": 3},
    core.CreationUnavailable: {"reason": "weights missing"},
    core.ConceptsBlocked: {"category": "violence"},
    core.OverMemoryBudget: {"estimate": 2, "budget": 1},
    core.CreationFailed: {"step": 3},
    core.InvalidImage: {"path": "cat.png"},
    core.ChainDiverged: {"step": 3},
    core.NotConverged: {"iterations": 3, "residual": 0.5},
}


def tree(kind=core.PippinError):
    return [kind, *(found for child in kind.__subclasses__() for found in tree(child))]


def make(kind):
    for base in kind.__mro__:
        if base in EXTRA:
            return kind("what happened", **EXTRA[base])
    return kind("what happened")


@pytest.mark.parametrize("kind", sorted(set(tree()), key=lambda kind: kind.__name__))
def test_every_error_is_sent_in_the_shape_that_the_client_raises_on(kind):
    made = failure(make(kind))
    assert made.status == next(TABLE[base][0] for base in kind.__mro__ if base in TABLE)
    assert 400 <= made.status < 600
    response = httpx2.Response(made.status, json=made.body, request=httpx2.Request("POST", "http://server/v1"))
    raised = openai.OpenAI(api_key="k")._make_status_error_from_response(response)
    assert isinstance(raised, openai.APIStatusError)
    assert raised.code == made.detail.code
    assert raised.body["message"].endswith("what happened")
    # what the client can mend is its own mistake, what it cannot is the server's
    assert (made.status < 500) == (made.detail.type not in ("server_error", "timeout_error", "overloaded_error"))


def test_a_context_that_is_too_small_is_said_in_openais_words_once():
    error = core.ContextOverflow("a prompt of 20 tokens", context_size=16, token_count=20)
    said = failure(error).detail.message
    assert said == "This model's maximum context length is 16 tokens. However, a prompt of 20 tokens"
    again = core.ContextOverflow(said, context_size=16, token_count=20)  # of a provider behind this server
    assert failure(again).detail.message == said
    assert context_numbers(said) == (16, 20)


@pytest.mark.parametrize(
    ("kind", "status", "code", "raised"),
    [
        (core.ModelNotFound, 404, "model_not_found", openai.NotFoundError),
        (core.ContextOverflow, 400, "context_length_exceeded", openai.BadRequestError),
        (core.UnsupportedGuide, 400, "unsupported_schema", openai.BadRequestError),
        (core.UnsupportedContent, 400, "unsupported_content", openai.BadRequestError),
        (core.GuardrailViolation, 400, "content_filter", openai.BadRequestError),
        (core.RateLimited, 429, "rate_limit_exceeded", openai.RateLimitError),
        (core.QuotaExceeded, 429, "insufficient_quota", openai.RateLimitError),
        (core.Overloaded, 503, "overloaded", openai.InternalServerError),
        (core.TimedOut, 504, "timeout", openai.InternalServerError),
        (core.Cancelled, 499, "request_cancelled", openai.APIStatusError),
        (core.Denied, 403, "denied", openai.PermissionDeniedError),
        (core.InvalidInput, 400, None, openai.BadRequestError),
        (core.NetworkFailure, 502, "provider_error", openai.InternalServerError),
    ],
)
def test_the_errors_that_clients_act_on(kind, status, code, raised):
    made = failure(make(kind))
    assert (made.status, made.detail.code) == (status, code)
    response = httpx2.Response(status, json=made.body, request=httpx2.Request("POST", "http://server/v1"))
    assert isinstance(openai.OpenAI(api_key="k")._make_status_error_from_response(response), raised)


def test_what_to_wait_is_a_header_in_whole_seconds_and_never_none():
    assert failure(core.RateLimited("wait", retry_after=0.2)).headers == {"Retry-After": "1"}
    assert failure(core.Overloaded("full")).headers == {"Retry-After": "1"}
    quota = failure(core.QuotaExceeded("used up", retry_after=61.5)).headers
    assert quota == {"Retry-After": "62", "x-should-retry": "false"}


def test_a_slow_answer_is_not_tried_again_by_the_client():
    made = failure(core.TimedOut("too slow"))
    response = httpx2.Response(
        made.status, json=made.body, headers=made.headers, request=httpx2.Request("POST", "http://server/v1")
    )
    assert not openai.OpenAI(api_key="k")._should_retry(response)


def test_an_error_of_the_server_tells_nothing_of_its_text():
    made = failure(RuntimeError("the secret prompt"))
    assert made.status == 500
    assert "secret" not in json.dumps(made.body)


def test_an_invalid_request_names_field_and_code():
    made = failure(core.InvalidRequest("seed: too large", param="seed", code="invalid_value"))
    assert made.body == {
        "error": {
            "message": "seed: too large",
            "type": "invalid_request_error",
            "param": "seed",
            "code": "invalid_value",
        }
    }


def test_a_place_is_written_without_the_names_of_alternatives():
    body = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    place = ["body", "messages", 0, "user", "content", "list[tagged-union]", 0, "text", "text"]
    assert _path(place, body, missing=True) == "messages[0].content[0].text"
    assert _path(["body", "messages", 7, "user"], body, missing=False) == "messages"
    assert _path(["path", "model"], None, missing=False) == "model"


def test_each_documented_status_has_a_body():
    assert set(responses(*ALL)) == set(ALL)
    with pytest.raises(KeyError):
        responses(418)
