"""Reward models: one network for single inputs and for pairs of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pippin.bayes import batches
from pippin.core.errors import InvalidInput


class Pairs(nn.Module):
    """A reward model that also takes two inputs, whose rewards it then gives side by side."""

    def __init__(self, reward: nn.Module) -> None:
        super().__init__()
        self.reward = reward
        self.train(reward.training)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Rewards of one input (n, 1), or of a pair of them (n, 2)."""
        if named:
            return batches.call(self.reward, named)
        if len(inputs) > 2:
            raise InvalidInput(f"a reward model takes an input or a pair of them, got {len(inputs)}")
        rewards = [batches.call(self.reward, part) for part in inputs]
        if any(part.shape[1] != 1 for part in rewards):
            raise InvalidInput(f"a reward model must give one number per example, got {tuple(rewards[0].shape)}")
        return torch.cat(rewards, 1)
