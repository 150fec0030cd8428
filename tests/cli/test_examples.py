"""The examples run as they are, without a network once the model is there, and say what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.cli.common import inputs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(default_model_path):
    """Run a script of examples/ from another folder; gives what it prints."""

    def run(name: str) -> str:
        env = os.environ | {"PIPPIN_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        words = [sys.executable, str(EXAMPLES / name)]
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=EXAMPLES.parent.parent, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_quickstart_reads_the_invoice(example):
    assert example("quickstart.py") == "Marrow & Finch Bookbinders wants 1040 EUR by 11 April 2026.\n"


def test_demo_fills_the_form_calls_the_tool_and_counts(example):
    shown = example("demo.py")
    lines = [line.split() for line in shown.splitlines()]
    for name, value in (("invoice_number", "2026-117"), ("total", "1040"), ("payment_due", "2026-04-11")):
        assert [name, value] in lines
    assert "the model calls weekday(day='2026-04-11')" in shown
    assert "Python returns 11 April 2026 is a Saturday." in shown
    for turn in ("values", "tool call", "free answer"):
        assert any(line.startswith(f"{turn}  ") for line in shown.splitlines())


def test_the_json_schema_says_what_the_type_says():
    invoice = inputs.load_type(f"{EXAMPLES / 'forms.py'}:Invoice")
    schema = inputs.load_json_schema(EXAMPLES / "invoice.json")
    declared = invoice.model_json_schema()["properties"]
    assert list(schema["properties"]) == list(declared) == schema["required"]
    for name, field in schema["properties"].items():
        same = set(field) - {"type", "pattern"}  # pydantic writes the pattern with \d and the enum with its type
        assert {key: field[key] for key in same} == {key: declared[name][key] for key in same}


@pytest.mark.parametrize("name", ["letter.txt", "article.txt"])
def test_the_documents_are_prose_of_a_page(name):
    assert 200 <= len((EXAMPLES / name).read_text().split()) <= 350


def test_no_script_hides_a_module_of_python():
    # `python examples/demo.py` puts examples/ first on the path: a types.py there would break every import.
    assert {path.stem for path in EXAMPLES.glob("*.py")}.isdisjoint(sys.stdlib_module_names)
