"""Extraction over HTTP: the value, the places that it came from, and errors that name the field."""

import pytest

TEXT = "Dear Ms Roe,\n\nyour order 4711 of 3 May 2024 costs 12.50 EUR.\n😀 Yours, Paul Kern"
SCHEMA = {
    "type": "object",
    "properties": {
        "order": {"type": "integer"},
        "date": {"type": "string", "format": "date"},
        "sender": {"type": "string"},
    },
    "required": ["order", "date", "sender"],
}


def test_values_and_their_places(post):
    answer = post("extractions", {"model": "tiny", "input": TEXT, "schema": SCHEMA})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert set(found["value"]) == {"order", "date", "sender"}
    assert found["value"]["date"] == "2024-05-03"  # the only one
    assert found["object"] == "extraction"
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"] > 0
    assert {tuple(span["path"]) for span in found["spans"]} == {("order",), ("date",), ("sender",)}
    for span in found["spans"]:
        assert TEXT[span["start"] : span["end"]] == span["text"]
        assert 0 <= span["confidence"] <= 1
    assert found["value"]["sender"] in TEXT
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": " \n"}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"schema": []}, 400, "schema"),
        ({"schema": {"type": "nothing"}}, 400, "schema"),
        ({"schema": {"enum": []}}, 400, "schema"),
        ({"model": "nothing"}, 404, "model"),
        ({"model": "tiny-encoder"}, 400, None),
    ],
)
def test_a_bad_value_is_refused_by_name(post, change, status, param):
    answer = post("extractions", {"model": "tiny", "input": TEXT, "schema": SCHEMA} | change)
    assert answer.status_code == status, answer.text
    if param:
        assert answer.json()["error"]["param"] == param


def test_what_must_be_there_and_is_not(post):
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    answer = post("extractions", {"model": "tiny", "input": "No day is named.", "schema": schema})
    assert answer.status_code == 400
    assert "has no date" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("level", "expected"), [("strict", "[account number]"), ("off", "DE89370400440532013000")])
def test_guardrails_check_the_values(build_app, start_app, level, expected):
    running = start_app(build_app(guardrails=level, page=False))
    iban = {"type": "string", "pattern": r"^(DE[0-9]{20}|\[account number\])$"}
    schema = {"type": "object", "properties": {"iban": iban}, "required": ["iban"]}
    asked = {"model": "tiny", "schema": schema, "input": "IBAN DE89370400440532013000"}
    with running.client() as http:
        assert http.post("/v1/extractions", json=asked).json()["value"] == {"iban": expected}
    running.stop()
