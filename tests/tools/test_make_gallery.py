"""The gallery's page and commands: what it shows is there, and what it says to type is understood."""

import re
from pathlib import Path

import make_gallery
import pytest
from typer.main import get_command

from pippin.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for name, trained in make_gallery.MODELS.items() if trained.arguments])
def test_the_commands_are_those_of_the_command_line(name):
    images = get_command(app).commands["train"].commands["images"]
    words = [*make_gallery.MODELS[name].arguments, "--out", name]
    assert images.make_context("images", words).params["out"] == Path(name)


def test_every_figure_has_its_models():
    assert {model for figure in make_gallery.FIGURES.values() for model in figure.models} == set(make_gallery.MODELS)


def test_the_page_is_the_one_that_the_script_writes_and_shows_pictures_that_are_there():
    page = make_gallery.page()
    assert (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8") == page
    shown = re.findall(r"\]\((pictures/gallery/[\w.-]+)\)", page)
    assert len(shown) == len(make_gallery.FIGURES)
    missing = [name for name in shown if not (ROOT / "docs" / name).is_file()]
    assert missing == []
