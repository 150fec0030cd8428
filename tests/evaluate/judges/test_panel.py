"""A panel's report against made judges whose common cause is known, and every panel that cannot be measured."""

import json
import math

import numpy as np
import pytest
import torch

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.judges.aggregation import majority
from pippin.evaluate.judges.independence import Cells, plurality_is_right
from pippin.evaluate.judges.panel import JudgePanel, effective_votes

FAST = {"num_bootstrap": 400, "num_permutations": 199, "num_null": 400}
FEW = pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")


def made(rho, k=9, n=1000, accuracy=0.68, seed=0, classes=2):
    """Gold labels and votes: errors share a cause of weight rho; a wrong label is any other one."""
    from scipy.stats import norm

    rng = np.random.default_rng(seed)
    cause = np.sqrt(rho) * rng.standard_normal((n, 1)) + np.sqrt(1 - rho) * rng.standard_normal((n, k))
    gold = rng.integers(0, classes, n)
    wrong = cause < norm.ppf(1 - accuracy)
    return np.where(wrong, (gold[:, None] + rng.integers(1, classes, (n, k))) % classes, gold[:, None]), gold


def expected(rho, k=9, accuracy=0.68):
    """Correlation of errors, and accuracy of the majority, by integrating over the common cause."""
    from scipy.stats import binom, norm

    z, step = np.linspace(-9, 9, 20_001, retstep=True)
    weight = norm.pdf(z) * step
    wrong = norm.cdf((norm.ppf(1 - accuracy) - np.sqrt(rho) * z) / np.sqrt(1 - rho))
    rate = 1 - accuracy
    phi = ((weight * wrong**2).sum() - rate**2) / (rate * accuracy)
    return phi, (weight * binom.cdf((k - 1) // 2, k, wrong)).sum(), (weight * wrong**k).sum()


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7])
def test_a_common_cause_is_found_and_its_cost_too(rho):
    labels, gold = made(rho, n=4000)
    report = JudgePanel.from_labels(labels, gold).report(**FAST)
    phi, accuracy, all_wrong = expected(rho)
    independent = expected(0.0)[1]
    assert report.mean_phi == pytest.approx(phi, abs=0.02)
    assert report.n_eff == pytest.approx(9 / (1 + 8 * report.mean_phi))
    assert report.n_eff_ci[0] < 9 / (1 + 8 * phi) < report.n_eff_ci[1]
    assert report.accuracy == pytest.approx(accuracy, abs=0.025)
    assert report.null_accuracy == pytest.approx(independent, abs=0.015)
    assert report.gap == pytest.approx(independent - accuracy, abs=0.025)
    assert report.gap_ci[0] < independent - accuracy < report.gap_ci[1]
    assert report.all_wrong[0] == pytest.approx(all_wrong, abs=0.012)
    assert (report.p_value < 0.01) == (rho > 0)
    assert report.scaling[-1].mean == pytest.approx(report.n_eff)
    assert len(report.scaling) == 8
    assert report.checks["gap from split halves"] == pytest.approx(report.gap, abs=0.01)


def test_difficulty_that_is_known_explains_what_it_makes():
    """Judges who err by themselves, but all more often on hard items."""
    rng = np.random.default_rng(0)
    gold, hard = rng.integers(0, 2, 3000), rng.integers(0, 3, 3000)
    wrong = rng.random((3000, 7)) < np.array([0.05, 0.25, 0.48])[hard][:, None]
    labels = np.where(wrong, 1 - gold[:, None], gold[:, None])
    report = JudgePanel.from_labels(labels, gold, hard).report(**FAST)
    assert report.mean_phi > 0.1
    assert report.p_value > 0.01
    assert report.levels == 3
    assert report.gap_ci[0] < 0 < report.gap_ci[1]
    assert report.checks["gap without levels"] > 0.03
    blind = JudgePanel.from_labels(labels, gold).report(**FAST)
    assert blind.p_value < 0.01
    assert blind.gap == pytest.approx(report.checks["gap without levels"], abs=1e-9)


