"""The options of a command are the fields of its recipe's config: names, types, defaults, and what they make."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import pippin.recipes
from pippin.cli.common.declared_options import with_options
from pippin.core.checks import Fraction, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes.options import StrPath, share_or_path


@checked
@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of each kind."""

    model: Annotated[str, Option("Positional.", positional=True)]
    data: Annotated[tuple[StrPath, ...], Option("Required and repeated.")]
    out: Annotated[StrPath | None, Option("A path.")] = None
    fields: Annotated[Mapping[str, str], Option("Pairs.", flag="--field")] = field(default_factory=dict)
    held_out: Annotated[Fraction | Path, Option("Parsed.", parse=share_or_path)] = 0.05
    bits: Annotated[Literal[2, 4] | None, Option("A choice of numbers.")] = None
    kind: Annotated[Literal["a", "b"], Option("A choice of words.")] = "a"
    batch_size: Annotated[PositiveInt, Option("A number.")] = 8
    resume: Annotated[bool, Option("Off by itself.")] = False
    shift: Annotated[bool, Option("On by itself.")] = True


def parse(*words: object) -> Settings | BaseException:
    """The config that the words make, or the error of the call."""
    made = []
    app = typer.Typer()

    @app.command()
    @with_options
    def verb(config: Settings, extra: Annotated[int, typer.Option()] = 1) -> None:
        """Take a config."""
        made.append((config, extra))

    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=True)
    if made:
        assert made[0][1] == 1
        return made[0][0]
    return done.exception


def test_fields_without_an_option_given_keep_the_defaults_of_the_config():
    assert parse("m", "--data", "a.txt") == Settings(model="m", data=(Path("a.txt"),))


def test_every_kind_of_field_is_read():
    words = ["m", "--data", "a", "--data", "b", "--out", "o", "--field", "prompt=question", "--field", "text=body"]
    words += ["--held-out", "x.jsonl", "--bits", 4, "--kind", "b", "--batch-size", 2, "--resume", "--no-shift"]
    expected = Settings(
        model="m",
        data=(Path("a"), Path("b")),
        out=Path("o"),
        fields={"prompt": "question", "text": "body"},
        held_out=Path("x.jsonl"),
        bits=4,
        kind="b",
        batch_size=2,
        resume=True,
        shift=False,
    )
    assert parse(*words) == expected
    assert parse("m", "--data", "a", "--held-out", "0.25").held_out == 0.25


@pytest.mark.parametrize("words", [["--batch-size", 0], ["--held-out", "1.5"], ["--field", "prompt"]])
def test_values_out_of_range_are_the_errors_of_the_config(words):
    assert isinstance(parse("m", "--data", "a", *words), InvalidArgument)


@pytest.mark.parametrize("words", [[], ["--data", "a", "--bits", 3], ["--data", "a", "--kind", "c"]])
def test_words_that_fit_no_option_are_usage_errors(words):
    assert isinstance(parse("m", *words), SystemExit)


RECIPES = [
    module
    for info in pkgutil.walk_packages(pippin.recipes.__path__, "pippin.recipes.")
    if hasattr(module := importlib.import_module(info.name), "Config")
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__.rpartition(".")[2])
def test_every_setting_of_every_recipe_is_described_and_every_config_is_frozen(recipe):
    hints = get_type_hints(recipe.Config, include_extras=True)
    for entry in dataclasses.fields(recipe.Config):
        (option,) = [each for each in getattr(hints[entry.name], "__metadata__", ()) if isinstance(each, Option)]
        assert option.help.endswith((".", ".)")), entry.name
    assert recipe.Config.__dataclass_params__.frozen
    assert callable(recipe.run)

    def verb(config):
        pass

    verb.__annotations__["config"] = recipe.Config
    with_options(verb)  # typer knows all of its types
