"""`pippin shape share` on a small model: a folder that opens, figures that are true, errors before any work."""

import json

import pytest
import torch

import pippin
from pippin.claims._byte_text import byte_config, byte_model
from pippin.cli import main
from pippin.language import Decoder


@pytest.fixture
def base(tmp_path):
    byte_model(Decoder(byte_config(layers=4, width=32)).initialise(seed=0)).save(tmp_path / "base")
    (tmp_path / "text.txt").write_text("The rain in Spain stays mainly in the plain.\n" * 100)
    return tmp_path


def share(base, *words) -> int:
    options = ["--data", str(base / "text.txt"), "--out", str(base / "out"), "--length", "32", "--rows", "2"]
    return main(["shape", "share", str(base / "base"), *options, *map(str, words)])


def test_a_shared_model_is_trained_saved_and_measured(base, capsys):
    assert share(base, "--shared", 2, "--steps", 5, "--lr", 1e-2, "--device", "cpu", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cache of a token before"] == 2 * said["cache of a token after"] > 0
    assert said["held-out loss trained"] < said["held-out loss untrained"]
    assert said["time to first token, after / before"] > 0
    assert said["steps"] == 5
    again = pippin.load(base / "out", device="cpu", dtype="float32")
    assert [layer.attention.source for layer in again.config.layers] == [None, None, 1, 1]
    with torch.no_grad():
        assert again.module(torch.arange(20)[None]).isfinite().all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shared", 4], "shared must be from 1 to 3"),
        ([], "give either shared or group"),
        (["--shared", 2, "--start", "best"], "--start is 'best'; choose mean or own"),
        (["--shared", 2, "--weight", 2], "weight of the teacher must be from 0 to 1, got 2"),
    ],
)
def test_bad_options_are_refused_before_any_work(base, words, message, capsys):
    assert share(base, *words) != 0
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (base / "out").exists()
