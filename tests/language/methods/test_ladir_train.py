"""Teaching thoughts: losses against closed forms, what is frozen, what reaches what, and a lesson learned."""

import json

import pytest
import torch
import torch.nn.functional as F

from pippin.claims.worlds.sequences import countdown
from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord, NotPrepared
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.methods.ladir.autoencoder import ThoughtVAE, pad
from pippin.language.methods.ladir.data import Problem, read_problems, split_solution
from pippin.language.methods.ladir.loss import Reconstruction, RolloutTraining, TeacherForcing, reconstruction_loss
from pippin.language.methods.ladir.model import LatentReasoner
from pippin.language.methods.ladir.train import (
    fit_reasoner,
    fit_vae,
    reconstruction_accuracy,
    training_batches,
    training_examples,
)
from pippin.language.objectives import NextToken
from pippin.nn.images.time_embedding import TimedHead
from pippin.train import AdamW, CosineSchedule, Trainer

PROBLEMS = [
    Problem("1,2=3", ("1+2=3",), "1+2"),
    Problem("8,5=3", ("8-5=3",), "8-5"),
    Problem("9,4,2=7", ("9-4=5", "5+2=7"), "9-4+2"),
]
SENTENCES = sorted({step for problem in PROBLEMS for step in problem.steps})


@pytest.fixture(scope="module")
def base():
    """A model that was trained to write the solutions, as one would before it learns to think them."""
    made = countdown.model(layers=1, width=32, seed=0)
    end = made.tokenizer.eos_ids[0]
    rows = [[*made.tokenizer.encode("\n".join([p.question, *p.steps, p.answer])), end] for p in PROBLEMS]
    batch = TokenBatch(pad(rows, end)[:, :-1], pad(rows, IGNORE)[:, 1:])
    Trainer(made.module, NextToken(), [batch] * 50, steps=50, optimizer=AdamW(lr=1e-2), show_progress=False).fit()
    return made


@pytest.fixture(scope="module")
def taught(base):
    """An autoencoder and a reasoner that were trained until they know three problems."""
    vae = ThoughtVAE.from_language_model(base, block_size=2, latent_size=8, max_sentence_length=8, seed=0)
    how = Reconstruction(beta=1e-3, noise=0.2, replace_prob=0.0)
    fit_vae(vae, SENTENCES, steps=80, batch_size=5, optimizer=AdamW(lr=1.5e-2), objective=how, show_progress=False)
    reasoner = LatentReasoner.from_language_model(base, vae, max_blocks=3, max_answer_length=8, seed=0, null_prob=0.2)
    frozen = {name: tensor.clone() for name, tensor in reasoner.vae.state_dict().items()}
    fit_reasoner(
        reasoner,
        training_examples(reasoner, PROBLEMS),
        TeacherForcing(num_noise_samples=4),
        steps=110,
        batch_size=3,
        optimizer=AdamW(lr=1e-2),
        schedule=CosineSchedule(),
        show_progress=False,
    )
    return reasoner, frozen


def test_a_lesson_is_learned_and_its_thoughts_are_known(taught):
    reasoner, _ = taught
    assert reconstruction_accuracy(reasoner.vae, SENTENCES) > 0.8
    assert int(reasoner.trained_steps) == 110
    questions = [problem.question for problem in PROBLEMS]
    answers = reasoner.generate(questions, steps=8, seed=0, return_thoughts=True)
    assert [(answer.text, answer.blocks, answer.complete) for answer in answers] == [
        (problem.answer, len(problem.steps), True) for problem in PROBLEMS
    ]
    batch = next(iter(training_batches(reasoner, training_examples(reasoner, PROBLEMS), 3, seed=0)))
    shown, head = torch.zeros(3, dtype=torch.bool), reasoner.velocity_head
    with torch.no_grad():
        flow = (
            TeacherForcing(num_noise_samples=32)
            .losses(reasoner, batch, shown, torch.Generator().manual_seed(0))[0]
            .mean()
        )
        reasoner.velocity_head = TimedHead(32, 8).initialize()
        plain = (
            TeacherForcing(num_noise_samples=32)
            .losses(reasoner, batch, shown, torch.Generator().manual_seed(0))[0]
            .mean()
        )
        reasoner.velocity_head = head
    assert float(flow) < 0.5 * float(plain)  # of which the normal law is all that an untaught one knows