@FEW
def test_intervals_are_those_of_a_plain_bootstrap():
    labels, gold = made(0.4, k=5, n=400, classes=3, seed=3)
    report = JudgePanel.from_labels(labels, gold).report(num_bootstrap=4000, num_permutations=199, num_null=400)
    wrong, rng = labels != gold[:, None], np.random.default_rng(9)
    plain = [effective_votes(wrong[rng.integers(0, 400, 400)]) for _ in range(1500)]
    np.testing.assert_allclose(report.n_eff_ci, np.quantile(plain, [0.025, 0.975]), rtol=0.02)


def test_the_judge_who_harms_is_named():
    labels, gold = made(0.1, k=4, n=2000, accuracy=0.75)
    rng = np.random.default_rng(5)
    labels = np.column_stack([labels, np.where(rng.random(2000) < 0.2, gold, 1 - gold)])
    panel = JudgePanel.from_labels(labels, gold, judges=["Ada", "Bo", "Cy", "Di", "Eve"])
    report = panel.report(**FAST)
    assert "Without Eve it is" in report.advice
    worst = report.leave_one_out[4]
    without = JudgePanel.from_labels(labels[:, :4], gold)
    assert worst.votes == pytest.approx(effective_votes(without.errors) - report.n_eff)
    assert worst.accuracy_ci[0] <= worst.accuracy <= worst.accuracy_ci[1]
    assert report.best_judge != "Eve"
    assert report.judge_accuracy[4] == pytest.approx(0.2, abs=0.03)
    assert report.aggregators["weighted by accuracy"] >= report.aggregators["majority"]


@FEW
def test_the_best_of_equal_judges_is_not_flattered():
    """Chosen on the items it is scored on, the best of nine coins would look better than a coin."""
    rng = np.random.default_rng(1)
    reports = []
    for _ in range(30):
        gold, labels = rng.integers(0, 2, 100), rng.integers(0, 2, (100, 9))
        reports.append(JudgePanel.from_labels(labels, gold).report(**FAST))
    assert np.mean([max(report.judge_accuracy) for report in reports]) > 0.55
    assert np.mean([report.best_judge_accuracy for report in reports]) == pytest.approx(0.5, abs=0.02)
    assert np.mean([report.best_judge_advantage for report in reports]) == pytest.approx(0.0, abs=0.02)


@FEW
def test_the_best_judge_leads_a_panel_of_guessers_by_what_it_is_better():
    rng = np.random.default_rng(3)
    gold, guesses = rng.integers(0, 2, 4000), rng.integers(0, 2, (4000, 2))
    able = np.where(rng.random(4000) < 0.9, gold, 1 - gold)
    report = JudgePanel.from_labels(np.column_stack([guesses, able]), gold).report(**FAST)
    # the panel is right if the able judge and a guesser are, or else both guessers: 0.9 * 3/4 + 0.1 * 1/4
    assert report.best_judge == "judge 3"
    assert report.best_judge_advantage == pytest.approx(0.9 - 0.7, abs=0.03)


@FEW
def test_the_smallest_p_value_counts_the_panel_itself():
    """Among 199 shuffles none is as correlated; the panel's own order is the 200th."""
    labels, gold = made(0.7, k=5, n=300)
    assert JudgePanel.from_labels(labels, gold).report(**FAST).p_value == 1 / 200


@FEW
def test_the_split_half_forecast_uses_no_item_that_it_is_held_to():
    """The same figure by plain loops over the items instead of weights of distinct rows."""
    labels, gold = made(0.4, k=3, n=120, classes=3, seed=2)
    panel = JudgePanel.from_labels(labels, gold)
    report = panel.report(**FAST)
    right = majority(panel.codes, 3)[0] == panel.gold
    rng, gaps = np.random.default_rng((0, 6)), []
    for _ in range(10):
        odd = rng.permutation(120) % 2 == 1
        for fit, held in ((odd, ~odd), (~odd, odd)):
            known = Cells.of_rows(panel.codes[fit], panel.gold[fit], np.zeros(fit.sum(), int), 3)
            confusion = known.confusion(np.ones(fit.sum()))
            forecast = plurality_is_right(confusion, known.gold, FAST["num_null"], 0)
            share = np.array([(panel.gold[held] == label).mean() for label in known.gold])
            gaps.append(share @ forecast - right[held].mean())
    assert report.checks["gap from split halves"] == pytest.approx(np.mean(gaps), abs=1e-9)


