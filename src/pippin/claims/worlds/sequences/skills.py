"""Skills that share one feed-forward layer: each is a random table from two symbols to one.

Notable here:
- a token names the skill; a mask over the channels depends on it, is the same for all, or is absent
- training covers the whole tables, so accuracy measures capacity, not generalization
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pippin.claims.worlds.training import fit
from pippin.language import Decoder
from pippin.language.methods.instruction_pruning.loss import PruningSchedule
from pippin.language.methods.instruction_pruning.model import MaskPredictor, StaticMask
from pippin.language.presets import preset
from pippin.nn.feedforward.feedforward import FeedForward, FeedForwardSpec, activate
from pippin.nn.soft_top_k import top_k_mask
from pippin.train import Loss

SKILLS, SYMBOLS, CHANNELS, KEPT = 8, 32, 512, 48
EPS, WIDTH = 0.3, 64


class SkillLayer(nn.Module):
    """A feed-forward layer over three summed embeddings, with all channels or a selection.

    Args:
        arm: "whole", "dense" (only as many channels as a mask selects), "once" (one mask), "by the prompt".
        seed: seed of the weights.
    """

    def __init__(self, arm: str, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.embed = nn.ModuleList(nn.Embedding(count, WIDTH) for count in (SKILLS, SYMBOLS, SYMBOLS))
        self.mlp = FeedForward(FeedForwardSpec(KEPT if arm == "dense" else CHANNELS), WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            scale = 1.0 if parameter.shape[0] in (SKILLS, SYMBOLS) else 1 / math.sqrt(parameter.shape[-1])
            nn.init.normal_(parameter, 0.0, scale if parameter.ndim > 1 else 0.0, generator)
        self.predictor: MaskPredictor | StaticMask | None = None
        if arm == "once":
            self.predictor = StaticMask(1, CHANNELS).initialize(seed=seed)
        elif arm == "by the prompt":
            self.predictor = MaskPredictor(Decoder(preset("nano", SKILLS)), 1, CHANNELS).initialize(seed=seed)

    def masks(self, keep: int = KEPT, eps: float = EPS) -> Tensor:
        """Masks of each skill, predicted from the token that names it."""
        assert self.predictor is not None
        scores: Tensor = self.predictor(torch.arange(SKILLS)[:, None])
        return top_k_mask(scores[:, 0], keep, eps)

    def forward(self, batch: Tensor, masks: Tensor | None) -> Tensor:
        """Logits of the output symbol; ``masks`` are those of all skills."""
        x = sum((embed(batch[:, i]) for i, embed in enumerate(self.embed)), torch.zeros(()))
        assert self.mlp.gate_proj is not None
        assert self.mlp.up_proj is not None
        inner = activate(self.mlp.gate_proj(x), self.mlp.spec.activation) * self.mlp.up_proj(x)
        logits: Tensor = self.head(self.mlp.down_proj(inner if masks is None else inner * masks[batch[:, 0]]))
        return logits


def tables(seed: int) -> Tensor:
    """The output symbol of each skill for each two symbols."""
    return torch.randint(0, SYMBOLS, (SKILLS, SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(seed))


def trained(arm: str, seed: int, lr: float, *, steps: int, rows: int) -> SkillLayer:
    """Train a layer on the tables of the seed; masks become sparse over the first tenth of the steps."""
    module, answers = SkillLayer(arm, seed), tables(seed)
    annealing = PruningSchedule(keep_steps=steps // 10, eps_steps=steps * 7 // 10)
    done = 0

    def objective(model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        nonlocal done
        keep, eps = annealing.at(done, intermediate_size=CHANNELS, keep=KEPT, eps=EPS)
        done += 1
        logits = module(batch, None if module.predictor is None else module.masks(keep, eps))
        total = nn.functional.cross_entropy(logits, answers[tuple(batch.T)], reduction="sum")
        return Loss(total, float(len(batch)))

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed + 1)
        while True:
            columns = [torch.randint(0, n, (rows,), generator=generator) for n in (SKILLS, SYMBOLS, SYMBOLS)]
            yield torch.stack(columns, 1)

    fit(module, objective, batches(), steps=steps, seed=seed, lr=lr, warmup=0.08, weight_decay=0.0, max_grad_norm=None)
    return module


@torch.no_grad()
def accuracy(module: SkillLayer, seed: int, masks: Tensor | None) -> float:
    """Accuracy over all entries of the tables."""
    everything = torch.cartesian_prod(torch.arange(SKILLS), torch.arange(SYMBOLS), torch.arange(SYMBOLS))
    right = module(everything, masks).argmax(-1) == tables(seed)[tuple(everything.T)]
    return float(right.float().mean())