def test_the_autoencoder_is_frozen_and_stays_in_evaluation_mode(taught):
    reasoner, frozen = taught
    for name, tensor in reasoner.vae.state_dict().items():
        assert torch.equal(tensor, frozen[name]), name
    assert reasoner.train().decoder.training
    assert not any(module.training for module in reasoner.vae.modules())
    assert not any(parameter.requires_grad for parameter in reasoner.vae.parameters())
    reasoner.eval()


def test_a_rollout_sends_the_gradient_of_the_answer_through_every_step(taught):
    reasoner, _ = taught
    batch = next(iter(training_batches(reasoner, training_examples(reasoner, PROBLEMS), 4, seed=0)))
    answer_only = RolloutTraining(steps=3, num_noise_samples=1, loss_weights=(0.0, 1.0, 0.0))
    reasoner.zero_grad()
    loss = answer_only(reasoner, batch, torch.Generator().manual_seed(0))
    loss.total.backward()
    assert loss.count == 3
    # from the velocity head, the only way to the answer is the trajectory
    assert float(reasoner.velocity_head.out.weight.grad.norm()) > 0
    assert float(reasoner.time_embedding.up.weight.grad.norm()) > 0
    reasoner.zero_grad()
    forced = TeacherForcing(num_noise_samples=1, loss_weights=(0.0, 1.0, 0.0))(
        reasoner, batch, torch.Generator().manual_seed(0)
    )
    forced.total.backward()
    assert reasoner.velocity_head.out.weight.grad is None or float(reasoner.velocity_head.out.weight.grad.norm()) == 0
    reasoner.zero_grad()


def test_a_rollout_needs_a_reasoner_that_was_taught(base, taught):
    vae = taught[0].vae
    fresh = LatentReasoner.from_language_model(base, vae, max_blocks=2, max_answer_length=8)
    data = training_batches(fresh, training_examples(fresh, PROBLEMS), 2)
    with pytest.raises(NotPrepared, match="TeacherForcing first"):
        Trainer(fresh, RolloutTraining(steps=1), data, steps=1, show_progress=False).fit()
    with pytest.raises(InvalidInput, match="1 to 1 blocks"):
        training_examples(LatentReasoner.from_language_model(base, vae, max_blocks=1), PROBLEMS)
    with pytest.raises(InvalidInput, match="max_answer_length"):
        training_examples(LatentReasoner.from_language_model(base, vae, max_answer_length=3), PROBLEMS)
    with pytest.raises(InvalidArgument, match="no problems"):
        training_examples(fresh, [])
    other = ThoughtVAE.from_language_model(base, block_size=2, latent_size=3)
    other.fit_normalization(SENTENCES)
    narrow = LatentReasoner.from_language_model(base, other, max_blocks=2)
    batch = next(iter(data))
    with pytest.raises(InvalidArgument, match=r"latents of \(2, 8\)"):
        TeacherForcing(num_noise_samples=1)(narrow, batch, torch.Generator().manual_seed(0))


def test_the_loss_of_a_batch_is_the_sum_over_its_problems_of_means(taught):
    reasoner, _ = taught
    learned = training_examples(reasoner, PROBLEMS[1:3])
    batch = next(iter(training_batches(reasoner, learned, 2, seed=0)))
    shown = torch.zeros(2, dtype=torch.bool)
    with torch.no_grad():
        flow, answer, more, _ = TeacherForcing(num_noise_samples=3).losses(
            reasoner, batch, shown, torch.Generator().manual_seed(7)
        )
        generator = torch.Generator().manual_seed(7)
        t = torch.rand(2, 2, 3, generator=generator)
        noise = torch.randn(2, 2, 3, 2, 8, generator=generator)
        clean = batch.latents[:, :, None]
        made = reasoner(batch, clean + t[..., None, None] * (noise - clean), t, shown)
        for row, count in enumerate(batch.num_blocks.tolist()):
            errors = (made.velocity - (noise - clean))[row, :count].square()
            assert float(flow[row]) == pytest.approx(float(errors.mean()), rel=1e-4)
            wanted = batch.targets[row][batch.targets[row] >= 0]
            logits = reasoner.decoder.lm_head(made.answer[row, : len(wanted)])
            assert float(answer[row]) == pytest.approx(float(F.cross_entropy(logits, wanted)), rel=1e-4, abs=1e-5)
            follows = torch.tensor([1.0] * (count - 1) + [0.0])
            nats = F.binary_cross_entropy_with_logits(made.continues[row, :count], follows)
            assert float(more[row]) == pytest.approx(float(nats), rel=1e-4, abs=1e-5)


