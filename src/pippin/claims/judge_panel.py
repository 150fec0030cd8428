"""Nine judges are worth far fewer votes: made judges whose common cause is known, and real classifiers.

Notable here:
- made judges share one Gaussian cause, so correlation, accuracy of the majority and its value for independent judges
  are integrals, and each measured figure has its true one beside it
- a control in which only difficulty is shared, and known: nothing may be left to explain
- nine classifiers learn from the same pictures, nine others from slices that do not overlap, with other pixels each
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pippin.evaluate.panel import PanelReport


@dataclass(frozen=True)
class Size:
    """Seeds, bootstraps and shuffles of each report, panels for the coverage of the interval, training items."""

    seeds: tuple[int, ...]
    samples: int
    panels: int
    items: int
    grammar: tuple[int, ...]
    """Widths of the transformer judges; empty where there are none."""


SIZES = {
    "smoke": Size((0,), 200, 4, 1000, ()),
    "laptop": Size((0, 1, 2), 10_000, 200, 1000, ()),
    "gpu": Size((0, 1, 2), 10_000, 400, 3000, (256, 320, 384, 448, 512, 256, 320, 384, 448)),
}
JUDGES, ACCURACY = 9, 0.68
CAUSES = (0.0, 0.3, 0.45, 0.58, 0.7)
STRONG = CAUSES[2:]


@claim(
    id="judge-panel",
    source="arXiv:2605.29800",
    paper="nine language models as judges are worth 2.0 to 2.5 independent votes, and the panel is 7 to 22 points "
    "less accurate than independent judges would be; aggregation closes at most 11 % of that gap",
    setting="(a) nine made judges, 1,000 items, accuracy 0.68, errors with one Gaussian cause of weight 0 to 0.7; "
    "(b) scikit-learn's digits, 20 % of the test pictures blurred, nine classifiers of several kinds trained on the "
    "same 300 pictures against nine networks on nine slices that do not overlap, each with half of the pixels",
    accept="(a) for every weight and seed: mean correlation within 0.05 of its integral, effective votes as Kish's "
    "formula has them, gap within 4 points of its integral (0 without a cause), independent forecast within 2.5 points "
    "of 0.87; over panels drawn again with weight 0.45 the 95 % interval holds the true effective votes in 90 to 99 %; "
    "permutation p <= 0.001 from weight 0.3 on, and above 0.01 on two of three seeds without a cause; with shared "
    "difficulty only, known in three levels, correlation above 0.1, but on two of three seeds each the gap's interval "
    "holds 0 and p is above 0.01; nine copies are exactly 1.0 vote, 0.391 gives 2.180 of 9, 1.950 of 5 and 2.558 of "
    "endlessly many; from weight 0.45 on Dawid-Skene and weights by accuracy close at most 11 % of the gap on average. "
    "(b) every seed: same pictures: effective votes' interval below 5, gap's interval above 0; other pictures: "
    "effective votes' interval above that of the same pictures",
)
def run(scale: Scale) -> Evidence:
    """The simulation, its controls, and the classifiers, for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    found = [_simulated(evidence, seed, size) for seed in size.seeds]
    closed = evidence.mean("share of the gap that aggregation closes")
    identities = _identities(evidence)
    quiet = [_difficulty_only(evidence, seed, size) for seed in size.seeds]
    coverage = _coverage(evidence, size)
    real = [_digits(evidence, seed, size) for seed in size.seeds]
    if size.grammar:
        real += [_readers(evidence, seed, size) for seed in size.seeds]
    most = math.ceil(2 * len(size.seeds) / 3)
    return evidence.accept(
        correlation=all(each["correlation"] for each in found),
        gap=all(each["gap"] for each in found),
        forecast=all(each["forecast"] for each in found),
        significant=all(each["significant"] for each in found),
        without_cause=sum(p > 0.01 for p in evidence.each("p, weight 0")) >= most,
        difficulty=all(each["correlated"] for each in quiet)
        and sum(each["gap"] for each in quiet) >= most
        and sum(each["p"] for each in quiet) >= most,
        coverage=0.90 <= coverage <= 0.99,
        identities=identities,
        aggregation=closed <= 0.11,
        few_votes=all(each["few"] for each in real),
        real_gap=all(each["gap"] for each in real),
        other_data_helps=all(each["more"] for each in real),
    )


