"""SECURITY.md names the tests that hold its promises: they exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    missing = [pair for pair in named if f"def {pair[1]}" not in (ROOT / pair[0]).read_text(encoding="utf-8")]
    assert not missing
