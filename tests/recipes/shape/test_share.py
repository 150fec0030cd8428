"""KV sharing on a small model: a folder that opens, figures that are true, errors before any work."""

import json

import pytest
import torch

import pippin
from pippin.claims.worlds.sequences.byte_text import byte_config, byte_model
from pippin.core.errors import InvalidArgument
from pippin.language import Decoder
from pippin.recipes import shape
from pippin.recipes.train import full


@pytest.fixture
def base(tmp_path):
    byte_model(Decoder(byte_config(layers=4, width=32)).initialize(seed=0)).save(tmp_path / "base")
    (tmp_path / "text.txt").write_text("The rain in Spain stays mainly in the plain.\n" * 100)
    return tmp_path


def share(base, **given):
    always = {"model": str(base / "base"), "data": (base / "text.txt",), "out": base / "out"}
    always |= {"max_length": 32, "batch_size": 2, "device": "cpu"}
    return shape.share.run(shape.share.Config(**(always | given)), show_progress=False)


def test_a_shared_model_is_trained_saved_and_measured(base):
    result = share(base, shared_layers=2, steps=5, lr=1e-2)
    before, after = result.cache_bytes
    assert before == 2 * after > 0
    assert result.losses["trained"] < result.losses["untrained"]
    assert min(result.first_token_seconds) > 0
    assert result.summary()["steps"] == 5
    again = pippin.load(base / "out", device="cpu", dtype="float32")
    assert [layer.attention.kv_source for layer in again.config.layers] == [None, None, 1, 1]
    with torch.no_grad():
        assert again.module(torch.arange(20)[None]).isfinite().all()


def test_a_routed_model_is_trained_and_cut_without_data(base):
    config = full.Config(
        model=str(base / "base"),
        data=(base / "text.txt",),
        out=base / "routed",
        max_length=32,
        batch_size=2,
        steps=3,
        route_caches=0.5,
        device="cpu",
    )
    result = full.run(config, show_progress=False)
    assert result.held_out_by_kv_sharing_ratio.keys() == {1.0, 0.5, 0.25}
    assert result.held_out_by_kv_sharing_ratio[1.0] == pytest.approx(result.held_out_after["loss"])
    recorded = {"kv_routing": {"p_cross": 0.5}}
    assert json.loads((base / "routed" / "config.json").read_text())["training_methods"] == recorded
    for given, kv_sharing_layers in (({"kv_sharing_ratio": 0.5}, [0, 2]), ({"kv_sharing_layers": (0, 3)}, [0, 3])):
        out = base / f"cut{kv_sharing_layers}"
        before, after = share(base, model=str(base / "routed"), data=(), out=out, **given).cache_bytes
        assert before == 2 * after > 0
        again = pippin.load(out, device="cpu", dtype="float32")
        assert list(again.config.cached_layers) == kv_sharing_layers
        assert again.config.training_methods == recorded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shared_layers": 4}, "from 1 to 3"),
        ({}, "give either"),
        ({"kv_sharing_ratio": 0.5, "shared_layers": 2}, "leave shared_layers and group_size out"),
        ({"kv_sharing_ratio": 0.5, "kv_sharing_layers": (0,)}, "give either kv_sharing_ratio or kv_sharing_layers"),
        ({"kv_sharing_ratio": 2.0}, "kv_sharing_ratio must be above 0 and at most 1, got 2.0"),
        ({"data": (), "shared_layers": 2}, "give data"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_any_work(base, given, message):
    with pytest.raises(InvalidArgument, match=message):
        share(base, **given)
    assert not (base / "out").exists()
