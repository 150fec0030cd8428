"""The page of extraction says what its benchmark counted."""

import json
import re
import sys
from types import SimpleNamespace

import extraction_figures
import pytest
import run_benchmarks

sys.path.append(str(run_benchmarks.ROOT / "benchmarks"))
import extraction as benchmark

FORM = SimpleNamespace(
    schema={"type": "object", "properties": {name: {"type": "string"} for name in "ab"}, "required": []},
    expected={"a": "Roe", "b": None},
    text="Roe and Doe",
)
RIGHT, WRONG, INVENTED = {"a": "Roe"}, {"a": "Doe", "b": "Doe"}, {"a": "Joe"}


def tally(name, *found, seconds=1.0, **given):
    kept = benchmark.Tally(name, **given)
    for value in found:
        kept.add(FORM, value, seconds)
    return kept


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Write rows of the benchmark where the page looks for them."""
    monkeypatch.setattr(extraction_figures, "RECORDS", tmp_path)

    def write(name, rows):
        kept = [vars(row) | {"what": f"{title}, {row.what}"} for title, row in rows]
        machine = {"threads": 2, "instruction_sets": ["avx2"]}
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": kept, "machine": machine}))

    return write


def rows_of(title, ours, *peers):
    return [(title, row) for peer in peers for row in benchmark.compared_with(ours, peer, "")]


def sides(**given):
    return [
        tally("small without adapter", RIGHT, RIGHT, WRONG, WRONG, seconds=3.0),
        tally("label patterns", WRONG, WRONG, WRONG, RIGHT, timed=False),
        tally("llama.cpp (0.3)", INVENTED, RIGHT, seconds=12.0, **given),
        tally("langextract 1.7 over llama.cpp", None, seconds=40.0),
    ]


def test_each_cell_is_the_figure_of_its_side_on_all_its_documents(record):
    ours = tally("small with the built-in adapter", RIGHT, RIGHT, RIGHT, WRONG, seconds=2.0)
    record("extraction", [row for name in extraction_figures.SETS for row in rows_of(name, ours, *sides())])
    shown = extraction_figures.default_model().splitlines()
    assert shown[2] == "| kinds that it was not trained on | 75 % | 50 % | 25 % | 50 % | 0 % |"
    assert shown[6] == "| written values that the text does not say | 0 | 0 | 0 | 4 of 8 |  |"
    assert shown[7].endswith("2 cores with AVX2 | 2.0 to 2.0 | 3.0 to 3.0 |  | 12 to 12 | 40 to 40 |")
    assert shown[9].endswith("the adapter leaves 75 % empty, of those in letters 75 %.")


def test_of_larger_models_each_has_its_own_figures(record):
    rows = []
    for model, found in zip(extraction_figures.MODELS, ((RIGHT, WRONG), (RIGHT, RIGHT)), strict=True):
        for name in ("unseen kinds", "letters"):
            ours, alone = tally(f"{model} with the adapter", *found), tally(f"{model} without adapter", WRONG, WRONG)
            rows += rows_of(name, ours, alone, *sides()[1:])
    record("extraction_larger", rows)
    shown = extraction_figures.larger_models()
    assert "| Qwen2.5 Coder 0.5B | 50 %, 0 % | 50 %, 0 % | 1.0 to 1.0 |" in shown
    assert "| Qwen2.5 Coder 1.5B | 100 %, 0 % | 100 %, 0 % | 1.0 to 1.0 |" in shown
    assert "an adapter leaves 50 % and 100 % empty, in place of 0 % and 0 %." in shown


def test_a_run_without_a_peer_does_not_make_the_page(record):
    ours = tally("small with the built-in adapter", RIGHT)
    absent = benchmark.Tally("llama.cpp (not installed)", installed=False)
    given = [absent if side.name.startswith("llama.cpp") else side for side in sides()]
    record("extraction", [row for name in extraction_figures.SETS for row in rows_of(name, ours, *given)])
    with pytest.raises(SystemExit, match=re.escape("unseen kinds, fields right, llama.cpp (; there are [None]")):
        extraction_figures.default_model()
