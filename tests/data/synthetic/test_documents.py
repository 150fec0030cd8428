"""Generated documents: every fact stands where it is said to, in every kind, language and layout."""

import random
import re
from decimal import Decimal

import pytest

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import Fact
from pippin.session.extraction.values import find_dates, find_numbers, find_times

EVERY = [(kind, language, layout) for kind in documents.KINDS for language in documents.LANGUAGES
         for layout in documents.layouts(kind)]  # fmt: skip


def facts_of(spec, facts):
    """The facts of a document with their specifications."""
    for each in spec:
        found = facts.get(each.name)
        if isinstance(found, Fact):
            yield each, found
        elif isinstance(found, dict):
            yield from facts_of(each.fields, found)
        elif isinstance(found, list):
            for item in found:
                yield from [(each.fields[0], item)] if isinstance(item, Fact) else facts_of(each.fields, item)


@pytest.mark.parametrize(("kind", "language", "layout"), EVERY)
def test_facts_stand_where_they_are_said_to(kind, language, layout):
    texts = set()
    for seed in range(6):
        document = documents.sample(kind, language=language, layout=layout, seed=seed, noise=seed / 6)
        texts.add(document.text)
        assert (document.kind, document.language, document.layout) == (kind, language, layout)
        assert set(document.values) == {field.name for field in document.fields}
        found = list(facts_of(document.fields, document.values))
        assert found
        for spec, fact in found:
            assert document.text[fact.start : fact.end] == fact.text
            assert fact.text.strip() == fact.text != ""
            if spec.kind == "choice":
                assert fact.value in spec.choices
            if spec.kind == "flag":
                assert isinstance(fact.value, bool)
    assert len(texts) == 6


def test_values_are_those_that_an_independent_reader_finds():
    rng = random.Random(0)
    readers = {"date": find_dates, "time": find_times, "amount": find_numbers, "integer": find_numbers}
    checked = 0
    for _ in range(300):
        kind, language, layout = rng.choice(EVERY)
        document = documents.sample(kind, language=language, layout=layout, seed=rng)
        for spec, fact in facts_of(document.fields, document.values):
            if spec.kind not in readers:
                continue
            candidates = readers[spec.kind](document.text, language=language)
            inside = [each for each in candidates if each.start < fact.end and fact.start < each.end]
            if any(each.ambiguous for each in inside):
                continue
            values = {each.value.removesuffix(":00") if spec.kind == "time" else each.value for each in inside}
            wanted = str(fact.value)
            checked += 1
            if spec.kind in ("amount", "integer"):
                assert Decimal(wanted) in set(map(Decimal, values)), (fact, values)
            elif inside:
                assert wanted in values, (fact, values)
    assert checked > 500


def test_some_facts_are_absent_and_lists_have_any_length():
    lengths, absent = set(), 0
    for seed in range(60):
        facts = documents.sample("invoice", language="en", seed=seed).values
        lengths.add(len(facts["items"] or ()))
        absent += sum(fact is None for fact in facts.values())
    assert {0, 1, 4} <= lengths
    assert absent > 60


def test_the_same_seed_is_the_same_document():
    one, other = (documents.sample("receipt", language="fr", seed=5, noise=0.5) for _ in range(2))
    assert one == other


def test_noise_changes_words_and_no_fact():
    clean, noisy = (documents.sample("job_posting", language="de", seed=8, noise=noise) for noise in (0.0, 0.9))
    assert clean.text != noisy.text


def test_kinds_ask_for_different_things():
    names = [frozenset(field.name for field in documents.fields(kind)) for kind in documents.KINDS]
    assert len(set(names)) == len(names)


def test_a_document_keeps_to_one_theme():
    seen = set()
    for seed in range(150):
        facts = documents.sample("appointment", language="en", layout="lines", seed=seed).values
        brought = " ".join(each.text for each in facts["bring"] or ())
        theme = "garage" if "car keys" in brought else "doctor" if "insurance card" in brought else ""
        seen.add(theme)
        if theme == "garage" and facts["specialist"]:
            assert not facts["specialist"].text.startswith("Dr.")
        if theme == "doctor" and facts["provider"]:
            assert not any(each in facts["provider"].text for each in ("Motors", "Garage", "Auto", "Hair", "Barbers"))
    assert {"garage", "doctor"} <= seen


