r"""The objectives of LaDiR's stages: reconstruction for the VAE, then teacher forcing and rollout training.

Notable here:
- in rollout training the answer follows thoughts that the model has generated, with gradients through every denoising
  step of every block
- losses are means within a problem and sums over problems, so that they do not depend on how a batch is split

Source: arXiv:2510.04573, sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import Fraction, NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotPrepared
from pippin.data.token_batches import IGNORE
from pippin.language.decoder import logits_of
from pippin.language.methods.ladir.autoencoder import ThoughtVAE
from pippin.language.methods.ladir.model import LatentReasoner
from pippin.language.methods.ladir.sample import denoise
from pippin.language.methods.ladir.sequence import ThoughtBatch
from pippin.language.objectives import cross_entropy
from pippin.nn.kv_cache import NoCache
from pippin.train import Loss

LossWeights = tuple[Annotated[float, Ge(0), Lt(math.inf)], ...]
"""Weights of flow matching, answer and special token (does another block follow)."""


class Reconstruction:
    r"""The VAE's loss: cross-entropy of sentences given their latents, plus $\beta$ times their KL divergence.

    The divergence is a mean over the elements of the latents and counts once for each token, so $\beta$ means the same
    for any ``block_size`` and ``latent_size``. For robustness, the encoder sees sentences with some tokens replaced,
    and latents are perturbed before they are decoded.

    Args:
        beta: weight of the divergence.
        noise: standard deviation of the perturbation, in units of that of the batch's latents.
        replace_prob: probability with which a token of the encoder's input is replaced by a random one.

    Raises:
        InvalidArgument: a number out of range.

    Source: arXiv:2510.04573, section 3.1.
    """

    unit = "tokens"

    @checked
    def __init__(
        self, *, beta: NonNegativeFloat = 1e-3, noise: NonNegativeFloat = 0.3, replace_prob: Fraction = 0.3
    ) -> None:
        self.beta, self.noise, self.replace_prob = beta, noise, replace_prob

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator) -> Loss:
        """The loss of sentences: their token ids, padded on the right, and their lengths."""
        assert isinstance(model, ThoughtVAE)
        (ids, lengths), device = batch, batch[0].device
        real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        other = torch.randint(model.decoder.config.vocab_size, ids.shape, generator=generator, device=device)
        replaced = torch.rand(ids.shape, generator=generator, device=device) < self.replace_prob
        mean, log_variance = model.posterior(torch.where(replaced & real, other, ids), lengths)
        z = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator, device=device)
        std = self.noise * (mean.detach().std() if mean.numel() > 1 else 1.0)
        z = z + std * torch.randn(mean.shape, generator=generator, device=device)
        total, correct, tokens = reconstruction_loss(model, z, ids, lengths)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean((1, 2))
        divergence = (divergence * (lengths + 1)).sum()
        return Loss(
            total + self.beta * divergence, float(tokens), {"accuracy": correct, "divergence": divergence.detach()}
        )


def reconstruction_loss(
    vae: ThoughtVAE,
    z: Float[Tensor, "batch tokens latent"],
    ids: Int[Tensor, "batch length"],
    lengths: Int[Tensor, batch],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], int]:
    """Cross-entropy of sentences given latents in the encoder's units, summed; correct tokens; and all tokens."""
    prompt = vae.soft_prompt(z)
    index = torch.arange(ids.shape[1] + 1, device=ids.device)
    targets = torch.cat([ids, torch.full_like(ids[:, :1], vae.end_id)], 1)
    targets = torch.where(index == lengths[:, None], vae.end_id, targets)
    wanted = index <= lengths[:, None]  # the sentence and its end token
    x = torch.cat([prompt, vae.decoder.embed(ids)], 1)
    hidden = vae.decoder.norm(vae.decoder.forward_layers(x, NoCache()))[:, prompt.shape[1] - 1 :]
    total, correct = cross_entropy(vae.decoder, hidden[wanted], targets[wanted])
    return total, correct, int(wanted.sum())


