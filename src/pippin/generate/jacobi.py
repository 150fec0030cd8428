r"""Inverting an autoregressive flow for many tokens at a time: fixed-point rounds in place of one pass for each token.

A token of the sample is $x_i = \mu_i(x_{<i}) + \sigma_i(x_{<i})\, z_i$. A round computes all tokens of a window from
the guesses of the round before; token i of a window is exact after i rounds at the latest, mostly long before.

Notable here:
- a window stops by the largest change of any number of a sample: a mean hides a single wrong token
- keys and values of finished windows are kept, and a round computes the tokens of its window that are not settled
- guesses that overflow on the way do no harm, since what they touch is computed again; a result that is not finite does
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, JacobiUnconverged

Guess = Callable[[Tensor, int, int], Tensor]
"""Tokens ``first`` to ``stop`` guessed from the sequence, whose tokens before ``first`` are known."""

_SHARED = 16
"""Tokens whose pass takes hardly longer than that of one, on a CPU."""
_QUIET = 0.1
"""Of the tolerance: a token that changed by less leaves its window, if all before it did."""


@runtime_checkable
class Causal(Protocol):
    """What tells the mean and the scale of each token from the tokens before it (`flow_block.Reading`)."""

    def stats(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Mean and log scale of tokens ``first`` to ``stop`` from tokens 0 to ``stop - 1`` of ``x``.

        Called for windows in order, for the same one as often as wanted.
        """


@dataclass(frozen=True)
class SolveInfo:
    """How an inversion went.

    Attributes:
        rounds: made in each window, in order; a token at a time is one round each.
        residual: largest change of any number of each sample in the last round of any window.
        converged: which samples ended at or below the tolerance in every window, or after as many rounds as make the
            result exact.
    """

    rounds: tuple[int, ...]
    residual: Float[Tensor, n]
    converged: Bool[Tensor, n]

    @property
    def total(self) -> int:
        """Rounds in all: passes through the block, one after the other."""
        return sum(self.rounds)


@dataclass(frozen=True)
class Jacobi:
    """How windows are solved.

    Attributes:
        window: tokens that are solved together.
        tolerance: largest change of any number that counts as settled, in the units of the tokens; 0 goes on until the
            result is exact.
        most: rounds at most in a window; None for as many as make the result exact.

    Raises:
        InvalidArgument: numbers out of range.
    """

    window: int = 64
    tolerance: float = 1e-3
    most: int | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidArgument(f"window is {self.window}; give at least 1 token")
        if not 0 <= self.tolerance < float("inf"):
            raise InvalidArgument(f"tolerance is {self.tolerance}; give 0 or more, 0 for exact")
        if self.most is not None and self.most < 1:
            raise InvalidArgument(f"most is {self.most}; give at least 1 round, or None")

    @classmethod
    def fitting(
        cls, samples: int, device: torch.device | str, *, tolerance: float = 1e-3, most: int | None = None
    ) -> Jacobi:
        """Windows that pay for so many samples.

        On a CPU a pass waits for the weights until about 16 tokens share them and then for the arithmetic, of which
        windows are many times as much as single tokens: the more samples, the smaller the windows, down to a token at a
        time.

        >>> [Jacobi.fitting(n, "cpu").window for n in (1, 4, 16)]
        [16, 4, 1]
        """
        return cls(max(_SHARED // max(samples, 1), 1) if torch.device(device).type == "cpu" else 64, tolerance, most)


@torch.no_grad()
def jacobi_invert(
    reading: Causal,
    z: Float[Tensor, "n tokens inner"],
    solve: Jacobi = Jacobi(),
    *,
    x: Float[Tensor, "n tokens inner"] | None = None,
    first: int = 0,
    guess: Guess | None = None,
    on_tokens: Callable[[int, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
    r"""Find x with $x_i = \mu_i(x_{<i}) + \sigma_i(x_{<i})\, z_i$.

    Args:
        reading: tells means and scales; has read the tokens before ``first``.
        z: the noise, in the block's own order.
        solve: windows, tolerance, rounds.
        x: holds the known tokens before ``first``; the rest is overwritten. None where none is known.
        first: where to begin.
        guess: where a window begins from; None for mean 0 and scale 1, that is the noise.
        on_tokens: called after each window with the number of tokens that are done, and the sequence.

    Returns:
        The sequence (``x`` itself, if given), and how it went. Numbers that are not finite stay in it.

    Raises:
        InvalidArgument: known tokens without ``x``, or more than there are.

    Warns:
        JacobiUnconverged: a window was left after ``most`` rounds above the tolerance.

    Source: Song et al. 2021, arXiv:2002.03629, algorithm 1; in windows with kept keys: arXiv:2511.20462, section 3.
    """
    n, tokens, _ = z.shape
    if not 0 <= first <= tokens or (first and x is None):
        raise InvalidArgument(f"first is {first} of {tokens} tokens; give the tokens before it as x")
    x = torch.zeros_like(z) if x is None else x
    rounds: list[int] = []
    residual, converged = z.new_zeros(n), torch.ones(n, dtype=torch.bool, device=z.device)
    for start in range(first, tokens, solve.window):
        stop = min(start + solve.window, tokens)
        x[:, start:stop] = z[:, start:stop] if guess is None else guess(x, start, stop)
        made, change, settled = _window(reading, z, x, start, stop, solve)
        rounds.append(made)
        residual, converged = torch.maximum(residual, change), converged & settled
        if on_tokens is not None:
            on_tokens(stop, x)
    if not bool(converged.all()):
        warnings.warn(
            f"{int((~converged).sum())} of {n} samples still changed by up to {float(residual.max()):.3g} after "
            f"{solve.most} rounds (tolerance {solve.tolerance}); allow more rounds, or solve smaller windows",
            JacobiUnconverged,
            stacklevel=2,
        )
    return x, SolveInfo(tuple(rounds), residual, converged)


def _window(reading: Causal, z: Tensor, x: Tensor, start: int, stop: int, solve: Jacobi) -> tuple[int, Tensor, Tensor]:
    """Solve one window in place; rounds, the last change of each sample, and whether it is settled."""
    exact = stop - start
    most = exact if solve.most is None else min(solve.most, exact)
    change, low = z.new_zeros(len(z)), start
    for made in range(1, most + 1):
        mean, log_scale = reading.stats(x, low, stop)
        new = torch.addcmul(mean, z[:, low:stop], log_scale.exp())
        finite = bool(new.isfinite().all())
        changes = (new - x[:, low:stop]).abs().amax(2)
        change = changes.amax(1)
        if not finite:
            # it would spread to every token through a product with a hidden key: unless it is final, it waits as a zero
            new[:, start + made - low :].nan_to_num_(0.0, 0.0, 0.0)
        x[:, low:stop] = new
        if made == exact or (finite and bool((change <= solve.tolerance).all())):
            return made, change, torch.ones_like(change, dtype=torch.bool)
        # tokens behind settled ones are settled for good, and so is one more with each round, whatever it changed by
        quiet = (changes <= _QUIET * solve.tolerance).all(0)
        low = max(start + made, low + int(quiet.cumprod(0).sum()))
    return most, change, change <= solve.tolerance
