r"""The next-token objective of language models.

Notable here:
- the logits of a whole batch are never in memory at once (8 x 1024 tokens with a vocabulary of 49,152 would take
  1.6 GB): the head computes a chunk of tokens at a time
- nothing is computed twice: the gradient of cross-entropy, $p - \mathrm{onehot}$, follows from the logits, so it is
  computed in the forward pass, and only the gradients of hidden states and head are stored
- tokens without a target do not enter the head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.chunked_loss import MAX_LOGITS, hidden_states, sum_in_chunks
from pippin.language.decoder import logit_scaling
from pippin.language.router_losses import RouterLog, RouterLosses, move_biases, watch_routers
from pippin.nn.linear import Linear
from pippin.nn.matmul import onednn_product, slow_blas, traced
from pippin.train.objective import Loss, as_loss


class NextToken:
    """Cross-entropy of the next token, for any model with ``hidden(ids, cache=...)`` and an ``lm_head``.

    An objective for `pippin.train.Trainer`. The total is in nats, summed over the tokens with a target; their number is
    the count. The metric "accuracy" counts targets that are the model's likeliest token.

    For mixtures of experts it may have losses of the routers too; the metric "cross_entropy" is the loss without them,
    "balance" the balance loss without its weight: 1 where all experts of a mixture get equally much.

    Args:
        chunk_size: tokens whose logits are in memory at once; None for as many as fit in 64 MiB of float32.
        router_losses: how mixtures of experts are balanced; None for not at all.
    """

    unit = "tokens"

    @checked
    def __init__(self, chunk_size: PositiveInt | None = None, *, router_losses: RouterLosses | None = None) -> None:
        self.chunk_size, self.router_losses = chunk_size, router_losses
        self._log: RouterLog | None = None

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used."""
        targets = batch.targets.reshape(-1)
        watched = self.router_losses is not None
        with watch_routers(model) if watched else nullcontext(RouterLog()) as log:
            hidden = hidden_states(model, batch)
        is_target = targets != IGNORE
        count = int(is_target.sum())
        if count < len(targets):
            hidden, targets = hidden[is_target], targets[is_target]
        total, correct = cross_entropy(model, hidden, targets, chunk_size=self.chunk_size)
        if self.router_losses is None or not log.balance:
            return Loss(total, float(count), {"accuracy": correct})
        self._log = log
        balance = torch.stack(log.balance).detach().mean()
        metrics = {"accuracy": correct, "cross_entropy": total.detach(), "balance": count * balance}
        return Loss(total + count * log.total(self.router_losses), float(count), metrics)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Move the biases for the choice of experts, where that was asked for."""
        if self.router_losses is not None and self.router_losses.bias_step and self._log is not None:
            move_biases(self._log, self.router_losses.bias_step)


def cross_entropy(
    model: nn.Module,
    hidden: Float[Tensor, "tokens width"],
    targets: Int[Tensor, tokens],
    *,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """``F.cross_entropy(model.lm_head(hidden), targets, reduction="sum")``, with logits computed in chunks.

    Gradients flow to ``hidden`` and to the parameters of the head; there are no second derivatives.

    Args:
        model: a model with ``lm_head``, the output matrix, and a ``config``.
        hidden: inputs of the head.
        targets: the target of each token; none is `IGNORE`.
        chunk_size: tokens in a chunk; None for as many as fit in 64 MiB.

    Returns:
        The sum in nats, float32, and the number of tokens whose target had the largest logit.
    """
    module: Any = model
    head = module.lm_head
    if len(targets) and _is_plain(head) and logit_scaling(module) == (1.0, None):
        chunk_size = chunk_size or max(64, MAX_LOGITS // head.outputs)
        total, correct = _Fused.apply(hidden, head.weight, targets, chunk_size)  # type: ignore[no-untyped-call]
        return total, correct

    def score(logits: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        logits, wanted = logits.float(), targets[part]
        correct = (logits.gather(-1, wanted[:, None])[:, 0] >= logits.amax(-1)).sum()
        return F.cross_entropy(logits, wanted, reduction="sum"), {"right": correct.float()}

    total, sums = sum_in_chunks(module, hidden, score, chunk_size=chunk_size)
    return total, sums.get("right", torch.zeros((), device=hidden.device))


def held_out(
    batches: Iterable[TokenBatch], objective: Callable[..., Loss | Tensor] | None = None
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A measure for `pippin.train.Evaluation`: mean "loss" and metrics over held-out batches.

    Args:
        batches: held-out batches, iterated once at each call; a finite stream, or a list.
        objective: the objective that is measured; None for `NextToken`.

    Raises:
        InvalidArgument: (when the measure is called) the batches have no targets.
    """
    chosen = NextToken() if objective is None else objective

    def measure(model: nn.Module) -> Mapping[str, float]:
        sums: dict[str, float] = {"loss": 0.0}
        count = 0.0
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        training = model.training
        model.eval()
        with torch.no_grad():
            for batch in batches:
                here = TokenBatch(batch.ids.to(device), batch.targets.to(device), batch.documents)
                loss = as_loss(chosen(model, here, torch.Generator(device)))
                count += loss.count
                sums["loss"] += float(loss.total)
                for name, value in loss.metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        model.train(training)
        if count == 0:
            raise InvalidArgument("the held-out batches hold no token that a loss is taken of")
        return {name: value / count for name, value in sums.items()}

    return measure


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is only a product with its weight, which may be computed (by fake quantization, say)."""
    return (
        isinstance(head, Linear)
        and type(head).forward is Linear.forward
        and head.bias is None
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T``, by the faster library."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and slow_blas() and not traced(a, b):
        return onednn_product(a, b)
    return a @ b.T


class _Fused(torch.autograd.Function):
    """Cross-entropy over ``hidden @ weight.T``, with its gradient computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        total, correct = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        with torch.autocast(device, enabled=False):
            matrix = weight.detach().to(precision)
            for start in range(0, len(targets), chunk):
                part, wanted = hidden[start : start + chunk].to(precision), targets[start : start + chunk, None]
                probability = F.log_softmax(_product(part, matrix), -1, dtype=torch.float32)
                chosen = probability.gather(-1, wanted)
                total -= chosen.sum()
                correct += (chosen[:, 0] >= probability.amax(-1)).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
                # the gradient with respect to the logits, in the same memory
                gradient = probability.exp_().scatter_add_(-1, wanted, torch.full_like(chosen, -1.0)).to(precision)
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk] = _product(gradient, matrix.t())
                if grad_weight is not None:
                    grad_weight += _product(gradient.t(), part.t())
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = (None if g is None else g.mul_(gradient) for g in ctx.gradients)
        ctx.gradients = ()
        return grad_hidden, grad_weight, None, None
