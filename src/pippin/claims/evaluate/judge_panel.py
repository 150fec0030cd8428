"""Nine judges are worth far fewer votes: synthetic judges whose common cause is known, classifiers, language models.

Notable here:
- each figure of synthetic judges has its true one beside it
- a control in which only difficulty is shared, and known: nothing may be left to explain
- nine classifiers are trained on the same images, nine others on slices that do not overlap
- nine language models say which of two sentences a person wrote
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.claims.worlds.judges import Votes
    from pippin.evaluate.judges.panel import PanelReport


class _Size(NamedTuple):
    """Resamples of each report, panels for the coverage of its interval, and sizes of each kind of panel."""

    samples: int
    shuffles: int
    independent: int
    panels: int
    items: int
    pairs: int = 0
    readers: tuple[int, ...] = ()


SIZES = Scale.choose(
    smoke=_Size(100, 99, 100, 2, 100, 30),
    laptop=_Size(10_000, 10_000, 10_000, 200, 1000),
    long=_Size(10_000, 10_000, 10_000, 200, 1000, 250),
    gpu=_Size(10_000, 10_000, 10_000, 400, 3000, 250, (256, 320, 384, 448, 512, 256, 320, 384, 448)),
)
CAUSES = (0.0, 0.3, 0.45, 0.58, 0.7)


@claim(
    id="judge-panel",
    source="arXiv:2605.29800",
    headline="nine language models as judges are worth 2.0 to 2.5 independent votes, and the panel is 7 to 22 points "
    "less accurate than independent judges would be; aggregation closes at most 11 % of that gap",
    setting="(a) nine synthetic judges, 1,000 items, accuracy 0.68, errors with one Gaussian cause of weight 0 to 0.7; "
    "(b) scikit-learn's digits, 20 % of the test images blurred, nine classifiers of several kinds trained on the "
    "same 300 images against the same nine kinds on nine slices that do not overlap; (c) at `long`, nine judges out of "
    "three language models of up to 1.5B, each with three openings, which of two sentences has no words swapped",
    method="same images",
    negative_controls=("weight 0", "difficulty only"),
    conditions=[
        Condition(
            "language models",
            "nine language models as judges: effective votes from 2.0 to 2.5 and a gap of 7 to 22 points, as published",
            lambda e, arm: (
                2.0 <= e.mean("effective votes", "language models") <= 2.5
                and 7 <= e.mean("gap", "language models") <= 22
            ),
            headline=True,
        ),
        Condition(
            "few votes",
            "nine judges are worth at most 3 independent votes, every seed",
            lambda e, arm: e.max("effective votes", arm) <= 3,
        ),
        Condition(
            "gap",
            "the panel is at least 2 points less accurate than independent judges would be, every seed, and the "
            "interval of the gap above 0",
            lambda e, arm: e.min("gap", arm) >= 2 and e.min("gap, from", arm) > 0,
        ),
        Condition(
            "other data helps",
            "the same kinds of judges trained on other images each are worth more votes: intervals apart, every seed",
            lambda e, arm: all(
                high < low
                for high, low in zip(
                    e.each("effective votes, to", arm), e.each("effective votes, from", "other images"), strict=True
                )
            ),
        ),
        Condition(
            "estimated well",
            "(a) every weight and seed: mean correlation within 0.05 of its integral and gap within 4 points of its "
            "own; the 95 % interval holds the true effective votes in 90 to 99 % of panels made again",
            lambda e, arm: (
                all(
                    abs(found - e.mean(f"true {what}, weight {weight:g}")) <= tolerance
                    for weight in CAUSES
                    for what, name, tolerance in (("correlation", "correlation of errors", 0.05), ("gap", "gap", 4))
                    for found in e.each(f"{name}, weight {weight:g}")
                )
                and 0.90 <= e.mean("share of intervals that hold the true effective votes") <= 0.99
            ),
        ),
        Condition(
            "not by difficulty",
            "(a) judges who share only known difficulty have correlated errors, but no gap within its levels: p above "
            "0.01 on two of three seeds; with a cause of 0.3 and more p is at most 0.001",
            lambda e, arm: (
                e.min("correlation of errors", "difficulty only") > 0.1
                and 3 * sum(p > 0.01 for p in e.each("p", "difficulty only")) >= 2 * len(e.each("p", "difficulty only"))
                and all(e.max(f"p, weight {weight:g}") <= 0.001 for weight in CAUSES if weight >= 0.3)
            ),
        ),
    ],
    reported="what aggregation closes of the gap, which is small by construction for judges of equal skill, for judges "
    "of unequal skill, too; nine openings of one language model, where no other is there",
    version=2,
    superseded={
        1: "no language model was a judge, so the published numbers were not measured; that aggregation closes little "
        "held by construction; and the judges on other images saw half of the pixels only"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure simulated judges, their controls and classifiers on each seed; language models once."""
    from pippin.claims.worlds import judges

    evidence, size = Evidence(), SIZES[scale]
    for seed in scale.seeds:
        _simulated(evidence, seed, size)
        _note(evidence, "difficulty only", judges.difficulty_only(seed, 3 * size.items), seed, size)
        for arm, votes in judges.classifiers(seed, quick=scale.is_smoke):
            _note(evidence, arm, votes, seed, size)
        for arm, votes in judges.readers(seed, size.items, size.readers) if size.readers else ():
            _note(evidence, arm, votes, seed, size)
    if size.pairs and (found := judges.language_models(size.pairs, _random_bytes if scale.is_smoke else None)):
        _note(evidence, *found, 0, size)
    _coverage(evidence, size)
    return evidence


