"""Service tiers and priorities: what is asked for, what is granted, and what the answer says of it."""

import pytest

from pippin.core.errors import InvalidRequest
from pippin.serve.api.common import priority
from pippin.serve.api.common.fields import PriorityFields
from pippin.serve.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("asked", "plain", "allowed"),
    [
        ({}, (0, {}), (0, {})),
        ({"service_tier": "auto"}, (0, {"service_tier": "default"}), (0, {"service_tier": "default"})),
        ({"service_tier": "scale"}, (0, {"service_tier": "default"}), (0, {"service_tier": "default"})),
        ({"service_tier": "flex"}, (-5, {"service_tier": "flex"}), (-5, {"service_tier": "flex"})),
        ({"service_tier": "priority"}, (0, {"service_tier": "default"}), (5, {"service_tier": "priority"})),
        ({"service_tier": "fast"}, (0, {"service_tier": "default"}), (5, {"service_tier": "priority"})),
        ({"priority": 10}, (-10, {}), (-10, {})),
        ({"priority": -10}, (0, {}), (10, {})),
        ({"priority": 3, "service_tier": "auto"}, (-3, {"service_tier": "flex"}), (-3, {"service_tier": "flex"})),
    ],
)
def test_less_is_always_granted_and_more_only_where_it_is_allowed(asked, plain, allowed):
    assert priority.priority_of(PriorityFields(**asked), ServerSettings()) == plain
    assert priority.priority_of(PriorityFields(**asked), ServerSettings(priorities=True)) == allowed


def test_a_tier_and_a_number_contradict_each_other():
    with pytest.raises(InvalidRequest, match="give one of the two") as caught:
        priority.priority_of(PriorityFields(service_tier="flex", priority=0), ServerSettings())
    assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("completions", {"prompt": "Hello", "max_tokens": 2}),
        ("responses", {"input": "Hello", "max_output_tokens": 2}),
    ],
)
def test_every_way_to_ask_takes_both_and_answers_with_the_tier(post, path, body):
    assert "service_tier" not in post(path, body).json()
    assert post(path, body | {"service_tier": "priority"}).json()["service_tier"] == "default"
    assert post(path, body | {"service_tier": "flex"}).json()["service_tier"] == "flex"
    assert post(path, body | {"priority": 4}).status_code == 200
    for field, value in (("service_tier", "gold"), ("priority", 11), ("priority", "high")):
        refused = post(path, body | {field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    text = post(path, body | {"service_tier": "flex", "stream": True}).text
    assert '"service_tier":"flex"' in text.replace(" ", "")


def test_the_official_client_sees_the_tier(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, service_tier="flex")
    assert answer.service_tier == "flex"
