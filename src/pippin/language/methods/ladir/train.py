"""Training LaDiR: the VAE on sentences, then the reasoner on problems, both through the one `Trainer`.

Notable here:
- latents of all sentences are computed once, before stage 1, since the autoencoder is frozen then
- `fit_reasoner` runs both stages of the reasoner, with a different objective for each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.streams import Shuffled
from pippin.data.token_batches import IGNORE
from pippin.language.methods.ladir.autoencoder import ThoughtVAE, pad
from pippin.language.methods.ladir.data import Problem
from pippin.language.methods.ladir.loss import Reconstruction, RolloutTraining, TeacherForcing, reconstruction_loss
from pippin.language.methods.ladir.model import LatentReasoner
from pippin.language.methods.ladir.sequence import ThoughtBatch
from pippin.train import AdamW, Checkpoints, CosineSchedule, Trainer, TrainingResult
from pippin.train.optimizers import Optimizer
from pippin.train.schedules import Schedule


class FitOptions(TypedDict, total=False):
    """Options of both kinds of training for `pippin.train.Trainer`."""

    optimizer: Optimizer
    schedule: Schedule
    checkpoints: Checkpoints | None
    gradient_accumulation_steps: int
    precision: Literal["float32", "bfloat16"]
    show_progress: bool


# --- the autoencoder --------------------------------------------------------------------------------------------------


def fit_vae(
    vae: ThoughtVAE,
    sentences: Sequence[str],
    *,
    steps: int,
    batch_size: int = 64,
    objective: Reconstruction | None = None,
    seed: int = 0,
    **options: Unpack[FitOptions],
) -> TrainingResult:
    """Train an autoencoder on sentences and measure the normalization of its latents.

    Args:
        vae: the autoencoder.
        sentences: one sentence each.
        steps: optimizer steps.
        batch_size: sentences of a batch.
        objective: the objective; None for `Reconstruction` with its defaults.
        seed: seed of the order of the data and of the noise.
        options: options of the trainer; by default AdamW at a learning rate of 1e-3 and a cosine schedule.

    Raises:
        InvalidArgument: no sentences, an empty one, or a number out of range.
    """
    result = Trainer(
        vae,
        Reconstruction() if objective is None else objective,
        Shuffled(sentences, batch_size, seed=seed, collate=vae.tokenize),
        steps=steps,
        seed=seed,
        title="autoencoder of thoughts",
        **_with_defaults(options, 1e-3),
    ).fit()
    vae.eval().fit_normalization(sentences[:4096])
    return result


@torch.no_grad()
def reconstruction_accuracy(vae: ThoughtVAE, sentences: Sequence[str], *, noise: float = 0.0, seed: int = 0) -> float:
    """Accuracy of the decoder's tokens (with end tokens), given latents with noise in units of the data."""
    correct, tokens = 0.0, 0
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(sentences), 256):
        ids, lengths = vae.tokenize(sentences[start : start + 256])
        z = vae.posterior(ids, lengths).mean
        z = z + noise * vae.latent_scale * torch.randn(z.shape, generator=generator).to(z.device)
        _, found, count = reconstruction_loss(vae, z, ids, lengths)
        correct, tokens = correct + float(found), tokens + count
    return correct / tokens


# --- the reasoner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReasoningExample:
    """A training example of the reasoner.

    Attributes:
        question: token ids of the question.
        latents: latents of each sentence of the solution, in units of the data.
        answer: token ids of the answer, with the end token.
    """

    question: list[int]
    latents: Float[Tensor, "blocks tokens latent"]
    answer: list[int]


