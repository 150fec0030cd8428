r"""The gated delta rule: a matrix of memory for each head that forgets, and writes what it does not predict yet.

$S_t = \mathrm{diag}(\alpha_t) S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top \mathrm{diag}(\alpha_t) k_t)^\top$ with output
$o_t = S_t^\top q_t$; $\alpha_t$ is one number for each head (Gated DeltaNet) or one for each channel of the keys (Kimi
delta attention).

Notable here:
- within a chunk, the values $w_t = \beta_t (v_t - \dots)$ that are written solve a triangular system, so that a chunk
  is a few matrix products; only the matrix between chunks is carried step by step
- decays are summed as logarithms and only differences of them are exponentiated, none of which is positive: nothing
  overflows, whatever is forgotten
- everything is computed in float32 at least

Source: Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3; Kimi Team 2025, arXiv:2510.26692.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk where heads forget as a whole."""
CHANNEL_CHUNK = 16
"""Tokens of a chunk where channels forget by themselves, whose pairs of tokens take memory for each channel."""


def delta_rule(
    q: Float[Tensor, "rows heads new keys"],
    k: Float[Tensor, "rows heads new keys"],
    v: Float[Tensor, "rows heads new values"],
    decay: Float[Tensor, "rows heads new #keys"],
    beta: Float[Tensor, "rows heads new"],
    state: Float[Tensor, "rows heads keys values"],
    *,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "rows heads new values"], Float[Tensor, "rows heads keys values"]]:
    r"""Outputs, and the memory after all tokens.

    Args:
        q: queries.
        k: keys, of length 1 or less.
        v: values.
        decay: $\log \alpha_t \le 0$, for a head or for each of its channels.
        beta: how much of what is new is written, 0 to 2.
        state: the memory before the first token.
        chunk: tokens of a chunk; None for `CHUNK` or `CHANNEL_CHUNK`. It changes the rounding and the time, not the
            result.

    >>> q = k = torch.eye(2)[None, None]
    >>> v, zero = torch.tensor([[[[1.0], [2.0]]]]), torch.zeros(1, 1, 2, 1)
    >>> delta_rule(q, k, v, torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2), zero)[0].flatten().tolist()
    [1.0, 2.0]
    """
    if chunk is None:
        chunk = CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK
    outputs = []
    pieces = (part.split(chunk, 2) for part in (q, k, v, decay, beta[..., None]))
    for one, two, three, four, five in zip(*pieces, strict=True):
        y, state = _chunk(one, two, three, four, five, state)
        outputs.append(y)
    return torch.cat(outputs, 2), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk; what is written, W, solves (I + L) W = beta (V - K_decayed S) with a strictly lower triangular L."""
    total = decay.cumsum(2)  # log of all that is forgotten from the beginning of the chunk to each token
    since = total.exp()
    overlap = _decayed_products(k, k, total)
    system = overlap * beta
    wanted = beta * (v - (k * since) @ state)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    y = (q * since) @ state + _decayed_products(q, k, total) @ written
    left = total[:, :, -1:]
    state = state * left.exp().transpose(2, 3) + (k * (left - total).exp()).transpose(2, 3) @ written
    return y, state


def _decayed_products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Products of a of each token with b of it and of all earlier ones, decayed since then; zero for later ones."""
    later = torch.ones(a.shape[2], b.shape[2], dtype=torch.bool, device=a.device).triu(1)
    if total.shape[-1] == 1:
        between = (total - total.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
        return (a @ b.transpose(2, 3)) * between
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(later[..., None], -torch.inf).exp()
    return torch.einsum("rhik,rhjk,rhijk->rhij", a, b, between)


def delta_step(
    q: Float[Tensor, "rows heads keys"],
    k: Float[Tensor, "rows heads keys"],
    v: Float[Tensor, "rows heads values"],
    decay: Float[Tensor, "rows heads #keys"],
    beta: Float[Tensor, "rows heads"],
    state: Float[Tensor, "rows heads keys values"],
) -> tuple[Float[Tensor, "rows heads values"], Float[Tensor, "rows heads keys values"]]:
    """`delta_rule` for one token: the memory is read once, for key and query together."""
    alpha = decay.exp()
    predicted, read = (torch.stack([k * alpha, q * alpha], 2) @ state).unbind(2)
    written = beta[..., None] * (v - predicted)
    state = torch.addcmul(state * alpha[..., None], k[..., None], written[:, :, None])
    return read + (q * k).sum(-1, keepdim=True) * written, state


def normalized(x: Float[Tensor, "*batch channels"]) -> Float[Tensor, "*batch channels"]:
    """Vectors of length 1, with an epsilon of 1e-6 under the root, as in the models that use the delta rule."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
