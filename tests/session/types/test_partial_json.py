"""Partial JSON at every cut against the standard parser, and partial types that never take a value back."""

import dataclasses
import datetime
import enum
import json
import time
from typing import Annotated, Any, Literal, NotRequired

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field, RootModel
from tests.machine import slowness
from typing_extensions import TypedDict

from pippin.session.types.partial_json import Growing, fill, parse_partial, partial_type
from pippin.session.types.schema import Schema

TEXT = st.text(st.sampled_from('ab"\\/\n\té😀\ud7ff\u2028{}[]:, u0'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
MISSING = object()


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether a partial value is what the whole value can grow from."""
    if isinstance(part, Growing):
        return isinstance(whole, str) and whole.startswith(part)
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and is_beginning(v, whole[k]) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) <= len(whole) and all(map(is_beginning, part, whole))
    return type(part) is type(whole) and part == whole


@pytest.mark.parametrize("ascii_only", [True, False])
@given(value=VALUES)
@settings(max_examples=150)
def test_every_cut_is_a_beginning_and_the_whole_is_the_value(ascii_only, value):
    text = json.dumps(value, ensure_ascii=ascii_only)
    last = MISSING
    for cut in range(len(text) + 1):
        part, whole = parse_partial(text[:cut])
        assert not whole or cut == len(text) or text[cut:].strip() == ""
        if part is not None:
            assert is_beginning(part, value), (text[:cut], part)
        if last is not MISSING and last is not None:
            assert is_growth(last, part), (text[:cut], last, part)
        last = part
    if not isinstance(value, int | float) or isinstance(value, bool):
        assert parse_partial(text) == (value, True)


def is_growth(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return isinstance(after, dict) and all(k in after and is_growth(v, after[k]) for k, v in before.items())
    if isinstance(before, list):
        return isinstance(after, list) and all(map(is_growth, before, after)) and len(before) <= len(after)
    return after.startswith(before) if isinstance(before, Growing) else before == after


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ('"', ""),
        ('"a\\', "a"),
        ('"a\\\\', "a\\"),
        ('"a\\u00', "a"),
        ('"\\ud83d', ""),
        ('"\\ud83d\\u', ""),
        ('"\\ud83d\\ude00', "😀"),
        ('"\\\\ud83d', "\\ud83d"),
        ("12", None),
        ("tru", None),
        ("[1", []),
        ("[1,", [1]),
        ("[1, tru", [1]),
        ('{"a', {}),
        ('{"a"', {}),
        ('{"a":', {}),
        ('{"a": {"b": [1, "c', {"a": {"b": [1, "c"]}}),
        ('{"a": 1, "a": "x', {"a": "x"}),
    ],
)
def test_cuts_in_awkward_places(text, value):
    assert parse_partial(text) == (value, False)


@pytest.mark.parametrize("text", ["]", '{"a": 1]', '"\\x"', '[1 "a"]', "nonsense,"])
def test_what_cannot_become_json(text):
    with pytest.raises(ValueError, match=r"."):
        parse_partial(text)


def test_a_long_answer_is_read_many_times_in_little_time():
    text = json.dumps([{"name": "x" * 40, "tags": ["a", "b"], "n": i} for i in range(130)])
    assert len(text) > 10_000
    began = time.process_time()
    for cut in range(0, len(text), 100):
        parse_partial(text[:cut])
    assert time.process_time() - began < 5 * slowness()  # a hundred snapshots; one takes about a millisecond


class Color(enum.Enum):
    RED = "red"
    REDDISH = "reddish"


class Leaf(BaseModel):
    label: str
    size: int | None = None


class Tree(BaseModel):
    name: str = Field(alias="Name")
    day: datetime.date
    color: Color
    tags: list[str]
    days: list[datetime.date]
    either: Leaf | list[int] | str
    kids: list["Tree"] = []
    more: dict[str, Leaf] = {}
    pair: tuple[int, str] = (0, "")


@dataclasses.dataclass
class Point:
    x: int
    label: str


class Row(TypedDict):
    a: int
    b: NotRequired[str]


TREE = {
    "Name": "oak",
    "day": "2024-02-29",
    "color": "reddish",
    "tags": ["tall", "gr"],
    "days": ["2024-01-01", "2024-01-02"],
    "either": {"label": "é\n", "size": None},
    "kids": [{"Name": "k", "day": "2024-01-01", "color": "red", "tags": [], "days": [], "either": [1, 2]}],
    "more": {"m": {"label": "in", "size": 3}},
    "pair": [3, "three"],
}


def plain(value: Any) -> Any:
    """A value of any type as dicts and lists of what is not None."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, set):
        return sorted(value)
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def grows(before: Any, after: Any) -> bool:
    """Nothing that was shown is gone: dicts gain keys, lists items, strings an ending; all else stays."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(k in after and grows(v, after[k]) for k, v in before.items())
    if isinstance(before, list):
        return isinstance(after, list) and len(before) <= len(after) and all(map(grows, before, after))
    return after.startswith(before) if isinstance(before, str) and isinstance(after, str) else before == after


@pytest.mark.parametrize(
    ("target", "value"),
    [
        (Tree, TREE),
        (Point, {"x": 3, "label": "here"}),
        (Row, {"a": 1, "b": "text"}),
        (list[Tree], [TREE, TREE]),
        (dict[str, list[int]], {"a": [1, 2], "b": []}),
        (tuple[int, str, Leaf], [1, "two", {"label": "three"}]),
        (set[Literal["x", "y"]], ["x", "y"]),
        (Leaf | Point, {"x": 3, "label": "here"}),
        (Annotated[str, Field(min_length=3)] | int, "growing"),
        (int | None, None),
        (RootModel[list[str]], ["ab", "cd"]),
        (dict[str, Any], {"a": {"b": [1, {"c": "d"}]}}),
        ({"type": "object"}, {"a": {"b": [1, {"c": "d"}]}}),
    ],
)
def test_snapshots_grow_and_end_with_the_answer(target, value):
    schema, text = Schema(target), json.dumps(value, ensure_ascii=False)
    last: Any = None
    for cut in range(len(text) + 1):
        snapshot = schema.snapshot(text[:cut])
        if last is not None:
            assert grows(plain(last), plain(snapshot)), (text[:cut], last, snapshot)
        last = snapshot
    assert schema.snapshot(text, complete=True) == schema.parse(text)
    assert last == schema.parse(text)


def test_fields_that_have_not_begun_are_none_and_others_are_of_their_type():
    schema = Schema(Tree)
    snapshot = schema.snapshot('{"Name": "oak", "day": "2024-02-29", "color": "red')
    assert isinstance(snapshot, partial_type(Tree))
    assert (snapshot.name, snapshot.day, snapshot.color, snapshot.tags) == (
        "oak",
        datetime.date(2024, 2, 29),
        None,
        None,
    )
    snapshot = schema.snapshot(json.dumps(TREE)[: json.dumps(TREE).index("2024-01-02") + 5])
    assert snapshot.color is Color.REDDISH
    assert snapshot.days == [datetime.date(2024, 1, 1)]
    assert type(schema.snapshot('{"Name": "o').name) is str


def test_a_number_alone_shows_only_at_the_end():
    schema = Schema(int)
    assert schema.snapshot("12") is None
    assert schema.snapshot("12", complete=True) == 12


def test_partial_types_have_the_fields_of_the_whole():
    assert partial_type(Point)() == partial_type(Point)(None, None)
    assert partial_type(int) is int
    assert partial_type(Row) is dict
    assert fill(int, None) is None