def _random_bytes(name: str) -> Any:
    from pippin.claims.worlds.sequences.byte_text import byte_config, byte_decoder, byte_model

    return byte_model(byte_decoder(byte_config(layers=1, width=16), seed=len(name)))


def _report(votes: Votes, seed: int, size: _Size) -> PanelReport:
    from pippin.core.errors import InferenceAtRisk
    from pippin.evaluate.judges.panel import JudgePanel

    labels, gold, difficulty = votes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)  # of ten classes some items are ties; their number is recorded
        panel = JudgePanel.from_labels(labels, gold, difficulty, classes=range(int(gold.max()) + 1))
        return panel.report(
            num_bootstrap=size.samples, num_permutations=size.shuffles, num_null=size.independent, seed=seed
        )


def _note(evidence: Evidence, arm: str, votes: Votes, seed: int, size: _Size) -> PanelReport:
    report = _report(votes, seed, size)
    for name, value, unit in (
        ("effective votes", report.n_eff, ""),
        ("effective votes, from", report.n_eff_ci[0], ""),
        ("effective votes, to", report.n_eff_ci[1], ""),
        ("effective votes by eigenvalue", report.n_eff_eig, ""),
        ("correlation of errors", report.mean_phi, ""),
        ("p", report.p_value, ""),
        ("panel", 100 * report.accuracy, "%"),
        ("independent judges", 100 * report.null_accuracy, "%"),
        ("best judge, held out", 100 * report.best_judge_accuracy, "%"),
        ("all wrong", 100 * report.all_wrong[0], "%"),
        ("gap", 100 * report.gap, "points"),
        ("gap, from", 100 * report.gap_ci[0], "points"),
        ("gap, to", 100 * report.gap_ci[1], "points"),
        ("Dawid-Skene", 100 * report.aggregators["Dawid-Skene"], "%"),
        ("ties", report.ties, "items"),
    ):
        evidence.add(name, value, arm=arm, seed=seed, unit=unit)
    return report


def _simulated(evidence: Evidence, seed: int, size: _Size) -> None:
    """Record simulated judges of equal skill for each weight of the common cause, and of unequal skill."""
    from pippin.claims.worlds import judges

    independent = judges.truth(0.0)[1]
    for weight in CAUSES:
        arm = f"weight {weight:g}"
        report = _note(evidence, arm, judges.synthetic(weight, seed, size.items), seed, size)
        phi, majority, all_wrong = judges.truth(weight)
        if seed == 0:
            evidence.add("true correlation", phi, arm=arm)
            evidence.add("true gap", 100 * (independent - majority), arm=arm, unit="points")
            evidence.add("true share all wrong", 100 * all_wrong, arm=arm, unit="%")
        _closed(evidence, arm, report, seed)
    votes = judges.synthetic(0.45, seed, size.items, judges.UNEQUAL)
    _closed(evidence, "unequal skill", _note(evidence, "unequal skill", votes, seed, size), seed)


def _closed(evidence: Evidence, arm: str, report: PanelReport, seed: int) -> None:
    gains = [report.aggregators[rule] - report.accuracy for rule in ("Dawid-Skene", "weighted by accuracy")]
    evidence.add("what aggregation gains", 100 * max(gains), arm=arm, seed=seed, unit="points")


def _coverage(evidence: Evidence, size: _Size) -> None:
    """Record how often the interval covers the true number, over freshly sampled panels."""
    from pippin.claims.worlds import judges

    true = judges.JUDGES / (1 + (judges.JUDGES - 1) * judges.truth(0.45)[0])
    few = size._replace(samples=min(size.samples, 1000), shuffles=min(size.shuffles, 999))  # intervals count here
    held = 0
    for panel in range(size.panels):
        low, high = _report(judges.synthetic(0.45, 10_000 + panel, size.items), panel, few).n_eff_ci
        held += low <= true <= high
    evidence.add("share of intervals that hold the true effective votes", held / size.panels)
