"""Random numbers of which each sample of a batch has its own generator.

Notable here:
- sample i uses the seed ``seed + i``, on the CPU, so its numbers do not depend on the number of samples, the batch size
  or the device
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveInt, checked


class Noise:
    """A source of random numbers for each of ``n`` samples.

    Args:
        n: number of samples.
        seed: seed of the first sample; sample i has ``seed + i``.
        device: device of the returned tensors.

    >>> two, three = Noise(2, seed=7), Noise(3, seed=7)
    >>> torch.equal(two.normal((4,)), three.normal((4,))[:2])
    True
    """

    @checked
    def __init__(self, n: PositiveInt, *, seed: NonNegativeInt = 0, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generators = [torch.Generator().manual_seed(seed + i) for i in range(n)]

    def __len__(self) -> int:
        return len(self._generators)

    def normal(self, shape: Sequence[int]) -> Float[Tensor, "n ..."]:
        """Standard normal numbers of ``shape`` for each sample: (n, *shape), float32."""
        samples = [torch.randn(tuple(shape), generator=generator) for generator in self._generators]
        return torch.stack(samples).to(self.device)

    def uniform(self, shape: Sequence[int]) -> Float[Tensor, "n ..."]:
        """Uniform numbers from 0 to below 1 of ``shape`` for each sample: (n, *shape), float32."""
        samples = [torch.rand(tuple(shape), generator=generator) for generator in self._generators]
        return torch.stack(samples).to(self.device)
