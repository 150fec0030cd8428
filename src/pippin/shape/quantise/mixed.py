r"""Mixed widths: the matrices that a model is sensitive to get more bits, the others pay for them.

Notable here:
- what rounding a matrix costs is told by one backward pass of a few sequences: with the gradient $g$ of each sequence's
  loss, the expected increase is about $\tfrac12 \sum_i F_i\,\delta_i^2$, $F = E[g^2]$ (the diagonal of the Fisher
  matrix) and $\delta$ what rounding does to weight $i$
- the widths are then bought greedily, the largest fall of cost per bit first, which is the best for every average that
  the greedy choice passes through

Source: the sensitivity is that of arXiv:2306.07629, eq. 4; mixed widths by sensitivity are in arXiv:2407.21075.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.load import LanguageModel
from pippin.nn.packed import BITS
from pippin.shape.quantise import rtn
from pippin.shape.quantise.calibration import check_calibration, is_outer, matrices
from pippin.shape.quantise.config import QuantisationSettings


def choose_bits(
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Int[Tensor, "rows length"],
    average: float,
    *,
    rows: int = 8,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, int]:
    """Widths of the matrices inside the layers, for an average number of bits per weight (without scales).

    Args:
        model: float weights.
        settings: levels and groups; matrices to leave out.
        calibration: token ids, see `calibration_ids`.
        average: bits per weight, 2 to 8.
        rows: sequences whose gradients are taken.
        on_matrix: told the name of each matrix that is done.

    Raises:
        InvalidArgument: an average outside 2 to 8, or what `sensitivities` raises.
    """
    _check_average(average)
    costs = sensitivities(model, settings, calibration[:rows], on_matrix=on_matrix)
    sizes = {name: part.dense_weight().numel() for name, part in matrices(model.module).items() if name in costs}
    return allocate(costs, sizes, average)


def energies(
    model: LanguageModel, settings: QuantisationSettings, calibration: Int[Tensor, "rows length"]
) -> dict[str, Float[Tensor, "rows columns"]]:
    """For each matrix inside the layers, the squared gradients of the rows' losses (nats, summed over a row's tokens).

    They are added up over the rows, in float32. Matrices that the settings skip are left out.

    Raises:
        InvalidArgument: packed weights, or ids that are no text of the model.
    """
    check_calibration(model.module, calibration)
    weights = {
        name: part.weight
        for name, part in matrices(model.module).items()
        if part.weight is not None and not is_outer(name) and name not in settings.skip
    }
    wanted = {id(weight) for weight in weights.values()}
    before = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
    energy = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    try:
        for parameter in model.module.parameters():
            parameter.requires_grad_(id(parameter) in wanted)
        for row in calibration.to(model.device):
            logits = model.module(row[None, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, row[1:], reduction="sum")
            slopes = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)  # an idle expert has none
            for name, slope in zip(weights, slopes, strict=True):
                if slope is not None:
                    energy[name].add_(slope.float().square_())
    finally:
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(before[name])
    return energy


def sensitivities(
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Int[Tensor, "rows length"],
    *,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[int, float]]:
    """For each matrix inside the layers and each width, how much rounding is expected to cost, in nats per token.

    Raises:
        InvalidArgument: packed weights, weights that are not finite, ids that are no text of the model.
    """
    energy = energies(model, settings, calibration)
    parts, tokens = matrices(model.module), calibration[:, 1:].numel()
    costs: dict[str, dict[int, float]] = {}
    for name in list(energy):
        weight, costs[name] = parts[name].dense_weight().float(), {}
        for bits in BITS:
            wrong = rtn.round_weight(weight, bits, settings, name=name).dense() - weight
            costs[name][bits] = float((energy[name] * wrong.square_()).sum()) / (2 * tokens)
        del energy[name]
        on_matrix(name)
    return costs


def allocate(costs: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], average: float) -> dict[str, int]:
    """The widths that a budget buys, the largest fall of cost per bit first.

    Args:
        costs: for each matrix, the cost of each width.
        sizes: weights of each matrix.
        average: bits per weight that may be spent, 2 to 8.

    Raises:
        InvalidArgument: an average outside 2 to 8.

    >>> allocate({"a": {2: 9.0, 4: 1.0}, "b": {2: 2.0, 4: 1.5}}, {"a": 10, "b": 10}, average=3)
    {'a': 4, 'b': 2}
    """
    _check_average(average)
    chosen = {name: min(by) for name, by in costs.items()}
    left = average * sum(sizes[name] for name in costs) - sum(bits * sizes[name] for name, bits in chosen.items())
    while True:
        steps = [
            ((costs[name][now] - costs[name][more]) / ((more - now) * sizes[name]), name, more)
            for name, now in chosen.items()
            for more in costs[name]
            if more > now and (more - now) * sizes[name] <= left + 1e-6
        ]
        gain, name, more = max(steps, default=(0.0, "", 0))
        if gain <= 0:
            return chosen
        left -= (more - chosen[name]) * sizes[name]
        chosen[name] = more


def _check_average(average: float) -> None:
    if not min(BITS) <= average <= max(BITS):
        raise InvalidArgument(f"an average of {average} bits cannot be had; choose {min(BITS)} to {max(BITS)}")
