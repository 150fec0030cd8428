"""Training: one loop, its optimisers and schedules, and how it spreads over processes."""

from pippin.train.checkpoints import Checkpoints, load_weights
from pippin.train.ema import EMA
from pippin.train.objective import Loss, Objective
from pippin.train.optimisers import AdamW, Muon
from pippin.train.processes import Processes
from pippin.train.schedules import WSD, Constant, Cosine, Linear
from pippin.train.trainer import Evaluation, Trainer
from pippin.train.training import Training

__all__ = [
    "EMA",
    "WSD",
    "AdamW",
    "Checkpoints",
    "Constant",
    "Cosine",
    "Evaluation",
    "Linear",
    "Loss",
    "Muon",
    "Objective",
    "Processes",
    "Trainer",
    "Training",
    "load_weights",
]
