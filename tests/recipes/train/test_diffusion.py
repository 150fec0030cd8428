"""A masked diffusion model made of one that continues text, and trained further."""

import json

import pytest

from pippin.core.errors import InvalidArgument
from pippin.language import MaskedDiffusionLM
from pippin.recipes.train.diffusion import Config, run

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]


def test_training_makes_a_model_that_fills_and_continues_from_there(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(600)))
    small = {"max_length": 32, "batch_size": 4, "lr": 0.01, "steps": 6, "eval_every": 3, "device": "cpu"}
    small["data"] = (tmp_path / "text.txt",)

    def train(model, out, **given):
        return run(Config(model=str(tmp_path / model), out=tmp_path / out, **small, **given), show_progress=False)

    assert train("model", "filler", anneal_steps=2).mask_id == 258
    lm = MaskedDiffusionLM.load(tmp_path / "filler", device="cpu")
    assert (lm.mask_id, lm.shift) == (258, True)
    log = [json.loads(line) for line in (tmp_path / "filler" / "run" / "log.jsonl").read_text().splitlines()]
    assert len([line for line in log if "loss" in line]) >= 6
    further = train("filler", "more")
    assert further.held_out_after["loss"] < further.held_out_before["loss"]
    assert MaskedDiffusionLM.load(tmp_path / "more", device="cpu").mask_id == 258
    with pytest.raises(InvalidArgument, match="is a masked diffusion model already"):
        train("filler", "other", shift=False)
