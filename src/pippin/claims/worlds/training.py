"""Training loop and device that the claims share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pippin.train import AdamW, CosineSchedule, Trainer, TrainingResult
from pippin.train.objective import Objective


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
    warmup: float = 0.1,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
) -> TrainingResult:
    """Train in place with AdamW and a cosine schedule, without a progress bar; leaves evaluation mode."""
    trainer = Trainer(
        model.train(),
        objective,
        data,
        steps=steps,
        optimizer=AdamW(lr=lr, weight_decay=weight_decay),
        schedule=CosineSchedule(warmup_steps=warmup),
        max_grad_norm=max_grad_norm,
        seed=seed,
        show_progress=False,
    )
    result = trainer.fit()
    model.eval()
    return result