@FEW
def test_the_same_seed_gives_the_same_report_and_the_input_kind_does_not_matter():
    labels, gold = made(0.3, k=5, n=300, classes=3)
    first = JudgePanel.from_labels(labels, gold).report(**FAST, seed=1)
    again = JudgePanel.from_labels(torch.tensor(labels), torch.tensor(gold)).report(**FAST, seed=1)
    words = np.array(["yes", "no", "maybe"])
    named = JudgePanel.from_labels(words[labels], words[gold], classes=["yes", "no", "maybe"]).report(**FAST, seed=1)
    assert first.to_json() == again.to_json() == named.to_json()
    other = JudgePanel.from_labels(labels, gold).report(**FAST, seed=2)
    assert other.n_eff == first.n_eff
    assert other.n_eff_ci != first.n_eff_ci


@FEW
def test_missing_votes_by_pairs_or_filled():
    labels, gold = made(0.4, k=5, n=600)
    holes = labels.astype(float)
    holes[np.random.default_rng(0).random(labels.shape) < 0.1] = np.nan
    holes[0, 2] = np.nan
    with pytest.raises(InvalidInput, match=r"judge 'judge \d' has no label on item 0 .*missing='pairwise'"):
        JudgePanel.from_labels(holes, gold)
    whole = JudgePanel.from_labels(labels, gold).report(**FAST)
    pairs = JudgePanel.from_labels(holes, gold, missing="pairwise").report(**FAST)
    assert pairs.mean_phi == pytest.approx(whole.mean_phi, abs=0.05)
    assert pairs.gap == pytest.approx(whole.gap, abs=0.04)
    assert pairs.p_value < 0.02
    filled = JudgePanel.from_labels(holes, gold, missing="fill")
    assert filled.filled == int(np.isnan(holes).sum())
    assert (filled.codes >= 0).all()
    assert filled.report(**FAST).mean_phi < pairs.mean_phi


@FEW
def test_two_judges_and_a_judge_without_errors():
    labels, gold = made(0.3, k=2, n=100)
    report = JudgePanel.from_labels(labels, gold).report(**FAST)
    assert report.ties > 0
    assert math.isnan(report.leave_one_out[0].votes)
    perfect = np.column_stack([labels, gold])
    report = JudgePanel.from_labels(perfect, gold).report(**FAST)
    assert report.to_dict()["phi"][2] == [None, None, None]
    assert report.best_judge == "judge 3"
    assert "alone is as accurate" in report.advice
    assert 1 < report.n_eff < 2


def test_what_is_at_risk_is_said():
    labels, gold = made(0.3, k=4, n=199)
    with pytest.warns(InferenceAtRisk, match="199 items"):
        panel = JudgePanel.from_labels(labels, gold)
    with pytest.warns(InferenceAtRisk, match="items are ties"):
        panel.report(**FAST)


def test_report_prints_saves_and_draws(tmp_path):
    labels, gold = made(0.5, k=5, n=300)
    report = JudgePanel.from_labels(labels, gold, judges=["a|b", "c", "d", "e", "f"]).report(**FAST)
    report.save(tmp_path / "r.json")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved == report.to_dict()
    assert saved["n_eff"] == report.n_eff
    assert saved["leave_one_out"][1]["judge"] == "c"
    assert saved["limit"] == pytest.approx(1 / report.mean_phi)
    assert report.to_markdown().count("\n| a/b |") == 1
    assert f"{report.n_eff:.4g}" in str(report.report())
    report.plot(tmp_path / "p.svg")
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()


