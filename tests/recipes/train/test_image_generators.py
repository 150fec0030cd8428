"""Every method makes a model that can be trained, samples, and comes back from its folder."""

import pytest
import torch

import pippin
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.recipes.train.image_generators import METHODS, patch_size_for, untrained
from pippin.train import AdamW, ConstantSchedule, Trainer


@pytest.fixture(scope="module")
def batches():
    """Dark pictures of class 0 and light ones of class 1."""
    g = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1] * 8)
    made = []
    for _ in range(100):
        x = (labels * 1.2 - 0.6).view(-1, 1, 1, 1) + 0.05 * torch.randn(16, 1, 8, 8, generator=g)
        made.append(Samples(x, Conditioning(labels=labels)))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_its_classes_and_comes_back(method, batches, tmp_path):
    spec = ConditioningSpec(num_classes=2, null=True)
    dit = method.endswith("dit")  # its branches begin closed
    made = untrained(
        method, (1, 8, 8), spec, hidden_size=32, num_hidden_layers=2 if dit else 1, patch_size=4 if dit else 2
    )
    how = {"optimizer": AdamW(lr=1e-2 if dit else 3e-3), "schedule": ConstantSchedule(), "show_progress": False}
    Trainer(made.model, made.objective, batches, steps=100 if dit else 60, **how).fit()
    made.model.requires_grad_(False).eval().save(tmp_path)
    model = pippin.load(tmp_path, device="cpu")
    condition = Conditioning(labels=torch.tensor([0, 1]).repeat_interleave(8))
    drawn = model.sample(condition, seed=3)
    assert torch.equal(drawn, made.model.sample(condition, seed=3))
    assert drawn.shape == (16, 1, 8, 8)
    assert float(drawn[8:].mean() - drawn[:8].mean()) > 0.4


def test_patches_leave_few_tokens():
    assert patch_size_for(16, 16, 256) == 1
    assert patch_size_for(30, 30, 64) == 5
    with pytest.raises(InvalidArgument, match="no patch divides 29 by 31"):
        patch_size_for(29, 31, 64)


def test_mistakes():
    with pytest.raises(InvalidArgument, match=r"method must be 'unet', 'dit', .*got 'gan'"):
        untrained("gan", (1, 8, 8), ConditioningSpec())
    with pytest.raises(InvalidArgument, match="num_hidden_layers must be at least 1, got 0"):
        untrained("dit", (1, 8, 8), ConditioningSpec(), num_hidden_layers=0)


def test_a_flow_without_noise_has_bits_per_dimension():
    levels = torch.randint(0, 256, (3, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    flow = untrained("tarflow", (1, 8, 8), ConditioningSpec(), noise_std=0.0).model
    assert flow.bits_per_dim(levels).shape == (3,)
    with pytest.raises(InvalidArgument, match=r"noise_std=0 \(--noise-std 0\)"):
        untrained("tarflow", (1, 8, 8), ConditioningSpec()).model.bits_per_dim(levels)
    with pytest.raises(InvalidArgument, match=r"noise_std \(--noise-std\) is for methods .* not for 'unet'"):
        untrained("unet", (1, 8, 8), ConditioningSpec(), noise_std=0.0)
    assert untrained("starflow", (1, 8, 8), ConditioningSpec(), noise_std=0.2).model.config.noise_std == 0.2
    assert untrained("starflow", (1, 8, 8), ConditioningSpec()).model.config.noise_std == 0.3
