"""Pictures: three formats, places that cannot be written, nothing half-written."""

import pytest

from pippin.core import plotting
from pippin.core.errors import InvalidArgument, InvalidInput

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", plotting.SUFFIXES)
def test_the_suffix_chooses_the_format(tmp_path, suffix):
    figure = plotting.new(2, 1)
    figure.subplots().plot([1, 2])
    plotting.save(figure, tmp_path / f"a{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes().startswith(STARTS[suffix])


def test_a_place_that_cannot_be_written_is_refused_in_words(tmp_path):
    figure = plotting.new(2, 1)
    for name in ("a", "a.gif", "a.txt"):
        with pytest.raises(InvalidArgument, match=r"must end in .png, .svg, .pdf"):
            plotting.save(figure, tmp_path / name)
    with pytest.raises(InvalidInput, match="there is no folder"):
        plotting.save(figure, tmp_path / "missing" / "a.png")
    assert not list(tmp_path.iterdir())


def test_an_error_while_drawing_leaves_the_older_picture(tmp_path):
    (tmp_path / "a.png").write_bytes(b"older")
    with pytest.raises(TypeError):
        plotting.save(plotting.new(2, 1), tmp_path / "a.png", dpi="many")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]
