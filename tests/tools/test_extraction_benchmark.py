"""The benchmark of extraction: its controls fill in what is easy, and it counts what a reader would count."""

import json
import sys
from types import SimpleNamespace

import jsonschema
import pytest
import run_benchmarks

import pippin
from pippin.evaluate.extraction import ExtractionScore, choices_of, score
from pippin.recipes.train.task_data import extraction
from pippin.session.session import Session

sys.path.append(str(run_benchmarks.ROOT / "benchmarks"))
import _extraction_arms as arms
import extraction as benchmark


def schema(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


TEXT, NUMBER, DATE = {"type": "string"}, {"type": "number"}, {"type": "string", "format": "date"}
NULLABLE = {"anyOf": [TEXT, {"type": "null"}]}
TEXTS = {"type": "array", "items": TEXT}


def test_what_is_missing_counts_as_null():
    item = SimpleNamespace(schema=schema(a=TEXT, b=TEXT, c=TEXT), expected={"a": "Roe"}, text="Roe and Doe")
    tally = benchmark.Tally("someone")
    tally.add(item, {"a": "Roe", "b": "Doe", "d": "no field of the form"}, 2.0)
    tally.add(item, None, 4.0)
    assert tally.figures(1) == {
        "fields right": 100.0,
        "empty fields left empty": 50.0,
        "written values that the text says": 100.0,
        "documents with everything right": 0.0,
        "a document": 2.0,
    }
    both = tally.figures(2)
    assert (both["fields right"], both["empty fields left empty"], both["a document"]) == (50.0, 25.0, 3.0)
    assert tally.failed == 1


def test_rows_are_of_the_documents_that_both_had():
    item = SimpleNamespace(schema=schema(a=TEXT), expected={"a": "Roe"}, text="Roe")
    ours, peer = benchmark.Tally("ours"), benchmark.Tally("peer")
    for value in ({"a": "Roe"}, {"a": "Doe"}):
        ours.add(item, value, 1.0)
    peer.add(item, {"a": "Doe"}, 1.0)
    rows = {row.what: row for row in benchmark.compared_with(ours, peer, "")}
    assert rows["ours: fields right"].ours == 100.0
    assert rows["ours: written values that the text says"].peer_value == 0.0
    absent = benchmark.compared_with(ours, benchmark.Tally("peer", installed=False), "")
    assert {row.peer_value for row in absent} == {None}
    assert len(absent) == 4  # no field here is empty


def test_the_letters_say_what_is_expected():
    letters = benchmark.letters()
    assert len(letters) >= 20
    assert len({item.language for item in letters}) >= 5
    for item in letters:
        jsonschema.validate(item.expected, item.schema)
        assert set(item.expected) == set(item.schema["properties"])
        known = score(item.expected, item.expected, item.text)
        assert (known.right, known.invented) == (known.fields, 0)


def test_the_adapter_reads_letters_that_no_generator_wrote(default_model_path):
    """Two fields of three are right, many more than without the adapter, and nothing is invented."""
    session, totals = Session(pippin.load(default_model_path)), dict[str | None, ExtractionScore]()
    for adapter in ("auto", None):
        totals[adapter] = ExtractionScore()
        for item in benchmark.letters():
            found = session.extract(item.text, item.schema, adapter=adapter).content
            totals[adapter] += score(item.expected, found, item.text, choices=choices_of(item.schema))
    assert totals["auto"].accuracy > 0.65
    assert totals["auto"].accuracy > totals[None].accuracy + 0.1
    assert totals["auto"].invented == 0


def test_extractions_of_classes_become_the_value_of_the_form():
    table = {"type": "array", "items": schema(name=TEXT, price=NUMBER)}
    form = schema(buyer=schema(name=TEXT, day=DATE), rows=table, tags=TEXTS, note=NULLABLE)
    found = [
        SimpleNamespace(extraction_class=name, extraction_text=text, attributes=attributes)
        for name, text, attributes in (
            ("buyer.name", "Ann Roe", None),
            ("buyer.day", "3 May 2024", None),
            ("rows", "desk", {"name": "desk", "price": "9.50 EUR"}),
            ("tags", "new", None),
            ("tags", "blue", None),
            ("other", "what nobody asked for", None),
        )
    ]
    assert arms._assembled(form, found) == {
        "buyer": {"name": "Ann Roe", "day": "2024-05-03"},
        "rows": [{"name": "desk", "price": 9.5}],
        "tags": ["new", "blue"],
        "note": None,
    }


def test_the_example_of_another_form_says_what_its_document_says():
    text, known = arms.example("support_ticket")
    assert all(said in text for _, said, _ in known)
    records = [attributes for *_, attributes in known if attributes]
    assert records
    assert all(said in text for record in records for said in record.values())


def test_every_field_is_described():
    table = {"type": "array", "items": schema(name=TEXT, price=NUMBER)}
    form = schema(
        buyer=schema(name={**TEXT, "description": "who pays"}), rows=table, state={"enum": ["open", "closed"]}
    )
    assert list(arms._described(form)) == [
        "- buyer.name: who pays",
        "- rows (several, with the attributes name, price)",
        "- state (one of open, closed)",
    ]


@pytest.mark.slow
def test_two_documents_with_and_without_a_model(capsys, monkeypatch):
    words = ["extraction.py", "--quick", "--json", "--arms", "plain,patterns,majority", "--sets", "kinds,letters"]
    monkeypatch.setattr(sys, "argv", words)
    benchmark.main()
    rows = json.loads(capsys.readouterr().out)
    assert {row["peer"] for row in rows} == {"label patterns", "majority"}
    assert all("without adapter" in row["what"] for row in rows)
    assert {row["what"].split(",")[0] for row in rows} == {"unseen kinds", "letters"}


def test_the_sets_have_what_no_adapter_was_trained_on():
    kinds, layout, language = benchmark.HELD_OUT
    assert {item.kind for item in extraction.items(20, seed=0, split=benchmark.split_of("kinds"))} <= set(kinds)
    layouts = extraction.items(20, seed=0, split=benchmark.split_of("layouts"))
    assert {item.layout for item in layouts} == {layout}
    assert not {item.kind for item in layouts} & set(kinds)
    languages = extraction.items(20, seed=0, split=benchmark.split_of("languages"))
    assert {item.language for item in languages} == {language}
    assert layout not in {item.layout for item in languages}
    for item in [*layouts, *languages]:
        assert (item.layout == layout) != (item.language == language)


@pytest.mark.parametrize(
    "words", [["--arms", "abacus"], ["--items", "0"], ["--sets", "receipts"], ["--adapter", "none", "none"]]
)
def test_wrong_words_are_refused(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["extraction.py", *words])
    with pytest.raises(SystemExit) as error:
        benchmark.main()
    assert error.value.code == 2
