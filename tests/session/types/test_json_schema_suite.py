"""The official JSON Schema test suite: nothing invalid is accepted, and the page in docs says what was measured."""

import pytest
from json_schema_table import DRAFTS, PAGE, measure, page

from pippin.core.errors import OfflineError
from pippin.core.store import store


@pytest.fixture(scope="module")
def suite():
    try:
        return store.pull("json-schema-test-suite", show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the suite is not in the cache: {error}")


# what old drafts let a validator assert or not, and which is ignored with a note here
OPTIONAL = ("optional/content", "optional/format/color")


@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_invalid_is_accepted_and_nothing_valid_called_empty(suite, draft):
    rows = measure(suite, draft)
    assert sum(row.groups for row in rows) > 100
    assert sum(row.enforced for row in rows) >= 0.6 * sum(row.groups for row in rows)
    assert [name for row in rows for name in row.wrong if row.name not in OPTIONAL] == []
    assert [name for row in rows for name in row.falsely_empty] == []


def test_the_page_is_what_is_measured(suite):
    assert PAGE.read_text(encoding="utf-8") == page(suite), "run: python tools/json_schema_table.py"
