"""Load fitted laws of any form from the files that `Law.save` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pippin.core.errors import CorruptedFile
from pippin.train.laws import fitting
from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
from pippin.train.laws.law import Law
from pippin.train.laws.scaling import ScalingLaw


def load_law(path: str | Path) -> Law:
    """Load a fitted law of any form, with the resamples of its coefficients and the runs of its fit.

    Raises:
        CorruptedFile: the file cannot be read, or does not contain a law.
    """
    classes = {law.form: law for law in (ForgettingLaw, FinetuningLaw)}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        form, settings = values["form"], values["settings"]
        law: Law = ScalingLaw(form) if form in ("chinchilla", "sparse") else classes[form](**settings)
        coefficients, samples, runs = (
            {name: np.asarray(value, dtype=float) for name, value in values[key].items()}
            for key in ("coefficients", "samples", "runs")
        )
        law._set(coefficients, samples, runs)
        law.goodness = fitting.Goodness(**values["goodness"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptedFile(f"{path} holds no law; fit one with `pippin laws fit --out {path}`: {error}") from error
    return law
