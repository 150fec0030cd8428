"""Blocks of thought in a row of tokens: who sees whom, where each stands, and what keeps samples apart.

Notable here:
- tokens of one block see each other in both directions, and no block sees a later one, however many there are
- noisy copies of a block lie behind the whole row, at the positions of their block, and see what their block saw
- rows of unequal length need no second layout: what a row does not have is seen by nobody
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.cache import Past, Visible

MARKS = 3
"""Vectors around the latents of a block: its begin, its time, and its end."""


def block_bidirectional_mask(
    block_ids: Int[Tensor, "#rows tokens"], pad_mask: Bool[Tensor, "#rows tokens"] | None = None
) -> Bool[Tensor, "rows tokens tokens"]:
    """Who may look at whom: each token what stands before it, and tokens of one block each other.

    Args:
        block_ids: the block of each token; -1 for none.
        pad_mask: false for padding, which nobody but itself sees; None for no padding.

    Source: arXiv:2510.04573, section 3.2; with an id for each block, so that no block sees a later one.

    >>> block_bidirectional_mask(torch.tensor([[-1, 0, 0, -1]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    place = torch.arange(block_ids.shape[1], device=block_ids.device)
    mask = place[None, :, None] >= place[None, None, :]
    mask = mask | ((block_ids[:, :, None] == block_ids[:, None, :]) & (block_ids >= 0)[:, :, None])
    if pad_mask is not None:
        mask = (mask & pad_mask[:, None, :]) | (place[:, None] == place)
    return mask


def repulsion(
    z: Float[Tensor, "groups samples size"], present: Bool[Tensor, "groups samples"] | None = None
) -> Float[Tensor, "groups samples size"]:
    r"""The force of each sample's neighbours on it: $F_i = \sum_j 2 (1 - r_{ij}^2) e^{-r_{ij}^2} (z_i - z_j)$.

    Distances $r$ are in units of the median distance within the group. Nearer than that, the force points away from the
    neighbour; beyond, towards it.

    Args:
        z: the samples of each group.
        present: false for samples that take no part; None for all.

    Source: arXiv:2510.04573, section 3.4.
    """
    apart = z[:, :, None] - z[:, None]
    distance = apart.square().sum(-1)
    pairs = ~torch.eye(z.shape[1], dtype=torch.bool, device=z.device).expand(len(z), -1, -1)
    if present is not None:
        pairs = pairs & present[:, :, None] & present[:, None]
    middle = distance.sqrt().masked_fill(~pairs, torch.nan).flatten(1).nanmedian(-1).values
    unit = middle.square()[:, None, None]
    ratio = torch.where(pairs & (unit > 0), distance / unit.clamp(min=1e-20), 1.0)  # at 1, nothing is felt
    return (2 * (1 - ratio) * (-ratio).exp())[..., None].mul(apart).sum(2)


def normal_velocity(z: Float[Tensor, "*batch tokens width"], t: Float[Tensor, "*batch"]) -> Tensor:
    r"""The velocity that straight paths to noise would have if latents were standard normal.

    It is $\frac{2t - 1}{(1 - t)^2 + t^2} z$; a network that adds to it has only to learn what thoughts are.

    >>> normal_velocity(torch.ones(2, 1, 1), torch.tensor([0.0, 1.0])).flatten().tolist()
    [-1.0, 1.0]
    """
    t = t.float()[..., None, None]
    return (2 * t - 1) / ((1 - t).square() + t.square()) * z.float()


@dataclass(frozen=True)
class ThoughtBatch:
    """Problems as a training step reads them.

    Args:
        questions: tokens, padded on the left.
        padding: pad tokens of each question.
        latents: of each block, in units of the data; anything where a problem has fewer.
        counts: blocks of each problem.
        answers: tokens with the end token, padded on the right.
        targets: the same, with -100 for padding.
    """

    questions: Int[Tensor, "rows question"]
    padding: Int[Tensor, rows]
    latents: Float[Tensor, "rows blocks tokens width"]
    counts: Int[Tensor, rows]
    answers: Int[Tensor, "rows answer"]
    targets: Int[Tensor, "rows answer"]


@dataclass
class State:
    """What is kept of trajectories: keys and values, who sees which, and where the next token stands."""

    past: Past
    seen: Bool[Tensor, "rows kept"]
    places: Int[Tensor, rows]


@dataclass(frozen=True)
class Thinking:
    """What `LatentReasoner.generate` tells after each step.

    Attributes:
        block: from 0.
        step: from 1.
        steps: of the block.
        estimate: where the block's latents would end, for every trajectory; `ThoughtVAE.decode` reads them.
    """

    block: int
    step: int
    steps: int
    estimate: Float[Tensor, "trajectories tokens width"]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        question: as it was asked.
        sample: which of its samples, from 0.
        text: the answer.
        blocks: how many were thought.
        complete: whether the model itself chose to answer; False where ``max_blocks`` ended its thought.
        thoughts: what the blocks stand for, where that was asked for.
        latents: the blocks themselves, where that was asked for.
    """

    question: str
    sample: int
    text: str
    blocks: int
    complete: bool
    thoughts: tuple[str, ...] = ()
    latents: Float[Tensor, "blocks tokens width"] | None = field(default=None, repr=False, compare=False)


class Layout:
    """The row of one pass for training: question, clean blocks, answer, and noisy copies of every block.

    Args:
        question: tokens of the longest question, padded on the left.
        blocks: of the problem with the most.
        answer: tokens of the longest answer, with the mark before it.
        copies: noisy ones of each block, without an end mark.
        tokens: latents of a block.
        device: where masks are made.
    """

    def __init__(
        self, question: int, blocks: int, answer: int, copies: int, tokens: int, device: torch.device | None = None
    ) -> None:
        self.question, self.blocks, self.answer, self.copies, self.tokens = question, blocks, answer, copies, tokens
        size, inside = tokens + MARKS, tokens + MARKS - 1
        clean, noisy, count = blocks * size, blocks * copies * inside, question + blocks * size + answer

        def along(own: Tensor, question_: int, answer_: int, copied: Tensor) -> Tensor:
            """One number for each token, of the four parts."""
            parts = [torch.full((question,), question_), own, torch.full((answer,), answer_), copied]
            return torch.cat(parts).to(device)

        block, copy = torch.arange(clean) // size, torch.arange(noisy) // inside
        within, inner = torch.arange(clean) % size, torch.arange(noisy) % inside
        latent, latent_ = (within >= 2) & (within < 2 + tokens), inner >= 2
        # which block a token belongs to (copies to the one that they are of), from 1; the answer comes after all
        self.stage = along(block + 1, 0, blocks + 1, copy // max(copies, 1) + 1)
        self.group = along(torch.zeros_like(block), 0, 0, copy + 1)
        self.within = along(within, 0, 0, inner)
        thought = along(torch.where(latent, block, -1), -1, -1, torch.where(latent_, blocks + copy, -1))
        mask = block_bidirectional_mask(thought[None])[0]
        same = self.group[:, None] == self.group
        earlier = (self.group > 0)[:, None] & (self.group == 0) & (self.stage < self.stage[:, None])
        self.mask = (mask & same) | earlier
        self._base = count

    def cache(self, padding: Int[Tensor, rows], counts: Int[Tensor, rows]) -> Visible:
        """Mask and positions for problems with so much padding and so many blocks."""
        real = self.real(padding, counts)
        mask = (self.mask & real[:, None]) | torch.eye(len(self.stage), dtype=torch.bool, device=real.device)
        return Visible(mask[:, None], positions=self.places(padding, counts))

    def real(self, padding: Int[Tensor, rows], counts: Int[Tensor, rows]) -> Bool[Tensor, "rows all"]:
        """Tokens that are neither padding nor of a block that a problem does not have."""
        place = torch.arange(len(self.stage), device=padding.device)
        answer = self.stage > self.blocks
        return (place >= padding[:, None]) & ((self.stage <= counts[:, None]) | answer)

    def places(self, padding: Int[Tensor, rows], counts: Int[Tensor, rows]) -> Int[Tensor, "rows all"]:
        """The position of each token; a question begins at 0, and what a problem does not have takes no room."""
        size, place = self.tokens + MARKS, torch.arange(len(self.stage), device=padding.device)
        first = self._base - self.answer
        ahead = torch.where(self.stage > self.blocks, counts[:, None], self.stage - 1) * size
        inner = torch.where(self.stage > self.blocks, place - first, self.within)
        asked = (place - padding[:, None]).clamp(min=0)
        return torch.where(self.stage == 0, asked, self.question - padding[:, None] + ahead + inner)


def own_noise(
    questions: Sequence[str], samples: int, shape: tuple[int, int, int], seed: int
) -> Float[Tensor, "rows blocks tokens width"]:
    """Normal numbers for each sample of each question that depend on seed, question and sample alone."""
    drawn = []
    for question in questions:
        for sample in range(samples):
            digest = hashlib.blake2b(f"{seed}/{sample}/{question}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn.append(torch.randn(shape, generator=generator))
    return torch.stack(drawn)


def check_sampling(
    steps: int, samples: int, guidance: float, init_std: float, diversity: float, blocks: int, at_once: int
) -> None:
    """Refuse numbers that `LatentReasoner.generate` has no use for.

    Raises:
        InvalidArgument: the first of them.
    """
    for name, value in (("steps", steps), ("samples", samples), ("max_blocks", blocks), ("at_once", at_once)):
        if value < 1:
            raise InvalidArgument(f"{name} must be at least 1, got {value}")
    if not (math.isfinite(guidance) and 0 < init_std < math.inf and 0 <= diversity < math.inf):
        raise InvalidArgument(
            f"guidance ({guidance}) must be finite, init_std ({init_std}) above 0, diversity ({diversity}) 0 or more"
        )
    if diversity > 0 and samples < 2:
        raise InvalidArgument(f"diversity keeps samples apart, and there is {samples}; ask for 2 or more")
