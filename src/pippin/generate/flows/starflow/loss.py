"""The training objective of STARFlow-V: likelihood and flow-score matching.

Notable here:
- one backward pass gives both the flow's gradient and the target of the score network
- the score network's loss has no gradient with respect to the flow
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
    r"""Likelihood and flow-score matching of a `StarFlow` in one pass; an objective for `pippin.train.Trainer`.

    Training noise of the model's $\sigma$ is added to samples. The flow's loss is $-\log p(\tilde x)$ per dimension;
    the score network's is $\|s_\phi(\tilde x) - \sigma \nabla_{\tilde x} (-\log p(\tilde x))\|^2$ per dimension, with
    no gradient with respect to the flow. Without a score network only the first is used. Metrics: "nll" (nats per
    dimension) and "score".

    Args:
        condition_dropout: probability of replacing a condition by the null condition, as guidance needs.
        weight: weight of the score network's loss.

    Raises:
        InvalidArgument: numbers out of range; when called, condition dropout with a model that has no null condition.

    Source: STARFlow-V, arXiv:2511.20462, section on flow-score matching.
    """

    unit = "samples"

    @checked
    def __init__(self, *, condition_dropout: Fraction = 0.0, weight: PositiveFloat = 1.0) -> None:
        self.condition_dropout, self.weight = condition_dropout, weight

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch of images or videos from -1 to 1, summed over samples."""
        flow: StarFlow = model  # type: ignore[assignment]
        condition = batch.condition
        if condition is not None and self.condition_dropout:
            if not flow.condition.null:
                raise InvalidArgument(
                    f"condition_dropout={self.condition_dropout} needs a model with a null condition; give its "
                    "ConditioningSpec null=True"
                )
            condition = condition.dropout(self.condition_dropout, generator)
        latents = flow.to_latents(batch.x)
        noise = torch.randn(latents.shape, generator=generator, device=generator.device).to(latents)
        noisy = latents + flow.config.noise_std * noise
        dims = noisy[0].numel()
        training = torch.is_grad_enabled()
        with torch.enable_grad():
            noisy.requires_grad_()
            nll = -flow.latent_log_prob(noisy, condition).sum()
            if flow.score_network is None:
                return Loss(nll / dims, len(batch), {"nll": nll.detach() / dims})
            parameters = [p for p in flow.flow_parameters() if p.requires_grad] if training else []
            input_gradient, *gradients = torch.autograd.grad(nll, [noisy, *parameters], allow_unused=True)
        loss = nll.detach() / dims
        if parameters:  # the backward pass is already done: let the loss return its result
            scaled = [None if gradient is None else gradient / dims for gradient in gradients]
            loss = _WithGradients.apply(loss, scaled, *parameters)  # type: ignore[no-untyped-call]
        score = flow.score_network(flow.to_tokens(noisy.detach()), condition)
        target = flow.to_tokens(flow.config.noise_std * input_gradient)
        score_loss = F.mse_loss(score, target, reduction="sum") / score[0].numel()
        metrics: dict[str, Tensor | float] = {"nll": nll.detach() / dims, "score": score_loss.detach()}
        return Loss(loss + self.weight * score_loss, len(batch), metrics)


class _WithGradients(torch.autograd.Function):
    """A value with precomputed gradients with respect to parameters."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if gradient is None else grad_output * gradient for gradient in ctx.gradients))
