"""The objective of a soup of experts, and its held-out loss by specialists.

Source: arXiv:2502.01804, eq. of the loss over the meta-distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import TokenBatch
from pippin.language.methods.soup_of_experts.model import SoupOfExperts
from pippin.language.objectives import held_out
from pippin.train.objective import Loss, Objective


class SoupObjective:
    """An objective for a soup, and batches with a mixture: the model's objective for the parameters of that mixture.

    In addition to the metrics of the model's objective, "coefficients" is the 2-norm of the coefficients: together with
    `SoupOfExperts.expert_norms` it shows whether weight decay shrinks the experts or the router.

    Args:
        objective: the objective of the model, such as `NextToken`.

    Source: arXiv:2502.01804, eq. of the loss over the meta-distribution.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.unit = getattr(objective, "unit", "units")
        self._soup: SoupOfExperts | None = None
        self._resumed: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, batch: tuple[Any, Any], generator: torch.Generator) -> Loss:
        """The loss of a batch: its mixture, and the batch of the inner objective."""
        soup: Any = model
        if self._resumed:
            soup.load_state_dict(self._resumed, strict=False)
            self._resumed = {}
        self._soup = soup
        weights, inner = batch
        soup.record_mixture(weights)
        loss: Loss = soup.call_mixture(weights, lambda module: self.objective(module, inner, generator))
        norm = soup.coefficients(weights).detach().norm() * loss.count
        return Loss(loss.total, loss.count, {**loss.metrics, "coefficients": norm})

    def state_dict(self) -> dict[str, Tensor]:
        """The record of the mixtures seen."""
        return {} if self._soup is None else {name: getattr(self._soup, name).clone() for name in _SEEN}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the record; the soup receives it with the next batch."""
        self._resumed = dict(state)


_SEEN: Final = ("seen_support", "seen_entropy", "seen_domains")


def specialist_loss(
    batches: Sequence[Sequence[TokenBatch]], generic: Sequence[float]
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A measure for `pippin.train.Evaluation` on a soup of a decoder.

    "loss" is the mean loss of held-out tokens under the specialist of their domain; "generic" is that under the model
    for the generic weights.

    Args:
        batches: held-out batches of each domain; may be empty for some.
        generic: the weights of the whole corpus.
    """

    def measure(model: nn.Module) -> Mapping[str, float]:
        soup: Any = model
        totals, count = {"loss": 0.0, "generic": 0.0}, 0
        for index, part in enumerate(batches):
            if not part:
                continue
            own = [float(index == other) for other in range(len(batches))]
            tokens = sum(batch.learned for batch in part)
            for name, weights in (("loss", own), ("generic", generic)):
                totals[name] += tokens * soup.call_mixture(weights, held_out(part))["loss"]
            count += tokens
        if not count:
            raise InvalidArgument("the held-out batches hold no token that a loss is taken of")
        return {name: total / count for name, total in totals.items()}

    return measure
