"""Outputs of tools with other values each time: what an answer says is what the output says."""

import json
import random
import re

import pytest

from pippin.core.errors import InvalidInput
from pippin.data.synthetic import tool_requests
from pippin.data.synthetic.tool_requests import outputs
from pippin.data.synthetic.tool_requests.tool_files import failures


def _redrawn(output, answer, language="en", count=40):
    return [outputs.redraw(output, answer, language, random.Random(seed)) for seed in range(count)]


@pytest.mark.parametrize(
    ("language", "answer", "number"),
    [
        ("en", "It is 2,410.30 euros.", lambda text: text.replace(",", "")),
        ("de", "Es sind 2.410,30 Euro.", lambda text: text.replace(".", "").replace(",", ".")),
        ("fr", "Cela fait 2 410,30 euros.", lambda text: text.replace(" ", "").replace(",", ".")),
        ("es", "Son 2410,30 euros.", lambda text: text.replace(",", ".")),
        ("it", "Sono 2.410,30 euro.", lambda text: text.replace(".", "").replace(",", ".")),
    ],
)
def test_a_number_is_another_one_and_stays_in_its_language(language, answer, number):
    seen = set()
    for report in _redrawn('{"net": 2410.3}', answer, language):
        value = json.loads(report.output)["net"]
        (written,) = re.findall(r"\d[\d., ]*\d", report.answer)
        assert float(number(written)) == value
        assert written in report.findings[0]
        assert str(value) in report.findings[0]
        seen.add(value)
    assert len(seen) > 30


def test_dates_and_times_are_other_ones():
    for report in _redrawn('{"due": "2027-01-15", "at": "10:00"}', "Bis zum 15. Januar 2027, 10:00 Uhr.", "de"):
        values = json.loads(report.output)
        year, month, day = map(int, values["due"].split("-"))
        assert re.search(rf"{day}\. \w+ {year}, {values['at']} Uhr", report.answer)
        assert 1 <= month <= 12
        assert len(report.findings) == 2


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ('{"found": 1}', "There is one message."),  # told in words
        ('{"id": 381}', "The event is saved."),  # not told at all
        ('{"rooms": 1}', "There is 1 room."),  # a singular
        ('{"to": "{count}"}', "{count} of 12"),  # a parameter, and a number of the answer alone
        ("[]", "Nothing."),
    ],
)
def test_what_an_answer_does_not_have_in_figures_stays(output, answer):
    for report in _redrawn(output, answer, count=10):
        assert report.answer == answer
        assert report.output == output


def test_numbers_that_are_parts_of_one_another_stay_apart():
    for report in _redrawn('{"a": 12, "b": 120, "c": "X-12"}', "12 of 120 in X-12", count=30):
        values = json.loads(report.output)
        assert report.answer == f"{values['a']} of {values['b']} in {values['c']}"
    for report in _redrawn('{"low": 9, "high": 5}', "from 9 to 5", count=60):  # new values may be old ones of others
        values = json.loads(report.output)
        assert report.answer == f"from {values['low']} to {values['high']}"


def test_outputs_have_several_forms():
    rng, text = random.Random(0), '{"price": 12.5, "stops": ["Leeds", "York"]}'
    forms = {outputs.written(text, "It costs 12.5.", rng) for _ in range(100)}
    assert {text, "It costs 12.5.", "price: 12.5\nstops: Leeds\nstops: York"} <= forms
    assert "64" in {outputs.written('{"percent": 64}', "At 64 percent.", rng) for _ in range(60)}


def test_every_fact_is_in_the_output_and_in_the_answer():
    rng, count = random.Random(5), 0
    for _ in range(800):
        request = tool_requests.sample(rng)
        for spellings in request.findings:
            count += 1
            assert spellings[0] in request.answer
            assert any(each in request.output for each in spellings)
        for text in (request.output, request.answer):
            assert not re.search(r"\{=|\{\w+\}|[\x01\ue000-\uf8ff]", text or "")
    assert count > 200


def test_the_library_says_something_else_each_time():
    rng = random.Random(6)
    answers = [tool_requests.sample(rng, language="en") for _ in range(3000)]
    found = {request.findings for request in answers if request.call and request.call[0] == "get_weather"}
    assert len(found) > 5  # other figures and skies, whatever the city


def test_failures_are_told_in_every_language():
    assert len(failures()) >= 8
    for output, answers in failures():
        assert output
        assert set(answers) == set(tool_requests.LANGUAGES)
    told = {answers["it"] for _, answers in failures()}
    rng = random.Random(7)
    assert any(tool_requests.sample(rng, language="it").answer in told for _ in range(300))


def test_alternatives_of_one_tool_have_one_length():
    text = '[a] b\n+ do it\n> {"x": "{=one|two}"}\n< It is {=eins|zwei|drei}.'
    with pytest.raises(InvalidInput, match="alternatives"):
        tool_requests.read(text)
