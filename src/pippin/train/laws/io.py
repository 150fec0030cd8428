"""Fitted laws of any form, read back from the file that `Law.save` wrote."""

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
    """A law of any form that was saved, with the resamples of its coefficients and the runs of its fit.

    Raises:
        CorruptedFile: the file holds none.
    """
    classes = {law.form: law for law in (ForgettingLaw, FinetuningLaw)}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        form, settings = values["form"], values["settings"]
        law: Law = ScalingLaw(form) if form in ("chinchilla", "sparse") else classes[form](**settings)
        coefficients, samples, runs = (
            {name: np.asarray(value, dtype=float) for name, value in values[part].items()}
            for part in ("coefficients", "samples", "runs")
        )
        law._take(coefficients, samples, runs)
        law.goodness = fitting.Goodness(**values["goodness"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptedFile(f"{path} holds no law; make one with `pippin laws fit --out {path}`: {error}") from error
    return law
