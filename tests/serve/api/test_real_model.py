"""The default model behind the server: what comes out makes sense, and is what a session says."""

import openai
import pydantic
import pytest

import pippin


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def real(build_app, start_app, model):
    running = start_app(build_app(models=("smollm2-135m",), load=lambda name: model, page=False))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0, timeout=120) as client:
        yield client
    running.stop()


def test_an_answer_is_the_session_s_own(real, model):
    question = "What is the capital of France?"
    expected = pippin.Session(model).respond(question, options=pippin.GenerationOptions(max_tokens=24))
    messages = [{"role": "user", "content": question}]
    chunks = real.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=24, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected.content
    assert "Paris" in text


def test_a_value_is_read_out_of_a_text(real, model):
    question = "Ann is 31 years old and lives in Oslo. Who is it?"
    expected = pippin.Session(model).respond(question, generating=Person)
    schema = pippin.Schema(Person).json_schema
    made = real.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=60,
    )
    assert made.choices[0].message.content == expected.raw_content
    assert expected.content.age == 31


def test_the_likelier_text_has_the_higher_score(real):
    def score(text):
        made = real.completions.create(model="smollm2-135m", prompt=text, echo=True, logprobs=0, max_tokens=0)
        return sum(made.choices[0].logprobs.token_logprobs[1:])

    assert score("The capital of France is Paris") > score("The capital of France is Banana")
