"""The loop against a plain torch loop, and what it does with sums, ends and bad input."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim import lr_scheduler

from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteLoss
from pippin.train import AdamW, Checkpoints, ConstantSchedule, CosineSchedule, Evaluation, LinearSchedule, Loss, Trainer


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        x = torch.randn(size, 4, generator=generator)
        made.append((x, x.sum(1, keepdim=True).sin()))
    return made


def regression(model, batch, generator):
    x, y = batch
    error = (model(x) - y).square().sum()
    return Loss(error, len(x), {"rows": float(len(x)), "absolute": (model(x) - y).abs().sum().detach()})


def run(data, steps, model=None, objective=regression, **changes):
    settings = {"optimizer": AdamW(lr=0.01), "schedule": ConstantSchedule(), "show_progress": False, **changes}
    return Trainer(model or net(), objective, data, steps=steps, **settings)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_losses_are_those_of_a_plain_loop_bit_for_bit(clip, precision):
    """Batches of 16 rows: a division by a power of two is exact, so it may stand anywhere."""
    data = batches([16] * 30)
    trainer = run(
        data, 30, max_grad_norm=clip, precision=precision, schedule=CosineSchedule(warmup_steps=0, min_lr_ratio=0.1)
    )
    losses = trainer.fit().losses

    model = net()
    groups = [{"params": [p]} if p.ndim > 1 else {"params": [p], "weight_decay": 0.0} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * step / 30)) / 2)
    plain = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = (model(x) - y).square().sum() / 16
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        plain.append(loss.item())
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_however_a_batch_is_cut_the_step_is_the_same(sizes):
    """Losses, gradient norm and metrics; the means of the parts would differ."""
    parts = batches(sizes)
    one = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    cut, whole = (
        run(parts, 1, model=net().double(), objective=double, gradient_accumulation_steps=len(parts)),
        run([one], 1, model=net().double(), objective=double),
    )
    a, b = cut.fit().steps[0], whole.fit().steps[0]
    assert a.loss == pytest.approx(b.loss, rel=1e-9)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-9)
    assert a.metrics["absolute"] == pytest.approx(b.metrics["absolute"], rel=1e-9)
    assert a.units == b.units == sum(sizes)
    for p, q in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        # the first update of Adam is about the rate times the gradient's sign, so its rounding is seen where that is 0
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def double(model, batch, generator):
    return regression(model, tuple(tensor.double() for tensor in batch), generator)


def test_metrics_are_per_unit():
    data = batches([3, 5])
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    mean = (net()(x) - y).abs().mean().item()
    step = run(data, 1, gradient_accumulation_steps=2).fit().steps[0]
    assert step.metrics == {"rows": 1.0, "absolute": pytest.approx(mean)}


def test_the_norm_is_that_before_clipping_and_the_rate_that_of_the_schedule():
    data = batches([8, 8])
    trainer = run(data, 2, max_grad_norm=1e-3, schedule=LinearSchedule(min_lr_ratio=0.0))
    first, second = trainer.fit().steps
    model = net()
    (regression(model, data[0], None).total / 8).backward()
    assert first.grad_norm == pytest.approx(
        torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(), rel=1e-6
    )
    assert (first.lr, second.lr) == (0.01, 0.005)


def test_a_step_without_units_changes_nothing():
    def masked(model, batch, generator):
        return Loss(model(batch[0]).sum() * 0.0, 0)

    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    training = run(batches([4, 4]), 2, model=model, objective=masked).fit()
    assert all(math.isnan(loss) for loss in training.losses)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert '"loss": null' in training.steps[0].to_json()


def test_data_that_ends_ends_the_run():
    trainer = run(batches([4] * 5), 100, gradient_accumulation_steps=2)
    training = trainer.fit()
    assert training.stopped == "exhausted"
    assert [step.units for step in training.steps] == [8, 8, 4]
    assert trainer.fit().stopped == "exhausted"
    assert run(batches([4] * 5), 5).fit().stopped is None


@pytest.mark.parametrize("data", [[], iter(())])
def test_data_without_a_batch_is_refused(data):
    with pytest.raises(InvalidInput, match="has no batch"):
        run(data, 3).fit()


def test_weights_that_are_not_finite_are_all_named():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 1] = math.nan
        model[2].bias[0] = math.inf
    with pytest.raises(InvalidInput, match=r"0.weight \(1 of 32\), 2.bias \(1 of 1\)"):
        run(batches([4]), 1, model=model)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update_and_keeps_the_batch(tmp_path, what):
    from safetensors.torch import load_file

    def breaks(model, batch, generator):
        error = regression(model, batch, generator).total
        if batch[0].shape[0] == 3:
            zero = (model(batch[0]) * 0.0).sum()
            error = error + (zero.sqrt() if what == "gradient" else zero * math.inf)
        return Loss(error, len(batch[0]))

    data = batches([4, 4, 4, 3])
    trainer = run(
        data, 4, objective=breaks, gradient_accumulation_steps=2, checkpoints=Checkpoints(tmp_path, save_every=10)
    )
    trainer.advance(1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteLoss, match=r"step 2: the loss is .* lower learning rate") as caught:
        trainer.fit()
    assert caught.value.step == 2
    saved = load_file(caught.value.saved)
    assert torch.equal(saved["batch.1.0"], data[3][0])
    assert torch.equal(saved["batch.0.1"], data[2][1])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.step == 1


def test_without_a_folder_nothing_is_saved():
    def infinite(model, batch, generator):
        return Loss(model(batch[0]).sum() * math.inf, 1)

    with pytest.raises(NonFiniteLoss, match="With checkpoints") as caught:
        run(batches([2]), 1, objective=infinite).fit()
    assert caught.value.saved is None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: Loss(out.sum().detach(), 1), "step 1: the loss has no gradient"),
        (lambda out: Loss(out, 1), r"got shape \(2, 1\) and count 1"),
        (lambda out: Loss(out.sum(), -1), r"got shape \(\) and count -1"),
        (lambda out: Loss(out.sum(), math.nan), "count nan"),
        (lambda out: None, "a scalar tensor or a Loss, got NoneType"),
        (lambda out: {"loss": out.sum()}, "a scalar tensor or a Loss, got dict"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, message):
    with pytest.raises(InvalidInput, match=message):
        run(batches([2]), 1, objective=lambda model, batch, generator: loss(model(batch[0]))).fit()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0 and finite, got 0.0"),
        ({"precision": "float16"}, "'float32' or 'bfloat16', got 'float16'"),
        ({"device": "tpu"}, "tpu"),
        ({"ema": 1.0}, "got 1.0"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "settings of one.* not torch's SGD"),
    ],
)
def test_an_argument_outside_its_range_is_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        run(batches([2]), **{"steps": 1, **changes})


def test_an_evaluation_outside_its_range_or_without_its_best_measure_is_refused():
    with pytest.raises(InvalidArgument, match="eval_every must be at least 1, got 0"):
        Evaluation(lambda model: {}, eval_every=0)
    with pytest.raises(InvalidArgument, match=r"measures \['accuracy'\], and best='loss'"):
        run(batches([2]), 1, evaluation=Evaluation(lambda model: {"accuracy": 1.0}, eval_every=1)).fit()


def test_an_evaluation_sees_the_averages_in_evaluation_mode_and_gives_the_weights_back():
    seen = []

    def measure(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(model[0].weight.detach().clone())
        return {"loss": float(torch.rand(()))}

    trainer = run(batches([4] * 6), 6, ema=0.5, evaluation=Evaluation(measure, eval_every=4))
    averages, weights = [], []
    for _ in range(6):
        trainer.advance(1)
        averages.append(trainer.ema.averages["0.weight"].clone())
        weights.append(trainer.model[0].weight.detach().clone())
    assert [step for step, _ in trainer.result.evaluations] == [4, 6]
    assert torch.equal(seen[0], averages[3])
    assert torch.equal(seen[1], averages[5])
    assert not torch.equal(seen[1], weights[5])
    plain = run(batches([4] * 6), 6)
    plain.fit()
    assert torch.equal(plain.model[0].weight, weights[5])


def test_modes_and_the_callers_random_numbers_are_as_before():
    model = nn.Sequential(net(), nn.Dropout(0.5)).eval()
    model[0].train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(batches([4] * 3), 3, model=model).fit()
    assert torch.equal(torch.rand(3), expected)
    assert not model.training
    assert model[0].training
    assert not model[1].training


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    def noisy(model, batch, generator):
        x, y = batch
        return Loss((model(x) - y - torch.randn(y.shape, generator=generator)).square().sum(), len(x))

    def losses(seed):
        model = nn.Sequential(net(), nn.Dropout(0.2))
        return run(batches([4] * 5), 5, model=model, objective=noisy, seed=seed).fit().losses

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_noise_of_an_objective_and_of_dropout_are_not_the_same_numbers():
    drawn = []

    def objective(model, batch, generator):
        drawn.append((torch.rand(8), torch.rand(8, generator=generator)))
        return regression(model, batch, generator)

    run(batches([4] * 4), 2, objective=objective, gradient_accumulation_steps=2).fit()
    numbers = torch.stack([tensor for pair in drawn for tensor in pair])
    assert len(numbers.unique(dim=0)) == 8


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Named:
    pair: Pair
    name: str


@pytest.mark.parametrize(
    "form", [lambda x, y: {"a": [x, y]}, lambda x, y: Named(Pair(x, y), "a"), lambda x, y: (x, {"y": y})]
)
def test_a_batch_may_have_any_form(form):
    from pippin.train.batch import tensors_of, to_device

    ((x, y),) = batches([2])
    moved = to_device(form(x, y), torch.device("meta"))
    assert [tensor.device.type for _, tensor in tensors_of(moved)] == ["meta", "meta"]
    assert type(moved) is type(form(x, y))
    assert [tensor.shape for _, tensor in tensors_of(moved)] == [x.shape, y.shape]


def test_no_gradient_is_left_and_none_from_before_is_used():
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    trainer = run(batches([4]), 1, model=model)
    clean = run(batches([4]), 1)
    assert trainer.fit().steps[0].grad_norm == clean.fit().steps[0].grad_norm
    assert all(p.grad is None for p in model.parameters())
