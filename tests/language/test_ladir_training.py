"""Teaching thoughts: losses against closed forms, what is frozen, what reaches what, and a lesson learnt to its end."""

import json

import pytest
import torch
import torch.nn.functional as F

from pippin.claims import _arithmetic
from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord, NotPrepared
from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.ladir import LatentReasoner
from pippin.language.ladir_training import (
    Problem,
    Reconstruction,
    Rollout,
    Teacher,
    fit_vae,
    lesson_batches,
    lessons,
    read_back,
    read_problems,
    reconstruction,
    split_solution,
)
from pippin.language.objectives import NextToken
from pippin.language.thoughts import ThoughtVAE, padded
from pippin.nn.time_embedding import TimedHead
from pippin.train import AdamW, Trainer

PROBLEMS = [
    Problem("1,2=3", ("1+2=3",), "1+2"),
    Problem("8,5=3", ("8-5=3",), "8-5"),
    Problem("9,4,2=7", ("9-4=5", "5+2=7"), "9-4+2"),
]
SENTENCES = sorted({step for problem in PROBLEMS for step in problem.steps})


@pytest.fixture(scope="module")
def base():
    """A model that was trained to write the solutions, as one would before it learns to think them."""
    made = _arithmetic.model(layers=1, width=32, seed=0)
    end = made.tokenizer.eos_ids[0]
    rows = [[*made.tokenizer.encode("\n".join([p.question, *p.steps, p.answer])), end] for p in PROBLEMS]
    batch = TokenBatch(padded(rows, end)[:, :-1], padded(rows, IGNORE)[:, 1:])
    Trainer(made.module, NextToken(), [batch] * 50, steps=50, optimiser=AdamW(lr=1e-2), show=False).fit()
    return made


@pytest.fixture(scope="module")
def taught(base):
    """An autoencoder and a reasoner that were trained until they know three problems."""
    vae = ThoughtVAE(base, tokens=2, width=8, longest=8, seed=0)
    how = Reconstruction(beta=1e-3, noise=0.2, replace=0.0)
    fit_vae(vae, SENTENCES, steps=80, rows=5, optimiser=AdamW(lr=1.5e-2), objective=how, show=False)
    reasoner = LatentReasoner(base, vae, max_blocks=3, max_answer=8, seed=0, null_share=0.2)
    frozen = {name: tensor.clone() for name, tensor in reasoner.vae.state_dict().items()}
    data = lesson_batches(reasoner, lessons(reasoner, PROBLEMS), 3, seed=0)
    Trainer(reasoner, Teacher(draws=4), data, steps=110, optimiser=AdamW(lr=1e-2), show=False).fit()
    return reasoner, frozen


def test_a_lesson_is_learnt_and_its_thoughts_are_known(taught):
    reasoner, _ = taught
    assert reconstruction(reasoner.vae, SENTENCES) > 0.8
    assert int(reasoner.taught) == 110
    questions = [problem.question for problem in PROBLEMS]
    answers = reasoner.generate(questions, steps=8, seed=0, return_thoughts=True)
    assert [(answer.text, answer.blocks, answer.complete) for answer in answers] == [
        (problem.answer, len(problem.steps), True) for problem in PROBLEMS
    ]
    batch = next(iter(lesson_batches(reasoner, lessons(reasoner, PROBLEMS), 3, seed=0)))
    shown, head = torch.zeros(3, dtype=torch.bool), reasoner.head
    with torch.no_grad():
        flow = Teacher(draws=32).parts(reasoner, batch, shown, torch.Generator().manual_seed(0))[0].mean()
        reasoner.head = TimedHead(32, 8).initialise()
        plain = Teacher(draws=32).parts(reasoner, batch, shown, torch.Generator().manual_seed(0))[0].mean()
        reasoner.head = head
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
    batch = next(iter(lesson_batches(reasoner, lessons(reasoner, PROBLEMS), 4, seed=0)))
    answer_only = Rollout(steps=3, draws=1, weights=(0.0, 1.0, 0.0))
    reasoner.zero_grad()
    loss = answer_only(reasoner, batch, torch.Generator().manual_seed(0))
    loss.total.backward()
    assert loss.count == 3
    assert float(reasoner.head.out.weight.grad.norm()) > 0  # the only way from there to the answer is the trajectory
    assert float(reasoner.time.up.weight.grad.norm()) > 0
    reasoner.zero_grad()
    forced = Teacher(draws=1, weights=(0.0, 1.0, 0.0))(reasoner, batch, torch.Generator().manual_seed(0))
    forced.total.backward()
    assert reasoner.head.out.weight.grad is None or float(reasoner.head.out.weight.grad.norm()) == 0
    reasoner.zero_grad()


