"""The measurement of extraction: the same documents for every model, and what is wrong is counted."""

import pytest

from pippin.core.errors import InvalidArgument
from pippin.recipes.evaluate import extraction
from pippin.recipes.train.task_data import ExampleSplit, extraction as form_data


def test_items_are_a_function_of_the_seed_and_their_values_stand_in_them():
    split = ExampleSplit(kinds=("receipt",), layouts=("table",), languages=("de",))
    items = form_data.items(8, seed=3, split=split)
    assert items == form_data.items(8, seed=3, split=split)
    assert items[0].text != form_data.items(1, seed=4, split=split)[0].text
    assert {(each.kind, each.layout, each.language) for each in items} == {("receipt", "table", "de")}
    for item in items:
        plain = [name for name, field in item.schema["properties"].items() if field.get("type") == "string"]
        texts = [item.expected.get(name) for name in plain if "format" not in item.schema["properties"][name]]
        assert all(text in item.text for text in texts if text is not None)


def test_a_model_is_measured(default_model_path):
    config = extraction.Config(model=str(default_model_path), items=3, kinds=("receipt",), languages=("en",))
    result = extraction.run(config, show_progress=False)
    summary = result.summary()
    assert summary["items"] == 3
    assert summary["invented"] == 0  # the grammar allows parts of the text only
    assert 0 <= summary["right"] < 1
    assert summary["seconds_per_item"] > 0
    assert len(result.report().rows) >= 6


@pytest.mark.parametrize("change", [{"kinds": ("poem",)}, {"layouts": ("spiral",)}, {"languages": ("la",)}])
def test_what_there_is_not_is_refused_before_a_model_is_loaded(change):
    with pytest.raises(InvalidArgument, match=f"there is no {next(iter(change)).removesuffix('s')}"):
        extraction.run(extraction.Config(model="no such model", **change), show_progress=False)


def test_kinds_without_the_layout_are_left_out():
    split = extraction.split_of((), ("card",), ())
    assert split.kinds == ("contact_card",)
    assert {each.layout for each in form_data.items(5, seed=0, split=split)} == {"card"}
    with pytest.raises(InvalidArgument, match="receipt have no layout card"):
        extraction.split_of(("receipt",), ("card",), ())
