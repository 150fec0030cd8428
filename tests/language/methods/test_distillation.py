"""Distillation against the plain formula in float64, in one piece and in many."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from pippin.claims.worlds.sequences.byte_text import byte_config, byte_model
from pippin.core.errors import InvalidArgument, VocabularyMismatch
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language import Decoder
from pippin.language.chunked_loss import sum_in_chunks
from pippin.language.methods.distillation import Distillation
from pippin.train import AdamW, ConstantSchedule, Trainer


def model(seed: int, **sizes) -> Decoder:
    module = Decoder(byte_config(**({"layers": 2, "width": 32} | sizes))).initialize(seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)  # laws that are far from uniform
    return module


def batch(seed: int, *, documents=None) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 257, (2, 13), generator=generator)
    targets = rows[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE
    return TokenBatch(rows[:, :-1], targets, documents)


def formula(student, teacher, made, weight, temperature, top):
    """The definition, with all logits in memory; documents one by one."""
    counts = made.documents or (made.ids.shape[1],) * len(made.ids)
    ids = made.ids.reshape(-1).split(list(counts))
    ours, theirs = (torch.cat([m(part[None])[0] for part in ids]) for m in (student, teacher))
    wanted = made.targets.reshape(-1) != IGNORE
    ours, theirs, labels = ours[wanted], theirs[wanted].detach(), made.targets.reshape(-1)[wanted]
    if top is not None:
        least = theirs.topk(top).values[:, -1:]
        theirs = theirs.masked_fill(theirs < least, -torch.inf)
    taught = F.cross_entropy(ours / temperature, (theirs / temperature).softmax(-1))
    return (1 - weight) * F.cross_entropy(ours, labels) + weight * temperature**2 * taught


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 100),
    weight=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top=st.sampled_from([None, 1, 4, 300]),
    piece=st.sampled_from([None, 1, 5]),
    documents=st.sampled_from([None, (12, 12), (5, 7, 3, 9)]),
)
def test_loss_and_gradients_are_those_of_the_formula(seed, weight, temperature, top, piece, documents):
    student, teacher, made = model(seed, shared=1).double(), model(seed + 1).double(), batch(seed, documents=documents)
    loss = Distillation(teacher, weight, temperature, top, chunk_size=piece)(student, made, torch.Generator())
    assert loss.count == made.learned
    (loss.total / loss.count).backward()
    found = [parameter.grad.clone() for parameter in student.parameters()]
    student.zero_grad()
    expected = formula(student, teacher, made, weight, temperature, None if top == 300 else top)
    expected.backward()
    assert float(loss.total.detach() / loss.count) == pytest.approx(float(expected.detach()), rel=1e-5)
    for ours, parameter in zip(found, student.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-4)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_what_is_logged_adds_up_to_the_loss():
    student, teacher, made = model(0), model(1), batch(0)
    loss = Distillation(teacher, weight=0.9)(student, made, torch.Generator())
    labels = formula(student, teacher, made, 0.0, 1.0, None)
    with torch.no_grad():
        kept = made.targets.reshape(-1) != IGNORE
        ours, theirs = (m(made.ids).flatten(0, 1)[kept].log_softmax(-1) for m in (student, teacher))
        divergence = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        hits = (ours.argmax(-1) == made.targets.reshape(-1)[kept]).sum()
    assert float(loss.metrics["labels"].detach()) == pytest.approx(float(labels.detach()) * loss.count, rel=1e-4)
    assert float(loss.metrics["divergence"]) == pytest.approx(float(divergence), rel=1e-3)
    assert float(loss.metrics["accuracy"]) == float(hits)


def test_a_packed_teacher_says_the_same_as_a_dense_one():
    student, teacher, made = model(0), model(1), batch(0)
    dense = Distillation(teacher)(student, made, torch.Generator())
    packed = Distillation(byte_model(copy.deepcopy(teacher).pack()))(student, made, torch.Generator())
    assert float(packed.total.detach()) == pytest.approx(float(dense.total.detach()), rel=1e-4)


def test_nothing_to_learn_is_no_loss_and_no_gradient():
    student, made = model(0), batch(0)
    nothing = TokenBatch(made.ids, torch.full_like(made.targets, IGNORE))
    loss = Distillation(model(1))(student, nothing, torch.Generator())
    loss.total.backward()
    assert (float(loss.total.detach()), loss.count) == (0.0, 0.0)


def test_a_student_that_is_its_teacher_has_no_divergence_and_one_that_is_taught_comes_nearer():
    teacher, made = model(1), batch(0)
    same = Distillation(teacher, weight=1.0)(copy.deepcopy(teacher), made, torch.Generator())
    assert float(same.metrics["divergence"]) == pytest.approx(0.0, abs=1e-3)
    student = model(2, shared=1)
    trainer = Trainer(
        student,
        Distillation(teacher, weight=1.0),
        [made] * 20,
        steps=20,
        optimizer=AdamW(lr=3e-3, weight_decay=0.0),
        schedule=ConstantSchedule(),
        show_progress=False,
    )
    figures = [step.metrics["divergence"] for step in trainer.fit().steps]
    assert figures[-1] < 0.5 * figures[0]


def test_gradients_in_pieces_reach_whatever_the_head_is_made_of():
    """A head whose matrix is computed from parameters elsewhere in the model, as a fake-quantized one is."""
    module = model(0)
    scale = torch.nn.Parameter(torch.ones(257, 1))
    module.register_parameter("scale", scale)

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x @ (scale * module.embed_tokens.weight).T

    module.lm_head = Scaled()
    hidden, gradients = torch.randn(11, 32, generator=torch.Generator().manual_seed(0)), []
    for piece in (11, 4):
        module.zero_grad()
        total, sums = sum_in_chunks(
            module, hidden, lambda logits, part: (logits.logsumexp(-1).sum(), {"max": logits.amax()}), chunk_size=piece
        )
        total.backward()
        gradients.append([scale.grad.clone(), module.embed_tokens.weight.grad.clone()])
        assert sums["max"].requires_grad is False
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": 1.5}, "from 0 to 1, got 1.5"),
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ],
)
def test_bad_settings_name_the_value(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        Distillation(model(0), **arguments)


def test_another_vocabulary_is_refused_before_anything_is_computed():
    from dataclasses import replace

    other = Decoder(replace(byte_config(layers=1, width=32), vocab_size=300)).initialize(seed=0)
    with pytest.raises(VocabularyMismatch, match="the student has 300 tokens and the teacher 257"):
        Distillation(model(0))(other, batch(0), torch.Generator())
