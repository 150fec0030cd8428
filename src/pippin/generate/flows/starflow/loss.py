"""The training objective of STARFlow-V: likelihood, and flow-score matching beside it.

Notable here:
- the target of the score network comes with the gradient that trains the flow: one backward pass gives both
- the score network's loss does not touch the flow
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.core.checks import Fraction, PositiveFloat, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Samples
from pippin.generate.flows.starflow.model import StarFlow
from pippin.train.objective import Loss


class LikelihoodAndScore:
    r"""Both losses of a `StarFlow`, in one pass: an objective for `pippin.train.Trainer`.

    Samples get noise of the model's σ. The flow's loss is $-\log p(\tilde x)$ per element of a sample; the score
    network's is $\|s_\phi(\tilde x) - \sigma \nabla_{\tilde x} (-\log p(\tilde x))\|^2$, also for each number. The
    second does not touch the flow, and its target is a by-product of the first one's backward pass. Without a score
    network there is only the first. Metrics: "nll" (nats for each number) and "score".

    Args:
        condition_dropout: probability of replacing a condition by the null condition, as guidance needs.
        weight: of the score network's loss.

    Raises:
        InvalidArgument: numbers out of range; later, dropout of a model that has no null condition.

    Source: STARFlow-V, arXiv:2511.20462, section on flow-score matching.
    """

    unit = "samples"

    @checked
    def __init__(self, *, condition_dropout: Fraction = 0.0, weight: PositiveFloat = 1.0) -> None:
        self.condition_dropout, self.weight = condition_dropout, weight

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch of images or videos from -1 to 1."""
        flow: StarFlow = model  # type: ignore[assignment]
        condition = batch.condition
        if condition is not None and self.condition_dropout:
            if not flow.condition.null:
                raise InvalidArgument(
                    f"condition_dropout={self.condition_dropout} leaves conditions out; make the model's ConditionSpec "
                    "null=True"
                )
            condition = condition.dropout(self.condition_dropout, generator)
        latents = flow.to_latents(batch.x)
        drawn = torch.randn(latents.shape, generator=generator, device=generator.device).to(latents)
        noisy = latents + flow.config.noise_std * drawn
        numbers = noisy[0].numel()
        learning = torch.is_grad_enabled()
        with torch.enable_grad():
            noisy.requires_grad_()
            total = -flow.latent_log_prob(noisy, condition).sum()
            if flow.score_network is None:
                return Loss(total / numbers, len(batch), {"nll": total.detach() / numbers})
            parameters = [p for p in flow.flow_parameters() if p.requires_grad] if learning else []
            into, *slopes = torch.autograd.grad(total, [noisy, *parameters], allow_unused=True)
        loss = total.detach() / numbers
        if parameters:
            known = [None if slope is None else slope / numbers for slope in slopes]
            loss = _Known.apply(loss, known, *parameters)  # type: ignore[no-untyped-call]
        guess = flow.score_network(flow.to_tokens(noisy.detach()), condition)
        off = F.mse_loss(guess, flow.to_tokens(flow.config.noise_std * into), reduction="sum") / guess[0].numel()
        metrics: dict[str, Tensor | float] = {"nll": total.detach() / numbers, "score": off.detach()}
        return Loss(loss + self.weight * off, len(batch), metrics)


class _Known(torch.autograd.Function):
    """A value whose gradients with respect to parameters are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if slope is None else change * slope for slope in ctx.slopes))
