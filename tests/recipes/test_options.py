"""Results never overwrite what is there: every verb with --out asks before it does anything."""

import pytest
import typer

from pippin.cli import main
from pippin.cli.app import app
from pippin.core.errors import InvalidArgument
from pippin.recipes.options import refuse_existing, refuse_existing_run

DATA = ("--data", "none.txt")
VERBS = {
    "imagine": ("a disc", "--model", "none"),
    "evaluate panel": ("{votes}",),
    "laws fit": ("none.csv",),
    "train full": ("none", *DATA),
    "train diffusion": ("none", *DATA),
    "train task-adapter": ("none", "--task", "extraction"),
    "train images": ("none",),
    "train lora": ("none", *DATA),
    "train neuron-predictor": ("none", *DATA),
    "train prune": ("none", "--keep", "8", *DATA),
    "train reasoner": ("none", *DATA),
    "train refiner": ("none", "none"),
    "train route": ("none", "--keep", "4", *DATA),
    "train soup": ("none", "--preset", "nano", *DATA),
    "shape merge": ("none", "--adapter", "none"),
    "shape quantize": ("none", "--bits", "4"),
    "shape palettize": ("none",),
    "shape share": ("none", "--shared-layers", "2", *DATA),
    "shape specialize": ("none", "--prompt", "x"),
    "shape export": ("none", "--to", "torch"),
}


def verbs_with_out(command, *names):
    """The words of every command that has an option --out."""
    for name, each in getattr(command, "commands", {}).items():
        yield from verbs_with_out(each, *names, name)
    if any("--out" in parameter.opts for parameter in command.params):
        yield " ".join(names)


def test_every_verb_with_out_is_tried_here():
    assert sorted(verbs_with_out(typer.main.get_command(app))) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_overwrites_nothing(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / ("out.png" if verb == "imagine" else "out")
    votes = tmp_path / "votes.csv"
    votes.write_text("item,a,b\n1,x,y\n2,x,x\n")
    out.write_text("mine")
    words = [word.format(votes=votes) for word in (*verb.split(), *VERBS[verb])]
    assert main([*words, "--out", str(out)]) == 2
    assert f"{out} exists already; give another out (--out)" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "votes.csv"}


def test_what_holds_nothing_may_be_written_to(tmp_path):
    refuse_existing(tmp_path / "new")
    refuse_existing(tmp_path)
    (tmp_path / "note.txt").write_text("")
    for path, message in ((tmp_path, "holds files already"), (tmp_path / "note.txt", "exists already")):
        for refuse in (refuse_existing, lambda out: refuse_existing_run(out, False)):
            with pytest.raises(InvalidArgument, match=message):
                refuse(path)


def test_a_run_overwrites_only_what_it_resumes(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("")
    refuse_existing_run(tmp_path, False)  # it ended before its first checkpoint
    (tmp_path / "run" / "step-00000004").mkdir()
    with pytest.raises(InvalidArgument, match="holds a run; continue it with --resume"):
        refuse_existing_run(tmp_path, False)
    (tmp_path / "config.json").write_text("{}")
    refuse_existing_run(tmp_path, True)
