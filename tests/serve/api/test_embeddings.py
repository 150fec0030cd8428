"""Embeddings through OpenAI's client, whose own decoding of base64 is the oracle."""

import math

import openai
import pytest

from pippin.serve.api.embeddings import encoded, shortened


def ask(client, given, **options):
    return client.embeddings.create(model="tiny-encoder", input=given, **options)


def test_numbers_and_base64_are_the_same_vectors(client):
    as_base64 = ask(client, ["cat", "dog"])  # the client asks for base64 and decodes it
    as_numbers = ask(client, ["cat", "dog"], encoding_format="float")
    assert [one.index for one in as_numbers.data] == [0, 1]
    for one, other in zip(as_base64.data, as_numbers.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    assert as_numbers.usage.prompt_tokens == as_numbers.usage.total_tokens == 2


def test_one_text_is_a_list_of_one(client):
    assert ask(client, "cat").data[0].embedding == ask(client, ["cat"]).data[0].embedding


def test_fewer_dimensions_are_the_first_ones_at_length_one(client):
    whole = ask(client, "cat", encoding_format="float").data[0].embedding
    short = ask(client, "cat", encoding_format="float", dimensions=3).data[0].embedding
    length = math.hypot(*whole[:3])
    assert short == pytest.approx([x / length for x in whole[:3]])
    assert shortened([0.0, 1.0], 1) == [0.0]
    assert encoded(short, None) is short


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": [1, 2]}, "input"),
        ({"input": [[1], [2]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"dimensions": 27}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_a_bad_value_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "cat", extra_body=options)
    assert caught.value.param == param


def test_a_model_that_is_no_encoder(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="cat")
    assert caught.value.code == "unsupported_capability"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="cat")
