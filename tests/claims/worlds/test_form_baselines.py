"""The controls of extraction fill in what is easy, and worse than the facts."""

from pippin.claims.worlds.form_baselines import LabelPatterns, Majority
from pippin.evaluate.extraction import ExtractionScore, score
from pippin.recipes.train.task_data import ExampleSplit
from pippin.recipes.train.task_data.extraction import items

INVOICE = """Invoice
Invoice number: RX-2024/17
Due date | 3 May 2024 | Paid | yes
Total:  1,250.50 EUR
Items:
- two chairs
- a desk

Thank you."""


def schema(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


TEXT, NUMBER, DATE = {"type": "string"}, {"type": "number"}, {"type": "string", "format": "date"}
NULLABLE = {"anyOf": [TEXT, {"type": "null"}]}
TEXTS = {"type": "array", "items": TEXT}


def test_labels_are_found_in_the_styles_of_names():
    form = schema(
        invoiceNumber=TEXT, DUE_DATE=DATE, total=NUMBER, paid={"type": "boolean"}, items=TEXTS, vat_id=NULLABLE
    )
    assert LabelPatterns().fill(INVOICE, form) == {
        "invoiceNumber": "RX-2024/17",
        "DUE_DATE": "2024-05-03",
        "total": 1250.5,
        "paid": True,
        "items": ["two chairs", "a desk"],
        "vat_id": None,
    }


def test_without_a_label_only_what_must_be_there_is_filled_in():
    form = schema(["sent_on", "f7"], sent_on=DATE, f7=NUMBER, shipped=DATE)
    found = LabelPatterns().fill("It left us on 3 May 2024 with 40 kg.", form)
    assert found == {"sent_on": "2024-05-03", "f7": 40, "shipped": None}


def test_a_description_finds_a_label_that_a_name_does_not():
    form = schema(f1={**TEXT, "description": "number of the invoice"})
    assert LabelPatterns().fill(INVOICE, form) == {"f1": "RX-2024/17"}


def test_the_majority_is_that_of_other_documents():
    choice = {"enum": ["open", "closed"]}
    others = [(schema(state=choice), {"state": "closed"})] * 2 + [(schema(state=choice), {"state": "open"})]
    form = schema(["state", "who"], state={"enum": ["closed", "open"]}, who=TEXT, note=TEXT, items=TEXTS)
    found = Majority(others).fill("Dear Ann Roe, all is well.", form)
    assert found == {"state": "closed", "who": "Dear Ann Roe,", "note": None, "items": []}


def test_patterns_do_better_than_nothing_and_worse_than_the_facts():
    total = ExtractionScore()
    for item in items(40, seed=0, split=ExampleSplit(languages=("en",))):
        total += score(item.expected, LabelPatterns().fill(item.text, item.schema), item.text)
    assert 0.05 < total.accuracy < 0.7
