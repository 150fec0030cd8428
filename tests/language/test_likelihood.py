"""Held-out likelihood: transformers' losses on the same tokens, windows by brute force, packed weights."""

import copy
import dataclasses
import math

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from pippin.core import native
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.likelihood import TextLikelihood, text_likelihood

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom… née Dickens."


@pytest.fixture(scope="module")
def sharp(tiny):
    """The small random model with larger weights, so that its guesses differ."""
    module = copy.deepcopy(tiny.module)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return dataclasses.replace(tiny, network=module)


@pytest.fixture(scope="module")
def theirs(sharp, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharp")
    sharp.save(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def nats(model, ids):
    """What transformers says of ids[1:], given what comes before each."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_a_text_in_one_window_is_what_transformers_says(sharp, theirs):
    ids = sharp.tokenizer.encode(TEXT)
    found = text_likelihood(sharp, TEXT)
    assert found.nats == pytest.approx(float(nats(theirs, ids).sum()), rel=1e-5)
    assert (found.tokens, found.bytes) == (len(ids) - 1, len(TEXT.encode()) - 1)
    assert found.perplexity == pytest.approx(math.exp(found.nats / found.tokens))
    assert found.per_byte == found.nats / found.bytes
    assert found.standard_error == pytest.approx(stats.sem(nats(theirs, ids)), rel=1e-5)
    assert found.perplexity_error == pytest.approx(found.perplexity * found.standard_error)


@pytest.mark.parametrize(("length", "stride"), [(16, None), (16, 16), (16, 5), (16, 1), (1, None), (90, 40)])
def test_windows_count_every_token_once_with_the_context_they_promise(sharp, theirs, length, stride):
    ids = sharp.tokenizer.encode(TEXT)
    step = stride or length
    expected, done = 0.0, 1
    for start in range(0, len(ids) - 1, step):
        end = min(start + length + 1, len(ids))
        if end > done:
            expected += float(nats(theirs, ids[start:end])[done - end :].sum())
            done = end
    found = text_likelihood(sharp, TEXT, max_length=length, stride=stride)
    assert found.tokens == done - 1 == len(ids) - 1
    assert found.nats == pytest.approx(expected, rel=1e-5)


def test_texts_do_not_see_each_other_and_a_limit_counts_over_all(sharp, theirs):
    texts = ["Once upon a time", "x", "", "in a land far away", TEXT]
    each = [nats(theirs, sharp.tokenizer.encode(text)) for text in texts if len(text) > 1]
    whole = text_likelihood(sharp, texts)
    assert whole.nats == pytest.approx(float(torch.cat(each).sum()), rel=1e-5)
    part = text_likelihood(sharp, texts, max_tokens=20)
    assert part.tokens == 20
    assert part.nats == pytest.approx(float(torch.cat(each)[:20].sum()), rel=1e-5)
    assert part.bytes == 20


def test_ids_are_as_good_as_their_text(sharp):
    assert text_likelihood(sharp, sharp.tokenizer.encode(TEXT)) == text_likelihood(sharp, TEXT)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_packed_weights_give_the_same_figure(sharp):
    packed = dataclasses.replace(sharp, network=copy.deepcopy(sharp.module).pack())
    ours, dense = (text_likelihood(one, [TEXT, TEXT[:30]], max_length=32, stride=8) for one in (packed, sharp))
    assert (ours.tokens, ours.bytes) == (dense.tokens, dense.bytes)
    assert ours.nats == pytest.approx(dense.nats, rel=1e-4)


def test_perplexity_beyond_a_float_is_infinite():
    assert TextLikelihood(1000.0, 1, 0).perplexity == math.inf
    assert math.isnan(TextLikelihood(1000.0, 1, 0).per_byte)
    assert math.isnan(TextLikelihood(1000.0, 1, 0, 1e6).standard_error)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (TEXT, {"max_length": 0}, InvalidArgument, "max_length must be at least 1, got 0"),
        (TEXT, {"max_length": 4096}, InvalidArgument, "reads at most 2048 tokens"),
        (TEXT, {"max_length": 8, "stride": 9}, InvalidArgument, "stride is 9, which must be at most max_length"),
        ([5, 900], {}, InvalidArgument, "token id 900"),
        ("x", {}, InvalidInput, "nothing to predict"),
        ([], {}, InvalidInput, "nothing to predict"),
    ],
)
def test_what_cannot_be_measured_is_refused(sharp, text, options, error, message):
    with pytest.raises(error, match=message):
        text_likelihood(sharp, text, **options)
