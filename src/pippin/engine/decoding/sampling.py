"""From logits to a token: penalties, temperature, top-k, top-p, min-p, and a seed.

Notable here:
- the order is fixed and documented: repetition penalty, frequency and presence penalty, logit bias, constraint,
  temperature, top-k, top-p, min-p, sampling
- greedy decoding is temperature 0: the likeliest token, the first one of equals
- one pass over the vocabulary finds the candidates; the rest works on those few and costs little
- `probabilities` gives the distribution that `sample` samples from, for speculative decoding
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from pippin.core.errors import DecodingFailure
from pippin.engine.options import SamplingOptions

# More candidates than this are ranked only where a flat distribution leaves so many in the nucleus.
SHORTLIST = 256
# Beyond these, a temperature, a repetition penalty or its inverse overflows in 32 bits; within them the sample is the
# same.
SMALLEST, LARGEST = 1e-30, 1e30


class Sampler:
    """The sampling state of one request: its options, the tokens so far (for penalties) and its random generator.

    It works on the CPU.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int] | Int[Tensor, tokens], vocab_size: int) -> None:
        self.options, self.temperature = options, options.temperature or 0.0
        self.repetition_penalty = 1.0 if options.repetition_penalty is None else options.repetition_penalty
        self.generator = torch.Generator()
        if options.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(options.seed)
        self.seen: Bool[Tensor, vocab] | None = None
        if self.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.as_tensor(prompt)] = True
        self.counts: Float[Tensor, vocab] | None = None
        if options.frequency_penalty or options.presence_penalty:
            self.counts = torch.zeros(vocab_size)
        self.bias: tuple[Tensor, Tensor] | None = None
        if options.logit_bias:
            self.bias = (
                torch.tensor([*options.logit_bias]),
                torch.tensor([float(b) for b in options.logit_bias.values()]),
            )

    def penalize(self, logits: Float[Tensor, vocab]) -> None:
        """Apply the repetition penalty, then frequency and presence penalty, then the bias, in place.

        Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition); OpenAI's API reference (the others).
        """
        options = self.options
        if self.seen is not None:
            penalty = within_float32(self.repetition_penalty)
            torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits, out=logits)
        if self.counts is not None:
            logits -= options.frequency_penalty * self.counts + options.presence_penalty * (self.counts > 0)
        if self.bias is not None:
            logits.index_add_(0, *self.bias)

    def sample(self, logits: Float[Tensor, vocab]) -> int:
        """Sample a token from float32 logits, in which forbidden tokens are minus infinity.

        Raises:
            DecodingFailure: no token is allowed, or a logit is not a number.
        """
        best, max_logit = self._best(logits)
        token = best if self.temperature == 0 else self._sample(logits, max_logit)
        self.observe(token)
        return token

    def probabilities(self, logits: Float[Tensor, vocab]) -> Float64[Tensor, vocab]:
        """The probability with which `sample` would choose each token; 1 for one token if sampling is greedy.

        Raises:
            DecodingFailure: no token is allowed, or a logit is not a number.
        """
        best, max_logit = self._best(logits)
        distribution = torch.zeros(len(logits), dtype=torch.float64)
        if self.temperature == 0:
            distribution[best] = 1
            return distribution
        ids, weights = self._weights(logits, max_logit)
        weights = weights.double()
        weights /= weights.sum()
        return weights if ids is None else distribution.index_copy_(0, ids, weights)

    def fork(self, generator: torch.Generator) -> Sampler:
        """An independent copy of this sampler, with another random generator."""
        other = copy(self)
        other.generator = generator
        other.seen = None if self.seen is None else self.seen.clone()
        other.counts = None if self.counts is None else self.counts.clone()
        return other

    def observe(self, token: int) -> None:
        """Add a token of the answer to the counts of the penalties."""
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1

    @staticmethod
    def _best(logits: Tensor) -> tuple[int, float]:
        """The likeliest token and its logit."""
        values = logits.numpy()  # NumPy's argmax takes a tenth of the time of torch's
        best = int(values.argmax())
        max_logit = float(values[best])
        if not math.isfinite(max_logit):
            problem = "no token is allowed" if max_logit == -math.inf else f"a logit is {max_logit}"
            raise DecodingFailure(f"cannot choose a token: {problem}; check the weights and the constraint")
        return best, max_logit

    def _sample(self, logits: Tensor, max_logit: float) -> int:
        ids, weights = self._weights(logits, max_logit)
        index = sample_index(weights, self.generator)
        return index if ids is None else int(ids[index])

    def _weights(self, logits: Tensor, max_logit: float) -> tuple[Tensor | None, Tensor]:
        """The candidates (None for all tokens, in order), and weights proportional to their probabilities."""
        options = self.options
        scores = (logits - max_logit) / within_float32(self.temperature)
        if options.top_k is None and options.top_p is None and options.min_p is None:
            return None, scores.exp()
        total = scores.exp().sum()
        size = min(len(scores), SHORTLIST if options.top_k is None else options.top_k)
        best, ids = scores.topk(size)
        weights = best.exp()
        if options.top_k is not None:
            total = weights.sum()
        elif not self._covers(weights, float(total)):
            best, ids = scores.sort(descending=True, stable=True)
            weights = best.exp()
        is_candidate = torch.ones_like(weights, dtype=torch.bool)
        if options.top_p is not None:
            is_candidate &= weights.cumsum(0) - weights < options.top_p * total
        if options.min_p is not None:
            is_candidate &= weights >= options.min_p * weights[0]
        is_candidate[0] = True  # also where top_p is so small that its share of the total underflows
        return ids, weights * is_candidate

    def _covers(self, weights: Tensor, total: float) -> bool:
        """Whether the shortlist contains every token that top-p and min-p may select."""
        options = self.options
        if options.top_p is not None and float(weights.sum()) >= options.top_p * total:
            return True
        return options.min_p is not None and float(weights[-1]) < options.min_p * float(weights[0])


def within_float32(factor: float) -> float:
    """A positive factor, clamped so that both it and its inverse are finite in 32 bits."""
    return min(max(factor, SMALLEST), LARGEST)


def sample_index(weights: Float[Tensor, choices], generator: torch.Generator) -> int:
    """Sample an index with probability proportional to its weight, by inverting the cumulative sum.

    It takes one random number from the generator.

    >>> sample_index(torch.tensor([0.0, 2.0, 0.0]), torch.Generator())
    1
    """
    sums = weights.double().cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    at = int(torch.searchsorted(sums, point, right=True))
    return at if at < len(sums) else int(weights.nonzero()[-1])  # a point rounded up to the end
