"""The table of what each family can do: every cell is there, and comes from a test that exists."""

import json

from model_table import COLUMNS, SUPPORT, is_there

from pippin.language import families


def test_every_cell_comes_from_a_test():
    kept = json.loads(SUPPORT.read_text())
    assert kept.keys() == families.SHARED_FAMILIES.keys()
    for family, cells in kept.items():
        assert cells.keys() == COLUMNS.keys(), family
        gone = [cell["test"] for cell in cells.values() if not is_there(cell["test"])]
        assert not gone, f"of {family}; run `pytest tests/language/families tests/shape/export --write-support`"
