r"""Training objective of DART: all noise levels of each sample in one pass.

Notable here:
- the weights of the likelihood bound fall so fast that with few steps the clearest view dominates; by default each
  level has a minimum weight
- a flow-matching head is trained together with the mean, from the same hidden states
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pippin.core.checks import Fraction, checked
from pippin.generate.conditions import Samples
from pippin.generate.contract import check_samples
from pippin.generate.methods.dart.model import DartConfig
from pippin.nn.images.patches import patchify
from pippin.train.objective import Loss


class NoisyViews:
    r"""$\sum_t \omega_t \lVert \hat x_0(x_{t:T}) - x_0 \rVert^2$ in one pass; an objective for `pippin.train.Trainer`.

    Squared errors are means over the elements of a sample, weights have a mean of 1 over the levels. With a
    flow-matching head, $\lVert u(z_\tau, \tau, h) - (e - x_0) \rVert^2$ at $z_\tau = (1 - \tau) x_0 + \tau e$ is added,
    with one uniform $\tau$ for each token. Metrics: "first", "middle" and "last", the squared error of the prediction
    from the noisiest view, from half of the views and from all; and "flow", the loss of the flow-matching head.

    Args:
        weighting: see `NomadSchedule.weights`; None for "snr" from 16 steps on, and "clipped" below, where the clearest
            view would dominate the loss.
        condition_dropout: probability of replacing a condition by the null condition, where the model has one.

    Raises:
        InvalidArgument: a probability out of range, or an unknown weighting.

    Source: Gu et al. 2025, arXiv:2410.08159, eq. for the loss of section 3.1; the flow, section 3.3.
    """

    unit = "samples"

    @checked
    def __init__(
        self, weighting: Literal["snr", "uniform", "clipped"] | None = None, *, condition_dropout: Fraction = 0.1
    ) -> None:
        self.weighting, self.condition_dropout = weighting, condition_dropout

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch, summed over samples."""
        config: DartConfig = model.config  # type: ignore[assignment]
        check_samples(batch.x, config.shape)
        condition, n, device = batch.condition, len(batch), batch.x.device
        if condition is not None and self.condition_dropout and config.condition.null:
            condition = condition.dropout(self.condition_dropout, generator)
        noise = torch.randn(n, config.steps, *config.shape, generator=generator, device=device)
        predicted, states = model(batch.x, noise, condition)  # (n, steps, tokens, inner)
        patches = patchify(batch.x, config.patch_size)[:, None]
        errors = (predicted - patches).square().mean((2, 3))  # (n, steps), the noisiest first
        weights = config.schedule.weights(self.weighting or ("snr" if config.steps >= 16 else "clipped"))
        total = (errors * torch.tensor(weights[::-1], device=device)).mean(1).sum()
        levels = {"first": 0, "middle": config.steps // 2, "last": config.steps - 1}
        metrics = {name: errors[:, level].detach().sum() for name, level in levels.items()}
        if config.head == "fm":
            flow_loss = _flow_loss(model, patches.expand_as(predicted), states, generator)
            total, metrics["flow"] = total + flow_loss, flow_loss.detach()
        return Loss(total, n, metrics)


def _flow_loss(model: Any, patches: Tensor, states: Tensor, generator: torch.Generator) -> Tensor:
    """The flow-matching loss: the squared error of the velocity, summed over samples."""
    noise = torch.randn(patches.shape, generator=generator, device=patches.device)
    tau = torch.rand(patches.shape[:-1], generator=generator, device=patches.device)
    velocity = model.flow(torch.lerp(patches, noise, tau[..., None]), tau, states)
    loss: Tensor = (velocity - (noise - patches)).square().mean((1, 2, 3)).sum()
    return loss