class TeacherForcing:
    r"""Stage 1: each block is denoised after the encoder's latents of the blocks before it.

    $z_t = (1 - t) z_0 + t \epsilon$, and the target of the velocity is $\epsilon - z_0$, for several $(t, \epsilon)$ of
    each block in one pass. The loss of a problem is the weighted sum of the mean squared error of the velocity (flow
    matching), the cross-entropy of the answer's tokens given the clean blocks, and the binary cross-entropy of "another
    block follows" at each EOT (special tokens). All three are trained where the question is hidden, too: the answer
    must then be read from the thought.

    Args:
        num_noise_samples: noisy copies of each block.
        loss_weights: of flow matching, answer and special tokens.

    Raises:
        InvalidArgument: no copies, or a negative weight.

    Source: arXiv:2510.04573, section 3.2.
    """

    unit = "problems"

    @checked
    def __init__(self, *, num_noise_samples: PositiveInt = 8, loss_weights: LossWeights = (1.0, 1.0, 0.1)) -> None:
        self.num_noise_samples, self.loss_weights = num_noise_samples, loss_weights

    def __call__(self, model: nn.Module, batch: ThoughtBatch, generator: torch.Generator) -> Loss:
        """The loss of a batch of problems."""
        reasoner = _unwrap(model)
        hide = _hidden_questions(reasoner, batch, generator)
        return _weighted(self.loss_weights, *self.losses(reasoner, batch, hide, generator))

    def losses(
        self,
        reasoner: LatentReasoner,
        batch: ThoughtBatch,
        hide_question: Bool[Tensor, batch],
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The three losses of each problem, and the accuracy of its answer's tokens."""
        z, device = batch.latents, batch.latents.device
        _check_latents(reasoner, z)
        batch_size, blocks = z.shape[:2]
        t = torch.rand(batch_size, blocks, self.num_noise_samples, generator=generator, device=device)
        clean = z[:, :, None].expand(-1, -1, self.num_noise_samples, -1, -1)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        time = t[..., None, None]
        output = reasoner(batch, (1 - time) * clean + time * noise, t, hide_question)
        present = torch.arange(blocks, device=device) < batch.num_blocks[:, None]
        flow = (output.velocity - (noise - clean)).square().mean((2, 3, 4))  # (batch, blocks)
        follows = torch.arange(1, blocks + 1, device=device) < batch.num_blocks[:, None]
        special = F.binary_cross_entropy_with_logits(output.continues, follows.float(), reduction="none")
        flow, special = ((part * present).sum(1) / batch.num_blocks for part in (flow, special))
        answer, accuracy = _answer_loss(reasoner, output.answer, batch)
        return flow, answer, special, accuracy

    def after_step(self, model: nn.Module, step: int) -> None:
        """Count the step, so that rollout training knows that there was a stage 1."""
        _unwrap(model).trained_steps += 1


class RolloutTraining:
    """Stage 2: the answer is trained after thoughts that the model generates, with the other losses as in stage 1.

    Gradients flow through every denoising step of every block.

    Args:
        steps: denoising steps of each block; fewer than in sampling, to save memory.
        num_noise_samples: as for `TeacherForcing`.
        loss_weights: as for `TeacherForcing`; the second is that of the answer after the model's own thoughts.

    Raises:
        InvalidArgument: no steps, no copies, or a negative weight.
        NotPrepared: when called, a reasoner that was not trained with `TeacherForcing` before.

    Source: arXiv:2510.04573, section 3.3.
    """

    unit = "problems"

    @checked
    def __init__(
        self,
        *,
        steps: PositiveInt = 10,
        num_noise_samples: PositiveInt = 8,
        loss_weights: LossWeights = (1.0, 1.0, 0.1),
    ) -> None:
        self.steps = steps
        self.teacher_forcing = TeacherForcing(num_noise_samples=num_noise_samples, loss_weights=loss_weights)

    def __call__(self, model: nn.Module, batch: ThoughtBatch, generator: torch.Generator) -> Loss:
        """The loss of a batch of problems."""
        reasoner = _unwrap(model)
        if not int(reasoner.trained_steps):
            raise NotPrepared("rollout training needs a reasoner that was trained with TeacherForcing first")
        hide = _hidden_questions(reasoner, batch, generator)
        flow, _, special, _ = self.teacher_forcing.losses(reasoner, batch, hide, generator)
        state = reasoner.start(batch.questions, batch.padding, torch.zeros_like(hide))
        for block in range(batch.latents.shape[1]):
            shape = batch.latents[:, block].shape
            noise = torch.randn(shape, generator=generator, device=batch.latents.device)
            z = denoise(partial(reasoner.velocity, state), noise, steps=self.steps)
            reasoner.append(state, z, block < batch.num_blocks)
        answer, accuracy = _answer_loss(reasoner, reasoner.answer_states(state, batch.answers), batch)
        return _weighted(self.teacher_forcing.loss_weights, flow, answer, special, accuracy)


def _hidden_questions(reasoner: LatentReasoner, batch: ThoughtBatch, generator: torch.Generator) -> Bool[Tensor, batch]:
    device = batch.num_blocks.device
    return torch.rand(len(batch.num_blocks), generator=generator, device=device) < reasoner.config.null_prob


def _answer_loss(reasoner: LatentReasoner, hidden: Tensor, batch: ThoughtBatch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of each answer, and the accuracy of its tokens."""
    logits: Tensor = logits_of(reasoner.decoder, hidden).float()
    real = batch.targets != IGNORE
    tokens = real.sum(1)
    nats = F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORE, reduction="none")
    correct = (logits.argmax(-1) == batch.targets) & real
    return nats.sum(1) / tokens, (correct.sum(1) / tokens).detach()


def _weighted(weights: LossWeights, flow: Tensor, answer: Tensor, special: Tensor, accuracy: Tensor) -> Loss:
    total = weights[0] * flow.sum() + weights[1] * answer.sum() + weights[2] * special.sum()
    metrics = {"flow": flow, "answer": answer, "special": special, "accuracy": accuracy}
    return Loss(total, float(len(flow)), {name: value.detach().sum() for name, value in metrics.items()})


def _unwrap(model: nn.Module) -> LatentReasoner:
    """The reasoner inside the wrapper of a distributed run."""
    module = getattr(model, "module", model)
    assert isinstance(module, LatentReasoner)
    return module


def _check_latents(reasoner: LatentReasoner, z: Tensor) -> None:
    shape = (reasoner.config.vae.block_size, reasoner.config.vae.latent_size)
    if tuple(z.shape[2:]) != shape:
        raise InvalidArgument(f"the batch has latents of {tuple(z.shape[2:])}, and the reasoner's autoencoder {shape}")