@FEW
def test_votes_from_a_file_are_votes_from_arrays(tmp_path):
    labels, gold = made(0.3, k=3, n=250, classes=3)
    hard = np.random.default_rng(0).random(250).round(3)
    words = ["ja", "naïve", "否"]
    lines = ["item;A;B;gold;C;h"]
    lines += [
        f"{i};{words[a]};{words[b]};{words[g]};{words[c]};{h}"
        for i, ((a, b, c), g, h) in enumerate(zip(labels, gold, hard, strict=True))
    ]
    path = tmp_path / "v.csv"
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    panel = JudgePanel.from_csv(path, difficulty="h")
    assert panel.judges == ("A", "B", "C")
    same = JudgePanel.from_labels(labels, gold, hard, judges="ABC")
    assert panel.report(**FAST).to_json() == same.report(**FAST).to_json()
    assert JudgePanel.from_csv(path, judges=["A", "C"]).judges == ("A", "C")
    lines[8] = "7;ya;" + lines[8].split(";", 2)[2]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"judge 'A' gives the unknown label 'ya' on line 9 of .*v.csv"):
        JudgePanel.from_csv(path, difficulty="h")
    path.write_text("gold,A\nx,y\n")
    with pytest.raises(InvalidInput, match="1 columns of votes"):
        JudgePanel.from_csv(path)


@pytest.mark.parametrize(
    ("labels", "gold", "options", "error", "message"),
    [
        (np.zeros((100, 1), int), np.zeros(100, int), {}, InvalidInput, "2 judges or more"),
        (np.zeros(100, int), np.zeros(100, int), {}, InvalidInput, "2 judges or more"),
        (np.zeros((29, 3), int), np.arange(29) % 2, {}, InvalidInput, "29 items are too few"),
        (np.zeros((5, 9), int), np.arange(5) % 2, {}, InvalidInput, r"fewer items \(5\) than judges \(9\)"),
        (np.zeros((0, 3), int), np.zeros(0, int), {}, InvalidInput, r"fewer items \(0\)"),
        (np.zeros((200, 3), int), np.zeros(200, int), {}, InvalidInput, "single class"),
        (np.zeros((200, 3), int), np.arange(199) % 2, {}, InvalidInput, "each of 200 items"),
        (np.full((200, 3), 7), np.arange(200) % 2, {}, InvalidInput, "unknown label 7"),
        (np.zeros((200, 3), int), np.arange(200) % 2, {"difficulty": np.zeros(9)}, InvalidInput, "difficulty must be"),
        (np.zeros((200, 3), int), np.arange(200) % 2, {"difficulty": ["a"] * 200}, InvalidInput, "difficulty must be"),
        (
            np.zeros((200, 3), int),
            np.arange(200) % 2,
            {"difficulty": [math.nan] * 200},
            InvalidInput,
            "difficulty of item 0 is not finite",
        ),
        (np.zeros((200, 3), int), np.arange(200) % 2, {"judges": ["a", "a", "b"]}, InvalidArgument, "all different"),
        (np.zeros((200, 3), int), np.arange(200) % 2, {"classes": [0]}, InvalidInput, "single class"),
        (
            np.full((200, 3), np.nan),
            np.arange(200) % 2,
            {"missing": "pairwise"},
            InvalidInput,
            "item 0 has no vote",
        ),
    ],
)
def test_panels_that_cannot_be_measured(labels, gold, options, error, message):
    with pytest.raises(error, match=message):
        JudgePanel.from_labels(labels, gold, **options)


def test_numbers_out_of_range_and_an_unknown_choice():
    labels, gold = made(0.3, k=3, n=200)
    with pytest.raises(InvalidArgument, match="num_bootstrap must be at least 100, got 10"):
        JudgePanel.from_labels(labels, gold).report(num_bootstrap=10)
    with pytest.raises(InvalidArgument, match="missing must be 'error', 'pairwise' or 'fill', got 'guess'"):
        JudgePanel.from_labels(labels, gold, missing="guess")


def test_perfect_judges_have_no_correlations():
    gold = np.arange(200) % 2
    with pytest.raises(InvalidInput, match="0 of 3 judges err sometimes"):
        JudgePanel.from_labels(np.repeat(gold[:, None], 3, 1), gold).report()
