"""What every generator checks, its noise, and its folder."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, ModelNotFound, UnsupportedModel
from pippin.core.formats import model_types
from pippin.generate import contract
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.contract import GeneratorModule, SamplingStep, check_samples, prepare_sampling
from pippin.generate.noise import Noise

CPU = torch.device("cpu")
CLASSES = ConditioningSpec(num_classes=4, null=True)


def test_each_sample_has_its_own_noise():
    three, one = Noise(3, seed=5), Noise(1, seed=7)
    first = three.normal((2, 2))
    assert torch.equal(first[2], one.normal((2, 2))[0])
    assert torch.equal(first[2], torch.randn(2, 2, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(three.uniform((3,))[2], one.uniform((3,))[0])
    assert abs(float(torch.corrcoef(Noise(2, seed=0).normal((10_000,)))[0, 1])) < 0.05
    for n, seed in ((0, 1), (1, -1)):
        with pytest.raises(InvalidArgument, match="must be at least"):
            Noise(n, seed=seed)


def test_one_condition_serves_all_samples():
    call = prepare_sampling(CLASSES, CPU, Conditioning(labels=torch.tensor([3])), 4)
    assert (call.condition.labels.tolist(), call.n) == ([3] * 4, 4)
    assert prepare_sampling(CLASSES, CPU).n == 1
    assert prepare_sampling(CLASSES, CPU, Conditioning(labels=torch.tensor([1, 2])), guidance=2.0).n == 2
    assert prepare_sampling(CLASSES, CPU, guidance=2.0, unconditional_guidance=True).guidance == 2.0


@pytest.mark.parametrize(
    ("spec", "condition", "options", "message"),
    [
        (CLASSES, None, {"n": 0}, "n must be at least 1"),
        (CLASSES, None, {"guidance": -1.0}, "guidance must be at least 0 and finite, got -1.0"),
        (CLASSES, None, {"guidance": float("nan")}, "guidance must be"),
        (CLASSES, None, {"steps": 0}, "steps must be at least 1"),
        (CLASSES, None, {"seed": -1}, "seed must be at least 0"),
        (CLASSES, None, {"guidance": 2.0}, "no condition was given"),
        (
            ConditioningSpec(num_classes=4),
            Conditioning(labels=torch.tensor([0])),
            {"guidance": 2.0},
            "not trained without its condition",
        ),
        (CLASSES, Conditioning(labels=torch.tensor([0, 1])), {"n": 3}, "condition of 2 samples for n=3"),
        (CLASSES, Conditioning(labels=torch.tensor([4])), {}, "label 4 is outside"),
        (ConditioningSpec(), Conditioning(labels=torch.tensor([0])), {}, "reads no condition"),
    ],
)
def test_what_cannot_be_sampled_is_refused(spec, condition, options, message):
    with pytest.raises(InvalidArgument, match=message):
        prepare_sampling(spec, CPU, condition, **options)


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
    with contract.sampling_progress("drawing") as on_step:
        on_step(SamplingStep(1, 5, lambda: torch.zeros(1)))
        on_step(SamplingStep(4, 5, lambda: torch.zeros(1)))
    assert drawn == ["drawing", 1, "of 5", 3, "of 5"]


# --- folders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Of a generator that is saved."""

    size: int
    condition: ConditioningSpec

    @property
    def shape(self):
        return (1, self.size, self.size)


class Made(GeneratorModule):
    """A generator without any skill."""

    model_type = "pippin_made"
    config_type = Config

    def __init__(self, config):
        super().__init__(config)
        if config.size < 1:
            raise InvalidArgument("size")
        self.layer = nn.Linear(config.size, config.size)

    def sample(self, condition=None, n=None, **options):
        return torch.zeros(n or 1, 1, self.config.size, self.config.size)


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.setattr(model_types, "MODEL_TYPES", {"pippin_made": f"{__name__}:Made", "pippin_other": "pathlib:Path"})
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Made=Made))


def test_a_folder_comes_back(tmp_path, kinds):
    model = Made(Config(3, CLASSES))
    model.metadata = {"classes": ["é", "b"]}
    model.save(tmp_path / "m")
    back = GeneratorModule.load(tmp_path / "m", device="cpu")
    assert back.config == model.config
    assert back.metadata == model.metadata
    assert torch.equal(back.layer.weight, model.layer.weight)
    assert not back.training
    assert not back.layer.weight.requires_grad


def test_folders_that_do_not_fit(tmp_path, kinds):
    with pytest.raises(ModelNotFound):
        GeneratorModule.load(tmp_path / "none")
    Made(Config(3, CLASSES)).save(tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    for change, error, message in (
        ({"model_type": "llama"}, UnsupportedModel, "unknown model type 'llama'"),
        ({"model_type": "pippin_other"}, UnsupportedModel, "holds a Path, which is no generator"),
        ({"size": "large"}, CorruptedFile, "size"),
        ({"size": 4}, CorruptedFile, "layer.weight"),
        ({"size": 0}, CorruptedFile, "contradicts itself"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(error, match=message):
            GeneratorModule.load(tmp_path)
