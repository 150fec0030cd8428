"""One answer, driven by hand: what is checked before it, what is taken from each row, and why it ends."""

import pytest
import torch
from hypothesis import given, strategies as st

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.options import SamplingOptions
from pippin.engine.output_processor import OutputProcessor, check
from pippin.engine.request import Request
from pippin.engine.speculation import Draft, Speculation

PROMPT = list(b"write: ")


def start(model, size=2048, grammar=None, speculation=None, **options):
    return OutputProcessor(
        model, Request(PROMPT, SamplingOptions(**options), grammar=grammar, speculation=speculation), size
    )


def ids(output, text):
    """A token for each letter; "$" is the end."""
    return [256 if letter == "$" else output.model.tokenizer.encode(letter)[0] for letter in text]


def rows(output, text):
    """Logits whose likeliest tokens spell this text."""
    logits = torch.zeros(len(text), 260)
    logits[torch.arange(len(text)), torch.tensor(ids(output, text))] = 5.0
    return logits


def feed(output, text, guess=None):
    draft = None if guess is None else Draft(ids(output, guess))
    return "".join(token.text for token in output.process(rows(output, text), draft))


def test_one_row_is_one_token(tiny):
    output = start(tiny)
    assert [feed(output, letter) for letter in "hi"] == ["h", "i"]
    assert (output.num_tokens, output.finish_reason) == (2, None)


def test_an_end_token_ends_the_answer_and_is_not_part_of_it(tiny):
    output = start(tiny)
    feed(output, "a")
    assert output.process(rows(output, "$")) == []
    assert output.finish_reason == "stop"
    end = output.finished(output.finish_reason)
    assert (end.answer_tokens, end.prompt_tokens, end.finish_reason) == (1, len(PROMPT), "stop")


@pytest.mark.parametrize(
    ("maximum", "size", "limit"), [(2, 2048, 2), (None, len(PROMPT) + 2, 2), (9, len(PROMPT) + 2, 2)]
)
def test_the_limit_is_the_lower_of_maximum_and_room(tiny, maximum, size, limit):
    output = start(tiny, size, max_tokens=maximum)
    assert output.max_tokens == limit
    feed(output, "a")
    assert output.finish_reason is None
    feed(output, "b")
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("guess", "held", "written"),
    [("bcd", 3, "abcd!"), ("bxd", 1, "abc"), ("xcd", 0, "ab")],
    ids=["all", "in part", "not at all"],
)
def test_a_draft_is_taken_up_to_the_first_difference(tiny, guess, held, written):
    output = start(tiny, speculation=Speculation("ngram"))
    assert feed(output, "a") + feed(output, "bcd!", guess) == written
    assert (output.drafted, output.accepted, output.num_tokens) == (3, held, len(written))


@pytest.mark.parametrize(
    ("options", "written", "reason"),
    [({"max_tokens": 2}, "ab", "length"), ({"stop": ["bc"]}, "a", "stop"), ({}, "ab", "stop")],
    ids=["maximum", "stop string", "end token"],
)
def test_nothing_is_taken_behind_the_end(tiny, options, written, reason):
    output = start(tiny, speculation=Speculation("ngram"), **options)
    letters = "abcde" if options else "ab$de"
    answer = feed(output, letters, letters[:-1])
    end = output.finished(output.finish_reason)
    assert (answer + end.text, end.finish_reason) == (written, reason)
    assert end.answer_tokens == {"ab": 2, "a": 3}[written]


def test_what_a_grammar_forces_is_written_and_a_draft_may_go_on_behind_it(tiny):
    grammar = Grammar.regex("(yes|no), (please|thanks)")
    output = start(tiny, grammar=grammar, speculation=Speculation("ngram"))
    assert feed(output, "y") == "yes, "
    # the choice of t forces the rest; a draft of it changes nothing
    assert feed(output, "tttttt", "thank") == "thanks"
    assert (output.drafted, output.accepted, output.finish_reason) == (5, 5, "stop")
    output = start(tiny, grammar=Grammar.regex("(ab|cd)+"), speculation=Speculation("ngram"))
    assert feed(output, "axcxax", "abcda") == "abcdab"


def test_penalties_see_the_tokens_of_the_draft_that_were_taken(tiny):
    """Both rows like the same token; once it is written, the penalty lets another win."""
    output = start(tiny, presence_penalty=2.0, speculation=Speculation("ngram"))
    logits = rows(output, "aa")
    logits[:, ids(output, "b")] = 4.0
    taken = output.process(logits, Draft(ids(output, "a")))
    assert [token.id for token in taken] == ids(output, "ab")


def test_log_probabilities_are_those_before_penalties_row_by_row(tiny):
    output = start(tiny, presence_penalty=2.0, logprobs=2, speculation=Speculation("ngram"))
    logits = rows(output, "abc")
    before = logits.log_softmax(-1)
    for row, token in enumerate(output.process(logits.clone(), Draft(ids(output, "ab")))):
        assert token.logprob == pytest.approx(float(before[row, token.id]))
        assert token.top_logprobs[0] == (token.id, pytest.approx(token.logprob))
        assert len(token.top_logprobs) == 2


def test_times_are_in_order(tiny):
    output = start(tiny, max_tokens=1)
    output.prompt_done()
    feed(output, "a")
    end = output.finished("length")
    assert 0 < end.prompt_seconds <= end.first_token_seconds <= end.total_seconds


@pytest.mark.parametrize(("prompt", "maximum", "size"), [(2048, None, 2048), (2040, 9, 2048), (10, 7, 16)])
def test_what_does_not_fit_is_refused_with_both_numbers(tiny, prompt, maximum, size):
    holder = "context of tiny" if size == 2048 else r"cache \(cache_tokens\)"
    with pytest.raises(ContextOverflow, match=f"{holder} holds {size:,}") as caught:
        check(tiny, [65] * prompt, SamplingOptions(max_tokens=maximum), size)
    assert caught.value.context_size == size
    assert caught.value.token_count == prompt + (maximum or 1)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([3, 260], "token id 260"), ([-1], "token id -1")]
)
def test_impossible_prompts_are_refused(tiny, prompt, message):
    with pytest.raises(InvalidArgument, match=message):
        check(tiny, prompt, SamplingOptions(), 2048)


def test_a_bias_outside_the_vocabulary_is_refused(tiny):
    with pytest.raises(InvalidArgument, match="token id 260 is outside the vocabulary of 260"):
        check(tiny, [65], SamplingOptions(logit_bias={260: 1}), 2048)
    check(tiny, [65], SamplingOptions(logit_bias={259: 1}, max_tokens=2047), 2048)


lists = st.lists(st.integers(0, 2), max_size=12)


@given(lists, lists, lists)
def test_the_common_prefix_is_the_longest_one(start, one, other):
    one, other = start + one, start + other
    same = common_prefix(one, tuple(other))
    assert one[:same] == other[:same]
    assert same == min(len(one), len(other)) or one[same] != other[same]
