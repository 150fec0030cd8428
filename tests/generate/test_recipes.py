"""Every method makes a model that learns, draws, and comes back from its folder."""

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate import folder
from pippin.generate.condition import Condition, ConditionSpec, Samples
from pippin.generate.recipes import METHODS, patch_of, recipe
from pippin.train import AdamW, Constant, Trainer


@pytest.fixture(scope="module")
def batches():
    """Dark pictures of class 0 and light ones of class 1."""
    g = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1] * 8)
    made = []
    for _ in range(100):
        x = (labels * 1.2 - 0.6).view(-1, 1, 1, 1) + 0.05 * torch.randn(16, 1, 8, 8, generator=g)
        made.append(Samples(x, Condition(labels=labels)))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_its_classes_and_comes_back(method, batches, tmp_path):
    spec = ConditionSpec(classes=2, null=True)
    dit = method.endswith("dit")  # its branches begin closed
    made = recipe(method, (1, 8, 8), spec, width=32, layers=2 if dit else 1, patch=4 if dit else 2)
    how = {"optimiser": AdamW(lr=1e-2 if dit else 3e-3), "schedule": Constant(), "show": False}
    Trainer(made.model, made.objective, batches, steps=100 if dit else 60, **how).fit()
    folder.save(made.model.requires_grad_(False).eval(), tmp_path)
    model = folder.load(tmp_path, device="cpu")
    condition = Condition(labels=torch.tensor([0, 1]).repeat_interleave(8))
    drawn = model.sample(condition, seed=3)
    assert torch.equal(drawn, made.model.sample(condition, seed=3))
    assert drawn.shape == (16, 1, 8, 8)
    assert float(drawn[8:].mean() - drawn[:8].mean()) > 0.4


def test_patches_leave_few_tokens():
    assert patch_of(16, 16, 256) == 1
    assert patch_of(30, 30, 64) == 5
    with pytest.raises(InvalidArgument, match="no patch divides 29 by 31"):
        patch_of(29, 31, 64)


def test_mistakes():
    with pytest.raises(InvalidArgument, match="no method 'gan'; choose one of unet, dit, ec-dit"):
        recipe("gan", (1, 8, 8), ConditionSpec())
    with pytest.raises(InvalidArgument, match="layers is 0"):
        recipe("dit", (1, 8, 8), ConditionSpec(), layers=0)
