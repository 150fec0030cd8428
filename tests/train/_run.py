"""A run with all that must survive a kill; `python _run.py FOLDER STEPS EVERY` makes it in a process of its own."""

import random
import sys
from pathlib import Path

import torch
from torch import nn

from pippin.train import AdamW, Checkpoints, Evaluation, Loss, Muon, Trainer, WSDSchedule


class Net(nn.Module):
    """A hidden matrix for Muon, dropout for the global generator, a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x):
        return self.layers(x)


class Cursor:
    """Endless batches whose order is drawn at random, with a cursor."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.drawn = 0

    def __iter__(self):
        while True:
            self.drawn += 1
            rows = [[self.random.gauss(0, 1) for _ in range(4)] for _ in range(self.random.randrange(2, 7))]
            x = torch.tensor(rows)
            yield {"x": x, "y": x.sum(1, keepdim=True).sin()}

    def state_dict(self):
        return {"random": self.random.getstate(), "drawn": self.drawn}

    def load_state_dict(self, state):
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        self.drawn = state["drawn"]


class Plain(Cursor):
    """The same batches without a cursor: a resumed run must read them again."""

    state_dict = load_state_dict = None

    def __init__(self, seed=0):
        super().__init__(seed)
        self.items = super().__iter__()

    def __iter__(self):
        return self.items


class Drifting:
    """A noisy regression whose weight is remembered by the objective and moves after every step."""

    unit = "rows"

    def __init__(self):
        self.weight = torch.ones(1)

    def __call__(self, model, batch, generator):
        noise = 0.1 * torch.randn(batch["y"].shape, generator=generator)
        error = (model(batch["x"]) - batch["y"] - noise).square().sum()
        return Loss(error * self.weight.item(), len(batch["x"]), {"error": error.detach()})

    def after_step(self, model, step):
        self.weight = 0.9 * self.weight + 0.1 * (1 + 1 / step)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]


def measure(model):
    return {"loss": model(torch.eye(4)).square().mean().item()}


def trainer(folder, steps=40, every=5, **changes):
    settings = dict(
        optimizer=Muon(lr=0.02, other=AdamW(lr=0.02)),
        schedule=WSDSchedule(warmup_steps=4, decay_steps=10),
        gradient_accumulation_steps=2,
        ema=0.9,
        evaluation=Evaluation(measure, eval_every=7),
        checkpoints=None if folder is None else Checkpoints(Path(folder), save_every=every),
        seed=3,
        show_progress=False,
    )
    settings.update(changes)
    parts = [settings.pop(name, make()) for name, make in (("model", Net), ("objective", Drifting), ("data", Cursor))]
    return Trainer(*parts, steps=steps, **settings)


if __name__ == "__main__":
    trainer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).fit()
