r"""Sampling: thought tokens denoised by Euler's method, diversity by repulsion between samples, greedy text decoding.

Notable here:
- the force of diversity guidance enters the step of the latents, away from neighbors; it is part of the velocity, so
  its effect does not grow with the number of steps
- noise is sampled independently for each question and sample: an answer does not depend on the rest of the batch
- sentences and answers are decoded by the same loop over cached keys and values

Source: arXiv:2510.04573, sections 3.2 and 3.4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.language.decoder import Decoder, logits_of
from pippin.nn.kv_cache import MaskedCache, PastKeyValues

Velocity = Callable[[Float[Tensor, "batch tokens latent"], float], Float[Tensor, "batch tokens latent"]]
"""The flow's velocity of thought tokens at a time from 1 (noise) to 0 (clean)."""


@dataclass(frozen=True)
class DenoisingStep:
    """The state that `LatentReasoner.generate` reports after each step.

    Attributes:
        block: number of the block, from 0.
        step: number of the step within the block, from 1.
        steps: steps of a block.
        estimate: the clean thought tokens as predicted at this step, for every trajectory; `ThoughtVAE.decode` turns
            them into text.
    """

    block: int
    step: int
    steps: int
    estimate: Float[Tensor, "trajectories tokens latent"]


@dataclass(frozen=True)
class ReasonerAnswer:
    """One sampled answer to a question.

    Attributes:
        question: the question as it was given.
        sample: number of the sample of this question, from 0.
        text: the answer.
        blocks: number of blocks of the thought.
        complete: whether the model ended its thought; False if ``max_blocks`` ended it.
        thoughts: each block decoded to text, with ``return_thoughts``.
        latents: the blocks themselves, with ``return_thoughts``.
    """

    question: str
    sample: int
    text: str
    blocks: int
    complete: bool
    thoughts: tuple[str, ...] = ()
    latents: Float[Tensor, "blocks tokens latent"] | None = field(default=None, repr=False, compare=False)


def denoise(
    velocity: Velocity,
    z: Float[Tensor, "batch tokens latent"],
    *,
    steps: int,
    null_velocity: Velocity | None = None,
    guidance: float = 1.0,
    force: Velocity | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Float[Tensor, "batch tokens latent"]:
    r"""From noise at $t = 1$ to clean latents at $t = 0$ by Euler's method in float32: $z \leftarrow z - \Delta t\, u$.

    Args:
        velocity: $u_\theta(z, t)$ given the question.
        z: the noise.
        steps: number of equal steps.
        null_velocity: the velocity without the question, for classifier-free guidance.
        guidance: w in $u = u_\varnothing + w (u - u_\varnothing)$; used where there is a ``null_velocity``.
        force: added to $-u$: a force on the latents at a time.
        on_step: called with the number of the step, from 1, and the predicted clean latents $z - t u$.
    """
    z = z.float()
    for step in range(steps):
        t = 1.0 - step / steps
        u = velocity(z, t)
        if null_velocity is not None:
            null = null_velocity(z, t)
            u = null + guidance * (u - null)
        if on_step is not None:
            on_step(step + 1, z - t * u)
        if force is not None:
            u = u - force(z, t)
        z = z - u / steps
    return z


def repulsion(
    z: Float[Tensor, "groups samples size"], present: Bool[Tensor, "groups samples"] | None = None
) -> Float[Tensor, "groups samples size"]:
    r"""Diversity guidance: a force between samples, $F_i = \sum_j 2 (1 - r_{ij}^2) e^{-r_{ij}^2} (z_i - z_j)$.

    Distances $r$ are in units of the median distance within the group. Below it the force points away from the other
    sample, above it towards it.

    Args:
        z: the flattened latents of each sample of each group.
        present: False for samples that take no part; None for all.

    Source: arXiv:2510.04573, section 3.4.
    """
    difference = z[:, :, None] - z[:, None]  # (groups, samples, samples, size)
    squared = difference.square().sum(-1)
    pairs = ~torch.eye(z.shape[1], dtype=torch.bool, device=z.device).expand(len(z), -1, -1)
    if present is not None:
        pairs = pairs & present[:, :, None] & present[:, None]
    median = squared.sqrt().masked_fill(~pairs, torch.nan).flatten(1).nanmedian(-1).values
    unit = median.square()[:, None, None]
    ratio = torch.where(pairs & (unit > 0), squared / unit.clamp(min=1e-20), 1.0)  # the force vanishes at 1
    return (2 * (1 - ratio) * (-ratio).exp())[..., None].mul(difference).sum(2)


def sample_noise(
    questions: Sequence[str], samples: int, shape: tuple[int, int, int], seed: int
) -> Float[Tensor, "trajectories blocks tokens latent"]:
    """Standard normal noise that depends on the seed, the question and the number of the sample alone."""
    noise = []
    for question in questions:
        for sample in range(samples):
            digest = hashlib.blake2b(f"{seed}/{sample}/{question}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            noise.append(torch.randn(shape, generator=generator))
    return torch.stack(noise)


def decode_text(
    decoder: Decoder,
    x: Float[Tensor, "batch new hidden"],
    past: PastKeyValues,
    seen: Bool[Tensor, "batch cached"],
    positions: Int[Tensor, batch],
    *,
    end_ids: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[Float[Tensor, "batch vocab"]], Int[Tensor, batch]] | None = None,
) -> list[list[int]]:
    """Decode text for every sequence of a batch, each until an end token.

    Args:
        decoder: the language model.
        x: embeddings of the first new tokens, with causal attention.
        past: cached keys and values of earlier tokens; those of new tokens are added.
        seen: which cached positions each sequence attends to.
        positions: the position of the first of ``x`` in each sequence.
        end_ids: tokens that end a sequence; not part of the result.
        max_new_tokens: maximum number of tokens of a sequence.
        choose: returns the next token of each sequence from its logits; None takes the likeliest.
    """
    written: list[list[int]] = [[] for _ in range(len(x))]
    unfinished = set(range(len(x)))
    for _ in range(max_new_tokens):
        new = x.shape[1]
        causal = torch.ones(new, new, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        mask = torch.cat([seen[:, None].expand(-1, new, -1), causal], 2)[:, None]  # (batch, 1, new, cached + new)
        cache = MaskedCache(mask, past, positions=positions[:, None] + torch.arange(new, device=x.device), keep=True)
        hidden = decoder.norm(decoder.forward_layers(x, cache)[:, -1])
        cache.advance(new)
        seen, positions = torch.cat([seen, seen.new_ones(len(x), new)], 1), positions + new
        logits: Tensor = logits_of(decoder, hidden).float()
        ids = logits.argmax(-1) if choose is None else choose(logits)
        for row, token in enumerate(ids.tolist()):
            if row in unfinished and token in end_ids:
                unfinished.discard(row)
            elif row in unfinished:
                written[row].append(token)
        if not unfinished:
            break
        x = decoder.embed(ids[:, None])
    return written
