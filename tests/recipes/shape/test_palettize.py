"""Palettization: a folder that opens, figures that are the file's, refusals."""

import pytest

import pippin
from pippin.core.errors import InvalidArgument
from pippin.recipes.shape.palettize import Config, run


def test_a_model_of_tables_opens_and_is_as_small_as_it_says(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("An apple grown from seed is called a pippin. " * 40)
    out = tmp_path / "small"
    config = Config(model=str(tmp_path / "model"), out=out, average_bits=3.0, data=(tmp_path / "text.txt",))
    result = run(config, show_progress=False)
    assert result.bytes_after == (out / "model.safetensors").stat().st_size < result.bytes_before / 2
    assert set(result.widths) == {2, 3, 4, 8}
    assert result.widths[2] > 0
    assert result.widths[4] > 1  # the embedding and some others
    loaded = pippin.load(out, device="cpu", pack=False)
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.q_proj"):
        assert len(loaded.module.get_submodule(name).weight[:16].unique()) <= 16
    pairs = zip(loaded.module.state_dict().values(), tiny.module.state_dict().values(), strict=True)
    parts = [((ours - exact).square().sum(), exact.square().sum()) for ours, exact in pairs if exact.ndim == 2]
    error, square = (float(sum(one)) for one in zip(*parts[1:], strict=True))
    assert result.squared_error == pytest.approx(error / square, rel=0.2)
    assert "bits per weight, with tables" in str(result.report())


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for given, message in (
        ({"bits": 4, "average_bits": 3.0}, "not both"),
        ({"average_bits": 3.0}, "give some with data"),
        ({"bits": 7}, "bits must be 2, 3, 4 or 8, got 7"),
        ({"out": tmp_path / "file"}, "exists already; give another out"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            run(Config(**({"model": "smollm2-135m", "out": tmp_path / "out"} | given)))
