r"""Teaching a model to think in vectors: an autoencoder of thoughts, a flow over them, then its own thoughts.

Notable here:
- three objectives for the one `Trainer`: `Reconstruction` of sentences, `Teacher` forcing, and `Rollout`, whose answers
  follow thoughts that the model has just made, with gradients through all of their steps
- losses are means within a problem and sums over problems, so how a batch is cut changes nothing
- data is what fine-tuning on written chains reads: a prompt, and a completion that ends in "The answer is …"
- latents of all sentences are computed once: the autoencoder is frozen by then
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput, NotPrepared
from pippin.data.batches import IGNORE
from pippin.data.ordering import Shuffled
from pippin.data.records import read_records
from pippin.language.ladir import LatentReasoner
from pippin.language.objectives import cross_entropy
from pippin.language.thought_blocks import ThoughtBatch
from pippin.language.thoughts import ThoughtVAE, padded
from pippin.nn.cache import NoCache
from pippin.train import AdamW, Checkpoints, Cosine, Loss, Trainer, Training
from pippin.train.optimisers import Optimiser

_ANSWER = re.compile(r"\s*(?:####|[Tt]he (?:final )?answer is:?)\s*")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\s*\n\s*")


class Problem(NamedTuple):
    """A question, the sentences of a solution, and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: str


def split_solution(text: str) -> tuple[tuple[str, ...], str]:
    """The sentences of a written solution, and the answer after "The answer is" or "####" (the last one in the text).

    Raises:
        InvalidInput: there is no such mark, nothing before it, or nothing after it.

    >>> split_solution("3 + 8 = 11. 11 - 5 = 6.\\nThe answer is 6.")
    (('3 + 8 = 11.', '11 - 5 = 6.'), '6')
    """
    marks = list(_ANSWER.finditer(text))
    if not marks:
        raise InvalidInput(f"no 'The answer is …' and no '#### …' in the solution {text[:60]!r}")
    before, answer = text[: marks[-1].start()], text[marks[-1].end() :].strip().removesuffix(".")
    steps = tuple(step for step in _SENTENCE.split(before.strip()) if step)
    if not steps or not answer:
        raise InvalidInput(f"no {'answer after' if steps else 'reasoning before'} the mark in {text[:60]!r}")
    return steps, answer


def read_problems(
    paths: str | Path | Iterable[str | Path], *, fields: Mapping[str, str] | None = None
) -> list[Problem]:
    """The problems of some files: prompts, and completions as `split_solution` reads them.

    Args:
        paths: as `pippin.data.records.read_records` takes them.
        fields: as there.

    Raises:
        InvalidRecord: a record that is no prompt with a completion, or without a marked answer; with its place.
        InvalidArgument: as there.
    """
    problems = []
    for record in read_records(paths, fields=fields):
        if record.prompt is None or not record.prompt.strip():
            raise record.error("a problem needs a prompt, the question, and a completion, its solution")
        try:
            problems.append(Problem(record.prompt, *split_solution(record.text)))
        except InvalidInput as error:
            raise record.error(str(error)) from error
    return problems


# --- the autoencoder --------------------------------------------------------------------------------------------------


class Reconstruction:
    r"""Cross-entropy of sentences from their latents, and $\beta$ times the divergence from a normal law.

    The divergence is the mean over all numbers of a latent and counts once for each token, so $\beta$ means the same
    for any length and width. The encoder sees sentences with some tokens replaced; latents get noise before they
    are read.

    Args:
        beta: weight of the divergence.
        noise: standard deviation of the noise, in units of that of the batch's latents.
        replace: share of the encoder's tokens that are replaced at random.

    Raises:
        InvalidArgument: a number out of range.

    Source: arXiv:2510.04573, section 3.1.
    """

    unit = "tokens"

    def __init__(self, *, beta: float = 1e-3, noise: float = 0.3, replace: float = 0.3) -> None:
        if not (beta >= 0 and noise >= 0 and 0 <= replace < 1):
            raise InvalidArgument(
                f"beta ({beta}) and noise ({noise}) must not be negative, replace ({replace}) below 1"
            )
        self.beta, self.noise, self.replace = beta, noise, replace

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator) -> Loss:
        """The loss of sentences: their tokens, padded on the right, and the counts of these."""
        assert isinstance(model, ThoughtVAE)
        (ids, counts), device = batch, batch[0].device
        real = torch.arange(ids.shape[1], device=device) < counts[:, None]
        other = torch.randint(model.decoder.config.vocab_size, ids.shape, generator=generator, device=device)
        changed = torch.rand(ids.shape, generator=generator, device=device) < self.replace
        mean, spread = model.posterior(torch.where(changed & real, other, ids), counts)
        z = mean + (spread / 2).exp() * torch.randn(mean.shape, generator=generator, device=device)
        size = self.noise * (mean.detach().std() if mean.numel() > 1 else 1.0)
        z = z + size * torch.randn(mean.shape, generator=generator, device=device)
        total, right, learnt = read_back(model, z, ids, counts)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).mean((1, 2))
        units = counts + 1
        total = total + self.beta * (divergence * units).sum()
        return Loss(total, float(learnt), {"accuracy": right, "divergence": (divergence * units).sum().detach()})


