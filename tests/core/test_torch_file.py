"""Weights out of pickled modules, against torch's own reader; nothing in a file is ever called."""

import io
import pickle  # noqa: TID251 - makes the files that the reader must not unpickle
import zipfile

import pytest
import torch
from torch import nn

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.torch_file import read_numbers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.gain = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("table", torch.arange(6).reshape(2, 3))
        self.note = {"not": "a tensor"}


def model():
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.ReLU(), nn.Linear(4, 2))
    net[2].weight.data = net[2].weight.data.to(torch.bfloat16)
    return net


def test_a_pickled_module_gives_its_state(tmp_path):
    net = model()
    torch.save(net, tmp_path / "net.pth")
    found = read_numbers(tmp_path / "net.pth")
    expected = net.state_dict()
    assert list(sorted(found)) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_state_dict_and_views_of_one_storage(tmp_path):
    base = torch.arange(12.0)
    values = {"a": base[2:8].reshape(2, 3).t(), "b": base[5:], "empty": base[:0], "scalar": base[3]}
    torch.save({"state_dict": values, "epoch": 3}, tmp_path / "state.pt")
    found = read_numbers(tmp_path / "state.pt")
    assert {name.removeprefix("state_dict.") for name in found} == set(values)
    for name, tensor in values.items():
        assert torch.equal(found[f"state_dict.{name}"], tensor)


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the file ran code')",))


def test_a_trap_is_not_sprung(tmp_path):
    torch.save({"weight": torch.ones(2), "trap": Trap()}, tmp_path / "trap.pt")
    assert torch.equal(read_numbers(tmp_path / "trap.pt")["weight"], torch.ones(2))


def test_what_is_no_such_file_is_refused(tmp_path):
    path = tmp_path / "file.pt"
    for content in (b"", b"PK\x03\x04", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(CorruptedFile, match="zip format"):
            read_numbers(path)
    torch.save({"a": torch.ones(3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptedFile):
        read_numbers(path)
    with pytest.raises(CorruptedFile):
        read_numbers(tmp_path / "missing.pt")


def rewritten(path, change):
    """The same archive with some members changed or dropped."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            if (data := change(name, data)) is not None:
                archive.writestr(name, data)
    path.write_bytes(buffer.getvalue())


def test_missing_and_short_numbers_are_named(tmp_path):
    path = tmp_path / "file.pt"
    for change, words in (
        (lambda name, data: None if name.endswith("data/0") else data, "weight are missing"),
        (lambda name, data: data[:-4] if name.endswith("data/0") else data, "weight wants 3 numbers"),
        (lambda name, data: data[:-1] if name.endswith(".pkl") else data, "pickle"),
        (lambda name, data: b"\x80\x02}U\x01aR." if name.endswith(".pkl") else data, "pickle"),
    ):
        torch.save({"weight": torch.ones(3)}, path)
        rewritten(path, change)
        with pytest.raises((CorruptedFile, UnsupportedModel), match=words):
            read_numbers(path)


def test_a_file_without_tensors_says_so(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "file.pt")
    with pytest.raises(UnsupportedModel, match="no tensors"):
        read_numbers(tmp_path / "file.pt")
