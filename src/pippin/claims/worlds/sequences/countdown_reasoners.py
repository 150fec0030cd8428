"""Solvers of CountDown problems: chains of thought, latent reasoning, random expressions, brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pippin.claims.worlds.sequences import countdown
from pippin.claims.worlds.training import fit
from pippin.language import LanguageModel
from pippin.language.methods import ladir
from pippin.language.methods.ladir.data import Problem
from pippin.language.methods.ladir.train import reconstruction_accuracy
from pippin.language.objectives import NextToken
from pippin.train import AdamW, CosineSchedule


class ReasonerSize(NamedTuple):
    """Sizes of the models and of their training.

    Attributes:
        layers: layers of the decoder.
        width: hidden size of the decoder.
        problems: number of training problems.
        rows: batch size.
        chain: training steps of the chain of thought, from which the reasoner starts.
        vae: training steps of the autoencoder.
        teacher: training steps of stage 1.
        rollout: training steps of stage 2.
    """

    layers: int
    width: int
    problems: int
    rows: int
    chain: int
    vae: int
    teacher: int
    rollout: int


def chain_of_thought(problems: Sequence[Problem], size: ReasonerSize, seed: int) -> LanguageModel:
    """Train a decoder on chains of thought."""
    model = countdown.model(layers=size.layers, width=size.width, seed=seed)
    chains = countdown.Chains(model.tokenizer, problems, size.rows, seed=seed)
    fit(model.module, NextToken(), chains, steps=size.chain, seed=seed, lr=6e-3, warmup=0.1)
    return model


def thought_autoencoder(
    base: LanguageModel, problems: Sequence[Problem], size: ReasonerSize, seed: int
) -> ladir.ThoughtVAE:
    """Train the autoencoder of solution steps, with three latents of 16 dimensions each."""
    vae = ladir.ThoughtVAE.from_language_model(base, block_size=3, latent_size=16, max_sentence_length=8, seed=seed)
    ladir.fit_vae(
        vae,
        sorted({step for problem in problems for step in problem.steps}),
        steps=size.vae,
        batch_size=size.rows,
        optimizer=AdamW(lr=5e-3, weight_decay=0.0),
        # a sentence of five tokens has none to spare
        objective=ladir.Reconstruction(beta=1e-3, noise=0.3, replace_prob=0.0),
        seed=seed,
        show_progress=False,
    )
    return vae


def reconstructed(vae: ladir.ThoughtVAE, problems: Sequence[Problem], seed: int, noise: float = 0.0) -> float:
    """Share of tokens of the problems' steps that are reconstructed."""
    return reconstruction_accuracy(
        vae, sorted({step for problem in problems for step in problem.steps}), noise=noise, seed=seed
    )


def latent_reasoner(
    base: LanguageModel,
    vae: ladir.ThoughtVAE,
    problems: Sequence[Problem],
    size: ReasonerSize,
    seed: int,
    after_stage_1: Callable[[ladir.LatentReasoner], None],
) -> ladir.LatentReasoner:
    """Train both stages of the reasoner on the latents of an autoencoder."""
    reasoner = ladir.LatentReasoner.from_language_model(
        base, vae, max_blocks=3, max_answer_length=8, null_prob=0.2, seed=seed
    )
    examples = ladir.training_examples(reasoner, problems)

    def train(objective: ladir.TeacherForcing | ladir.RolloutTraining, steps: int, rate: float) -> None:
        ladir.fit_reasoner(
            reasoner,
            examples,
            objective,
            steps=steps,
            batch_size=size.rows,
            optimizer=AdamW(lr=rate, weight_decay=0.0),
            schedule=CosineSchedule(warmup_steps=0.1),
            seed=seed,
            show_progress=False,
        )

    train(ladir.TeacherForcing(num_noise_samples=4), size.teacher, 3e-3)
    after_stage_1(reasoner)
    train(ladir.RolloutTraining(steps=4, num_noise_samples=2), size.rollout, 3e-4)
    return reasoner


def random_expression(question: str, source: random.Random) -> str:
    """The question's numbers in random order with random signs; correct for one in five."""
    x, y, z = source.sample(question.split("=")[0].split(","), 3)
    return f"{x}{source.choice('+-')}{y}{source.choice('+-')}{z}"


def solved(question: str) -> list[str]:
    """All solutions, by brute force."""
    numbers, target = question.split("=")
    return [found[-1] for found in countdown.solutions([int(x) for x in numbers.split(",")], int(target))]