def read_back(
    vae: ThoughtVAE, z: Float[Tensor, "rows tokens width"], ids: Int[Tensor, "rows length"], counts: Int[Tensor, rows]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], int]:
    """Cross-entropy of sentences given latents in the encoder's units, tokens that were likeliest, and all tokens."""
    prompt = vae.prompt(z)
    end = torch.full_like(ids[:, :1], vae.end)
    targets = torch.cat([ids, end], 1)
    place = torch.arange(targets.shape[1], device=ids.device)
    targets = torch.where(place == counts[:, None], vae.end, targets)
    learnt = place <= counts[:, None]
    x = torch.cat([prompt, vae.decoder.embed(ids)], 1)
    hidden = vae.decoder.norm(vae.decoder.through(x, NoCache()))[:, prompt.shape[1] - 1 :]
    total, right = cross_entropy(vae.decoder, hidden[learnt], targets[learnt])
    return total, right, int(learnt.sum())


def sentence_batches(
    vae: ThoughtVAE, sentences: Sequence[str], rows: int, *, seed: int = 0
) -> Shuffled[str, tuple[Tensor, Tensor]]:
    """Batches of sentences without end, for `Reconstruction`.

    Raises:
        InvalidArgument: no sentences, or ``rows`` below 1.
    """
    return Shuffled(sentences, rows, seed=seed, collate=vae.tokenised)


@torch.no_grad()
def reconstruction(vae: ThoughtVAE, sentences: Sequence[str], *, noise: float = 0.0, seed: int = 0) -> float:
    """Share of tokens (ends too) that the decoder holds likeliest, given latents with noise in units of the data."""
    right, count = 0.0, 0
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(sentences), 256):
        ids, counts = vae.tokenised(sentences[start : start + 256])
        z = vae.posterior(ids, counts).mean
        z = z + noise * vae.scale * torch.randn(z.shape, generator=generator).to(z.device)
        _, found, learnt = read_back(vae, z, ids, counts)
        right, count = right + float(found), count + learnt
    return right / count


def fit_vae(
    vae: ThoughtVAE,
    sentences: Sequence[str],
    *,
    steps: int,
    rows: int = 64,
    optimiser: Optimiser | None = None,
    objective: Reconstruction | None = None,
    checkpoints: Checkpoints | None = None,
    accumulate: int = 1,
    precision: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    show: bool = True,
) -> Training:
    """Train an autoencoder on sentences and measure the units of its latents.

    Raises:
        InvalidArgument: no sentences, an empty one, or numbers out of range.
    """
    data = sentence_batches(vae, sentences, rows, seed=seed)
    trainer = Trainer(
        vae,
        Reconstruction() if objective is None else objective,
        data,
        steps=steps,
        optimiser=AdamW(lr=1e-3, weight_decay=0.03) if optimiser is None else optimiser,
        schedule=Cosine(warmup=0.05),
        checkpoints=checkpoints,
        accumulate=accumulate,
        precision=precision,
        seed=seed,
        title="autoencoder of thoughts",
        show=show,
    )
    training = trainer.fit()
    vae.eval().calibrate(sentences[:4096])
    return training


# --- the reasoner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """A problem as the reasoner learns it: tokens of question and answer (with its end), latents of the sentences."""

    question: list[int]
    latents: Float[Tensor, "blocks tokens width"]
    answer: list[int]


