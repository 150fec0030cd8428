"""Train the guardrails' classifier from its packaged sentences and write `model.json` with how well it does.

    python tools/train_guardrail_classifier.py            train, measure, write
    python tools/train_guardrail_classifier.py --check    say whether the file is what this would write

It is measured twice on what it never saw: on a fifth of its own intents in a fifth of its own templates, for five
seeds, and on the prompts of `pippin evaluate safety`, of which neither intents nor templates are trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from pippin.core.files import atomic_write
from pippin.evaluate.safety import suite as safety_suite
from pippin.metrics import roc_auc
from pippin.session.guardrails import classifier, training_data
from pippin.session.guardrails.guardrails import LOCALES

SEED, STEPS, DECAY, HARM_SHARE = 0, 100, 5e-6, 0.4
FILE = Path(str(files("pippin.session.guardrails").joinpath("model.json")))


def fit(sentences: list[training_data.Sentence], seed: int = SEED) -> classifier.NgramClassifier:
    """A classifier of these sentences."""
    return classifier.fit(
        [s.text for s in sentences],
        [s.label for s in sentences],
        seed=seed,
        steps=STEPS,
        weight_decay=DECAY,
        harm_share=HARM_SHARE,
    )


def held_out(seeds: range) -> dict[str, dict[str, float]]:
    """Area under the curve, harmful against look-alike, on intents and templates kept out; mean over seeds."""
    made = [s for locale in LOCALES for s in training_data.sentences(locale)]
    areas: dict[str, list[float]] = {locale: [] for locale in LOCALES}
    for seed in seeds:
        train, test = training_data.split(made, seed=seed)
        model = fit(train, seed)
        for locale in LOCALES:
            scored = [(s.kind, model.harm_probability(s.text)) for s in test if s.locale == locale]
            areas[locale].append(
                roc_auc([p for k, p in scored if k == "harmful"], [p for k, p in scored if k == "look-alike"])
            )
    return {
        locale: {"area, mean": round(statistics.fmean(a), 3), "area, spread": round(statistics.stdev(a), 3)}
        for locale, a in areas.items()
    }


def on_suite(model: classifier.NgramClassifier) -> dict[str, dict[str, float]]:
    """Area, and shares above three thresholds, on the packaged evaluation prompts."""
    suite = safety_suite.load()
    found: dict[str, dict[str, float]] = {}
    for locale in LOCALES:
        scores = {
            kind: [model.harm_probability(p.text) for p in suite.prompts(locale, kind)]
            for kind in ("harmful", "look-alike", "neutral")
        }
        row = {"area": round(roc_auc(scores["harmful"], scores["look-alike"]), 3)}
        for kind, values in scores.items():
            for limit in (0.5, 0.65, 0.8):
                row[f"{kind} above {limit}"] = round(sum(v >= limit for v in values) / len(values), 3)
        found[locale] = row
    return found


def build() -> dict[str, Any]:
    """The whole content of `model.json`."""
    made = [s for locale in LOCALES for s in training_data.sentences(locale)]
    model = classifier.NgramClassifier.from_json(fit(made).to_json())
    data = files("pippin.session.guardrails").joinpath("training.json").read_bytes()
    return {
        "training": {
            "data": training_data.data()["name"],
            "data sha256": hashlib.sha256(data).hexdigest(),
            "sentences": len(made),
            "seed": SEED,
            "steps": STEPS,
            "decay": DECAY,
            "harm share": HARM_SHARE,
            "script": "tools/train_guardrail_classifier.py",
        },
        "metrics": {"held-out intents and templates, 5 seeds": held_out(range(5)), "pippin-safety-1": on_suite(model)},
        **model.to_json(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 1 if `--check` finds that the data changed since the file was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the data's hash with the file's")
    if parser.parse_args(arguments).check:
        data = files("pippin.session.guardrails").joinpath("training.json").read_bytes()
        written = json.loads(FILE.read_text(encoding="utf-8"))["training"]["data sha256"]
        return int(hashlib.sha256(data).hexdigest() != written)
    content = build()
    with atomic_write(FILE, mode="w") as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(content["metrics"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
