"""A predictor of neurons from text to answers: recall, least memory, the commands, errors before any work."""

import json

import pytest
from typer.testing import CliRunner

from pippin.claims.worlds.sequences.byte_text import byte_decoder, byte_model, byte_text, train_bytes
from pippin.claims.worlds.sequences.sparse_neurons import SparseActivations, relu_config
from pippin.cli.app import app
from pippin.core.errors import InvalidArgument, ModelNotFound
from pippin.language.presets import preset
from pippin.recipes import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predictor")
    module = byte_decoder(relu_config(64, 512, 2), seed=0)
    train_bytes(module, steps=60, seed=0, rows=4, length=64, objective=SparseActivations())
    byte_model(module).save(folder / "relu")
    byte_model(byte_decoder(preset("nano", 257), seed=0)).save(folder / "swiglu")
    text = bytes(each % 256 for each in byte_text().held_out[:20_000].tolist()).decode("ascii", "ignore")
    (folder / "text.jsonl").write_text(json.dumps({"text": text}))
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))


def fit(base, out, model="relu", **given):
    always = {"max_length": 64, "tokens": 12_000, "rank": 32, "steps": 150}
    config = train.neuron_predictor.Config(
        model=str(base / model), data=(base / "text.jsonl",), out=out, **(always | given)
    )
    return train.neuron_predictor.run(config, show_progress=False)


def test_a_predictor_is_trained_and_asked_with(base, tmp_path):
    result = fit(base, tmp_path / "predictor")
    assert min(result.recall) > 0.9
    assert all(fire < found < 0.6 for fire, found in zip(result.active, result.predicted, strict=True))
    assert result.tokens == 24 * 8 * 64
    assert result.least_memory <= result.least_memory_without  # packing a layer takes more than so small a model
    assert json.loads(json.dumps(result.summary()))["out"] == str(tmp_path / "predictor")
    assert "of those that fire are found" in str(result.report())
    asked = ["ask", "-m", str(base / "relu"), "--device", "cpu", "--max-tokens", "8", "--json", "def "]
    memory = ["--memory", str(result.least_memory), "--neuron-predictor", str(tmp_path / "predictor")]
    found = CliRunner().invoke(app, [*asked, *memory])
    assert found.exit_code == 0, found.output


def test_the_command_says_how_to_ask(base, tmp_path):
    given = ["--data", str(base / "text.jsonl"), "--max-length", "64", "--tokens", "6000", "--steps", "3"]
    words = ["train", "neuron-predictor", str(base / "relu"), *given, "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"--neuron-predictor {tmp_path / 'out'}" in done.output.replace("\n", "")


def test_a_model_without_relu_and_too_little_text_are_refused(base, tmp_path):
    with pytest.raises(InvalidArgument, match="none of its neurons is ever exactly zero"):
        fit(base, tmp_path / "out", "swiglu")
    with pytest.raises(InvalidArgument, match=r"has \d sequences of 4096 tokens, and a predictor needs 10"):
        fit(base, tmp_path / "out", max_length=4096)
    with pytest.raises(InvalidArgument, match="context"):
        fit(base, tmp_path / "out", max_length=5000)
    with pytest.raises(ModelNotFound):
        fit(base, tmp_path / "out", "none")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "home").exists()
