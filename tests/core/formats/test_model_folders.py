"""Models of ours as folders: config and tensors come back as they were, and what does not fit is listed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
from annotated_types import Ge
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsupportedModel
from pippin.core.formats import checkpoint
from pippin.core.formats.checkpoint import SavedModel, fill, load, open_folder, open_model, save


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Config:
    size: Annotated[int, Ge(1)]
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner | None = None


class Tied(nn.Module):
    count: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.size, 2))
        self.embed.no_decay = True  # type: ignore[attr-defined]
        self.head = nn.Linear(2, config.size, bias=False)
        self.head.weight = self.embed
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))


CONFIG = Config(4, (3, 5), Inner(0.25))


def build(saved: SavedModel[Config]) -> Tied:
    with torch.device("meta"):
        return Tied(saved.config)


def stored(path: Path) -> Tied:
    model = Tied(CONFIG)
    save(model, path, model_type="tied", config=CONFIG, metadata={"steps": 3})
    return model


def loaded(path: Path, model_type: str = "tied") -> Tied:
    return load(path, build, model_type=model_type, config_type=Config, device="cpu")


def test_config_metadata_and_tensors_come_back(tmp_path):
    model = stored(tmp_path)
    found = loaded(tmp_path)
    assert found.config == CONFIG
    assert open_model(tmp_path, model_type="tied", config_type=Config).metadata == {"steps": 3}
    for name, tensor in model.state_dict().items():
        assert found.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(found.state_dict()[name], tensor)
    assert not found.training


def test_a_tied_weight_is_stored_once_and_stays_tied_with_its_marks(tmp_path):
    stored(tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["count", "embed", "frozen"]
    found = loaded(tmp_path)
    assert found.head.weight is found.embed
    assert found.embed.no_decay  # type: ignore[attr-defined]
    assert found.embed.requires_grad
    assert not found.frozen.requires_grad


def test_dtype_is_of_floating_point_tensors_alone(tmp_path):
    stored(tmp_path)
    found = load(tmp_path, build, model_type="tied", config_type=Config, device="cpu", dtype=torch.float64)
    assert (found.embed.dtype, found.frozen.dtype, found.count.dtype) == (torch.float64, torch.float64, torch.int64)


def test_values_are_no_views_of_the_file(tmp_path):
    stored(tmp_path)
    found = loaded(tmp_path)
    with torch.no_grad():
        found.embed.zero_()
    assert bool(open_folder(tmp_path).tensor("embed").any())
    opened = open_folder(tmp_path)
    fill(found, opened)
    with torch.no_grad():
        found.embed.zero_()
    assert bool(opened.tensor("embed").any())


def test_tensors_that_do_not_fit_are_listed_and_nothing_is_changed(tmp_path):
    stored(tmp_path)
    save_file(
        {"embed": torch.zeros(4, 3), "count": torch.tensor(0), "other": torch.zeros(1)}, tmp_path / "model.safetensors"
    )
    model = Tied(CONFIG)
    before = model.embed.clone()
    with pytest.raises(CorruptedFile, match=r"'frozen' is missing; 'other' is unexpected; 'embed' has shape \(4, 3\)"):
        fill(model, open_folder(tmp_path))
    assert torch.equal(model.embed, before)
    assert int(model.count) == 7


def test_tensors_of_others_can_be_left_alone(tmp_path):
    model = Tied(CONFIG)
    checkpoint.save_folder(
        tmp_path, {}, {**{k: v for k, v in model.state_dict().items() if k != "head.weight"}, "x": torch.ones(1)}
    )
    fill(other := Tied(CONFIG), open_folder(tmp_path), ignore=("x",))
    assert torch.equal(other.embed, model.embed)


def test_many_faults_are_counted_behind_the_first_twenty(tmp_path):
    model = nn.Module()
    save_file({f"{at:02}": torch.zeros(1) for at in range(22)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened = open_folder(tmp_path)
    listed = "; ".join(f"'{at:02}' is unexpected" for at in range(20))
    with pytest.raises(CorruptedFile) as error:
        checkpoint.check_tensors(model, opened)
    assert str(error.value) == f"{tmp_path} does not match its config: {listed}; and 2 more"
    with pytest.raises(CorruptedFile) as error:
        checkpoint.check_tensors(model, opened, ignore={"20", "21"})
    assert str(error.value) == f"{tmp_path} does not match its config: {listed}"


class Nested(nn.Module):
    scale: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.part[1].register_buffer("same", self.scale)


def test_parts_of_parts_and_buffers_are_filled_and_what_is_not_saved_is_left(tmp_path):
    torch.manual_seed(0)
    model = Nested()
    model.scale.fill_(3)
    model.scratch.fill_(5)
    save(model, tmp_path, model_type="nested", config=Inner())
    assert "metadata" not in json.loads((tmp_path / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "nested", "rate": 0.5}
    found = load(tmp_path, lambda saved: Nested(), model_type="nested", config_type=Inner, device="cpu")
    assert torch.equal(found.part[0].weight, model.part[0].weight)
    assert found.part[0].weight.requires_grad
    assert found.scale.tolist() == [3, 3]
    assert found.part[1].same is found.scale
    assert found.scratch.tolist() == [1, 1]
    assert "scale" in dict(found.named_buffers())


@dataclass(frozen=True)
class Named:
    folder: Path = Path("a")
    sizes: frozenset[int] = frozenset({3})


def test_fields_are_written_as_json_has_them(tmp_path):
    save({"x": torch.ones(1)}, tmp_path, model_type="table", config=Named(), metadata={"é": 1})
    found = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert found == {"model_type": "table", "folder": "a", "sizes": [3], "metadata": {"é": 1}}
    assert open_model(tmp_path, model_type="table", config_type=Named).config == Named()


def test_a_folder_that_names_no_kind_of_model_is_none_of_ours(tmp_path):
    checkpoint.save_folder(tmp_path, {"rate": 0.5}, {"x": torch.ones(1)})
    with pytest.raises(UnsupportedModel, match="holds a model of type None, not 'table'"):
        open_model(tmp_path, model_type="table", config_type=Inner)


class Ends:
    eos_ids = (7,)
    bos_id = None

    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


def test_what_is_no_module_is_saved_by_name_with_its_tokenizer(tmp_path):
    save({"x": torch.ones(2)}, tmp_path, model_type="table", config=Inner(0.25), tokenizer=Ends())
    found = open_model(str(tmp_path), model_type="table", config_type=Inner)
    assert (found.path, found.config, found.metadata) == (tmp_path, Inner(0.25), {})
    assert found.checkpoint.tensor("x").tolist() == [1, 1]
    assert found.checkpoint.generation_config == {"eos_token_id": [7]}
    assert (tmp_path / "tokenizer.json").exists()


def test_the_device_of_a_loaded_model_is_the_one_that_is_asked_for(tmp_path, monkeypatch):
    stored(tmp_path)
    asked = []
    monkeypatch.setattr(checkpoint.devices, "choose", lambda name: (asked.append(name), torch.device("meta"))[1])
    found = load(tmp_path, build, model_type="tied", config_type=Config)
    load(tmp_path, build, model_type="tied", config_type=Config, device="meta")
    assert asked == [None, "meta"]
    assert {tensor.device.type for tensor in found.state_dict().values()} == {"meta"}
    found = Tied(CONFIG)
    fill(found, open_folder(tmp_path), device=torch.device("meta"), dtype=torch.float64)
    assert {(tensor.device.type, tensor.dtype) for tensor in found.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "4", "depth": 3, "a": 1}, "a 'tied': a: unknown field; depth: unknown field; size: Input should"),
        ({"size": "4"}, "size: Input should be a valid integer"),
        ({"size": 0}, "size: Input should be greater than or equal to 1"),
        ({"inner": {"rate": "fast"}}, "inner.rate: Input should be a valid number"),
        ({"depth": 3}, "depth: unknown field"),
        ({"metadata": 3}, "'tied': metadata: not an object$"),
    ],
)
def test_a_config_that_does_not_fit_says_where(tmp_path, change, message):
    stored(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CorruptedFile, match=message):
        loaded(tmp_path)


def test_a_missing_field_and_a_builder_that_refuses_are_damage(tmp_path):
    stored(tmp_path)

    def refuse(saved: SavedModel[Config]) -> Tied:
        raise InvalidArgument("size is odd")

    with pytest.raises(CorruptedFile, match="contradicts itself: size is odd"):
        load(tmp_path, refuse, model_type="tied", config_type=Config, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "tied"}')
    with pytest.raises(CorruptedFile, match="size: Field required"):
        loaded(tmp_path)


def test_another_kind_and_no_folder_are_told_apart(tmp_path):
    stored(tmp_path)
    with pytest.raises(UnsupportedModel, match="holds a model of type 'tied', not 'other'"):
        loaded(tmp_path, "other")
    with pytest.raises(ModelNotFound):
        loaded(tmp_path / "nowhere")
