"""AdamW and Muon: frozen settings from which torch's own optimizers are built.

Notable here:
- vectors (biases, gains of norms) are not decayed; `parameter.no_decay = True` says the same of any other parameter
- `parameter.lr_scale = 16.0` gives one parameter its own multiple of the rate: quantization scales and LoRA+ need it
- Muon takes the hidden matrices and leaves embeddings, heads and vectors to AdamW, in one run and one checkpoint
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
    """A frozen value that builds torch optimizers over a model's trainable parameters."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One or more optimizers that share the parameters among them; each group holds its rate as "base_lr"."""


@checked
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; torch's fused implementation where the device has one.

    Attributes:
        lr: the rate at factor 1 of the schedule.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: per unit of rate; not applied to vectors and scalars.

    Source: arXiv:1711.05101, algorithm 2.
    """

    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One torch.optim.AdamW.

        Raises:
            InvalidArgument: no parameter of the model wants a gradient.
        """
        return [self.for_parameters(_trainable(model))]

    def for_parameters(self, parameters: Iterable[Named]) -> torch.optim.AdamW:
        """The optimizer of some of a model's parameters."""
        parameters = list(parameters)
        fused = all(p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for _, p in parameters)
        groups = parameter_groups(parameters, self.lr, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)


@checked
@dataclass(frozen=True)
class Muon:
    """Momentum whose update of each hidden matrix is made orthogonal; AdamW for everything else.

    Attributes:
        lr: the rate of the hidden matrices. Updates are scaled to the size of AdamW's, so its rates carry over.
        momentum: Nesterov's.
        weight_decay: per unit of rate.
        newton_schulz_steps: iterations that make the update orthogonal, in bfloat16.
        exclude: a matrix whose dotted name has one of these in it is no hidden one; nor is any `nn.Embedding`.
        other: what the other parameters get.

    Source: Keller Jordan et al. 2024, "Muon"; scaling of the update: arXiv:2502.16982, eq. 4.
    """

    lr: PositiveFloat = 3e-4
    momentum: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.1
    newton_schulz_steps: PositiveInt = 5
    exclude: tuple[str, ...] = ("embed", "head")
    other: AdamW = field(default_factory=AdamW)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """A torch.optim.Muon and a torch.optim.AdamW; either is left out where it would have nothing to do.

        Raises:
            InvalidArgument: no parameter of the model wants a gradient.
        """
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        hidden: list[Named] = []
        rest: list[Named] = []
        for name, parameter in _trainable(model):
            outer = id(parameter) in tables or any(word in name for word in self.exclude)
            (hidden if parameter.ndim == 2 and not outer else rest).append((name, parameter))
        built: list[torch.optim.Optimizer] = []
        if hidden:
            groups = parameter_groups(hidden, self.lr, self.weight_decay)
            muon = torch.optim.Muon(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                ns_steps=self.newton_schulz_steps,
                adjust_lr_fn="match_rms_adamw",
            )
            built.append(muon)
        return [*built, self.other.for_parameters(rest)] if rest else built


def parameter_groups(parameters: Iterable[Named], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters sorted into torch's groups, by their own `lr_scale` and by whether they are decayed.

    Args:
        parameters: names and parameters.
        lr: the rate of a parameter without `lr_scale`.
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
            f"{type(model).__name__} has no parameter that wants a gradient; call model.requires_grad_(True) first"
        )
    return named
