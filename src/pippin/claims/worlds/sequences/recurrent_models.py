"""Small models of ParaGRU and ParaLSTM cells: a byte language model, and parity of bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.claims.worlds.sequences.byte_text import VOCABULARY
from pippin.nn.norm import RMSNorm
from pippin.nn.recurrent.cells import ParaGRU, ParaLSTM
from pippin.train import Loss

STARTS = ("state-tracking start", "released start", "linear in the state")
"""How the recurrent weights of a model of parity begin; the last stay 0."""


def cell(name: str, inputs: int, size: int, generator: torch.Generator, **settings: Any) -> ParaGRU | ParaLSTM:
    """An initialized cell by the name of its class."""
    made = (ParaGRU if name == "ParaGRU" else ParaLSTM)(inputs, size, **settings)
    made.initialize(generator)
    return made


def sequential_scan(cell: Any, x: Tensor) -> Tensor:
    """A cell in plain torch, with the input projections computed beforehand for all steps."""
    pre, state = cell._pre(x), cell.initial_state(len(x), x.device)
    matrices = cell._recurrence(pre.dtype)
    states = []
    for one in pre.unbind(1):
        state = cell._after(one, state, matrices)
        states.append(state)
    found: Tensor = cell._out(torch.stack(states, 1))
    return found


class ByteCells(nn.Module):
    """Byte language model of two pre-norm residual cells with tied embeddings."""

    def __init__(self, name: str, seed: int, mode: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, 64).normal_(0, 0.1, generator=generator))
        self.norms = nn.ModuleList(RMSNorm(64, eps=1e-6) for _ in range(3))
        self.cells = nn.ModuleList(cell(name, 64, 64, generator, mode=mode) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = F.embedding(ids, self.embedding)
        for norm, one in zip(self.norms, self.cells, strict=False):
            x = x + one(norm(x))[0]
        return F.linear(self.norms[-1](x), self.embedding)


class ParityCells(nn.Module):
    """Two cells over bits of -1 and 1, with one logit for each step."""

    def __init__(self, start: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.cells = nn.ModuleList(cell("ParaGRU", size, 32, generator, mode="sequential") for size in (1, 32))
        self.out = nn.Parameter(torch.empty(32).normal_(0, 0.2, generator=generator))
        recurrent: Any
        for recurrent in (one.recurrent for one in self.cells):
            with torch.no_grad():
                if start == STARTS[0]:
                    recurrent.zero_()
                    recurrent[2].uniform_(-3, 3, generator=generator)
                elif start == STARTS[2]:
                    recurrent.zero_().requires_grad_(False)

    def forward(self, bits: Tensor) -> Tensor:
        """Logits of an odd number of ones so far."""
        x = (2.0 * bits - 1)[..., None]
        for one in self.cells:
            x = one(x)[0]
        return x @ self.out


def parity_loss(model: nn.Module, batch: Any, generator: Any) -> Loss:
    """Mean binary cross-entropy over all steps."""
    bits: Tensor = batch
    odd = (bits.cumsum(1) % 2).float()
    return Loss(F.binary_cross_entropy_with_logits(model(bits), odd, reduction="sum"), bits.numel())


def parity_batches(seed: int, device: str) -> Iterator[Tensor]:
    """Endless batches of sequences of 2 to 24 bits with their parities."""
    draw = torch.Generator().manual_seed(seed + 1000)
    while True:
        length = int(torch.randint(2, 25, (), generator=draw))
        yield torch.randint(2, (64, length), generator=draw).to(device)
