"""The panels of the claim about judges: known laws hold, and a language model's two sentences differ by one swap."""

import numpy as np
import pytest

from pippin.claims.worlds import judges
from pippin.evaluate.judges.correlation import phi_matrix


@pytest.mark.parametrize("weight", [0.0, 0.45])
def test_integrals_are_what_many_items_come_to(weight):
    labels, gold, _ = judges.synthetic(weight, 0, 200_000)
    wrong = labels != gold[:, None]
    phi, majority, all_wrong = judges.truth(weight)
    assert wrong.mean() == pytest.approx(1 - judges.ACCURACY, abs=3e-3)
    found = phi_matrix(wrong)
    assert found[np.triu_indices(judges.JUDGES, 1)].mean() == pytest.approx(phi, abs=5e-3)
    assert (wrong.sum(1) <= 4).mean() == pytest.approx(majority, abs=5e-3)
    assert wrong.all(1).mean() == pytest.approx(all_wrong, abs=2e-3)


def test_judges_of_unequal_skill_are_as_good_in_the_mean():
    labels, gold, _ = judges.synthetic(0.45, 0, 100_000, judges.UNEQUAL)
    right = (labels == gold[:, None]).mean(0)
    assert right == pytest.approx(np.array(judges.UNEQUAL), abs=6e-3)
    assert right.mean() == pytest.approx(judges.ACCURACY, abs=3e-3)


def test_a_language_model_votes_for_the_sentence_it_finds_likelier(monkeypatch):
    written, swapped, gold = judges._sentences(40)
    for good, bad in zip(written, swapped, strict=True):
        apart = [at for at, (a, b) in enumerate(zip(good.split(), bad.split(), strict=True)) if a != b]
        assert len(apart) == 2
        assert apart[1] == apart[0] + 1
        assert sorted(good.split()) == sorted(bad.split())
    assert set(gold) == {0, 1}

    class Likelihood:
        def __init__(self, model, text):
            self.nats = float(text.split(": ")[-1].split(". ")[-1].strip(" \n-") in swapped)

    monkeypatch.setattr("pippin.language.likelihood.text_likelihood", Likelihood)
    arm, votes = judges.language_models(40, load=lambda name: name)
    assert arm == "language models"
    assert (votes.labels == gold[:, None]).all()
