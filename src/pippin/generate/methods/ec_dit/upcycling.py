"""Upcycling: a dense diffusion transformer becomes a mixture of experts that starts from its weights.

Notable here:
- every expert is a copy of the dense layer, the router is zero, and gates are scaled by experts / capacity: where the
  tokens of an image are divided evenly, the new network equals the old one exactly
- training then makes the experts differ, as each gets other tokens from the first step on
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.dit import DiT
from pippin.generate.methods.ec_dit.compute_map import dit_of
from pippin.nn.expert_choice import ExpertChoiceFFN

Model = TypeVar("Model", bound=nn.Module)


@checked
@torch.no_grad()
def upcycle(
    model: Model,
    num_experts: PositiveInt,
    *,
    capacity_factor: PositiveFloat = 2.0,
    moe_every: PositiveInt = 2,
    noise: NonNegativeFloat = 0.0,
    seed: int = 0,
) -> Model:
    """A model with expert choice that begins where a dense one is.

    Args:
        model: a dense `DiT`, or a diffusion model around one; it stays as it is.
        num_experts: of each sparse layer.
        capacity_factor: experts per token on average. Exact where it is a whole number and ``tokens * capacity`` a
            multiple of ``num_experts``; else some tokens begin with one expert more than others.
        moe_every: every how many layers one becomes sparse.
        noise: standard deviation of what is added to each expert's weights, in those of the dense layer; 0 for none.
        seed: of the noise.

    Raises:
        InvalidArgument: a network that has experts already, or numbers out of range.

    Source: Komatsuzaki et al. 2022, arXiv:2212.05055; the scale as Sun et al. 2024, arXiv:2410.02098, has its gates.
    """
    old = dit_of(model)
    if old.config.feed_forward != "dense":
        raise InvalidArgument(f"the network has experts already (feed_forward={old.config.feed_forward!r})")
    if capacity_factor > num_experts:
        raise InvalidArgument(f"capacity_factor must be at most num_experts={num_experts}, got {capacity_factor}")
    changes: dict[str, Any] = {"feed_forward": "expert_choice", "moe_every": moe_every}
    changes |= {
        "num_experts": num_experts,
        "capacity_factor": capacity_factor,
        "gate_scale": num_experts / capacity_factor,
        "routing_group": "image",
    }
    config = dataclasses.replace(old.config, **changes)
    given: Any = model
    made: Any
    if isinstance(model, DiT):
        made = DiT(config, old.shape, old.condition.spec)
    else:
        made = type(given)(dataclasses.replace(given.config, network=config))
        made.metadata = dict(given.metadata)
    new = dit_of(made)
    made.to(old.into.dense_weight())
    made.load_state_dict(model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(seed)
    for before, after in zip(old.blocks, new.blocks, strict=True):
        if isinstance(after.feed_forward, ExpertChoiceFFN):
            _copy(before.feed_forward, after.feed_forward, noise, generator)
    made.train(model.training)
    result: Model = made
    return result


def _copy(dense: Any, sparse: ExpertChoiceFFN, noise: float, generator: torch.Generator) -> None:
    """The dense layer into each expert; the router becomes zero."""
    sparse.router.zero_()
    into = sparse.experts
    pairs = ((dense.up_proj, into.up, into.up_bias), (dense.down_proj, into.down, into.down_bias))
    for layer, weights, biases in pairs:
        weight = layer.dense_weight().T
        weights.copy_(weight.expand_as(weights))
        biases.copy_(layer.bias.expand_as(biases))
        if noise:
            drawn = torch.randn(weights.shape, generator=generator).to(weights)
            weights.add_(noise * weight.std() * drawn)