def training_examples(reasoner: LatentReasoner, problems: Sequence[Problem]) -> list[ReasoningExample]:
    """Problems with the latents of their sentences: posterior means, in units of the data.

    Raises:
        InvalidInput: a problem has more sentences than ``max_blocks``, or a longer answer than ``max_answer_length``.
        InvalidArgument: no problems, or an empty question.
        ContextOverflow: a question that leaves no room.
    """
    if not problems:
        raise InvalidArgument("there are no problems to train on")
    config = reasoner.config
    sentences = list(dict.fromkeys(step for problem in problems for step in problem.steps))
    for problem in problems:
        if not 0 < len(problem.steps) <= config.max_blocks:
            raise InvalidInput(
                f"{len(problem.steps)} sentences for {problem.question[:60]!r}, and a thought has 1 to "
                f"{config.max_blocks} blocks; raise max_blocks, or join sentences"
            )
    latents = dict(zip(sentences, reasoner.vae.encode(sentences).cpu(), strict=True))
    examples = []
    for problem in problems:
        answer = [*reasoner.tokenizer.encode(problem.answer), reasoner.end_id]
        if len(answer) > config.max_answer_length:
            raise InvalidInput(
                f"the answer {problem.answer[:60]!r} has {len(answer)} tokens with its end, and may have "
                f"{config.max_answer_length}; raise max_answer_length"
            )
        question = reasoner.encode_question(problem.question)
        examples.append(ReasoningExample(question, torch.stack([latents[step] for step in problem.steps]), answer))
    return examples


def training_batches(
    reasoner: LatentReasoner,
    examples: Sequence[ReasoningExample],
    batch_size: int,
    *,
    seed: int = 0,
    epochs: int | None = None,
) -> Shuffled[ReasoningExample, ThoughtBatch]:
    """Batches of examples in an order that the seed determines; a resumable stream.

    Raises:
        InvalidArgument: no examples, or ``batch_size`` below 1.
    """
    end = reasoner.end_id

    def collate(chosen: list[ReasoningExample]) -> ThoughtBatch:
        questions = pad([example.question for example in chosen], end, left=True)
        num_blocks = torch.tensor([len(example.latents) for example in chosen])
        latents = torch.zeros(len(chosen), int(num_blocks.max()), *chosen[0].latents.shape[1:])
        for row, example in enumerate(chosen):
            latents[row, : len(example.latents)] = example.latents
        padding = questions.shape[1] - torch.tensor([len(example.question) for example in chosen])
        answers, targets = (pad([example.answer for example in chosen], value) for value in (end, IGNORE))
        return ThoughtBatch(questions, padding, latents, num_blocks, answers, targets)

    return Shuffled(examples, batch_size, seed=seed, epochs=epochs, collate=collate)


def fit_reasoner(
    reasoner: LatentReasoner,
    examples: Sequence[ReasoningExample],
    objective: TeacherForcing | RolloutTraining,
    *,
    steps: int,
    batch_size: int = 32,
    seed: int = 0,
    **options: Unpack[FitOptions],
) -> TrainingResult:
    """One stage of training: `TeacherForcing` first, then `RolloutTraining`.

    Args:
        reasoner: the reasoner; its autoencoder is frozen.
        examples: examples from `training_examples`.
        objective: the objective of the stage.
        steps: optimizer steps.
        batch_size: problems of a batch.
        seed: seed of the order of the data and of the noise.
        options: options of the trainer; by default AdamW at a learning rate of 1e-3 for stage 1 and 1e-4 for stage 2,
            and a cosine schedule with a warm-up of 5 % of the steps.

    Raises:
        InvalidArgument: no examples, or a number out of range.
        NotPrepared: `RolloutTraining` for a reasoner without stage 1.
    """
    rollout = isinstance(objective, RolloutTraining)
    return Trainer(
        reasoner,
        objective,
        training_batches(reasoner, examples, batch_size, seed=seed),
        steps=steps,
        seed=seed,
        title="rollout training" if rollout else "teacher forcing",
        **_with_defaults(options, 1e-4 if rollout else 1e-3),
    ).fit()


def _with_defaults(options: FitOptions, lr: float) -> FitOptions:
    return {"optimizer": AdamW(lr=lr, weight_decay=0.03), "schedule": CosineSchedule(warmup_steps=0.05), **options}
