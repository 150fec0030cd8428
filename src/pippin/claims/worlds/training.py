"""Training loop, search for learning rates, and device that the claims share.

Notable here:
- a learning rate is searched for each arm alike: short runs with a seed of their own, judged on data of their own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pippin.core.errors import NonFiniteLoss, NonFiniteSample
from pippin.train import AdamW, CosineSchedule, Trainer, TrainingResult
from pippin.train.objective import Objective

SEARCH_SEED = 99
"""Of the data and the weights of every search; no claim's own seed."""


def device_for(scale: str) -> str:
    """The GPU at scale "gpu" if there is one, else the CPU."""
    return "cuda" if scale == "gpu" and torch.cuda.is_available() else "cpu"


def fit(
    model: nn.Module,
    objective: Objective,
    data: Iterable[Any],
    *,
    steps: int,
    seed: int,
    lr: float,
    warmup: float = 0.05,
    weight_decay: float = 0.1,
    **options: Any,
) -> TrainingResult:
    """Train in place with AdamW and a cosine schedule, without a progress bar; leaves evaluation mode.

    Args:
        model: the network; where averages are kept (``ema``), it has their values at the end.
        objective, data: as for `pippin.train.Trainer`.
        steps: number of updates.
        seed: of the trainer.
        lr: highest learning rate.
        warmup: steps of warm-up, or below 1 their share.
        weight_decay: of AdamW.
        options: further arguments of `pippin.train.Trainer`; a ``schedule`` replaces the cosine.
    """
    settings: dict[str, Any] = {
        "optimizer": AdamW(lr=lr, weight_decay=weight_decay),
        "schedule": CosineSchedule(warmup_steps=warmup),
        "precision": "bfloat16" if options.get("device") == "cuda" else "float32",
        "show_progress": False,
    }
    trainer = Trainer(model.train(), objective, data, steps=steps, seed=seed, **settings | options)
    result = trainer.fit()
    if trainer.ema is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in trainer.ema.averages:
                    parameter.copy_(trainer.ema.averages[name])
    model.eval()
    return result


def best_rate(rates: Sequence[float], loss_at: Callable[[float], float]) -> float:
    """The learning rate of the lowest validation loss; a single rate is returned untried."""

    def finite(rate: float) -> float:
        try:
            loss = loss_at(rate)
        except (NonFiniteLoss, NonFiniteSample):  # a rate that is too high
            return math.inf
        return math.inf if math.isnan(loss) else loss

    return rates[0] if len(rates) == 1 else min(rates, key=finite)
