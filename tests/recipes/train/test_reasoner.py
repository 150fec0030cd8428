"""A latent reasoner: from a file of solutions to answers, on again, and what is refused."""

import json

import pytest

from pippin.claims.worlds.sequences import countdown
from pippin.core.errors import InvalidArgument
from pippin.language.methods.ladir.model import LatentReasoner
from pippin.recipes.train.reasoner import Config, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model of numbers, and problems with solutions."""
    place = tmp_path_factory.mktemp("reasoner")
    countdown.model(layers=1, width=16, seed=0).save(place / "model")
    lines = [
        {"prompt": p.question, "completion": "\n".join([*p.steps, f"The answer is {p.answer}"])}
        for p in countdown.problems(20, seed=0)
    ]
    (place / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def train(folder, out, **given):
    small = {"batch_size": 4, "max_length": 8, "block_size": 2, "latent_size": 4, "num_noise_samples": 2}
    config = Config(
        model=str(folder / "model"), data=(folder / "sums.jsonl",), out=out, device="cpu", **(small | given)
    )
    return run(config, show_progress=False)


def test_a_trained_reasoner_opens_and_is_not_overwritten(folder, tmp_path):
    result = train(folder, tmp_path / "thinker", steps=2, held_out=0.1)
    assert {name: len(run.steps) for name, run in result.runs.items()} == {"autoencoder": 2, "stage 1": 2, "stage 2": 1}
    assert set(result.solved) == {1, 4, 16}
    reasoner = LatentReasoner.load(tmp_path / "thinker", device="cpu")
    sizes = reasoner.config.vae.block_size, reasoner.config.vae.latent_size, reasoner.config.max_blocks
    assert (*sizes, int(reasoner.trained_steps)) == (2, 4, 2, 2)
    assert {path.name for path in (tmp_path / "thinker" / "run").iterdir()} == {"autoencoder", "stage-1", "stage-2"}
    (answer,) = reasoner.generate(["3,8,5=6"], steps=2, seed=1)
    assert isinstance(answer.text, str)
    with pytest.raises(InvalidArgument, match="--resume"):
        train(folder, tmp_path / "thinker", steps=2)
    again = train(folder, tmp_path / "thinker", steps=2, held_out=0.1, resume=True)
    assert {name: run.losses for name, run in again.runs.items()} == {n: r.losses for n, r in result.runs.items()}
    assert (again.reconstructed, again.solved) == (result.reconstructed, result.solved)


def test_a_thought_holds_every_sentence_of_a_solution(folder, tmp_path):
    with pytest.raises(InvalidArgument, match="2 sentences"):
        train(folder, tmp_path / "new", steps=1, max_blocks=1)
    assert not (tmp_path / "new").exists()
