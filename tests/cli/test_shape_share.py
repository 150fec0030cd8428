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


def test_a_routed_model_is_trained_and_cut_without_data(base, capsys):
    words = ["--data", base / "text.txt", "--out", base / "routed", "--length", 32, "--rows", 2, "--steps", 3]
    words = ["train", "full", base / "base", *words, "--route-caches", 0.5, "--device", "cpu", "--json"]
    assert main(list(map(str, words))) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["held_out_by_retention"].keys() == {"1.0", "0.5", "0.25"}
    assert said["held_out_by_retention"]["1.0"] == pytest.approx(said["held_out_after"]["loss"])
    assert json.loads((base / "routed" / "config.json").read_text())["kv_routing"] == 0.5
    for words, leaders in ((["--retention", 0.5], [0, 2]), (["--leaders", "0, 3"], [0, 3])):
        words = ["shape", "share", base / "routed", *words, "--out", base / f"cut{leaders}", "--json"]
        assert main(list(map(str, words))) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["cache of a token before"] == 2 * said["cache of a token after"] > 0
        again = pippin.load(base / f"cut{leaders}", device="cpu", dtype="float32")
        assert list(again.config.cached_layers) == leaders
        assert again.config.kv_routing == 0.5
    options = ["--prompt", "16", "--answer", "4", "--repeats", "1", "--retention", "0.25", "--json"]
    assert main(["bench", str(base / "routed"), *options]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert main(["bench", str(base / "routed"), *options[:-3], "--json"]) == 0
    whole = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert whole["cache read per token"] == pytest.approx(4 * rows["cache read per token"])


def test_routing_that_cannot_be_is_refused_before_any_work(base, capsys):
    for p in (1.5, -1):
        words = ["train", "full", str(base / "base"), "--data", str(base / "text.txt"), "--out", str(base / "out")]
        assert main([*words, "--length", "32", f"--route-caches={p}"]) == 2
        assert f"p_cross is a probability, from 0 to 1, got {float(p)}" in capsys.readouterr().err.replace("\n", " ")
        assert not (base / "out").exists()
    assert main(["shape", "share", str(base / "base"), "--out", str(base / "out"), "--shared", "2"]) == 2
    assert "give --data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shared", 4], "shared must be from 1 to 3"),
        ([], "give either shared or group"),
        (["--shared", 2, "--start", "best"], "--start is 'best'; choose mean or own"),
        (["--retention", 0.5, "--shared", 2], "leave --shared and --group out"),
        (["--retention", 0.5, "--leaders", "0"], "give either retention or leaders"),
        (["--leaders", "0,x"], "--leaders must be numbers of layers with commas between them, got '0,x'"),
        (["--retention", 2], "above 0 and at most 1, got 2.0"),
        (["--shared", 2, "--weight", 2], "weight of the teacher must be from 0 to 1, got 2"),
    ],
)
def test_bad_options_are_refused_before_any_work(base, words, message, capsys):
    assert share(base, *words) != 0
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (base / "out").exists()
