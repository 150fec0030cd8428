"""`pippin train soup` from files to a folder, and what it refuses before any work."""

import json

import pytest

import pippin
from pippin.cli import main
from pippin.cli.train_soup import PASSAGE, passages
from pippin.data.records import Record
from pippin.language.soup import SoupOfExperts

PROSE = "The river ran past the old mill, and the men were singing of the sea as they walked home.\n"
CODE = "def f(x):\n    return [y for y in x if y is not None]\n\n\n"


@pytest.fixture
def files(tmp_path, tiny):
    """Two kinds of text, and a small model to begin with."""
    data = tmp_path / "data"
    data.mkdir()
    for index in range(4):
        (data / f"prose{index}.txt").write_text(PROSE * (5 + index))
        (data / f"code{index}.py").write_text(CODE * (9 + index))
    tiny.save(tmp_path / "tiny")
    return tmp_path


def made(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_soup_is_trained_saved_and_specialised(files, capsys):
    how = ["--fresh", "--experts", 3, "--rank", 4, "--shared", "embed_tokens", "--length", 64, "--rows", 2, "--json"]
    told = made(
        capsys, "train", "soup", files / "tiny", "--data", files / "data", "--domains", 2, *how, "--steps", 8, "--out",
        files / "soup", "--lr", 1e-2, "--held-out", 0.2,
    )  # fmt: skip
    assert told["steps"] == 8
    assert sum(told["domains"].values()) == pytest.approx(1.0)
    assert told["held_out_after"]["loss"] < told["held_out_before"]["loss"]
    assert {"loss", "generic"} <= told["held_out_after"].keys()
    soup = SoupOfExperts.load(files / "soup", device="cpu")
    assert (soup.count, soup.rank, soup.shared) == (3, 4, ("embed_tokens",))
    kinds = {name.split("-")[1][:4] for name in soup.domains.names}
    assert kinds == {"pros", "code"}
    assert float(soup.seen_support.sum()) == 8
    (files / "mine.py").write_text(CODE)
    told = made(
        capsys, "shape", "specialize", files / "soup", "--documents", files / "mine.py", "--out", files / "mine",
        "--json",
    )  # fmt: skip
    assert any(key.startswith("share of") and "code" in key and value == 1.0 for key, value in told.items())
    assert pippin.load(files / "mine", device="cpu", pack=False).config == soup.base.config


def test_each_data_is_a_domain_and_a_trained_model_begins_as_itself(files, capsys):
    words = [
        "--data",
        files / "data" / "code0.py",
        "--data",
        files / "data" / "prose0.txt",
        "--held-out",
        files / "data",
    ]
    told = made(
        capsys, "train", "soup", files / "tiny", *words, "--experts", 2, "--length", 32, "--rows", 2, "--steps", 2,
        "--json",
        "--out", files / "soup",
    )  # fmt: skip
    assert list(told["domains"]) == ["code0", "prose0"]
    before = told["held_out_before"]
    assert before["loss"] == pytest.approx(before["generic"], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--domains", 0], "--domains must be at least 1"),
        (["--domains", 900], "900 clusters need as many different items"),
        (["--experts", 0], "experts must be at least 1"),
        (["--shared", "nothing"], "no parameter is named 'nothing'"),
        (["--length", 4096], "made for 2048 tokens"),
        (["--held-out", 1.5], "--held-out is 1.5"),
    ],
)
def test_what_is_refused(files, capsys, words, message):
    out = files / "soup"
    words = ["--domains", 2, *words] if "--domains" not in words else words
    code = main([str(w) for w in ("train", "soup", files / "tiny", "--data", files / "data", "--out", out, *words)])
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (out / "config.json").exists()


def test_two_data_of_one_name_are_no_two_domains(files, capsys):
    path = files / "data" / "code0.py"
    code = main(
        [str(w) for w in ("train", "soup", files / "tiny", "--data", path, "--data", path, "--out", files / "s")]
    )
    assert code == 2
    assert "two of --data are called 'code0'" in capsys.readouterr().err


def test_passages_lose_nothing_and_end_with_lines():
    for text in ("word word\n" * 2000, "x" * 10_000, "short", "a" * (PASSAGE + 5) + "\nb"):
        parts = passages([Record("a.txt", text=text)])
        assert "".join(part.text for part in parts) == text
        assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        if "word" in text:
            assert all(part.text.endswith("\n") and len(part.text) < PASSAGE + 20 for part in parts)
