r"""Mixed precision: the matrices to whose rounding the loss is most sensitive get more bits.

Notable here:
- the increase of the loss is estimated from one backward pass over a few sequences: with the gradient $g$ of each
  sequence's loss it is about $\tfrac12 \sum_i F_i\,\delta_i^2$, where $F = E[g^2]$ is the diagonal of the Fisher matrix
  and $\delta_i$ the rounding error of weight $i$
- bits are allocated greedily by the largest reduction of cost per bit, which is optimal for every average that the
  greedy choice reaches exactly

Source: the sensitivity is that of arXiv:2306.07629, eq. 4; mixed precision by sensitivity is in arXiv:2407.21075.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import checked
from pippin.language.language_model import LanguageModel
from pippin.nn.quantization.packed import BITS, Bits
from pippin.shape.quantize import rtn
from pippin.shape.quantize.calibration import check_calibration, is_outer, matrices
from pippin.shape.quantize.config import QuantizationConfig

AverageBits = Annotated[float, Ge(2), Le(8)]


@checked
def choose_bits(
    model: LanguageModel,
    config: QuantizationConfig,
    calibration: Int[Tensor, "rows length"],
    average_bits: AverageBits,
    *,
    rows: int = 8,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Bits]:
    """Bits of each matrix inside the layers, for an average number of bits per weight (without scales).

    Args:
        model: a model with float weights.
        config: levels and groups; matrices to skip.
        calibration: token ids, see `calibration_ids`.
        average_bits: bits per weight, 2 to 8.
        rows: number of sequences whose gradients are computed.
        on_matrix: called with the name of each finished matrix.

    Raises:
        InvalidArgument: as for `sensitivities`.
    """
    costs = sensitivities(model, config, calibration[:rows], on_matrix=on_matrix)
    sizes = {name: part.dense_weight().numel() for name, part in matrices(model.module).items() if name in costs}
    return allocate(costs, sizes, average_bits)


def squared_gradients(
    model: LanguageModel, config: QuantizationConfig, calibration: Int[Tensor, "rows length"]
) -> dict[str, Float[Tensor, "rows columns"]]:
    """The squared gradients of each matrix inside the layers, float32, summed over the sequences.

    The loss of a sequence is the cross-entropy in nats, summed over its tokens. Skipped matrices are left out.

    Raises:
        InvalidArgument: packed weights, or ids that are not valid for the model.
    """
    check_calibration(model.module, calibration)
    weights = {
        name: part.weight
        for name, part in matrices(model.module).items()
        if part.weight is not None and not is_outer(name) and name not in config.skip
    }
    wanted = {id(weight) for weight in weights.values()}
    before = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
    squares = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    try:
        for parameter in model.module.parameters():
            parameter.requires_grad_(id(parameter) in wanted)
        for row in calibration.to(model.device):
            logits = model.module(row[None, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, row[1:], reduction="sum")
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:  # None for an expert that no token was routed to
                    squares[name].add_(gradient.float().square_())
    finally:
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(before[name])
    return squares


def sensitivities(
    model: LanguageModel,
    config: QuantizationConfig,
    calibration: Int[Tensor, "rows length"],
    *,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[Bits, float]]:
    """The expected increase of the loss in nats per token, for each matrix inside the layers and each number of bits.

    Raises:
        InvalidArgument: packed weights, weights that are not finite, ids that are not valid for the model.
    """
    squares = squared_gradients(model, config, calibration)
    parts, tokens = matrices(model.module), calibration[:, 1:].numel()
    costs: dict[str, dict[Bits, float]] = {}
    for name in list(squares):
        weight, costs[name] = parts[name].dense_weight().float(), {}
        for bits in BITS:
            error = rtn.round_weight(weight, bits, config, name=name).dense() - weight
            costs[name][bits] = float((squares[name] * error.square_()).sum()) / (2 * tokens)
        del squares[name]  # free the memory
        on_matrix(name)
    return costs


@checked
def allocate(
    costs: Mapping[str, Mapping[Bits, float]], sizes: Mapping[str, int], average_bits: AverageBits
) -> dict[str, Bits]:
    """The bits of each matrix within a budget, allocated greedily by the largest reduction of cost per bit.

    Args:
        costs: for each matrix, the cost of each number of bits.
        sizes: number of weights of each matrix.
        average_bits: maximum bits per weight on average, 2 to 8.

    >>> allocate({"a": {2: 9.0, 4: 1.0}, "b": {2: 2.0, 4: 1.5}}, {"a": 10, "b": 10}, average_bits=3)
    {'a': 4, 'b': 2}
    """
    chosen = {name: min(by) for name, by in costs.items()}
    left = average_bits * sum(sizes[name] for name in costs) - sum(bits * sizes[name] for name, bits in chosen.items())
    while True:
        steps = [
            ((costs[name][now] - costs[name][more]) / ((more - now) * sizes[name]), name, more)
            for name, now in chosen.items()
            for more in costs[name]
            if more > now and (more - now) * sizes[name] <= left + 1e-6
        ]
        if not steps or max(steps)[0] <= 0:
            return chosen
        _, name, more = max(steps)
        left -= (more - chosen[name]) * sizes[name]
        chosen[name] = more