def test_a_rollout_needs_a_reasoner_that_was_taught(base, taught):
    vae = taught[0].vae
    fresh = LatentReasoner(base, vae, max_blocks=2, max_answer=8)
    data = lesson_batches(fresh, lessons(fresh, PROBLEMS), 2)
    with pytest.raises(NotPrepared, match="Teacher first"):
        Trainer(fresh, Rollout(steps=1), data, steps=1, show=False).fit()
    with pytest.raises(InvalidInput, match="1 to 1 blocks"):
        lessons(LatentReasoner(base, vae, max_blocks=1), PROBLEMS)
    with pytest.raises(InvalidInput, match="max_answer"):
        lessons(LatentReasoner(base, vae, max_answer=3), PROBLEMS)
    with pytest.raises(InvalidArgument, match="no problems"):
        lessons(fresh, [])
    other = ThoughtVAE(base, tokens=2, width=3)
    other.calibrate(SENTENCES)
    narrow = LatentReasoner(base, other, max_blocks=2)
    batch = next(iter(data))
    with pytest.raises(InvalidArgument, match=r"latents of \(2, 8\)"):
        Teacher(draws=1)(narrow, batch, torch.Generator().manual_seed(0))


def test_the_loss_of_a_batch_is_the_sum_over_its_problems_of_means(taught):
    reasoner, _ = taught
    learnt = lessons(reasoner, PROBLEMS[1:3])
    batch = next(iter(lesson_batches(reasoner, learnt, 2, seed=0)))
    shown = torch.zeros(2, dtype=torch.bool)
    with torch.no_grad():
        flow, answer, more, _ = Teacher(draws=3).parts(reasoner, batch, shown, torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(7)
        t = torch.rand(2, 2, 3, generator=generator)
        noise = torch.randn(2, 2, 3, 2, 8, generator=generator)
        clean = batch.latents[:, :, None]
        made = reasoner.teach(batch, clean + t[..., None, None] * (noise - clean), t, shown)
        for row, count in enumerate(batch.counts.tolist()):
            errors = (made.velocity - (noise - clean))[row, :count].square()
            assert float(flow[row]) == pytest.approx(float(errors.mean()), rel=1e-4)
            wanted = batch.targets[row][batch.targets[row] >= 0]
            logits = reasoner.decoder.lm_head(made.answer[row, : len(wanted)])
            assert float(answer[row]) == pytest.approx(float(F.cross_entropy(logits, wanted)), rel=1e-4, abs=1e-5)
            follows = torch.tensor([1.0] * (count - 1) + [0.0])
            nats = F.binary_cross_entropy_with_logits(made.more[row, :count], follows)
            assert float(more[row]) == pytest.approx(float(nats), rel=1e-4, abs=1e-5)


def test_the_autoencoder_s_loss_is_cross_entropy_and_the_divergence_of_two_normal_laws(taught):
    vae = taught[0].vae
    ids, counts = vae.tokenised(["1+2=3", "7"])
    with torch.no_grad():
        found = vae.posterior(ids, counts)
        total, _, learnt = read_back(vae, found.mean, ids, counts)
        wanted = 0.0
        for row, text in enumerate(["1+2=3", "7"]):
            tokens = torch.tensor([vae.tokenizer.encode(text)])
            x = torch.cat([vae.prompt(found.mean[row : row + 1]), vae.decoder.embed(tokens)], 1)
            from pippin.nn.cache import NoCache

            logits = vae.decoder.lm_head(vae.decoder.norm(vae.decoder.through(x, NoCache()))[0, vae.tokens :])
            wanted += float(F.cross_entropy(logits, torch.tensor([*tokens[0].tolist(), vae.end]), reduction="sum"))
        assert learnt == 5 + 1 + 1 + 1
        assert float(total) == pytest.approx(wanted, rel=1e-4)
        loss = Reconstruction(beta=0.5, replace=0.0)(vae, (ids, counts), torch.Generator().manual_seed(0))
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
        lambda: Reconstruction(replace=1.0),
        lambda: Teacher(draws=0),
        lambda: Teacher(weights=(1.0, -1.0, 0.1)),
        lambda: Rollout(steps=0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()