def test_amounts_fit_their_units():
    largest, twice = {}, 0
    for seed in range(40):
        items = documents.sample("recipe", language="de", seed=seed).values["ingredients"]
        units = [each["unit"].value for each in items]
        twice += len(set(units)) < len(units)  # items may share what is no name
        for each in items:
            unit = each["unit"].value
            largest[unit] = max(largest.get(unit, 0), each["quantity"].value)
            assert each["quantity"].value >= (20 if unit in ("gram", "milliliter") else 2)
            assert ("Eier" in each["name"].text) <= (unit == "piece")
    assert twice > 5
    assert largest["gram"] > 300 > 10 > max(largest["cup"], largest["tablespoon"])


def test_a_meter_has_gone_on_by_what_was_used():
    checked = 0
    for seed in range(40):
        facts = documents.sample("utility_bill", language="en", seed=seed).values
        before, used, after = (facts[name] for name in ("previous_reading", "consumption", "current_reading"))
        if before and used and after:
            checked += 1
            assert before.value + used.value == after.value
    assert checked > 5


def test_a_year_may_follow_another_one():
    jobs = []
    for seed in range(30):
        document = documents.sample("resume", language="fr", layout="table", seed=seed)
        jobs += [each for each in document.values["experience"] or () if each["to_year"]]
        assert document.values["birth_date"] is None or "1958" <= document.values["birth_date"].value < "1998"
    assert len(jobs) > 10
    for each in jobs:
        assert 1 <= each["to_year"].value - each["from_year"].value <= 6
        assert each["from_year"].text == f"{each['from_year'].value}"


@pytest.mark.parametrize("change", [{"kind": "poem"}, {"language": "la"}, {"layout": "spiral"}])
def test_what_there_is_not_is_refused(change):
    wanted = {"kind": "invoice", "language": "en", "layout": "table"} | change
    kind = wanted.pop("kind")
    with pytest.raises(InvalidArgument, match=f"{next(iter(change.values()))!r}"):
        documents.sample(kind, **wanted, seed=0)


def test_a_card_has_most_values_without_labels():
    alone = 0
    for seed in range(40):
        document = documents.sample("contact_card", language="en", layout="card", seed=seed)
        lines = document.text.replace(" | ", "\n").replace(" · ", "\n").splitlines()
        name = document.values["name"].text
        assert name in lines  # no label before it
        phone = document.values["phone"]
        alone += phone is not None and phone.text in lines
    assert alone == 0  # one number says nothing about whose it is


def test_items_of_a_list_are_lines_of_a_log():
    several = 0
    for seed in range(60):
        document = documents.sample("incident_report", language="en", layout="log", seed=seed)
        found = document.values["log_lines"] or ()
        starts = {document.text.rfind("\n", 0, each["message"].start) for each in found}
        assert len(starts) == len(found)
        several += len(found) > 1
    assert several > 10


def test_amended_documents_show_two_values_and_the_new_one_is_the_fact():
    marks, shown = ("Neu", "Jetzt", "Aktuell", "Ab jetzt", "Gültig", "Berichtigt", "Korrigiert", "Stand jetzt"), 0
    for seed in range(120):
        document = documents.sample("invoice", language="de", layout="amended", seed=seed)
        text, fact = document.text, document.values["total"]
        line = text[text.rfind("\n", 0, fact.start) + 1 : text.find("\n", fact.end)]
        if marked := re.search(r" \((.+)\): ", line):
            assert marked[1] in marks  # of two lines, the one that says that it is the new one
            shown += 1
        elif any(arrow in line for arrow in ("->", "→", "=>")):
            assert re.search(r"(->|→|=>) \D*$", line[: fact.start - text.rfind("\n", 0, fact.start) - 1])
            shown += 1
    assert shown > 20
