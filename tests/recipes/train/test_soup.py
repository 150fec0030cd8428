"""A soup of experts from files to a folder and to a specialist, and what is refused before any work."""

import pytest

import pippin
from pippin.core.errors import InvalidArgument
from pippin.data.records import TrainingRecord
from pippin.language.methods.soup_of_experts.model import SoupOfExperts
from pippin.recipes.shape import specialize
from pippin.recipes.train import soup
from pippin.recipes.train.soup import PASSAGE, passages

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


def train(files, **given):
    always = {"model": str(files / "tiny"), "data": (files / "data",), "out": files / "soup", "device": "cpu"}
    return soup.run(soup.Config(**(always | given)), show_progress=False)


def test_a_soup_is_trained_saved_and_specialized(files):
    result = train(
        files, domains=2, fresh=True, experts=3, rank=4, shared=("embed_tokens",), max_length=64, batch_size=2,
        steps=8, lr=1e-2, held_out=0.2,
    )  # fmt: skip
    assert sum(result.domains.values()) == pytest.approx(1.0)
    assert result.held_out_after["loss"] < result.held_out_before["loss"]
    assert {"loss", "generic"} <= result.held_out_after.keys()
    soup = SoupOfExperts.load(files / "soup", device="cpu")
    assert (soup.num_experts, soup.rank, soup.shared) == (3, 4, ("embed_tokens",))
    kinds = {name.split("-")[1][:4] for name in soup.domains.names}
    assert kinds == {"pros", "code"}
    assert float(soup.seen_support.sum()) == 8
    (files / "mine.py").write_text(CODE)
    config = specialize.Config(model=files / "soup", documents=(files / "mine.py",), out=files / "mine")
    figures = specialize.run(config).figures
    assert any(key.startswith("share of") and "code" in key and value == 1.0 for key, value in figures.items())
    assert pippin.load(files / "mine", device="cpu", pack=False).config == soup.base.config
    with pytest.raises(InvalidArgument, match="give documents or weights, not prompt"):
        specialize.run(specialize.Config(model=files / "soup", prompt="a", out=files / "no"))


def test_each_file_is_a_domain_and_a_trained_model_begins_as_itself(files):
    data = (files / "data" / "code0.py", files / "data" / "prose0.txt")
    result = train(files, data=data, held_out=files / "data", experts=2, max_length=32, batch_size=2, steps=2)
    assert list(result.domains) == ["code0", "prose0"]
    assert result.held_out_before["loss"] == pytest.approx(result.held_out_before["generic"], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"domains": 900}, "900 clusters need as many different items"),
        ({"domains": 2, "shared": ("nothing",)}, "no parameter is named 'nothing'"),
        ({"domains": 2, "max_length": 4096}, "the context of tiny is 2048 tokens"),
    ],
)
def test_what_is_refused(files, given, message):
    with pytest.raises(InvalidArgument, match=message):
        train(files, **given)
    assert not (files / "soup" / "config.json").exists()


def test_two_files_of_one_name_are_no_two_domains(files):
    path = files / "data" / "code0.py"
    with pytest.raises(InvalidArgument, match="two files of the data are called 'code0'"):
        train(files, data=(path, path))


def test_passages_lose_nothing_and_end_with_lines():
    for text in ("word word\n" * 2000, "x" * 10_000, "short", "a" * (PASSAGE + 5) + "\nb"):
        parts = passages([TrainingRecord("a.txt", text=text)])
        assert "".join(part.text for part in parts) == text
        assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        if "word" in text:
            assert all(part.text.endswith("\n") and len(part.text) < PASSAGE + 20 for part in parts)