def lessons(reasoner: LatentReasoner, problems: Sequence[Problem]) -> list[Lesson]:
    """Problems with the latents of their sentences: posterior means, in units of the data.

    Raises:
        InvalidInput: a problem has more sentences than the reasoner may think blocks, or a longer answer than it may
            write.
        InvalidArgument: no problems, or an empty question.
        ContextOverflow: a question that leaves no room.
    """
    if not problems:
        raise InvalidArgument("there are no problems to learn from")
    distinct = list(dict.fromkeys(step for problem in problems for step in problem.steps))
    for problem in problems:
        if not 0 < len(problem.steps) <= reasoner.max_blocks:
            raise InvalidInput(
                f"{len(problem.steps)} sentences for {problem.question[:60]!r}, and a thought has 1 to "
                f"{reasoner.max_blocks} blocks; raise max_blocks, or join sentences"
            )
    latents = dict(zip(distinct, reasoner.vae.encode(distinct).cpu(), strict=True))
    made = []
    for problem in problems:
        answer = [*reasoner.tokenizer.encode(problem.answer), reasoner.end]
        if len(answer) > reasoner.max_answer:
            raise InvalidInput(
                f"the answer {problem.answer[:60]!r} has {len(answer)} tokens with its end, and may have "
                f"{reasoner.max_answer}; raise max_answer"
            )
        question = reasoner.encode_question(problem.question)
        made.append(Lesson(question, torch.stack([latents[step] for step in problem.steps]), answer))
    return made


def lesson_batches(
    reasoner: LatentReasoner, learnt: Sequence[Lesson], rows: int, *, seed: int = 0, epochs: int | None = None
) -> Shuffled[Lesson, ThoughtBatch]:
    """Batches of lessons in an order that the seed fixes; a stream with a cursor.

    Raises:
        InvalidArgument: no lessons, or ``rows`` below 1.
    """
    end = reasoner.end

    def collate(chosen: list[Lesson]) -> ThoughtBatch:
        questions = padded([lesson.question for lesson in chosen], end, left=True)
        counts = torch.tensor([len(lesson.latents) for lesson in chosen])
        latents = torch.zeros(len(chosen), int(counts.max()), *chosen[0].latents.shape[1:])
        for row, lesson in enumerate(chosen):
            latents[row, : len(lesson.latents)] = lesson.latents
        padding = questions.shape[1] - torch.tensor([len(lesson.question) for lesson in chosen])
        answers, targets = (padded([lesson.answer for lesson in chosen], fill) for fill in (end, IGNORE))
        return ThoughtBatch(questions, padding, latents, counts, answers, targets)

    return Shuffled(learnt, rows, seed=seed, epochs=epochs, collate=collate)


