"""The rules of the ledger: how evidence becomes a verdict, and everything that it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pippin.claims import Evidence, Scale, claim
from pippin.claims.ledger import verdict
from pippin.core.errors import ClaimError

TEXTS = {"source": "arXiv:0000.00000", "paper": "it is larger", "setting": "two numbers", "accept": "a > b"}


def measured(**figures: float) -> Evidence:
    evidence = Evidence()
    for name, value in figures.items():
        evidence.add(name, value)
    return evidence


@given(st.dictionaries(st.text(min_size=1), st.booleans(), min_size=1))
def test_verdict_counts_the_conditions_that_hold(conditions):
    held = sum(conditions.values())
    expected = {0: "not reproduced", len(conditions): "reproduced"}.get(held, "partly")
    assert verdict(conditions) == expected


def test_without_conditions_nothing_was_run():
    assert Evidence().verdict == "not run"


@pytest.mark.parametrize("true", [True, np.bool_(True), np.array(True), torch.tensor(True), torch.tensor(2.0) > 1])
def test_truth_values_of_other_libraries_count(true):
    assert measured(a=1).accept(true).verdict == "reproduced"
    assert measured(a=1).accept(first=true, second=False).verdict == "partly"


@pytest.mark.parametrize("wrong", [0.95, 1, "yes", torch.tensor(0.95), [True]])
def test_a_forgotten_comparison_is_refused(wrong):
    with pytest.raises(ClaimError, match=r"condition 'accept' is .* compare it"):
        measured(a=1).accept(wrong)


def test_accept_is_said_once_and_after_measuring():
    with pytest.raises(ClaimError, match="before any figure"):
        Evidence().accept(True)
    with pytest.raises(ClaimError, match="at least one condition"):
        measured(a=1).accept()
    evidence = measured(a=1).accept(False)
    with pytest.raises(ClaimError, match="already called"):
        evidence.accept(True)
    assert evidence.verdict == "not reproduced"


def test_each_returns_the_values_in_order_and_mean_their_mean():
    evidence = Evidence()
    for seed, value in enumerate([3.0, 1.0, torch.tensor(2.0), np.float32(6.0)]):
        evidence.add("x", value, seed=seed, unit="s")
    assert evidence.each("x") == [3.0, 1.0, 2.0, 6.0]
    assert evidence.mean("x") == 3.0


def test_each_of_an_unknown_name_is_an_error_because_all_of_nothing_holds():
    with pytest.raises(ClaimError, match=r"no figure is called 'b'; measured: 'a'"):
        measured(a=1).each("b")


def test_figures_are_not_added_twice_nor_in_two_units():
    evidence = Evidence()
    evidence.add("x", 1, seed=0, unit="s")
    with pytest.raises(ClaimError, match="already added for seed 0"):
        evidence.add("x", 2, seed=0, unit="s")
    with pytest.raises(ClaimError, match="in 's' and cannot also be in 'ms'"):
        evidence.add("x", 2, seed=1, unit="ms")
    with pytest.raises(ClaimError, match="needs a name"):
        evidence.add(" ", 2)


def test_report_gives_the_mean_and_the_sample_deviation():
    evidence = Evidence()
    values = [1.0, 2.0, 4.0]
    for seed, value in enumerate(values):
        evidence.add("x", value, seed=seed, unit="s")
    evidence.add("once", math.nan)
    many, once = evidence.report("t").rows
    assert (many.value, many.unit) == (pytest.approx(np.mean(values)), "s")
    assert many.spread == pytest.approx(np.std(values, ddof=1))
    assert math.isnan(once.value)
    assert once.spread is None


def test_the_decorator_makes_a_claim_that_measures():
    @claim(id="larger", **TEXTS)
    def run(scale: Scale) -> Evidence:
        evidence = measured(a=2 if scale.name == "laptop" else 0, b=1)
        return evidence.accept(evidence.mean("a") > evidence.mean("b"))

    assert (run.id, run.accept) == ("larger", "a > b")
    assert run(Scale("laptop")).verdict == "reproduced"
    assert run(Scale("smoke")).verdict == "not reproduced"


@pytest.mark.parametrize("id", ["", "Two-Bit", "two_bit", "-two", "two--bit", "two bit"])
def test_ids_are_words_joined_by_hyphens(id):
    with pytest.raises(ClaimError, match="lower-case words"):
        claim(id=id, **TEXTS)(lambda scale: Evidence())


@pytest.mark.parametrize("field", list(TEXTS))
def test_no_text_may_be_empty(field):
    with pytest.raises(ClaimError, match=f"'x' has an empty '{field}'"):
        claim(id="x", **(TEXTS | {field: " "}))(lambda scale: Evidence())


def test_a_claim_must_return_evidence_with_an_answer():
    with pytest.raises(ClaimError, match="returned NoneType"):
        claim(id="x", **TEXTS)(lambda scale: None)(Scale("smoke"))  # type: ignore[arg-type,return-value]
    with pytest.raises(ClaimError, match=r"never called evidence\.accept"):
        claim(id="x", **TEXTS)(lambda scale: measured(a=1))(Scale("smoke"))


def test_scales_are_three():
    with pytest.raises(ClaimError, match="'huge' is not known; use one of: smoke, laptop, gpu"):
        Scale("huge")  # type: ignore[arg-type]
