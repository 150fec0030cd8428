"""Look-up against a search by brute force; drafts leave no trace in the constraint."""

from hypothesis import given, settings, strategies as st

from pippin.engine.decoding.sampling import Sampler
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.options import SamplingOptions
from pippin.engine.speculation.ngram import NGRAM_LENGTHS, NGramDrafter

letters = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def search(ids, room, ends=()):
    """The newest tokens, the longest first, and what followed their last occurrence before the end."""
    for size in NGRAM_LENGTHS:
        for at in range(len(ids) - 1, size - 1, -1):
            if size <= len(ids) and ids[at - size : at] == ids[-size:]:
                longer = list(ids)
                for place in range(at, at + room):
                    if longer[place] in ends:
                        break
                    longer.append(longer[place])
                return longer[len(ids) :]
    return []


@given(letters, st.integers(1, 9), st.sets(st.integers(0, 3)))
@settings(max_examples=300, deadline=None)
def test_look_up_finds_what_a_search_finds(ids, room, ends):
    assert NGramDrafter(sorted(ends)).follow(ids, room) == search(ids, room, ends)


@given(letters, st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_looking_up_as_the_sequence_grows_is_looking_up_afresh(ids, room, data):
    drafter = NGramDrafter([])
    for end in sorted(data.draw(st.sets(st.integers(1, len(ids))))):
        assert drafter.follow(ids[:end], room) == search(ids[:end], room)


def test_a_look_up_ends_where_the_constraint_does_not_follow(tiny):
    text = "yes no yes no "
    drafter, sampler = NGramDrafter([]), Sampler(SamplingOptions(), [0], 260)
    constraint = Grammar.regex("(yes )+now").start(tiny.tokenizer)
    for token in tiny.tokenizer.encode("yes "):
        constraint.accept(token)
    before = constraint.mask().copy()
    draft = drafter.draft(tiny.tokenizer.encode(text), 10, sampler, constraint, None)
    assert tiny.tokenizer.decode(draft.tokens) == "yes no"
    assert draft.probabilities is None
    assert (constraint.mask() == before).all()
    never = Grammar.choice(["never"]).start(tiny.tokenizer)
    assert drafter.draft(tiny.tokenizer.encode(text), 10, sampler, never, None) is None


def test_nothing_is_guessed_where_nothing_was_seen():
    assert NGramDrafter([]).draft([1, 2, 3], 5, Sampler(SamplingOptions(), [0], 9), None, None) is None
