"""Bytes and seconds: counted by hand, against what was used, and refused before they are taken."""

from dataclasses import replace

import pytest
import torch

from pippin.core.errors import OverMemoryBudget
from pippin.kits.image.plan import STARTED, LiveBytes, stored_weights, weights_of

from .conftest import creator

PROMPT = "two white squares"


def test_live_bytes_are_those_of_a_count_by_hand():
    before = torch.ones(500)
    with LiveBytes() as watch:
        a = before * 2  # 2000
        b = a.view(5, 100) + 1  # 4000: a view is no memory
        del a  # 2000
        c = torch.cat([b, b])  # 6000
        c += 1  # in place
        del b
    assert (watch.live, watch.peak) == (4000, 6000)


def test_weights_are_counted_once(tmp_path):
    layer = torch.nn.Linear(10, 10, bias=False)
    assert weights_of(layer, None, layer) == 400
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    assert stored_weights(tmp_path) == 5


def test_the_estimate_is_what_a_drawing_uses(family_creator):
    cost = family_creator.estimate(PROMPT, limit=3, batch_size=3)
    job = replace(family_creator.plan(PROMPT, limit=3).job, n=3)
    with LiveBytes() as watch:
        family_creator.backend.run(job, lambda step: None)
    used = watch.peak + weights_of(family_creator.model)
    assert used * 0.8 <= cost.bytes - STARTED <= used * 1.6
    assert cost.weight_bytes == weights_of(family_creator.model)
    assert cost.seconds >= cost.first_seconds > 0


def test_a_batch_is_made_smaller_before_anything_is_refused():
    made = creator("diffusion")
    weights = weights_of(made.model)
    each = made.estimate(PROMPT).bytes_per_image
    made = creator("diffusion", memory_budget=weights + STARTED + 2 * each)
    assert made.plan(PROMPT, limit=8, batch_size=8).batch_size == 2
    assert len(list(made.images(PROMPT, limit=3, batch_size=8))) == 3


def test_over_budget_is_refused_before_it_is_allocated():
    made = creator("diffusion")
    weights, each = weights_of(made.model), made.estimate(PROMPT).bytes_per_image
    budget = weights + STARTED + each // 2
    made = creator("diffusion", memory_budget=budget)
    with LiveBytes() as watch, pytest.raises(OverMemoryBudget, match="one image needs at least") as caught:
        made.images(PROMPT)
    assert caught.value.budget == budget < caught.value.estimate
    assert watch.peak <= each  # it stopped on the way to a whole image
    with pytest.raises(OverMemoryBudget, match="of weights"):
        creator("diffusion", memory_budget=weights // 2).images(PROMPT)
