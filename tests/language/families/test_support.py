"""The table of what each family can do: every cell is there, and comes from a test that exists."""

import json
from pathlib import Path

from pippin.language import families

COLUMNS = {"opens", "kernels", "batches", "prefixes", "LoRA", "2 to 8 bits", "reads GGUF", "writes GGUF"}


ROOT = Path(__file__).parents[3]


def is_there(nodeid):
    """Whether there is a test function of this name."""
    path, _, name = nodeid.partition("::")
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text()


def test_every_cell_comes_from_a_test():
    kept = json.loads((ROOT / "docs" / "models.json").read_text())
    assert kept.keys() == families.FAMILIES.keys()
    for family, cells in kept.items():
        assert cells.keys() == COLUMNS, family
        gone = [cell["test"] for cell in cells.values() if not is_there(cell["test"])]
        assert not gone, f"of {family}; run `pytest tests/language/families tests/shape/export --write-support`"
