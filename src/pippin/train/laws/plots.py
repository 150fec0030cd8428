"""Plots of fitted laws: the runs, and the law's curves with bootstrap intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pippin.core import plotting
from pippin.train.laws.compute_budget import optimum_in_closed_form

if TYPE_CHECKING:
    from pippin.train.laws.fitting import Array
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.scaling import ScalingLaw

_MAX_CURVES = 8  # model sizes with a curve


def scaling(law: ScalingLaw, path: Path) -> None:
    """Plot the loss over data and over compute."""
    figure, (left, right) = _figure(2)
    runs = law.runs
    sizes, colors = _sizes(runs["N"])
    dense = law.form == "chinchilla"
    over = np.geomspace(runs["D"].min() / 2, runs["D"].max() * 2, 80)
    for size, color in zip(sizes, colors, strict=True):
        of = runs["N"] == size
        left.plot(runs["D"][of], runs["loss"][of], "o", color=color, markersize=4, label=f"N = {_short(size)}")
        right.plot(6 * size * runs["D"][of], runs["loss"][of], "o", color=color, markersize=4)
        if dense:
            left.plot(over, law.predict(size, over), color=color, linewidth=1)
            _fill(left, over, law.band(np.full_like(over, size), over), color)
            right.plot(6 * size * over, law.predict(size, over), color=color, linewidth=0.6, alpha=0.7)
    if dense and law.coefficients["alpha"] > 0 and law.coefficients["beta"] > 0:
        compute = 6 * np.geomspace((runs["N"] * runs["D"]).min(), (runs["N"] * runs["D"]).max(), 80)
        N, D = np.asarray([optimum_in_closed_form(float(c), law.coefficients) for c in compute]).T
        right.plot(compute, law.predict(N, D), "--", color="black", linewidth=1.2, label="compute-optimal, by the law")
        right.legend(fontsize=8)
    left.set_xlabel("tokens D")
    right.set_xlabel("compute 6 N D")
    left.legend(fontsize=8, ncols=2)
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_ylabel("loss")
    low, high = runs["loss"].min(), runs["loss"].max()
    right.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    figure.suptitle(f"{law.form} law: R² {law.r2:.4f}, mean absolute error {100 * law.mae:.2f} %")
    plotting.save(figure, path)


def forgetting(law: ForgettingLaw, path: Path) -> None:
    """Plot the forgetting over the share of pretraining data, and predicted against measured forgetting."""
    figure, (left, right) = _figure(2)
    runs = law.runs
    sizes, colors = _sizes(runs["N"])
    amounts = np.unique(runs["D"])
    shown = amounts[[0, -1]] if len(amounts) > 1 else amounts
    forgotten = runs["loss_after"] - runs["loss_before"]
    predicted = law.forgetting(runs["N"], runs["D"], runs["p"])
    smallest = runs["p"][runs["p"] > 0].min()
    over = np.concatenate([[0.0], np.geomspace(smallest / 4, min(2 * runs["p"].max(), 0.99), 80)])
    for size, color in zip(sizes, colors, strict=True):
        for amount, line, mark in zip(shown, ("-", "--"), ("o", "s"), strict=False):
            of = (runs["N"] == size) & (runs["D"] == amount)
            label = f"N = {_short(size)}, D = {_short(amount)}"
            left.plot(100 * runs["p"][of], forgotten[of], mark, color=color, markersize=4)
            left.plot(100 * over, law.forgetting(size, amount, over), line, color=color, linewidth=1, label=label)
            _fill(left, 100 * over, law.band(np.full_like(over, size), np.full_like(over, amount), over), color)
        of = runs["N"] == size
        right.plot(forgotten[of], predicted[of], "o", color=color, markersize=4, label=f"N = {_short(size)}")
    left.set_xscale("symlog", linthresh=100 * smallest / 2)
    left.set_xlim(left=0)
    left.set_xlabel("share of pretraining data (%)")
    left.set_ylabel("forgetting (nats)")
    ends = [min(0.0, forgotten.min()), 1.05 * max(forgotten.max(), predicted.max())]
    right.plot(ends, ends, color="0.6", linewidth=1)
    right.set_xlabel("measured forgetting (nats)")
    right.set_ylabel("predicted forgetting (nats)")
    left.legend(fontsize=7)
    right.legend(fontsize=8)
    figure.suptitle(f"forgetting law: R² of the forgetting {law.r2_forgetting:.4f}, B = {law.coefficients['B']:.3g}")
    plotting.save(figure, path)


def finetuning(law: FinetuningLaw, path: Path) -> None:
    """Plot the target loss over the target data."""
    figure, (panel,) = _figure(1)
    runs = law.runs
    sizes, colors = _sizes(runs["N"])
    over = np.geomspace(runs["D"].min() / 2, runs["D"].max() * 2, 80)
    for size, color in zip(sizes, colors, strict=True):
        of = runs["N"] == size
        panel.plot(runs["D"][of], runs["loss"][of], "o", color=color, markersize=4, label=f"N = {_short(size)}")
        panel.plot(over, law.predict(size, over), color=color, linewidth=1)
        _fill(panel, over, law.band(np.full_like(over, size), over), color)
    panel.set_xscale("log")
    panel.set_xlabel("target tokens D")
    panel.set_ylabel("target loss")
    panel.legend(fontsize=8)
    figure.suptitle(f"fine-tuning law (curves without pretraining data): R² {law.r2:.4f}")
    plotting.save(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    figure = plotting.new(5.5 * panels, 4.2)
    return figure, np.ravel(figure.subplots(1, panels, squeeze=False))


def _sizes(N: Array) -> tuple[Array, list[Any]]:
    """Up to `_MAX_CURVES` evenly spaced model sizes to plot curves for, and their colors."""
    from matplotlib import colormaps

    sizes = np.unique(N)
    if len(sizes) > _MAX_CURVES:
        sizes = sizes[np.linspace(0, len(sizes) - 1, _MAX_CURVES).round().astype(int)]
    return sizes, [colormaps["viridis"](value) for value in np.linspace(0, 0.9, len(sizes))]


def _fill(panel: Any, x: Array, band: Array, color: Any) -> None:
    if np.isfinite(band).all():
        panel.fill_between(x, band[0], band[1], color=color, alpha=0.15, linewidth=0)


def _short(number: float) -> str:
    """Format a number with a metric suffix: 12,345,678 is "12.3M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
