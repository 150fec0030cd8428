"""The rules of the ledger: how evidence becomes a verdict, and everything that it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.claims.ledger import Prose, turned_away, verdict
from pippin.core.errors import ClaimError

TEXTS = {"source": "arXiv:0000.00000", "headline": "it is larger", "setting": "two numbers"}
ABOVE = Condition("above", "a above 1", lambda e, arm: e.min("a", arm) > 1, headline=True)
RULE = {"method": "m", "conditions": (ABOVE,)}
SMALL = Condition("small", "b below 1", lambda e, arm: e.max("b", arm) < 1)


def make(*, conditions=(ABOVE, SMALL), negative=("trivial",), positive=None, measure=lambda scale: Evidence(), **rest):
    return claim(
        id="larger",
        **TEXTS,
        method="ours",
        conditions=conditions,
        negative_controls=negative,
        positive_control=positive,
        **rest,
    )(measure)


def measured(**arms: dict[str, float]) -> Evidence:
    evidence = Evidence()
    for arm, figures in arms.items():
        for name, value in figures.items():
            evidence.add(name, value, arm=arm)
    return evidence


def judged(evidence, **settings):
    one = make(**settings)
    return verdict(one, one.ask(evidence))


GOOD, BAD = {"a": 2, "b": 0}, {"a": 0, "b": 0}


def test_reproduced_needs_the_method_to_pass_and_the_control_to_fail():
    evidence = measured(ours=GOOD, trivial=BAD)
    assert judged(evidence) == ("reproduced", ())
    one = make()
    assert turned_away(one, one.ask(evidence), "trivial") == ["above"]


@pytest.mark.parametrize(
    ("arms", "settings", "expected", "reason"),
    [
        ({"ours": GOOD, "trivial": GOOD}, {}, "partly", "the negative control 'trivial' passes the rule"),
        ({"ours": GOOD}, {}, "partly", "the negative control 'trivial' was not measured"),
        ({"ours": {"a": 2, "b": 2}, "trivial": BAD}, {}, "partly", "small: fails"),
        ({"ours": {"a": 2}, "trivial": BAD}, {}, "partly", "small: not measured"),
        ({"ours": {"b": 0}, "trivial": {"b": 2}}, {}, "partly", "the paper's headline is not measured"),
        ({"ours": BAD, "trivial": BAD}, {}, "not reproduced", "above: fails"),
        ({"trivial": BAD}, {}, "not run", None),
        ({"ours": GOOD}, {"conditions": (SMALL,), "negative": ()}, "partly", "the paper's headline is not measured"),
        (
            {"ours": GOOD, "trivial": BAD, "oracle": {"a": 0, "b": 0}},
            {"positive": "oracle"},
            "partly",
            "the positive control 'oracle' fails: the experiment could not have worked",
        ),
        (
            {"ours": GOOD, "trivial": BAD},
            {"positive": "oracle"},
            "partly",
            "the positive control 'oracle' was not measured",
        ),
        ({"ours": GOOD, "trivial": BAD, "oracle": {"a": 2}}, {"positive": "oracle"}, "reproduced", None),
    ],
)
def test_what_keeps_a_claim_from_reproduced(arms, settings, expected, reason):
    found, reasons = judged(measured(**arms), **settings)
    assert found == expected
    assert reason in reasons if reason else found in ("reproduced", "not run")


def test_a_condition_may_be_meant_for_the_positive_control_in_place_of_the_headline():
    small = Condition("small", "b below 1", SMALL.predicate, positive=True)
    evidence = measured(ours=GOOD, trivial=BAD, oracle={"a": 0, "b": 0})
    assert judged(evidence, conditions=(ABOVE, small), positive="oracle")[0] == "reproduced"


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=4), st.integers(0, 3))
def test_what_was_not_measured_never_adds_up_to_reproduced(held, headline):
    def condition(index, value):
        name = "present" if value is not None else "absent"
        return Condition(
            str(index), "t", lambda e, arm: e.mean(name, arm) == 1 and bool(value), headline=index == headline
        )

    conditions = tuple(condition(index, value) for index, value in enumerate(held))
    found, _ = judged(measured(ours={"present": 1}), conditions=conditions, negative=())
    assert (found == "reproduced") == (all(held) and headline < len(held))


@pytest.mark.parametrize("true", [np.bool_(True), np.array(True), torch.tensor(2.0) > 1])
def test_truth_values_of_other_libraries_count(true):
    assert Condition("c", "t", lambda e, arm: true).ask(Evidence(), "ours") is True


@pytest.mark.parametrize("wrong", [0.95, 1, "yes", torch.tensor(0.95), [True]])
def test_a_forgotten_comparison_is_refused(wrong):
    with pytest.raises(ClaimError, match=r"condition 'c' is .* compare it"):
        Condition("c", "t", lambda e, arm: wrong).ask(Evidence(), "ours")


def test_figures_of_an_arm_are_found_by_their_label_too():
    evidence = measured(ours={"a": 3})
    assert evidence.each("a", "ours") == evidence.each("a, ours") == [3.0]
    with pytest.raises(ClaimError, match=r"no figure is called 'b, ours'; measured: 'a, ours'"):
        evidence.each("b", "ours")


def test_paired_is_students_interval_over_the_shared_seeds():
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(1, 1, 6), generator.normal(0, 1, 6)
    evidence = Evidence()
    for seed in range(6):
        evidence.add("x", ours[seed], arm="ours", seed=seed)
        evidence.add("x", theirs[seed], arm="theirs", seed=seed)
    evidence.add("x", 100.0, arm="ours", seed=6)  # without a partner it does not count
    found = evidence.paired("x", "ours", "theirs")
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.mean, found.pairs) == (pytest.approx((ours - theirs).mean()), 6)


def test_two_pairs_say_nothing_about_their_spread():
    evidence = Evidence()
    for seed in range(2):
        evidence.add("x", 5.0, arm="ours", seed=seed)
        evidence.add("x", 1.0, arm="theirs", seed=seed)
    found = evidence.paired("x", "ours", "theirs")
    assert (found.mean, found.low, found.high) == (4.0, -math.inf, math.inf)
    evidence.add("x", 1.0, arm="late", seed=9)
    with pytest.raises(ClaimError, match="share no seed"):
        evidence.paired("x", "ours", "late")


def test_extremes_of_nan_hold_no_bound():
    evidence = Evidence()
    evidence.add("x", 1.0, seed=0)
    evidence.add("x", math.nan, seed=1)
    assert math.isnan(evidence.min("x"))
    assert math.isnan(evidence.max("x"))


def test_figures_are_not_added_twice_nor_in_two_units():
    evidence = Evidence()
    evidence.add("x", 1, arm="a", seed=0, unit="s")
    with pytest.raises(ClaimError, match="'x, a' was already added for seed 0"):
        evidence.add("x", 2, arm="a", seed=0, unit="s")
    with pytest.raises(ClaimError, match="in 's' and cannot also be in 'ms'"):
        evidence.add("x", 2, arm="a", seed=1, unit="ms")
    with pytest.raises(ClaimError, match="needs a name"):
        evidence.add(" ", 2)


def test_report_gives_the_mean_and_the_sample_deviation():
    evidence = Evidence()
    values = [1.0, 2.0, 4.0]
    for seed, value in enumerate(values):
        evidence.add("x", value, arm="a", seed=seed, unit="s")
    evidence.add("once", math.nan)
    many, once = evidence.report("t").rows
    assert (many.name, many.value, many.unit) == ("x, a", pytest.approx(np.mean(values)), "s")
    assert many.spread == pytest.approx(np.std(values, ddof=1))
    assert math.isnan(once.value)
    assert once.spread is None


def test_a_claim_measures_and_is_judged():
    one = make(measure=lambda scale: measured(ours=BAD if scale.is_smoke else GOOD, trivial=BAD))
    assert one(Scale("laptop")).verdict == "reproduced"
    found = one(Scale("smoke"))
    assert (found.verdict, found.reasons) == (
        "not reproduced",
        ("above: fails",),
    )


def test_a_rule_in_prose_of_an_old_run_is_at_most_partly():
    rule = Prose(("larger", "smaller"))
    assert verdict(rule, {"": {"larger": True, "smaller": True}})[0] == "partly"


@pytest.mark.parametrize("id", ["", "Two-Bit", "two_bit", "-two", "two--bit", "two bit"])
def test_ids_are_words_joined_by_hyphens(id):
    with pytest.raises(ClaimError, match="lower-case words"):
        claim(id=id, **TEXTS, **RULE)(lambda scale: Evidence())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": " "}, "empty 'source'"),
        ({"headline": ""}, "empty 'headline'"),
        ({"conditions": ()}, "empty 'conditions'"),
        ({"method": ""}, "empty 'method'"),
        ({"conditions": (ABOVE, ABOVE)}, "two conditions of one name"),
        ({"version": 3, "superseded": {1: "too soft"}}, "what was wrong with version 2"),
    ],
)
def test_a_claim_is_refused_before_it_runs(change, message):
    with pytest.raises(ClaimError, match=message):
        claim(**({"id": "x"} | TEXTS | RULE | change))(lambda scale: Evidence())


def test_a_claim_must_return_evidence_with_figures():
    with pytest.raises(ClaimError, match="returned NoneType"):
        make(measure=lambda scale: None)(Scale("smoke"))  # type: ignore[arg-type,return-value]
    with pytest.raises(ClaimError, match="measured nothing"):
        make()(Scale("smoke"))


def test_scales():
    with pytest.raises(ClaimError, match="'huge' is not known; use one of: smoke, laptop, long, gpu"):
        Scale("huge")
    assert len(Scale("smoke").seeds) == 1
    steps = Scale.choose(smoke=1, laptop=2, gpu=5)
    assert [steps[Scale(name)] for name in ("smoke", "laptop", "long", "gpu")] == [1, 2, 2, 5]


def test_a_finished_part_is_measured_once_for_each_folder(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        return {"loss": 0.1, "diverged": math.inf}

    scale = Scale("long", path=tmp_path)
    first = scale.measured("soup, seed 0", measure)
    assert scale.measured("soup, seed 0", measure) == first == {"loss": 0.1, "diverged": math.inf}
    assert len(calls) == 1
    assert scale.checkpoints("soup, seed 0") == scale.checkpoints("soup, seed 0") != scale.checkpoints("soup, seed 1")
    loose = Scale("smoke")
    loose.measured("soup, seed 0", measure)
    assert len(calls) == 2


def test_pairs_are_values_of_the_same_seed():
    evidence = Evidence()
    for seed, value in enumerate((1.0, 2.0)):
        evidence.add("x", value, arm="ours", seed=seed)
        evidence.add("x", -value, arm="theirs", seed=seed)
    evidence.add("x", 3.0, arm="late", seed=2)
    assert evidence.pairs("x", "ours", "theirs") == [(1.0, -1.0), (2.0, -2.0)]
    with pytest.raises(ClaimError, match="not measured on the same seeds of 'x'"):
        evidence.pairs("x", "ours", "late")
