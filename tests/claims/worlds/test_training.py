"""The averaged weights are those that remain, and the learning rate of the lowest loss is taken."""

import pytest
import torch
from torch import nn

from pippin.claims.worlds.training import best_rate, fit
from pippin.core.errors import NonFiniteLoss
from pippin.train import ConstantSchedule, Loss


def test_averaged_weights_are_those_of_every_step_and_the_model_is_left_in_evaluation_mode():
    seen = []

    def objective(model: nn.Module, batch: torch.Tensor, generator: torch.Generator) -> Loss:
        assert model.training
        seen.append(model.weight.item())
        return Loss((model(batch) - 1).square().sum(), len(batch))

    def trained(**options) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        result = fit(model, objective, [torch.ones(4, 1)] * 6, steps=6, seed=0, lr=0.1, **options)
        assert len(result.losses) == 6
        assert not model.training
        return model.weight.item()

    last = trained(schedule=ConstantSchedule())
    average = seen[0]
    for weight in [*seen[1:], last]:
        average = 0.5 * (average + weight)
    assert trained(schedule=ConstantSchedule(), ema=0.5) == pytest.approx(average, rel=1e-6)
    assert average < 0.9 * last
    assert trained() < last  # the cosine, after a warm-up, goes less far


def test_the_best_rate_is_searched_only_among_several():
    assert best_rate((1e-3,), lambda rate: pytest.fail("nothing to search")) == 1e-3
    assert best_rate((1.0, 2.0, 3.0), lambda rate: (rate - 2.2) ** 2) == 2.0


def test_a_rate_at_which_training_breaks_down_is_not_taken():
    def loss_at(rate: float) -> float:
        if rate == 3.0:
            raise NonFiniteLoss("too high", step=1)
        return float("nan") if rate == 1.0 else 5.0

    assert best_rate((1.0, 2.0, 3.0), loss_at) == 2.0
