"""What may be named, through OpenAI's client."""

import openai
import pytest


def test_all_models_are_listed_and_each_is_shown(client):
    listed = client.models.list().data
    assert {(model.id, model.kind) for model in listed} == {("tiny", "chat"), ("tiny-encoder", "encoder")}
    for model in listed:
        assert client.models.retrieve(model.id).to_dict().keys() == model.to_dict().keys()
        assert (model.object, model.owned_by) == ("model", "pippin")


def test_a_name_with_a_slash_is_one_name(make_server):
    running = make_server(models=("owner/name=tiny",))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key) as client:
        assert client.models.retrieve("owner/name").id == "owner/name"


def test_a_model_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"