class Teacher:
    r"""Stage 1: the flow of each block after clean ones, the answer after all of them, and whether another follows.

    $z_t = (1 - t) z_0 + t \epsilon$, and the target is $\epsilon - z_0$; several times and noises for each block, in
    one pass. Losses of a problem: mean squared error, cross-entropy of the answer's tokens, and that of going on.

    Where the question is hidden, all three are learnt as well: the answer must then be read from the thought.

    Args:
        draws: noisy copies of each block.
        weights: of the three losses.

    Raises:
        InvalidArgument: no draws, or a negative weight.

    Source: arXiv:2510.04573, section 3.2.
    """

    unit = "problems"

    def __init__(self, *, draws: int = 8, weights: tuple[float, float, float] = (1.0, 1.0, 0.1)) -> None:
        if draws < 1 or not all(0 <= weight < float("inf") for weight in weights):
            raise InvalidArgument(f"draws ({draws}) must be at least 1, and weights {weights} not negative")
        self.draws, self.weights = draws, weights

    def __call__(self, model: nn.Module, batch: ThoughtBatch, generator: torch.Generator) -> Loss:
        """The loss of a batch of problems."""
        reasoner = _reasoner(model)
        hidden = torch.rand(len(batch.counts), generator=generator, device=batch.counts.device) < reasoner.null_share
        return _loss(self.weights, *self.parts(reasoner, batch, hidden, generator))

    def parts(
        self, reasoner: LatentReasoner, batch: ThoughtBatch, hidden: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The three losses of each problem, and the share of the answer's tokens that were likeliest."""
        z, device = batch.latents, batch.latents.device
        _check_latents(reasoner, z)
        rows, blocks = z.shape[:2]
        t = torch.rand(rows, blocks, self.draws, generator=generator, device=device)
        clean = z[:, :, None].expand(-1, -1, self.draws, -1, -1)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        way = t[..., None, None]
        taught = reasoner.teach(batch, (1 - way) * clean + way * noise, t, hidden)
        there = torch.arange(blocks, device=device) < batch.counts[:, None]
        flow = (taught.velocity - (noise - clean)).square().mean((2, 3, 4))
        follows = torch.arange(1, blocks + 1, device=device) < batch.counts[:, None]
        more = F.binary_cross_entropy_with_logits(taught.more, follows.float(), reduction="none")
        flow, more = ((part * there).sum(1) / batch.counts for part in (flow, more))
        answer, right = _answered(reasoner, taught.answer, batch)
        return flow, answer, more, right

    def after_step(self, model: nn.Module, step: int) -> None:
        """Count the update, so that stage 2 knows that there was a stage 1."""
        _reasoner(model).taught += 1


class Rollout:
    """Stage 2: the answer after thoughts that the model makes itself, beside the losses of stage 1 on the encoder's.

    Gradients go back through every step of every block.

    Args:
        steps: of each block; fewer than in use, for memory's sake.
        draws: as in `Teacher`.
        weights: as there; the second is of the answer after the model's own thoughts.

    Raises:
        InvalidArgument: no steps, no draws, or a negative weight. NotPrepared, when called: the reasoner is untaught.

    Source: arXiv:2510.04573, section 3.3.
    """

    unit = "problems"

    def __init__(
        self, *, steps: int = 10, draws: int = 8, weights: tuple[float, float, float] = (1.0, 1.0, 0.1)
    ) -> None:
        if steps < 1:
            raise InvalidArgument(f"steps of a rollout must be at least 1, got {steps}")
        self.steps, self.teacher = steps, Teacher(draws=draws, weights=weights)

    def __call__(self, model: nn.Module, batch: ThoughtBatch, generator: torch.Generator) -> Loss:
        """The loss of a batch of problems."""
        reasoner, counts = _reasoner(model), batch.counts
        if not int(reasoner.taught):
            raise NotPrepared("a rollout needs a reasoner that can already think; train it with Teacher first")
        hidden = torch.rand(len(counts), generator=generator, device=counts.device) < reasoner.null_share
        flow, _, more, _ = self.teacher.parts(reasoner, batch, hidden, generator)
        shown = torch.zeros_like(hidden)
        state = reasoner.start(batch.questions, batch.padding, shown)
        for block in range(batch.latents.shape[1]):
            noise = torch.randn(batch.latents[:, block].shape, generator=generator, device=counts.device)
            z = reasoner.denoise([state], noise, steps=self.steps)
            reasoner.append(state, z, block < counts)
        answer, right = _answered(reasoner, reasoner.follow(state, batch.answers), batch)
        return _loss(self.teacher.weights, flow, answer, more, right)


def _answered(reasoner: LatentReasoner, hidden: Tensor, batch: ThoughtBatch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of each answer, and the share of its tokens that were likeliest."""
    logits: Tensor = reasoner.decoder.lm_head(hidden).float()
    real = batch.targets != IGNORE
    counts = real.sum(1)
    nats = F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORE, reduction="none")
    right = (logits.argmax(-1) == batch.targets) & real
    return nats.sum(1) / counts, (right.sum(1) / counts).detach()


def _loss(weights: tuple[float, float, float], flow: Tensor, answer: Tensor, more: Tensor, right: Tensor) -> Loss:
    total = weights[0] * flow.sum() + weights[1] * answer.sum() + weights[2] * more.sum()
    named = {"flow": flow, "answer": answer, "more": more, "accuracy": right}
    return Loss(total, float(len(flow)), {name: value.detach().sum() for name, value in named.items()})


def _reasoner(model: nn.Module) -> LatentReasoner:
    module = getattr(model, "module", model)
    assert isinstance(module, LatentReasoner)
    return module


def _check_latents(reasoner: LatentReasoner, z: Tensor) -> None:
    wanted = (reasoner.vae.tokens, reasoner.vae.width)
    if tuple(z.shape[2:]) != wanted:
        raise InvalidArgument(f"the batch has latents of {tuple(z.shape[2:])}, and the reasoner's autoencoder {wanted}")
