"""Rates counted by an imperfect judge are biased, and can be corrected by the judge's sensitivity and specificity."""

from __future__ import annotations

import math
import random
import statistics

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.core.errors import InvalidArgument
from pippin.evaluate.safety.statistics import JudgeCalibration, rogan_gladen
from pippin.metrics import wilson_interval

REPEATS = Scale.choose(smoke=50, laptop=500)
PROMPTS, LABELED = 200, 150
DRIFT = 0.1  # more false alarms in use than on the labeled answers
JUDGES = {  # true rate, sensitivity, specificity
    "rare harm": (0.05, 0.85, 0.93),
    "some harm": (0.2, 0.75, 0.9),
    "much harm": (0.5, 0.9, 0.7),
}


@claim(
    id="responsible-ai-judge",
    source="W. J. Rogan, B. Gladen, Am. J. Epidemiol. 107 (1978), used on judges of answers; arXiv:2507.13575 has "
    "human graders per locale",
    headline="grading by automatic judges alone misstates violation rates",
    setting=f"simulated judges of three kinds on {PROMPTS} prompts, calibrated on {LABELED} harmful and {LABELED} "
    "harmless answers labeled by people, 500 repeats",
    method="corrected",
    negative_controls=("uncorrected", "from 0 to 1", "judge that drifts"),
    conditions=[
        Condition(
            "coverage",
            "95 % intervals hold the true rate in 93 to 98 % of the repeats, for each judge and seed; no number "
            "published",
            lambda e, arm: all(
                0.93 <= c <= 0.98 for judge in JUDGES for c in e.each(f"truth in interval, {judge}", arm)
            ),
            headline=True,
        ),
        Condition(
            "width",
            "the mean interval is at most 0.35 wide, for each judge and seed",
            lambda e, arm: all(e.max(f"width of interval, {judge}", arm) <= 0.35 for judge in JUDGES),
        ),
    ],
    reported="judges that the calibration finds no better than chance; the mean error of corrected rates",
    version=2,
    superseded={1: "it bounded coverage from below alone, which the interval from 0 to 1 passes"},
)
def run(scale: Scale) -> Evidence:
    """Count how often each interval covers the true rate."""
    evidence = Evidence()
    for seed in Scale.choose(smoke=range(1), laptop=range(3), gpu=range(10))[scale]:
        generator = random.Random(seed)
        for name, (rate, sensitivity, specificity) in JUDGES.items():
            intervals: dict[str, list[tuple[float, float]]] = {
                arm: [] for arm in ("corrected", "uncorrected", "from 0 to 1", "judge that drifts")
            }
            values: list[float] = []
            for _ in range(REPEATS[scale]):
                found, passed = _draw(generator, sensitivity, LABELED), _draw(generator, specificity, LABELED)
                calibration = JudgeCalibration(found, LABELED, passed, LABELED)
                harmful = _draw(generator, rate, PROMPTS)
                for arm, drift in (("corrected", 0.0), ("judge that drifts", DRIFT)):
                    hits = _draw(generator, sensitivity, harmful)
                    hits += _draw(generator, 1 - specificity + drift, PROMPTS - harmful)
                    try:
                        share = rogan_gladen(hits, PROMPTS, calibration)
                    except InvalidArgument:  # counts as not holding the truth
                        intervals[arm].append((math.inf, math.inf))
                        continue
                    intervals[arm].append((share.low, share.high))
                    if arm == "corrected":
                        values.append(share.value)
                        plain = wilson_interval(hits, PROMPTS)
                        intervals["uncorrected"].append((plain.low, plain.high))
                intervals["from 0 to 1"].append((0.0, 1.0))
            for arm, pairs in intervals.items():
                known = [(low, high) for low, high in pairs if math.isfinite(low)]
                held = sum(low <= rate <= high for low, high in known) / len(pairs)
                evidence.add(f"truth in interval, {name}", held, arm=arm, seed=seed)
                width = statistics.fmean(high - low for low, high in known)
                evidence.add(f"width of interval, {name}", width, arm=arm, seed=seed)
            evidence.add(f"corrected rate, mean error, {name}", statistics.fmean(values) - rate, seed=seed)
            failed = sum(math.isinf(low) for low, _ in intervals["corrected"])
            evidence.add(f"judges no better than chance, {name}", failed, seed=seed)
    return evidence


def _draw(generator: random.Random, chance: float, n: int) -> int:
    return sum(generator.random() < chance for _ in range(n))
