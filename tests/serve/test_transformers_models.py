"""A model of a family that Pippin has no decoder for, behind the server, asked by OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from openai import BadRequestError, OpenAI
from tiny_model import CHATML
from transformers import AutoConfig, AutoModelForCausalLM

from .command import KEY, Process

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "book", "description": "Book a trip.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "phi",
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    server = Process(folder, tmp_path_factory.mktemp("keys"))
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
    server.close()


def ask(client, text, **options):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=120, temperature=0, **options
    )


def test_typed_answers_tools_streams_and_company(client):
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    typed = json.loads(ask(client, "Where to?", response_format=schema).choices[0].message.content)
    assert typed["city"] in ("Paris", "Rome")
    (call,) = ask(client, "Book it.", tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9

    alone = [ask(client, text).choices[0].message.content for text in ("One.", "A second one.", "Three!")]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda text: ask(client, text), ("One.", "A second one.", "Three!")))
    assert [answer.choices[0].message.content for answer in together] == alone
    deltas = ask(client, "One.", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas if chunk.choices) == alone[0]


def test_a_conversation_reuses_its_prefix(client):
    first = ask(client, "A long beginning, said twice. " * 4)
    again = ask(client, "A long beginning, said twice. " * 4)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 96


def test_a_token_outside_the_vocabulary_is_refused(client):
    with pytest.raises(BadRequestError, match="259"):
        client.completions.create(model="tiny", prompt=[5, 300], max_tokens=2)
