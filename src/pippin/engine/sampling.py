"""From logits to a token: penalties, temperature, top-k, top-p, min-p, and a seed.

Notable here:
- the order is fixed and documented: repetition penalty, frequency and presence penalty, logit bias, constraint,
  temperature, top-k, top-p, min-p, draw
- greedy decoding is temperature 0, the default: the likeliest token, the first one of equals
- one pass over the vocabulary finds the candidates; the rest works on those few and costs little
- `law` gives the very probabilities that `choose` draws from, for those who check a guess against them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from pippin.core.errors import DecodingFailure, InvalidArgument

# More candidates than this are ranked only where a flat distribution leaves so many in the nucleus.
SHORTLIST = 256
# Beyond these a temperature, or its inverse, is no 32-bit number any more; the draw is the same.
COLDEST, HOTTEST = 1e-30, 1e30
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen and when to stop.

    Args:
        temperature: 0 is greedy; above, logits are divided by it.
        top_k: only the k likeliest tokens; None for all.
        top_p: only the smallest set of likeliest tokens whose probabilities reach p, in (0, 1]; None for all.
        min_p: only tokens at least this share as likely as the likeliest, in [0, 1]; None for all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen so far, the prompt's too;
            1 for none.
        frequency_penalty: subtracted from a token's logit once for each time that the answer so far holds it, in
            [-2, 2].
        presence_penalty: subtracted once from the logit of every token that the answer so far holds, in [-2, 2].
        logit_bias: added to the logits of these token ids, each in [-100, 100]; None for none.
        seed: same seed, same text on the same device; None draws a fresh one. Not so where speculation draws its
            drafts: their lengths depend on the room that there is (the law of the answers does not).
        max_tokens: longest answer, in tokens; None for what the context leaves.
        stop: the answer ends before the first of these strings.
        logprobs: how many likeliest tokens to report with each token, 0 for the chosen one only; None for no report.

    Raises:
        InvalidArgument: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        number, integer = (int, float), int
        self._check("temperature", number, lambda t: math.isfinite(t) and t >= 0, "a finite number, 0 or above")
        self._check("top_k", integer, lambda k: k >= 1, "a whole number, 1 or above, or None")
        self._check("top_p", number, lambda p: 0 < p <= 1, "a number above 0 and at most 1, or None")
        self._check("min_p", number, lambda p: 0 <= p <= 1, "a number from 0 to 1, or None")
        self._check("repetition_penalty", number, lambda r: math.isfinite(r) and r > 0, "a finite number above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            self._check(name, number, lambda p: -2 <= p <= 2, "a number from -2 to 2")
        self._check("logit_bias", Mapping, _is_bias, "a mapping from token ids to numbers from -100 to 100, or None")
        self._check("seed", integer, lambda s: 0 <= s < 2**63, "a whole number from 0 to 2**63 - 1, or None")
        self._check("max_tokens", integer, lambda n: n >= 1, "a whole number, 1 or above, or None")
        self._check("logprobs", integer, lambda n: 0 <= n <= 100, "a whole number from 0 to 100, or None")
        sequence = not isinstance(self.stop, str) and isinstance(self.stop, Sequence)
        if not sequence or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidArgument(f"stop must be a sequence of strings that are not empty, got {self.stop!r}")

    def _check(self, name: str, kind: type | tuple[type, ...], ok: Callable[[Any], bool], rule: str) -> None:
        value = getattr(self, name)
        if value is None and name not in ("temperature", *PENALTIES):
            return
        if isinstance(value, bool) or not isinstance(value, kind) or not ok(value):
            raise InvalidArgument(f"{name} must be {rule}, got {value!r}")


def _is_bias(bias: Mapping[Any, Any]) -> bool:
    """Whether every key can be a token id and every value lies in range."""
    ids = all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in bias)
    plain = all(isinstance(by, int | float) and not isinstance(by, bool) for by in bias.values())
    return ids and plain and all(-100 <= by <= 100 for by in bias.values())


class Sampler:
    """The state of one request: what it has seen and its random numbers. Works on the CPU."""

    def __init__(self, options: SamplingOptions, prompt: Sequence[int] | Int[Tensor, tokens], vocab_size: int) -> None:
        self.options = options
        self.generator = torch.Generator()
        if options.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(options.seed)
        self.seen: Bool[Tensor, vocab] | None = None
        if options.repetition_penalty != 1.0:
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

    def penalise(self, logits: Float[Tensor, vocab]) -> None:
        """Apply the repetition penalty, then frequency and presence penalty, then the bias, in place.

        Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition); OpenAI's API reference (the others).
        """
        options = self.options
        if self.seen is not None:
            penalty = options.repetition_penalty
            torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits, out=logits)
        if self.counts is not None:
            logits -= options.frequency_penalty * self.counts + options.presence_penalty * (self.counts > 0)
        if self.bias is not None:
            logits.index_add_(0, *self.bias)

    def choose(self, logits: Float[Tensor, vocab]) -> int:
        """Draw a token from float32 logits in which forbidden tokens are minus infinity.

        Raises:
            DecodingFailure: no token is allowed, or a logit is not a number.
        """
        best, top = self._best(logits)
        token = best if self.options.temperature == 0 else self._draw(logits, top)
        self.note(token)
        return token

    def law(self, logits: Float[Tensor, vocab]) -> Float64[Tensor, vocab]:
        """The probabilities with which `choose` would draw each token; all on one token where it is greedy.

        Raises:
            DecodingFailure: no token is allowed, or a logit is not a number.
        """
        best, top = self._best(logits)
        law = torch.zeros(len(logits), dtype=torch.float64)
        if self.options.temperature == 0:
            law[best] = 1
            return law
        ids, weights = self._weights(logits, top)
        weights = weights.double()
        weights /= weights.sum()
        return weights if ids is None else law.index_copy_(0, ids, weights)

    def fork(self, generator: torch.Generator) -> Sampler:
        """A sampler that has seen the same and goes its own way, with random numbers of its own."""
        other = copy(self)
        other.generator = generator
        other.seen = None if self.seen is None else self.seen.clone()
        other.counts = None if self.counts is None else self.counts.clone()
        return other

    def note(self, token: int) -> None:
        """Remember a token of the answer for the penalties."""
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1

    @staticmethod
    def _best(logits: Tensor) -> tuple[int, float]:
        """The likeliest token and its logit."""
        values = logits.numpy()  # whose argmax takes a tenth of the time of torch's
        best = int(values.argmax())
        top = float(values[best])
        if not math.isfinite(top):
            problem = "no token is allowed" if top == -math.inf else f"a logit is {top}"
            raise DecodingFailure(f"cannot choose a token: {problem}; check the weights and the constraint")
        return best, top

    def _draw(self, logits: Tensor, top: float) -> int:
        ids, weights = self._weights(logits, top)
        index = pick(weights, self.generator)
        return index if ids is None else int(ids[index])

    def _weights(self, logits: Tensor, top: float) -> tuple[Tensor | None, Tensor]:
        """Candidates (None: all tokens, in order) and numbers in proportion to their probabilities."""
        options = self.options
        scores = (logits - top) / min(max(options.temperature, COLDEST), HOTTEST)
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
        keep = torch.ones_like(weights, dtype=torch.bool)
        if options.top_p is not None:
            keep &= weights.cumsum(0) - weights < options.top_p * total
        if options.min_p is not None:
            keep &= weights >= options.min_p * weights[0]
        return ids, weights * keep

    def _covers(self, weights: Tensor, total: float) -> bool:
        """Whether the shortlist holds every token that top-p and min-p may keep."""
        options = self.options
        if options.top_p is not None and float(weights.sum()) >= options.top_p * total:
            return True
        return options.min_p is not None and float(weights[-1]) < options.min_p * float(weights[0])


def pick(weights: Float[Tensor, choices], generator: torch.Generator) -> int:
    """Draw an index with probability proportional to its weight, by inverting the cumulative sum; one random number.

    >>> pick(torch.tensor([0.0, 2.0, 0.0]), torch.Generator())
    1
    """
    sums = weights.double().cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    at = int(torch.searchsorted(sums, point, right=True))
    return at if at < len(sums) else int(weights.nonzero()[-1])  # a point rounded up to the end
