"""Rates counted by a judge who errs are wrong in a known way, and can be set right with what is known of the judge."""

from __future__ import annotations

import random
import statistics

from pippin.claims import Evidence, Scale, claim
from pippin.core.errors import InvalidArgument
from pippin.evaluate.safety_statistics import Calibration, rogan_gladen, wilson

REPEATS = {"smoke": 50, "laptop": 500, "gpu": 500}
SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": tuple(range(10))}
PROMPTS, LABELLED = 200, 150
JUDGES = {  # true rate, sensitivity, specificity
    "rare harm": (0.05, 0.85, 0.93),
    "some harm": (0.2, 0.75, 0.9),
    "much harm": (0.5, 0.9, 0.7),
}


@claim(
    id="responsible-ai-judge",
    source="W. J. Rogan, B. Gladen, Am. J. Epidemiol. 107 (1978), used on judges of answers; arXiv:2507.13575 has "
    "human graders per locale",
    paper="grading by automatic judges alone misstates violation rates",
    setting=f"simulated judges of three kinds on {PROMPTS} prompts, calibrated on {LABELLED} harmful and {LABELLED} "
    "harmless answers labelled by people, 500 repeats",
    accept="95 % intervals of corrected rates hold the true rate in at least 93 % of the repeats, those of uncorrected "
    "rates in fewer, for each judge and seed",
)
def run(scale: Scale) -> Evidence:
    """Count how often each interval holds the truth."""
    evidence = Evidence()
    for seed in SEEDS[scale.name]:
        generator = random.Random(seed)
        for name, (rate, sensitivity, specificity) in JUDGES.items():
            corrected, plain, values, failed = [], [], [], 0
            for _ in range(REPEATS[scale.name]):
                found = _draw(generator, sensitivity, LABELLED)
                passed = _draw(generator, specificity, LABELLED)
                harmful = _draw(generator, rate, PROMPTS)
                hits = _draw(generator, sensitivity, harmful) + _draw(generator, 1 - specificity, PROMPTS - harmful)
                try:
                    share = rogan_gladen(hits, PROMPTS, Calibration(found, LABELLED, passed, LABELLED))
                except InvalidArgument:  # counts as not holding the truth
                    failed += 1
                    corrected.append(False)
                else:
                    corrected.append(share.low <= rate <= share.high)
                    values.append(share.value)
                uncorrected = wilson(hits, PROMPTS)
                plain.append(uncorrected.low <= rate <= uncorrected.high)
            evidence.add(f"truth in corrected interval, {name}", statistics.fmean(corrected), seed=seed)
            evidence.add(f"truth in uncorrected interval, {name}", statistics.fmean(plain), seed=seed)
            evidence.add(f"corrected rate, mean error, {name}", statistics.fmean(values) - rate, seed=seed)
            evidence.add(f"judges no better than chance, {name}", failed, seed=seed)
    return evidence.accept(
        corrected=all(c >= 0.93 for name in JUDGES for c in evidence.each(f"truth in corrected interval, {name}")),
        uncorrected=all(c < 0.93 for name in JUDGES for c in evidence.each(f"truth in uncorrected interval, {name}")),
    )


def _draw(generator: random.Random, chance: float, n: int) -> int:
    return sum(generator.random() < chance for _ in range(n))
