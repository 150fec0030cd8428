"""Sparse upcycling: a dense diffusion transformer initializes a mixture of experts with expert-choice routing.

Notable here:
- every expert is a copy of the dense layer, the router is zero, and gates are scaled by experts / capacity: if every
  token is processed by equally many experts, the sparse network equals the dense one
- the experts differ during training, since each processes different tokens from the first step on
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
from pippin.nn.feedforward.expert_choice import ExpertChoiceFFN

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
    """A model with expert-choice routing, initialized from a dense one.

    Args:
        model: a dense `DiT`, or a diffusion model with one; it is not changed.
        num_experts: number of experts of each sparse layer.
        capacity_factor: experts per token on average. The new model equals the dense one if this is a whole number and
            ``tokens * capacity_factor`` a multiple of ``num_experts``; else some tokens have one expert more.
        moe_every: one of how many layers becomes sparse.
        noise: standard deviation of noise on each expert's weights, relative to that of the dense weights; 0 for none.
        seed: seed of the noise.

    Raises:
        InvalidArgument: a network that already has experts, or numbers out of range.

    Source: Komatsuzaki et al. 2022, arXiv:2212.05055; gates: Sun et al. 2024, arXiv:2410.02098.
    """
    old = dit_of(model)
    if old.config.feed_forward != "dense":
        raise InvalidArgument(
            f"the network has experts already (feed_forward={old.config.feed_forward!r}); give a dense one"
        )
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
    dense: Any = model
    upcycled: Any
    if isinstance(model, DiT):
        upcycled = DiT(config, old.shape, old.condition.spec)
    else:
        upcycled = type(dense)(dataclasses.replace(dense.config, network=config))
        upcycled.metadata = dict(dense.metadata)
    new = dit_of(upcycled)
    upcycled.to(old.into.dense_weight())  # device and data type
    upcycled.load_state_dict(model.state_dict(), strict=False)  # all but the feed-forward layers that become sparse
    generator = torch.Generator().manual_seed(seed)
    for old_block, new_block in zip(old.blocks, new.blocks, strict=True):
        if isinstance(new_block.feed_forward, ExpertChoiceFFN):
            _copy(old_block.feed_forward, new_block.feed_forward, noise, generator)
    upcycled.train(model.training)
    result: Model = upcycled
    return result


def _copy(dense: Any, sparse: ExpertChoiceFFN, noise: float, generator: torch.Generator) -> None:
    """Copy the dense layer to each expert, and set the router to zero."""
    sparse.router.zero_()
    experts = sparse.experts
    pairs = ((dense.up_proj, experts.up, experts.up_bias), (dense.down_proj, experts.down, experts.down_bias))
    for layer, weights, biases in pairs:
        weight = layer.dense_weight().T
        weights.copy_(weight.expand_as(weights))  # (experts, inputs, outputs)
        biases.copy_(layer.bias.expand_as(biases))
        if noise:
            sample = torch.randn(weights.shape, generator=generator).to(weights)
            weights.add_(noise * weight.std() * sample)
