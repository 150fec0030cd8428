"""Bytes of the standard library: nothing is in two parts, and learning rates are chosen by the validation text."""

import torch

from pippin.claims.worlds.sequences import byte_text
from pippin.claims.worlds.sequences.byte_text import END, TUNING_SEED, tuned


def files(text):
    whole = bytes(text[text != END].to(torch.uint8).tolist()) if len(text) else b""
    return int((text == END).sum()), len(whole)


def test_parts_are_files_of_their_own():
    held, validation = byte_text.byte_text(), byte_text.byte_text(validation=True)
    assert torch.equal(held.train, validation.train)
    counts = [files(text) for text in (held.train, held.held_out, validation.held_out)]
    assert counts[0][0] > 7 * counts[1][0]
    assert abs(counts[1][0] - counts[2][0]) <= 1
    assert not torch.equal(held.held_out[:100], validation.held_out[:100])


def test_the_rate_with_the_lowest_loss_on_the_tuning_seed_is_used_for_every_seed():
    trained = []

    def train(seed, rate):
        trained.append((seed, rate))
        return rate

    found = dict(tuned(train, (1.0, 2.0, 3.0), (0, 1), loss=lambda rate: abs(rate - 2.0)))
    assert found == {0: 2.0, 1: 2.0}
    assert trained == [*((TUNING_SEED, rate) for rate in (1.0, 2.0, 3.0)), (0, 2.0), (1, 2.0)]
    trained.clear()
    assert dict(tuned(train, (5.0,), (7,))) == {7: 5.0}
    assert trained == [(7, 5.0)]
