"""Fields that tell items apart: unseen by the model, the same in every snapshot, different in different answers."""

import dataclasses
import json
from typing import Any, NamedTuple, NotRequired

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel
from typing_extensions import TypedDict

from pippin.core.errors import SchemaError
from pippin.session.generation_id import GenerationID
from pippin.session.tools import Tool
from pippin.session.types.schema import Schema


class Item(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(alias="Name")
    id: GenerationID = Field(description="never shown")
    kids: list["Item"] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    id: GenerationID
    x: int


class Row(TypedDict):
    id: NotRequired[GenerationID]
    a: str


class Rows(RootModel[list[Row]]):
    pass


class Everything(BaseModel):
    items: list[Item]
    points: tuple[Point, ...] = ()
    pair: tuple[str, Point] | None = None
    rows: Rows | None = None
    named: dict[str, Row] = {}
    either: list[Item | Point | Row] = []


ITEMS = st.recursive(
    st.builds(lambda name: {"Name": name}, st.text(max_size=4)),
    lambda kids: st.builds(lambda name, k: {"Name": name, "kids": k}, st.text(max_size=3), st.lists(kids, max_size=3)),
    max_leaves=5,
)
POINTS = st.builds(lambda x: {"x": x}, st.integers(-99, 99))
ROWS = st.builds(lambda a: {"a": a}, st.text(max_size=4))
VALUES = st.fixed_dictionaries(
    {"items": st.lists(ITEMS, max_size=3)},
    optional={
        "points": st.lists(POINTS, max_size=3),
        "pair": st.tuples(st.text(max_size=3), POINTS),
        "rows": st.lists(ROWS, max_size=3),
        "named": st.dictionaries(st.text(max_size=3), ROWS, max_size=3),
        "either": st.lists(ITEMS | POINTS | ROWS, max_size=4),
    },
)


def ids(value: Any, path: tuple = ()) -> dict[tuple, str]:
    """The id of each item by its place, found without the code under test."""
    if isinstance(value, RootModel):
        return ids(value.root, path)
    if isinstance(value, BaseModel):
        value = dict(value.__dict__)
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        own = {path: value["id"]} if "id" in value else {}
        return own | {k: v for name, item in value.items() for k, v in ids(item, (*path, name)).items()}
    if isinstance(value, list | tuple):
        return {k: v for index, item in enumerate(value) for k, v in ids(item, (*path, index)).items()}
    return {}


def count(value: Any) -> int:
    """Items in plain JSON: every dict but the root."""
    if isinstance(value, dict):
        return sum(map(count, value.values())) + bool({"Name", "x", "a"} & set(value))
    return sum(map(count, value)) if isinstance(value, list | tuple) else 0


@given(value=VALUES)
@settings(max_examples=60, deadline=None)
def test_an_item_keeps_its_id_in_every_snapshot(value):
    schema, text = Schema(Everything), json.dumps(value)
    whole = ids(schema.parse(text, identity="one"))
    assert len(whole) == len(set(whole.values())) == count(value)
    assert all(isinstance(each, GenerationID) for each in whole.values())
    before: dict = {}
    for cut in range(len(text) + 1):
        now = ids(schema.snapshot(text[:cut], identity="one"))
        assert now.items() >= before.items(), text[:cut]
        assert now.items() <= whole.items(), text[:cut]
        before = now
    assert before == whole
    other = ids(schema.parse(text, identity="two"))
    assert not set(whole.values()) & set(other.values())
    assert ids(schema.parse(text, identity="one")) == whole


def test_the_model_never_sees_it():
    schema = Schema(list[Item])
    assert '"id"' not in json.dumps(schema.json_schema)
    assert "x-generation-id" not in schema.prompt_text()
    assert schema.is_valid('[{"Name": "a", "kids": []}]')
    assert not schema.is_valid('[{"Name": "a", "id": "x", "kids": []}]')
    tool = Tool(lambda: None, name="t")
    assert tool.schema.is_valid("{}")


def test_a_value_made_by_hand_has_an_empty_id_or_its_own():
    assert Item(Name="a").id == ""
    assert Item(Name="a", id="mine").id == "mine"


class Pair(NamedTuple):
    id: GenerationID
    x: int


class Required(TypedDict):
    id: GenerationID


class Hashable(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: GenerationID


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (GenerationID, "only be a field"),
        (list[GenerationID], "only be a field"),
        (dict[str, GenerationID], "only be a field"),
        (Pair, "only be a field"),
        (Required, "NotRequired"),
        (set[Hashable], "use a list"),
        (list[frozenset[Hashable]], "use a list"),
    ],
)
def test_places_where_it_cannot_stand(target, hint):
    with pytest.raises(SchemaError, match=hint):
        Schema(target)
