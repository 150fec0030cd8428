r"""What a language model learns from: the next token.

Notable here:
- the logits of a whole batch never lie in memory at once (a batch of 8 x 1024 tokens over 49,152 of them would be
  1.6 GB): the head works on some tokens at a time
- nothing is computed twice for that: the gradient of cross-entropy, $p - \mathrm{onehot}$, is known as soon as the
  logits are, so the forward pass takes it at once and only the small gradients of hidden states and head are kept
- tokens that are not learnt do not enter the head at all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.readout import LOGITS, hidden_states, read_out
from pippin.nn.linear import Linear
from pippin.nn.product import onednn_product, slow_blas, traced
from pippin.train.objective import Loss


class NextToken:
    """Cross-entropy of the next token, for any model with ``hidden(ids, cache=...)`` and an ``lm_head``.

    An objective for `pippin.train.Trainer`. The total is in nats, summed over the tokens that are learnt; their number
    is the count. The metric "accuracy" sums the tokens that the model held likeliest.

    Args:
        chunk: tokens whose logits lie in memory at once; None for as many as 64 MiB of float32 hold.

    Raises:
        InvalidArgument: a chunk below 1.
    """

    unit = "tokens"

    def __init__(self, chunk: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise InvalidArgument(f"chunk is {chunk}; give at least 1 token, or None")
        self.chunk = chunk

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used."""
        targets = batch.targets.reshape(-1)
        hidden = hidden_states(model, batch)
        learnt = targets != IGNORE
        count = int(learnt.sum())
        if count < len(targets):
            hidden, targets = hidden[learnt], targets[learnt]
        total, right = cross_entropy(model, hidden, targets, chunk=self.chunk)
        return Loss(total, float(count), {"accuracy": right})


def cross_entropy(
    model: nn.Module,
    hidden: Float[Tensor, "tokens width"],
    targets: Int[Tensor, tokens],
    *,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """``F.cross_entropy(model.lm_head(hidden), targets, reduction="sum")``, its logits never in memory all at once.

    Gradients flow once (there is no second derivative) to ``hidden`` and to what the head is made of.

    Args:
        model: what has ``lm_head``, the output matrix, and a ``config``.
        hidden: as the head reads them.
        targets: the right token of each; no `IGNORE` among them.
        chunk: tokens at a time; None for as many as 64 MiB hold.

    Returns:
        The sum in nats, float32, and the number of tokens whose target had the largest logit.
    """
    module: Any = model
    head = module.lm_head
    if len(targets) and _is_plain(head):
        chunk = chunk or max(64, LOGITS // head.outputs)
        total, right = _Fused.apply(hidden, head.weight, targets, chunk)  # type: ignore[no-untyped-call]
        return total, right

    def score(logits: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        logits, wanted = logits.float(), targets[part]
        right = (logits.gather(-1, wanted[:, None])[:, 0] >= logits.amax(-1)).sum()
        return F.cross_entropy(logits, wanted, reduction="sum"), {"right": right.float()}

    total, sums = read_out(module, hidden, score, piece=chunk)
    return total, sums.get("right", torch.zeros((), device=hidden.device))


def held_out(
    batches: Iterable[TokenBatch], objective: Callable[..., Loss] | None = None
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A measure for `pippin.train.Evaluation`: mean "loss" and metrics over batches that the model does not learn.

    Args:
        batches: gone through once at each call; a stream that ends, or a list.
        objective: what is measured; None for `NextToken`.
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
                loss = chosen(model, here, torch.Generator(device))
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
    """Whether a head is a product with its weight and no more; the weight may be computed (fake-quantised, say)."""
    return (
        isinstance(head, Linear)
        and type(head).forward is Linear.forward
        and head.packed is None
        and head.bias is None
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def _times(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T``, by the quicker library."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and slow_blas() and not traced(a, b):
        return onednn_product(a, b)
    return a @ b.T


class _Fused(torch.autograd.Function):
    """Cross-entropy over ``hidden @ weight.T``, with its gradient taken in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        total, right = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        with torch.autocast(device, enabled=False):
            matrix = weight.detach().to(precision)
            for start in range(0, len(targets), chunk):
                part, wanted = hidden[start : start + chunk].to(precision), targets[start : start + chunk, None]
                probability = F.log_softmax(_times(part, matrix), -1, dtype=torch.float32)
                chosen = probability.gather(-1, wanted)
                total -= chosen.sum()
                right += (chosen[:, 0] >= probability.amax(-1)).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
                # the gradient with respect to the logits, in their place
                slope = probability.exp_().scatter_add_(-1, wanted, torch.full_like(chosen, -1.0)).to(precision)
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk] = _times(slope, matrix.t())
                if grad_weight is not None:
                    grad_weight += _times(slope.t(), part.t())
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = (None if g is None else g.mul_(slope) for g in ctx.gradients)
        ctx.gradients = ()
        return grad_hidden, grad_weight, None, None