def test_the_autoencoder_s_loss_is_cross_entropy_and_the_divergence_of_two_normal_laws(taught):
    vae = taught[0].vae
    ids, counts = vae.tokenize(["1+2=3", "7"])
    with torch.no_grad():
        found = vae.posterior(ids, counts)
        total, _, learned = reconstruction_loss(vae, found.mean, ids, counts)
        wanted = 0.0
        for row, text in enumerate(["1+2=3", "7"]):
            tokens = torch.tensor([vae.tokenizer.encode(text)])
            x = torch.cat([vae.soft_prompt(found.mean[row : row + 1]), vae.decoder.embed(tokens)], 1)
            from pippin.nn.kv_cache import NoCache

            hidden = vae.decoder.norm(vae.decoder.forward_layers(x, NoCache()))
            logits = vae.decoder.lm_head(hidden[0, vae.config.block_size :])
            wanted += float(F.cross_entropy(logits, torch.tensor([*tokens[0].tolist(), vae.end_id]), reduction="sum"))
        assert learned == 5 + 1 + 1 + 1
        assert float(total) == pytest.approx(wanted, rel=1e-4)
        loss = Reconstruction(beta=0.5, replace_prob=0.0)(vae, (ids, counts), torch.Generator().manual_seed(0))
        own = torch.distributions.Normal(found.mean, (found.log_variance / 2).exp())
        divergence = torch.distributions.kl_divergence(own, torch.distributions.Normal(0.0, 1.0)).mean((1, 2))
        assert float(loss.metrics["divergence"]) == pytest.approx(float((divergence * (counts + 1)).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("text", "steps", "answer"),
    [
        ("3 + 8 = 11. 11 - 5 = 6. The answer is 6.", ("3 + 8 = 11.", "11 - 5 = 6."), "6"),
        ("so\nit goes\n#### 42", ("so", "it goes"), "42"),
        (
            "The answer is near. It is 2.5 now! The final answer is: 2.5",
            ("The answer is near.", "It is 2.5 now!"),
            "2.5",
        ),
    ],
)
def test_solutions_are_split_into_sentences_and_an_answer(text, steps, answer):
    assert split_solution(text) == (steps, answer)


@pytest.mark.parametrize("text", ["no mark", "The answer is 3", "well. The answer is"])
def test_solutions_without_reasoning_or_answer_are_refused_with_their_place(text, tmp_path):
    with pytest.raises(InvalidInput):
        split_solution(text)
    path = tmp_path / "p.jsonl"
    good = {"prompt": "q", "completion": "a. The answer is 1"}
    path.write_text("\n".join(map(json.dumps, [good, {"prompt": "q", "completion": text}])))
    with pytest.raises(InvalidRecord) as caught:
        read_problems(path)
    assert caught.value.line == 2
    path.write_text(json.dumps({"text": "a. The answer is 1"}))
    with pytest.raises(InvalidRecord, match="prompt"):
        read_problems(path)
    path.write_text(json.dumps(good))
    assert read_problems(path) == [Problem("q", ("a.",), "1")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reconstruction(beta=-1.0),
        lambda: Reconstruction(replace_prob=1.0),
        lambda: TeacherForcing(num_noise_samples=0),
        lambda: TeacherForcing(loss_weights=(1.0, -1.0, 0.1)),
        lambda: RolloutTraining(steps=0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()