# --- made judges ------------------------------------------------------------------------------------------------------


def _truth(weight: float) -> tuple[float, float, float]:
    """Correlation of errors, accuracy of the majority, and share of items all get wrong: integrals over the cause."""
    import numpy as np
    from scipy.stats import binom, norm

    z, step = np.linspace(-9, 9, 20_001, retstep=True)
    density = norm.pdf(z) * step
    wrong = norm.cdf((norm.ppf(1 - ACCURACY) - math.sqrt(weight) * z) / math.sqrt(1 - weight))
    phi = ((density * wrong**2).sum() - (1 - ACCURACY) ** 2) / (ACCURACY * (1 - ACCURACY))
    majority = (density * binom.cdf((JUDGES - 1) // 2, JUDGES, wrong)).sum()
    return float(phi), float(majority), float((density * wrong**JUDGES).sum())


def _made(weight: float, seed: int, items: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Votes of judges whose errors share a cause, and the right labels."""
    import numpy as np
    from scipy.stats import norm

    rng = np.random.default_rng((4_000, seed, round(100 * weight)))
    cause = math.sqrt(weight) * rng.standard_normal((items, 1))
    hidden = cause + math.sqrt(1 - weight) * rng.standard_normal((items, JUDGES))
    gold = rng.integers(0, 2, items)
    return np.where(hidden < norm.ppf(1 - ACCURACY), 1 - gold[:, None], gold[:, None]), gold


def _measured(labels: Any, gold: Any, seed: int, size: Size, difficulty: Any = None) -> PanelReport:
    import warnings

    from pippin.core.errors import InferenceAtRisk
    from pippin.evaluate.panel import JudgePanel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)  # of ten classes some items are ties; their number is recorded
        panel = JudgePanel.from_labels(labels, gold, difficulty, classes=range(int(gold.max()) + 1))
        return panel.report(n_boot=size.samples, n_perm=max(999, size.samples), n_null=10_000, seed=seed)


def _simulated(evidence: Evidence, seed: int, size: Size) -> dict[str, bool]:
    independent = _truth(0.0)[1]
    held = dict.fromkeys(("correlation", "gap", "forecast", "significant"), True)
    closed = []
    for weight in CAUSES:
        report = _measured(*_made(weight, seed, size.items), seed, size)
        phi, majority, all_wrong = _truth(weight)
        name = f"weight {weight:g}"
        evidence.add(f"correlation of errors, {name}", report.mean_phi, seed=seed)
        evidence.add(f"effective votes, {name}", report.n_eff, seed=seed)
        evidence.add(f"effective votes by eigenvalue, {name}", report.n_eff_eig, seed=seed)
        evidence.add(f"gap, {name}", 100 * report.gap, seed=seed, unit="points")
        evidence.add(f"independent forecast, {name}", report.null_accuracy, seed=seed)
        evidence.add(f"all wrong, {name}", 100 * report.all_wrong[0], seed=seed, unit="%")
        evidence.add(f"p, {name}", report.p_value, seed=seed)
        if seed == size.seeds[0]:
            evidence.add(f"true correlation, {name}", phi)
            evidence.add(f"true gap, {name}", 100 * (independent - majority), unit="points")
            evidence.add(f"true share all wrong, {name}", 100 * all_wrong, unit="%")
        formula = JUDGES / (1 + (JUDGES - 1) * report.mean_phi)
        held["correlation"] &= abs(report.mean_phi - phi) <= 0.05 and abs(report.n_eff - formula) < 1e-9
        held["gap"] &= abs(report.gap - (independent - majority)) <= 0.04
        held["forecast"] &= abs(report.null_accuracy - 0.87) <= 0.025
        held["significant"] &= weight < 0.3 or report.p_value <= 0.001
        if weight in STRONG:
            for rule in ("Dawid-Skene", "weighted by accuracy"):
                closed.append((report.aggregators[rule] - report.accuracy) / report.gap)
    evidence.add("share of the gap that aggregation closes", sum(closed) / len(closed), seed=seed)
    return held


def _difficulty_only(evidence: Evidence, seed: int, size: Size) -> dict[str, bool]:
    """Judges who err by themselves, but all more often on items that are known to be harder."""
    import numpy as np

    rng = np.random.default_rng((5_000, seed))
    gold, hard = rng.integers(0, 2, 3 * size.items), rng.integers(0, 3, 3 * size.items)
    wrong = rng.random((len(gold), JUDGES)) < np.array([0.05, 0.25, 0.48])[hard][:, None]
    report = _measured(np.where(wrong, 1 - gold[:, None], gold[:, None]), gold, seed, size, hard)
    evidence.add("difficulty only: correlation of errors", report.mean_phi, seed=seed)
    evidence.add("difficulty only: gap within levels", 100 * report.gap, seed=seed, unit="points")
    evidence.add(
        "difficulty only: gap without levels", 100 * report.checks["gap without levels"], seed=seed, unit="points"
    )
    evidence.add("difficulty only: p within levels", report.p_value, seed=seed)
    low, high = report.gap_ci
    return {"correlated": report.mean_phi > 0.1, "gap": low <= 0 <= high, "p": report.p_value > 0.01}


def _coverage(evidence: Evidence, size: Size) -> float:
    """How often the interval holds the true number, over panels drawn again."""
    true = JUDGES / (1 + (JUDGES - 1) * _truth(0.45)[0])
    held = 0
    for panel in range(size.panels):
        labels, gold = _made(0.45, 10_000 + panel, size.items)
        # the intervals are what counts here: few shuffles, and 1,000 samples as in the paper's gap
        few = Size((0,), min(size.samples, 1000), 0, 0, ())
        low, high = _measured(labels, gold, panel, few).n_eff_ci
        held += low <= true <= high
    evidence.add("share of intervals that hold the true effective votes", held / size.panels)
    return held / size.panels


def _identities(evidence: Evidence) -> bool:
    import numpy as np

    from pippin.evaluate.correlation import kish
    from pippin.evaluate.panel import effective_votes

    one = (np.random.default_rng(0).random((1000, 1)) < 0.32).astype(float)
    copies = [effective_votes(np.repeat(one, JUDGES, 1), method) for method in ("kish", "eigen")]
    nine, five, endless = (float(kish(k, 0.391)) for k in (9, 5, 1e12))
    for name, value in (("nine copies", copies[0]), ("0.391 of 9", nine), ("0.391 of 5", five), ("0.391", endless)):
        evidence.add(f"effective votes, {name}", value)
    published = (abs(nine - 2.180) < 5e-4, abs(five - 1.950) < 5e-4, abs(endless - 2.558) < 5e-4)
    return all(published) and max(abs(copy - 1) for copy in copies) < 1e-12


# --- real classifiers -------------------------------------------------------------------------------------------------


def _digits(evidence: Evidence, seed: int, size: Size) -> dict[str, bool]:
    """Two panels on the same test pictures: taught by the same pictures, and by others each."""
    import numpy as np
    from scipy.ndimage import gaussian_filter
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    rng = np.random.default_rng((6_000, seed))
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    x, y = x[order] / 16, y[order]
    learn, test, gold = x[:897], x[897:].copy(), y[897:]
    blurred = rng.random(len(test)) < 0.2
    pictures = test[blurred].reshape(-1, 8, 8)
    test[blurred] = gaussian_filter(pictures, (0, 1.2, 1.2)).reshape(-1, 64)
    same = [model.fit(learn[:300], y[:300]).predict(test) for model in _kinds(seed)]
    other = []
    for judge, part in enumerate(np.array_split(np.arange(len(learn)), JUDGES)):
        pixels = rng.permutation(64)[:32]
        model = MLPClassifier((64,), max_iter=500, random_state=100 * seed + judge, tol=1e-3)
        other.append(model.fit(learn[part][:, pixels], y[part]).predict(test[:, pixels]))
    reports = {}
    for name, votes in (("same pictures", same), ("other pictures", other)):
        reports[name] = _note(evidence, f"digits, {name}", np.stack(votes, 1), gold, seed, size, blurred.astype(float))
    return _compared(reports["same pictures"], reports["other pictures"])


def _kinds(seed: int) -> list[Any]:
    """Nine classifiers of five families."""
    from sklearn.ensemble import AdaBoostClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC
    from sklearn.tree import DecisionTreeClassifier

    return [
        RandomForestClassifier(100, random_state=seed),
        AdaBoostClassifier(DecisionTreeClassifier(max_depth=4), n_estimators=50, random_state=seed),
        SVC(C=10),
        SVC(kernel="linear"),
        KNeighborsClassifier(1),
        KNeighborsClassifier(5),
        LogisticRegression(max_iter=500),
        MLPClassifier((64,), max_iter=500, random_state=seed, tol=1e-3),
        MLPClassifier((32, 32), max_iter=500, random_state=seed + 1, tol=1e-3),
    ]


def _note(evidence: Evidence, name: str, votes: Any, gold: Any, seed: int, size: Size, difficulty: Any) -> PanelReport:
    report = _measured(votes, gold, seed, size, difficulty)
    evidence.add(f"{name}: effective votes", report.n_eff, seed=seed)
    evidence.add(f"{name}: effective votes, from", report.n_eff_ci[0], seed=seed)
    evidence.add(f"{name}: effective votes, to", report.n_eff_ci[1], seed=seed)
    evidence.add(f"{name}: correlation of errors", report.mean_phi, seed=seed)
    evidence.add(f"{name}: panel", 100 * report.accuracy, seed=seed, unit="%")
    evidence.add(f"{name}: best judge, held out", 100 * report.best_judge_accuracy, seed=seed, unit="%")
    evidence.add(f"{name}: gap", 100 * report.gap, seed=seed, unit="points")
    evidence.add(f"{name}: gap, from", 100 * report.gap_ci[0], seed=seed, unit="points")
    evidence.add(f"{name}: gap, to", 100 * report.gap_ci[1], seed=seed, unit="points")
    evidence.add(f"{name}: Dawid-Skene", 100 * report.aggregators["Dawid-Skene"], seed=seed, unit="%")
    evidence.add(f"{name}: ties", report.ties, seed=seed, unit="items")
    return report


def _compared(same: PanelReport, other: PanelReport) -> dict[str, bool]:
    return {"few": same.n_eff_ci[1] < 5, "gap": same.gap_ci[0] > 0, "more": other.n_eff_ci[0] > same.n_eff_ci[1]}


# --- readers of a made language, on a large GPU -----------------------------------------------------------------------


def _readers(evidence: Evidence, seed: int, size: Size) -> dict[str, bool]:
    """Transformers that judge entailment: the same sentences for all, against other sentences for each."""
    import numpy as np
    import torch

    from pippin.claims._made_entailment import Sentences, trained_reader

    test, counts = Sentences(9_000 + seed).draw(size.items)
    gold = counts.argmax(1).numpy()
    share = counts.double() / counts.sum(1, keepdim=True)
    difficulty = torch.special.entr(share).sum(1).numpy()
    reports = {}
    for name in ("same sentences", "other sentences"):
        votes = []
        for judge, width in enumerate(size.grammar):
            source = Sentences(100 * seed + (judge if name == "other sentences" else 0))
            model = trained_reader(source, width, 12_000, 1500, 1000 * seed + judge)
            device = next(model.parameters()).device
            with torch.no_grad():
                votes.append(torch.cat([model(part.to(device)).argmax(1).cpu() for part in test.split(500)]).numpy())
        reports[name] = _note(evidence, f"readers, {name}", np.stack(votes, 1), gold, seed, size, difficulty)
    return _compared(reports["same sentences"], reports["other sentences"])
