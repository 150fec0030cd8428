r"""Jacobi iteration: a parallel fixed-point solution of an autoregressive inverse, a window of tokens at a time.

A token of the sample is $x_i = \mu_i(x_{<i}) + \sigma_i(x_{<i})\, z_i$. An iteration computes all tokens of a window
from their values in the iteration before; token i of a window is exact after at most i iterations, mostly earlier.

Notable here:
- a window stops by the largest change of any element: a mean would hide a single token that has not converged
- keys and values of finished windows are cached, and an iteration skips tokens that have converged
- values may overflow in early iterations, since they are computed again; only the result must be finite
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, JacobiUnconverged

Guess = Callable[[Tensor, int, int], Tensor]
"""Initial values of tokens ``first`` to ``stop - 1``: called with the sequence, ``first`` and ``stop``."""

_TOKENS_PER_PASS = 16
"""Number of tokens whose pass takes hardly longer than that of one, on a CPU."""
_SKIP_FRACTION = 0.1
"""Fraction of the tolerance: a token that changed by less is not computed again, if all before it changed by less."""


@runtime_checkable
class Causal(Protocol):
    """A predictor of mean and scale of each token from the tokens before it, such as `SequentialDecoding`."""

    def stats(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Mean and log scale of tokens ``first`` to ``stop - 1``, each from the tokens of ``x`` before it.

        Called for windows in order, and repeatedly for the same window.
        """


@dataclass(frozen=True)
class SolveInfo:
    """Iterations and convergence of an inversion.

    Attributes:
        iterations: number of iterations of each window, in order; sequential decoding has one for each token.
        residual: largest change of any element of each sample in the last iteration of any window.
        converged: whether each sample reached the tolerance, or the number of iterations at which the result is exact,
            in every window.
    """

    iterations: tuple[int, ...]
    residual: Float[Tensor, n]
    converged: Bool[Tensor, n]

    @property
    def total(self) -> int:
        """Total number of iterations, that is of sequential passes through the block."""
        return sum(self.iterations)


@checked
@dataclass(frozen=True)
class Jacobi:
    """Options of Jacobi iteration.

    Attributes:
        window: number of tokens that are solved together.
        tolerance: largest change of any element at which a window has converged, in the units of the tokens; with 0
            the result is exact.
        max_iterations: maximum number of iterations in a window; None for the number at which the result is exact.

    Raises:
        InvalidArgument: numbers out of range.
    """

    window: PositiveInt = 64
    tolerance: NonNegativeFloat = 1e-3
    max_iterations: PositiveInt | None = None

    @classmethod
    def fitting(
        cls, samples: int, device: torch.device | str, *, tolerance: float = 1e-3, max_iterations: int | None = None
    ) -> Jacobi:
        """Windows of a size that is fast for this number of samples.

        On a CPU, a pass over up to about 16 tokens is limited by memory bandwidth, and one over more tokens by
        arithmetic, of which windows need many times as much as single tokens. So windows get smaller with more samples,
        down to one token.

        >>> [Jacobi.fitting(n, "cpu").window for n in (1, 4, 16)]
        [16, 4, 1]
        """
        return cls(
            max(_TOKENS_PER_PASS // max(samples, 1), 1) if torch.device(device).type == "cpu" else 64,
            tolerance,
            max_iterations,
        )


@torch.no_grad()
def jacobi_invert(
    decoding: Causal,
    z: Float[Tensor, "n tokens inner"],
    solver: Jacobi = Jacobi(),
    *,
    x: Float[Tensor, "n tokens inner"] | None = None,
    first: int = 0,
    guess: Guess | None = None,
    on_tokens: Callable[[int, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
    r"""Find x with $x_i = \mu_i(x_{<i}) + \sigma_i(x_{<i})\, z_i$.

    Args:
        decoding: predicts means and log scales; its cache holds the tokens before ``first``.
        z: the noise, in the block's own order.
        solver: size of windows, tolerance and maximum number of iterations.
        x: sequence with the known tokens before ``first``; all others are overwritten. None if no token is known.
        first: first token to compute.
        guess: initial values of a window; None for the noise (mean 0 and scale 1).
        on_tokens: called after each window with the number of computed tokens and the sequence.

    Returns:
        The sequence (``x`` itself, if given), and the iterations and convergence. Values that are not finite stay in
        the sequence.

    Raises:
        InvalidArgument: ``first`` is out of range, or above 0 without ``x``.

    Warns:
        JacobiUnconverged: a window did not reach the tolerance within ``max_iterations``.

    Source: Song et al. 2021, arXiv:2002.03629, algorithm 1; in windows with cached keys: arXiv:2511.20462, section 3.
    """
    n, tokens, _ = z.shape
    if not 0 <= first <= tokens or (first and x is None):
        raise InvalidArgument(f"first is {first} of {tokens} tokens; give the tokens before it as x")
    x = torch.zeros_like(z) if x is None else x
    iterations: list[int] = []
    residual, converged = z.new_zeros(n), torch.ones(n, dtype=torch.bool, device=z.device)
    for start in range(first, tokens, solver.window):
        stop = min(start + solver.window, tokens)
        x[:, start:stop] = z[:, start:stop] if guess is None else guess(x, start, stop)
        done, change, window_converged = _window(decoding, z, x, start, stop, solver)
        iterations.append(done)
        residual, converged = torch.maximum(residual, change), converged & window_converged
        if on_tokens is not None:
            on_tokens(stop, x)
    if not bool(converged.all()):
        warnings.warn(
            f"{int((~converged).sum())} of {n} samples still changed by up to {float(residual.max()):.3g} after "
            f"{solver.max_iterations} iterations (tolerance {solver.tolerance}); allow more iterations, or use smaller "
            "windows",
            JacobiUnconverged,
            stacklevel=2,
        )
    return x, SolveInfo(tuple(iterations), residual, converged)


def _window(
    decoding: Causal, z: Tensor, x: Tensor, start: int, stop: int, solver: Jacobi
) -> tuple[int, Tensor, Tensor]:
    """Solve one window in place; return the iterations, the last change of each sample, and whether it converged."""
    exact = stop - start  # after as many iterations as tokens, the result is exact
    max_iterations = exact if solver.max_iterations is None else min(solver.max_iterations, exact)
    change, low = z.new_zeros(len(z)), start  # tokens before `low` are final
    for done in range(1, max_iterations + 1):
        mean, log_scale = decoding.stats(x, low, stop)
        new = torch.addcmul(mean, z[:, low:stop], log_scale.exp())
        finite = bool(new.isfinite().all())
        changes = (new - x[:, low:stop]).abs().amax(2)  # (n, tokens from low on)
        change = changes.amax(1)
        if not finite:
            # tokens that are computed again start from 0: a NaN would spread to all tokens, as even a masked key is
            # multiplied by 0
            new[:, start + done - low :].nan_to_num_(0.0, 0.0, 0.0)
        x[:, low:stop] = new
        if done == exact or (finite and bool((change <= solver.tolerance).all())):
            return done, change, torch.ones_like(change, dtype=torch.bool)
        # skip the leading tokens that hardly changed, and at least one token per iteration, which is exact by then
        unchanged = (changes <= _SKIP_FRACTION * solver.tolerance).all(0)
        low = max(start + done, low + int(unchanged.cumprod(0).sum()))
    return max_iterations, change, change <= solver.tolerance
