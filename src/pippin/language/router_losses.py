r"""Losses and biases that keep the experts of a mixture in use while it is trained.

Notable here:
- without them a few experts get most tokens early, are trained most, and get even more
- the balance loss of a mixture is $E \sum_e f_e p_e$, with $f_e$ the share of the choices that fell on an expert and
  $p_e$ its mean affinity: 1 where all are equal, $E / k$ where the same k get everything. Its gradient flows through
  $p_e$ alone
- the z-loss is the mean squared logarithm of the sum of exponentials of the router's logits: it keeps them small, so
  that rounding changes no choice
- routers with a bias for the choice may be balanced by it instead: after each step it moves up where an expert got less
  than its share, and down where it got more. No gradient interferes with the loss of the language

Source: Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6 (balance); Zoph et al. 2022, arXiv:2202.08906, equation 5
(z-loss); Wang et al. 2024, arXiv:2408.15664, algorithm 1 (bias).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, checked
from pippin.nn.feedforward.feedforward import Router
from pippin.nn.feedforward.routing import route
from pippin.nn.parallel.collectives import Collectives


@checked
@dataclass(frozen=True)
class RouterLosses:
    """How strongly the experts of mixtures are balanced.

    Args:
        balance: weight of the balance loss, the mean over the mixtures.
        z: weight of the z-loss, likewise.
        bias_step: by how much biases for the choice move after a step, in models that have them; 0 for not at all.
    """

    balance: NonNegativeFloat = 0.01
    z: NonNegativeFloat = 0.001
    bias_step: NonNegativeFloat = 0.0


@dataclass
class RouterLog:
    """What the routers of a model did in one forward pass.

    Attributes:
        balance: balance loss of each mixture, differentiable.
        z: z-loss of each mixture, differentiable.
        shares: of each router the share of the choices that fell on each of its experts.
        chosen: of each router the experts that each token takes, all of them allowed.
        collectives: connects processes that have as many mixtures each; None for a single one.
    """

    balance: list[Float[Tensor, ""]] = field(default_factory=list)
    z: list[Float[Tensor, ""]] = field(default_factory=list)
    shares: list[tuple[Router, Float[Tensor, experts]]] = field(default_factory=list)
    chosen: list[Int[Tensor, "tokens chosen"]] = field(default_factory=list)
    collectives: Collectives | None = None

    def total(self, losses: RouterLosses) -> Float[Tensor, ""]:
        """The weighted losses, means over the mixtures.

        Args:
            losses: the weights.
        """
        total = losses.balance * torch.stack(self.balance).mean() + losses.z * torch.stack(self.z).mean()
        return total if self.collectives is None else self.collectives.sum(total / self.collectives.size)


@contextmanager
def watch_routers(model: nn.Module) -> Iterator[RouterLog]:
    """Keep what the routers of a model do in a forward pass.

    >>> from pippin.language import Decoder, presets
    >>> model = Decoder(presets.preset("nano-moe", 100)).initialize(seed=0)
    >>> with watch_routers(model) as log:
    ...     _ = model(torch.arange(20)[None])
    >>> len(log.balance), 1 <= float(log.balance[0].detach()) < 8
    (4, True)
    """
    log, handles = RouterLog(collectives=getattr(model, "collectives", None)), []

    def keep(router: nn.Module, _: object, logits: Tensor) -> None:
        assert isinstance(router, Router)
        _keep(log, router, logits.float().reshape(-1, logits.shape[-1]))

    for module in model.modules():
        if isinstance(module, Router):
            handles.append(module.register_forward_hook(keep))
    try:
        yield log
    finally:
        for handle in handles:
            handle.remove()


def move_biases(log: RouterLog, step: float) -> None:
    """Move the biases for the choice towards equal shares.

    Args:
        log: what the routers did.
        step: by how much.
    """
    for router, shares in log.shares:
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias += step * (1 / len(shares) - shares).sign()


def _keep(log: RouterLog, router: Router, logits: Float[Tensor, "tokens experts"]) -> None:
    spec = router.spec
    affinities = logits.sigmoid() if spec.router.scores == "sigmoid" else logits.softmax(-1)
    affinities = affinities / affinities.sum(-1, keepdim=True)
    with torch.no_grad():
        _, chosen = route(
            logits,
            spec.router,
            spec.num_experts_per_tok,
            normalized=spec.norm_topk_prob,
            choice_bias=router.e_score_correction_bias,
        )
        shares = chosen.flatten().bincount(minlength=spec.num_experts) / chosen.numel()
    log.balance.append(spec.num_experts * (shares * affinities.mean(0)).sum())
    log.z.append(logits.logsumexp(-1).square().mean())
    log.shares.append((router, shares))
    log.chosen.append(chosen)
