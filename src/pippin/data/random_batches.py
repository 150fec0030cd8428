"""Infinite random batches from one generator: resampled from tensors, or created by a function.

Notable here:
- the state is that of the generator before the next batch, so a resumed training continues with the next batch,
  bit-identical
- resampling is with replacement; weights make some rows more likely than others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument

S = TypeVar("S")


class RandomBatches(Generic[S]):
    """An infinite `pippin.data.streams.DataStream` of batches that a function creates from random numbers.

    Args:
        make: creates a batch with the given generator.
        seed: seed of the generator.

    >>> import itertools
    >>> stream = RandomBatches(lambda generator: torch.randint(10, (2,), generator=generator).tolist(), seed=0)
    >>> [first, second] = itertools.islice(stream, 2)
    >>> next(iter(stream)) == second  # an iteration begins where the last one ended
    False
    """

    def __init__(self, make: Callable[[torch.Generator], S], *, seed: int = 0) -> None:
        self.make = make
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[S]:
        """The batches from the cursor on."""
        while True:
            yield self.make(self._generator)

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator before the next batch, as JSON values."""
        return {"generator": self._generator.get_state().numpy().tobytes().hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next batch."""
        values = np.frombuffer(bytearray.fromhex(state["generator"]), np.uint8)
        self._generator.set_state(torch.from_numpy(values))


@checked
def resampled(
    n: PositiveInt,
    batch_size: PositiveInt,
    make: Callable[[Int[Tensor, batch], torch.Generator], S],
    *,
    weights: Float[Tensor, n] | None = None,
    seed: int = 0,
) -> RandomBatches[S]:
    """Infinite batches of rows, sampled with replacement.

    Args:
        n: number of rows to sample from.
        batch_size: rows in a batch.
        make: creates a batch from the indices of its rows; may sample further random numbers from the generator.
        weights: probability of each row, up to a factor; None for equal ones.
        seed: seed of the indices and of ``make``.

    Raises:
        InvalidArgument: numbers out of range, or another number of weights than of rows.

    >>> x = torch.tensor([1.0, 2.0])
    >>> next(iter(resampled(2, 3, lambda index, _: x[index], weights=torch.tensor([0.0, 1.0])))).tolist()
    [2.0, 2.0, 2.0]
    """
    if weights is not None and len(weights) != n:
        raise InvalidArgument(f"{len(weights)} weights for {n} rows; give one for each")

    def batch(generator: torch.Generator) -> S:
        if weights is None:
            index = torch.randint(n, (batch_size,), generator=generator)
        else:
            index = torch.multinomial(weights, batch_size, replacement=True, generator=generator)
        return make(index, generator)

    return RandomBatches(batch, seed=seed)
