"""`pippin shape export` and `pippin shape report`: files that others read, and nonsense that is refused at once."""

import json

import pytest
import torch
from torch import nn

from pippin.cli import main
from pippin.shape.export import ExportedModel, SizeRange


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    asset = ExportedModel.capture(network, {"x": torch.randn(3, 8)}, {"x": {0: SizeRange("batch", 1, 16)}})
    path = tmp_path_factory.mktemp("asset")
    asset.save(path)
    return path


def test_a_program_is_written_for_onnx_with_its_interface(folder, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    out, face = tmp_path / "model.onnx", tmp_path / "face.py"
    assert (
        main(["shape", "export", str(folder), "--to", "onnx", "--out", str(out), "--interface", str(face), "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(out)]
    assert told["bytes"] == out.stat().st_size
    onnx.checker.check_model(str(out))
    assert [port.name for port in onnx.load(str(out)).graph.input] == ["x"]
    assert "class Model" in face.read_text()


def test_a_program_is_reported_by_layer(folder, capsys):
    assert (
        main(
            ["shape", "report", str(folder), "--backends", "torch", "--repetitions", "2", "--batch-size", "4", "--json"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["sizes"] == {"batch": 4}
    layers = {row["layer"]: row for row in told["rows"]}
    assert layers["0"]["flops"] == 2 * 4 * 8 * 32
    assert layers["2"]["flops"] == 2 * 4 * 32 * 4
    assert sum(row["share"] for row in told["rows"]) == pytest.approx(1.0)
    assert main(["shape", "report", str(folder), "--backends", "torch", "--repetitions", "2", "--by", "op"]) == 0
    assert "aten.linear.default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export", "MODEL", "--to", "onnx", "--out", "model.bin"], "out (--out) must end in .onnx"),
        (["export", "MODEL", "--to", "gguf", "--out", "a.gguf", "--interface", "b.py"], "gguf holds weights only"),
        (["report", "MODEL", "--backends", "tpu"], "not 'tpu'"),
        (["report", "MODEL", "--data", "text.txt"], "has no tokenizer"),
    ],
)
def test_nonsense_is_refused(folder, words, told, capsys):
    assert main(["shape", *(str(folder) if word == "MODEL" else word for word in words)]) != 0
    assert told in capsys.readouterr().err
