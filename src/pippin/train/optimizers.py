"""AdamW and Muon: frozen settings from which torch's optimizers are built.

Notable here:
- vectors (biases, norm weights) have no weight decay; `parameter.no_decay = True` excludes any other parameter
- `parameter.lr_scale = 16.0` multiplies the learning rate of one parameter, as quantization scales and LoRA+ need
- Muon optimizes the hidden matrices, and AdamW embeddings, heads and vectors, in one run and one checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from pippin.core.checks import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument

Named = tuple[str, nn.Parameter]


@runtime_checkable
class Optimizer(Protocol):
    """Settings that build torch optimizers for a model's trainable parameters."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One or more optimizers with disjoint parameters; each parameter group has its learning rate as "base_lr"."""


@checked
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; torch's fused implementation where the device has one.

    Attributes:
        lr: the learning rate at factor 1 of the schedule.
        betas: decay rates of the first and second moment, from 0 to below 1.
        eps: added to the square root of the second moment.
        weight_decay: multiplied by the learning rate; not applied to vectors and scalars.

    Source: arXiv:1711.05101, algorithm 2.
    """

    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Build one `torch.optim.AdamW`.

        Raises:
            InvalidArgument: the model has no trainable parameter.
        """
        return [self.for_parameters(_trainable(model))]

    def for_parameters(self, parameters: Iterable[Named]) -> torch.optim.AdamW:
        """The optimizer of the given parameters only."""
        parameters = list(parameters)
        fused = all(p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for _, p in parameters)
        groups = parameter_groups(parameters, self.lr, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)


@checked
@dataclass(frozen=True)
class Muon:
    """Momentum with orthogonalized updates of hidden matrices; AdamW for all other parameters.

    Attributes:
        lr: the learning rate of the hidden matrices; updates are scaled to the RMS of AdamW's, so its rates carry over.
        momentum: coefficient of the Nesterov momentum, from 0 to below 1.
        weight_decay: multiplied by the learning rate.
        newton_schulz_steps: iterations that orthogonalize an update, in bfloat16.
        exclude: a matrix whose name contains one of these gets AdamW, as does the weight of every `nn.Embedding`.
        other: the settings for the other parameters.

    Source: Keller Jordan et al. 2024, "Muon"; scaling of the update: arXiv:2502.16982, eq. 4.
    """

    lr: PositiveFloat = 3e-4
    momentum: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.1
    newton_schulz_steps: PositiveInt = 5
    exclude: tuple[str, ...] = ("embed", "head")
    other: AdamW = field(default_factory=AdamW)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Build a `torch.optim.Muon` and a `torch.optim.AdamW`; one without parameters is left out.

        Raises:
            InvalidArgument: the model has no trainable parameter.
        """
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        hidden: list[Named] = []
        other: list[Named] = []
        for name, parameter in _trainable(model):
            excluded = id(parameter) in embeddings or any(text in name for text in self.exclude)
            (hidden if parameter.ndim == 2 and not excluded else other).append((name, parameter))
        optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            groups = parameter_groups(hidden, self.lr, self.weight_decay)
            muon = torch.optim.Muon(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                ns_steps=self.newton_schulz_steps,
                adjust_lr_fn="match_rms_adamw",
            )
            optimizers.append(muon)
        return [*optimizers, self.other.for_parameters(other)] if other else optimizers


def parameter_groups(parameters: Iterable[Named], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Group parameters for torch's optimizers, by their `lr_scale` and by whether they have weight decay.

    Args:
        parameters: names and parameters.
        lr: the learning rate of a parameter without `lr_scale`.
        weight_decay: of a parameter with two or more dimensions and without `no_decay`.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for _, parameter in parameters:
        no_decay = parameter.ndim < 2 or getattr(parameter, "no_decay", False)
        key = (float(getattr(parameter, "lr_scale", 1.0)), 0.0 if no_decay else weight_decay)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "lr": lr * scale, "base_lr": lr * scale, "weight_decay": decay}
        for (scale, decay), members in groups.items()
    ]


def _trainable(model: nn.Module) -> list[Named]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise InvalidArgument(
            f"{type(model).__name__} has no trainable parameter; call model.requires_grad_(True) first"
        )
    return named
