"""The official JSON Schema test suite: nothing invalid is accepted, and the page in docs says what was measured."""

import json

import pytest
from json_schema_table import DRAFTS, PAGE, measure, page, texts

from pippin.core import store
from pippin.core.errors import OfflineError


@pytest.fixture(scope="module")
def suite():
    try:
        return store.pull("json-schema-test-suite", show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the suite is not in the cache: {error}")


@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_invalid_is_accepted_and_nothing_valid_called_empty(suite, draft):
    rows = measure(suite, draft)
    assert sum(row.groups for row in rows) > 300
    assert sum(row.enforced for row in rows) >= 0.6 * sum(row.groups for row in rows)
    assert [name for row in rows for name in row.wrong] == []
    assert [name for row in rows for name in row.falsely_empty] == []


def test_the_page_is_what_is_measured(suite):
    assert PAGE.read_text(encoding="utf-8") == page(suite), "run: python tools/json_schema_table.py"


def test_texts_are_all_orders_of_a_value():
    assert sorted(texts({"a": 1, "b": [{"c": 2, "d": 3}]})) == sorted(
        json.dumps(value)
        for value in (
            {"a": 1, "b": [{"c": 2, "d": 3}]},
            {"b": [{"c": 2, "d": 3}], "a": 1},
            {"a": 1, "b": [{"d": 3, "c": 2}]},
            {"b": [{"d": 3, "c": 2}], "a": 1},
        )
    )
    assert list(texts("\ud83d")) == []
