"""A draft model keeps step with the sequence through every detour; vocabularies, room and owners are respected."""

import gc
import random

import pytest
import torch

from pippin.core.errors import VocabularyMismatch
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.options import SamplingOptions
from pippin.engine.speculation import Speculation, draft_model
from pippin.engine.speculation.draft_model import DraftPool, ModelDrafter, check_vocabulary

GREEDY = SamplingOptions()


@pytest.fixture
def pool(make_small, memo_runner):
    """A pool of a tiny draft model over four blocks, 64 tokens."""
    pool = DraftPool(make_small(1), tokens=64)
    pool._runner = memo_runner(pool.model, pool.blocks)
    return pool


def drafter(pool, model, owner=""):
    return ModelDrafter(pool, model, owner, torch.Generator().manual_seed(0), skip_forced=True)


def expected(pool, ids, room):
    """What the draft model writes by itself, computed from whole sequences."""
    longer = list(ids)
    while len(longer) < len(ids) + room and (len(longer) == len(ids) or longer[-1] != 4):
        longer.append(int(pool.runner.row(tuple(longer)).argmax()))
    return longer[len(ids) :]


def test_drafts_are_the_draft_model_s_own_answer_whatever_became_of_the_last_one(pool, make_small):
    chance = random.Random(0)
    sampler = Sampler(GREEDY, [0], 5)
    for _ in range(20):
        one, ids = drafter(pool, make_small(0)), [chance.randrange(4) for _ in range(5)]
        while len(ids) < 50:
            room = chance.randrange(1, 6)
            draft = one.draft(ids, room, sampler, None, None)
            assert draft.tokens == expected(pool, ids, room)
            kept = draft.tokens[: chance.randrange(len(draft.tokens) + 1)]
            ids += [*kept, *(chance.randrange(4) for _ in range(chance.randrange(1, 4)))]


def test_only_new_tokens_are_computed(pool, make_small):
    one, sampler, ids = drafter(pool, make_small(0)), Sampler(GREEDY, [0], 5), [0, 1, 2, 3, 0, 1]
    draft = one.draft(ids, 3, sampler, None, None)
    pool.runner.passes.clear()
    one.draft([*ids, *draft.tokens, 1], 1, sampler, None, None)
    # all but its own last guess was computed while drafting; that and the new token are left
    assert pool.runner.passes == [2]


def test_several_sequences_share_the_room_and_none_is_confused(pool, make_small):
    chance, sampler = random.Random(1), Sampler(GREEDY, [0], 5)
    many = [(drafter(pool, make_small(0)), [chance.randrange(4) for _ in range(12)]) for _ in range(7)]
    for _ in range(60):
        one, ids = chance.choice(many)
        if len(ids) < 30:
            assert one.draft(ids, 2, sampler, None, None).tokens == expected(pool, ids, 2)
            ids.append(chance.randrange(4))
        tables = [block for state in pool._states for block in state.table]
        assert len(tables) == len(set(tables))
        assert sorted([*tables, *pool._free]) == list(range(pool.blocks))


def test_room_is_given_back_and_the_next_turn_begins_where_the_last_one_ended(pool, make_small):
    sampler, ids = Sampler(GREEDY, [0], 5), [0, 1, 2, 3] * 5
    drafter(pool, make_small(0), "ann").draft(ids, 1, sampler, None, None)
    gc.collect()
    for owner, computed in (("bob", 24), ("ann", 4)):
        pool.runner.passes.clear()
        one = drafter(pool, make_small(0), owner)
        one.draft([*ids, 1, 1, 1, 1], 1, sampler, None, None)
        assert pool.runner.passes == [computed]
    assert len(pool._states) == 2


def test_a_long_sequence_is_caught_up_with_in_parts(pool, make_small, monkeypatch):
    monkeypatch.setattr(draft_model, "MAX_PREFILL_TOKENS", 8)
    one, sampler, ids = drafter(pool, make_small(0)), Sampler(GREEDY, [0], 5), [0, 1, 2, 3] * 5
    assert one.draft(ids, 2, sampler, None, None) is None
    ids.append(2)
    assert one.draft(ids, 2, sampler, None, None) is None
    assert one.draft(ids, 2, sampler, None, None).tokens == expected(pool, ids, 2)
    assert pool.runner.passes[:3] == [8, 8, 5]


def test_a_sequence_longer_than_the_draft_model_reads_is_not_guessed_at(pool, make_small):
    one, sampler = drafter(pool, make_small(0)), Sampler(GREEDY, [0], 5)
    assert len(one.draft([0] * 62, 9, sampler, None, None).tokens) <= 2
    assert one.draft([0] * 64, 9, sampler, None, None) is None
    assert one.draft([0] * 70, 9, sampler, None, None) is None


def test_the_distribution_that_is_reported_is_the_one_that_was_drawn_from(pool, make_small, chi_square):
    options = SamplingOptions(temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=0)
    sampler, one = Sampler(options, [0, 1], 5), drafter(pool, make_small(0))
    drafts = [one.draft([0, 1, 2], 1, sampler, None, None) for _ in range(2000)]
    distribution = drafts[0].probabilities[0]
    assert all(torch.equal(draft.probabilities[0], distribution) for draft in drafts)
    counts = torch.bincount(torch.tensor([draft.tokens[0] for draft in drafts]), minlength=5)
    assert chi_square(counts, distribution) > 0.001
    assert sampler.seen.nonzero()[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("padding", [-2, 3])
def test_padding_of_the_output_layers_may_differ(make_small, memo_runner, padding):
    """The draft's output layer has more or fewer rows than the target's; what both lack is never guessed."""
    from pippin.language import LanguageModel

    target, draft = make_small(0, size=9), make_small(1, size=9 + padding)
    draft = LanguageModel("padded", draft.module, target.tokenizer, None)
    pool = DraftPool(draft)
    pool._runner = memo_runner(draft, pool.blocks)
    options = SamplingOptions(temperature=2.0, seed=0)
    one = drafter(pool, target)
    for _ in range(50):
        guess = one.draft([0, 1], 2, Sampler(options, [0], 9), None, None)
        assert guess.probabilities.shape == (len(guess.tokens), 9)
        assert guess.probabilities.sum(-1).tolist() == pytest.approx([1.0] * len(guess.tokens))


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(make_small, tiny):
    model, other = make_small(0), make_small(0, size=6)
    with pytest.raises(VocabularyMismatch, match=r"small 0 \(6 tokens\) .* token 4 is b'e' .* b'' for the other"):
        check_vocabulary(model, other)
    with pytest.raises(VocabularyMismatch, match="tiny"):
        Speculation(tiny).check(model)
    assert issubclass(VocabularyMismatch, ValueError)


def test_the_same_vocabulary_in_another_object_is_accepted_and_compared_once(make_small, monkeypatch):
    model, other = make_small(0), make_small(1)
    assert model.tokenizer is not other.tokenizer
    Speculation(other).check(model)
    monkeypatch.setattr(type(model.tokenizer), "first_difference", None)
    Speculation(other).check(model)
