"""What every generator checks, its noise, and its folder."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, ModelNotFound, UnsupportedModel
from pippin.generate import contract, folder
from pippin.generate.condition import Condition, ConditionSpec
from pippin.generate.contract import Step, check_samples, prepare
from pippin.generate.noise import Noise

CLASSES = ConditionSpec(classes=4, null=True)


def test_each_sample_has_its_own_noise():
    three, one = Noise(3, seed=5), Noise(1, seed=7)
    first = three.normal((2, 2))
    assert torch.equal(first[2], one.normal((2, 2))[0])
    assert torch.equal(first[2], torch.randn(2, 2, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(three.uniform((3,))[2], one.uniform((3,))[0])
    assert abs(float(torch.corrcoef(Noise(2, seed=0).normal((10_000,)))[0, 1])) < 0.05
    for n, seed in ((0, 1), (1, -1)):
        with pytest.raises(InvalidArgument, match="at least 1 sample"):
            Noise(n, seed=seed)


def test_one_condition_serves_all_samples():
    condition, n = prepare(CLASSES, Condition(labels=torch.tensor([3])), 4, 1.0, "cpu")
    assert (condition.labels.tolist(), n) == ([3] * 4, 4)
    assert prepare(CLASSES, None, None, 1.0, "cpu") == (None, 1)
    assert prepare(CLASSES, Condition(labels=torch.tensor([1, 2])), None, 2.0, "cpu")[1] == 2


@pytest.mark.parametrize(
    ("spec", "condition", "n", "guidance", "message"),
    [
        (CLASSES, None, 0, 1.0, "n is 0"),
        (CLASSES, None, 1, -1.0, "guidance is -1"),
        (CLASSES, None, 1, float("nan"), "guidance is nan"),
        (CLASSES, None, 1, 2.0, "no condition was given"),
        (ConditionSpec(classes=4), Condition(labels=torch.tensor([0])), 1, 2.0, "not trained without its condition"),
        (CLASSES, Condition(labels=torch.tensor([0, 1])), 3, 1.0, "condition of 2 samples for n=3"),
        (CLASSES, Condition(labels=torch.tensor([4])), 1, 1.0, "label 4 is outside"),
        (ConditionSpec(), Condition(labels=torch.tensor([0])), 1, 1.0, "reads no condition"),
    ],
)
def test_what_cannot_be_sampled_is_refused(spec, condition, n, guidance, message):
    with pytest.raises(InvalidArgument, match=message):
        prepare(spec, condition, n, guidance, "cpu")


def test_samples_of_another_kind_are_refused():
    with pytest.raises(InvalidArgument, match=r"\(2, 4\); the model's are \(1, 4\)"):
        check_samples(torch.zeros(3, 2, 4), (1, 4))
    with pytest.raises(InvalidInput, match="uint8"):
        check_samples(torch.zeros(3, 1, 4, dtype=torch.uint8), (1, 4))
    with pytest.raises(InvalidInput, match="NaN"):
        check_samples(torch.full((3, 1, 4), torch.nan), (1, 4))


def test_a_bar_is_drawn_for_steps_of_any_size(monkeypatch):
    drawn = []

    class Bar:
        advance, say = drawn.append, drawn.append

    @contract.contextmanager
    def bar(total, title, **how):
        drawn.append(title)
        yield Bar

    monkeypatch.setattr(contract.progress, "bar", bar)
    with contract.shown("drawing") as on_step:
        on_step(Step(1, 5, lambda: torch.zeros(1)))
        on_step(Step(4, 5, lambda: torch.zeros(1)))
    assert drawn == ["drawing", 1, "of 5", 3, "of 5"]


# --- folders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Of a generator that is saved."""

    size: int
    condition: ConditionSpec


class Made(nn.Module):
    """A generator without any skill."""

    config_type = Config

    def __init__(self, config):
        super().__init__()
        if config.size < 1:
            raise ValueError("size")
        self.config, self.facts = config, {}
        self.layer = nn.Linear(config.size, config.size)

    @property
    def shape(self):
        return (1, self.config.size, self.config.size)

    @property
    def condition(self):
        return self.config.condition

    def sample(self, condition=None, n=None, *, steps=None, guidance=1.0, seed=0, on_step=None):
        return torch.zeros(n or 1, *self.shape)


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.setattr(folder, "KINDS", {"pippin_made": f"{__name__}:Made"})
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Made=Made))


def test_a_folder_comes_back(tmp_path, kinds):
    model = Made(Config(3, CLASSES))
    model.facts = {"classes": ["é", "b"]}
    folder.save(model, tmp_path / "m")
    assert folder.is_generator(tmp_path / "m")
    back = folder.load(tmp_path / "m", device="cpu")
    assert back.config == model.config
    assert back.facts == model.facts
    assert torch.equal(back.layer.weight, model.layer.weight)
    assert not back.training
    assert not back.layer.weight.requires_grad


def test_folders_that_do_not_fit(tmp_path, kinds):
    with pytest.raises(UnsupportedModel, match="Linear is none of the generators"):
        folder.save(nn.Linear(1, 1), tmp_path)
    with pytest.raises(ModelNotFound):
        folder.load(tmp_path / "none")
    folder.save(Made(Config(3, CLASSES)), tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    for change, error, message in (
        ({"model_type": "llama"}, UnsupportedModel, "type 'llama' and no generator"),
        ({"config": {"size": "large", "condition": {}}}, CorruptedFile, "do not fit"),
        ({"config": {"size": 4, "condition": {}}}, CorruptedFile, "do not fit"),
        ({"config": {"size": 0, "condition": {}}}, CorruptedFile, "do not fit"),
        ({"config": None}, CorruptedFile, "do not fit"),
        ({"facts": []}, CorruptedFile, "no 'facts'"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(error, match=message):
            folder.load(tmp_path)
    assert not folder.is_generator(tmp_path / "none")
