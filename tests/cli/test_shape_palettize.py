"""`pippin shape palettize` as a user runs it: a folder that opens, figures that are the file's, refusals."""

import json

import pytest

import pippin
from pippin.cli import main


def run(capsys, *words):
    code = main(["shape", "palettize", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_model_of_tables_opens_and_is_as_small_as_it_says(tiny, tmp_path, capsys):
    tiny.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("An apple grown from seed is called a pippin. " * 40)
    out = tmp_path / "small"
    code, said, err = run(
        capsys, tmp_path / "model", "--out", out, "--average-bits", 3, "--data", tmp_path / "text.txt", "--json"
    )
    assert code == 0, err
    found = json.loads(said)
    assert found["bytes_after"] == (out / "model.safetensors").stat().st_size < found["bytes_before"] / 2
    assert set(found["widths"]) == {"2", "3", "4", "8"}
    assert found["widths"]["2"] > 0
    assert found["widths"]["4"] > 1  # the embedding and some others
    loaded = pippin.load(out, device="cpu", pack=False)
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.q_proj"):
        table = loaded.module.get_submodule(name).weight[:16].unique()
        assert len(table) <= 16
    pairs = zip(loaded.module.state_dict().values(), tiny.module.state_dict().values(), strict=True)
    parts = [((ours - exact).square().sum(), exact.square().sum()) for ours, exact in pairs if exact.ndim == 2]
    wrong, square = (float(sum(one)) for one in zip(*parts[1:], strict=True))
    assert found["squared_error"] == pytest.approx(wrong / square, rel=0.2)


def test_a_table_is_printed(tiny, tmp_path, capsys):
    tiny.save(tmp_path / "model")
    code, out, err = run(capsys, tmp_path / "model", "--out", tmp_path / "small", "--bits", 2)
    assert code == 0, err
    assert "tiny" in out or "model, palettised" in out
    assert "bits per weight, with tables" in out
    assert "saved in" in out + err


def test_options_that_do_not_go_together_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for words, message in (
        (("--bits", 4, "--average-bits", 3), "not both"),
        (("--average-bits", 3), "give some with --data"),
        (("--bits", 7), "bits is 7"),
    ):
        code, _, err = run(capsys, "smollm2-135m", "--out", tmp_path / "out", *words)
        assert code != 0
        assert message in err
    code, _, err = run(capsys, "smollm2-135m", "--out", tmp_path / "file")
    assert code != 0
    assert "which is a file" in err
