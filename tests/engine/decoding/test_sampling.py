"""Sampling against transformers' processors: the same tokens survive, drawn as often as their probability says."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pippin.core.errors import DecodingFailure, InvalidArgument
from pippin.engine.decoding.sampling import Sampler, sample_index
from pippin.engine.options import SamplingOptions

DRAWS = 4000


def expected(logits: torch.Tensor, options: SamplingOptions, prompt: torch.Tensor) -> torch.Tensor:
    """The distribution that transformers samples from."""
    steps = LogitsProcessorList()
    if options.repetition_penalty is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    steps.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k is not None:
        steps.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None:
        steps.append(TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        steps.append(MinPLogitsWarper(options.min_p))
    return steps(prompt[None], logits.clone()[None])[0].softmax(-1)


@pytest.mark.parametrize("size", [12, 1000])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 0.9, "min_p": 0.2},
        {"temperature": 5.0, "min_p": 0.001},
        {"temperature": 1.0, "top_k": 6, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.8, "repetition_penalty": 1.7, "top_k": 5},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options, size):
    options = SamplingOptions(seed=7, **options)
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    prompt = logits.topk(2).indices
    target = expected(logits, options, prompt)
    counts = torch.zeros(size)
    sampler = Sampler(options, prompt, size)
    for _ in range(DRAWS):
        sampler.seen = (
            None if sampler.seen is None else torch.zeros(size, dtype=torch.bool).index_fill_(0, prompt, True)
        )
        scores = logits.clone()
        sampler.penalize(scores)
        counts[sampler.sample(scores)] += 1
    assert not counts[target == 0].any(), "a token that transformers excludes was drawn"
    # Pearson's statistic over the tokens with enough expected draws; 5 standard deviations above its mean
    common = target * DRAWS >= 5
    statistic = float(((counts - target * DRAWS)[common] ** 2 / (target * DRAWS)[common]).sum())
    freedom = int(common.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    assert float(counts[~common].sum()) <= DRAWS * float(target[~common].sum()) + 5 * math.sqrt(DRAWS) * 0.1 + 5


def test_top_p_is_a_share_of_what_top_k_leaves():
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=10, top_p=0.5), torch.tensor([0]), 1000)
    probabilities = sampler.probabilities(torch.zeros(1000))
    assert probabilities[probabilities > 0].tolist() == [0.2] * 5


@pytest.mark.parametrize(("options", "kept"), [({"top_p": 0.5}, 2), ({"top_p": 0.25}, 1), ({"min_p": 1.0}, 4)])
def test_bounds_that_are_met_exactly(options, kept):
    sampler = Sampler(SamplingOptions(temperature=1.0, **options), torch.tensor([0]), 4)
    assert int((sampler.probabilities(torch.zeros(4)) > 0).sum()) == kept


@pytest.mark.parametrize(("options", "kept"), [({"top_p": 0.75}, 768), ({"top_p": 1.0}, 1024), ({"min_p": 1.0}, 1024)])
def test_what_a_flat_law_keeps_is_not_cut_to_the_shortlist(options, kept):
    sampler = Sampler(SamplingOptions(temperature=1.0, **options), torch.tensor([0]), 1024)
    probabilities = sampler.probabilities(torch.zeros(1024))
    assert probabilities.tolist() == [1 / kept] * kept + [0.0] * (1024 - kept)


@pytest.mark.parametrize(
    ("point", "weights", "index"),
    [
        (0.5, [1.0, 1.0], 1),
        (0.0, [0.0, 1.0], 1),
        (0.5, [1.0, 0.0, 1.0], 2),
        (1.0, [1.0, 2.0, 0.0], 1),  # a number rounded up to the end
        (1.0, [1.0, 2.0, 3.0, 0.0], 2),
    ],
)
def test_a_random_number_on_a_border_takes_the_next_index_with_any_weight(monkeypatch, point, weights, index):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(point, dtype=torch.float64))
    assert sample_index(torch.tensor(weights), torch.Generator()) == index


def test_greedy_is_the_first_of_the_likeliest():
    sampler = Sampler(SamplingOptions(), torch.tensor([0]), 4)
    assert [sampler.sample(torch.tensor([0.0, 2.0, 2.0, 1.0])) for _ in range(20)] == [1] * 20


@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_temperatures_that_are_no_32_bit_numbers_are_the_limits_that_they_stand_for(more):
    logits = torch.tensor([0.0, 2.0, 1.999, -math.inf, 1.0])
    for temperature in (5e-324, 1e-300, 1e-42):
        sampler = Sampler(SamplingOptions(temperature=temperature, seed=0, **more), torch.tensor([0]), 5)
        assert {sampler.sample(logits.clone()) for _ in range(20)} == {1}
    for temperature in (1e39, 1e300):
        sampler = Sampler(SamplingOptions(temperature=temperature, seed=0, **more), torch.tensor([0]), 5)
        assert {sampler.sample(logits.clone()) for _ in range(200)} <= {0, 1, 2, 4}
        assert float(sampler.probabilities(logits.clone()).max()) < 0.4


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-46])
def test_a_top_p_whose_share_of_the_total_is_no_32_bit_number_leaves_the_likeliest(top_p):
    sampler = Sampler(SamplingOptions(temperature=2.0, seed=0, top_p=top_p), torch.tensor([0]), 5)
    logits = torch.tensor([0.0, 2.0, 1.999, -math.inf, 1.0])
    assert sampler.sample(logits.clone()) == 1
    assert sampler.probabilities(logits.clone()).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(("penalty", "token"), [(5e-324, 1), (1e300, 2)])
def test_repetition_penalties_that_are_no_32_bit_numbers_are_the_limits_that_they_stand_for(penalty, token):
    sampler = Sampler(SamplingOptions(repetition_penalty=penalty), torch.tensor([0, 1, 3]), 5)
    logits = torch.tensor([0.0, 2.0, 0.5, -1.0, 0.25])
    sampler.penalize(logits)
    assert logits.isfinite().all()
    assert sampler.sample(logits) == token


@given(st.integers(0, 2**63 - 1))
@settings(max_examples=20)
def test_same_seed_same_tokens(seed):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    options = SamplingOptions(temperature=1.0, seed=seed)
    one, other = (Sampler(options, torch.tensor([0]), 500) for _ in range(2))
    assert [one.sample(logits.clone()) for _ in range(5)] == [other.sample(logits.clone()) for _ in range(5)]


def test_without_a_seed_two_requests_differ():
    options = SamplingOptions(temperature=1.0)
    draws = [
        [Sampler(options, torch.tensor([0]), 10_000).sample(torch.zeros(10_000)) for _ in range(4)] for _ in range(2)
    ]
    assert draws[0] != draws[1]


def test_forbidden_tokens_are_never_drawn_however_flat_the_rest():
    logits = torch.full((1000,), -math.inf)
    logits[torch.tensor([3, 500, 999])] = 0.0
    sampler = Sampler(SamplingOptions(temperature=100.0, seed=0), torch.tensor([0]), 1000)
    assert {sampler.sample(logits.clone()) for _ in range(200)} == {3, 500, 999}


@pytest.mark.parametrize(
    ("value", "message"), [(-math.inf, "^cannot choose a token: no token is allowed"), (math.nan, "a logit is nan")]
)
def test_no_choice_is_an_error(value, message):
    with pytest.raises(DecodingFailure, match=message):
        Sampler(SamplingOptions(), torch.tensor([0]), 8).sample(torch.full((8,), value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", None),
        ("presence_penalty", -2.1),
        ("logit_bias", [3]),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: -100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: "1"}),
        ("seed", -1),
        ("seed", True),
        ("max_tokens", 0),
        ("logprobs", 101),
        ("stop", "END"),
        ("stop", [""]),
        ("stop", [3]),
    ],
)
def test_values_outside_their_range_are_named(field, value):
    with pytest.raises(InvalidArgument, match=f"{field} must be"):
        SamplingOptions(**{field: value})


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.sampled_from([1.0, 1.7, 0.6]),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=4),
)
@settings(deadline=None)
def test_penalties_and_bias_follow_their_formula_in_the_documented_order(answer, frequency, presence, repetition, bias):
    options = SamplingOptions(
        frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition, logit_bias=bias
    )
    prompt = [0, 1, 2]
    sampler = Sampler(options, torch.tensor(prompt), 10)
    for token in answer:
        sampler.observe(token)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(0))
    expected = []
    for token, logit in enumerate(logits.tolist()):
        if token in prompt or token in answer:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = answer.count(token)
        logit -= frequency * count + presence * (count > 0)  # the prompt does not count
        expected.append(logit + bias.get(token, 0.0))
    sampler.penalize(logits)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_a_bias_of_a_hundred_decides_and_of_minus_a_hundred_forbids(tiny):
    from pippin.engine import Engine, Request

    options = SamplingOptions(max_tokens=5, temperature=1.0, seed=0, logit_bias={70: 100})
    assert [event.id for event in list(Engine(tiny).stream(Request([65], options)))[:-1]] == [70] * 5
    options = SamplingOptions(
        max_tokens=200, temperature=1.0, seed=0, logit_bias={70: 100, 256: -100}, frequency_penalty=2
    )
    ids = [event.id for event in list(Engine(tiny).stream(Request([65], options)))[:-1]]
    assert len(ids) == 200
    assert 256 not in ids
    # 100 over the others lasts for 50 occurrences, a little more or less by the model's own opinion
    assert 45 <= ids.count(70) <= 55


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 6, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 5.0, "min_p": 0.001},
        {"temperature": 0.8, "repetition_penalty": 1.7, "top_k": 5},
        {"temperature": 0.8, "repetition_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("size", [12, 1000])
def test_the_distribution_is_that_of_transformers(options, size):
    options = SamplingOptions(seed=7, **options)
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    prompt = logits.topk(2).indices
    sampler = Sampler(options, prompt, size)
    scores = logits.clone()
    sampler.penalize(scores)
    distribution = sampler.probabilities(scores)
    torch.testing.assert_close(distribution, expected(logits, options, prompt).double(), atol=1e-6, rtol=1e-5)
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-12)


def test_the_distribution_of_a_greedy_sampler_is_its_choice():
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert Sampler(SamplingOptions(), [0], 4).probabilities(logits).tolist() == [0, 1, 0, 0]
    with pytest.raises(DecodingFailure, match="no token is allowed"):
        Sampler(SamplingOptions(), [0], 4).probabilities(torch.full((4,), -math.inf))


def test_a_fork_has_seen_the_same_and_goes_its_own_way():
    options = SamplingOptions(repetition_penalty=2.0, frequency_penalty=1.0, temperature=1.0, seed=0)
    sampler = Sampler(options, [3], 10)
    sampler.observe(4)
    state = sampler.generator.get_state()
    fork = sampler.fork(torch.Generator().manual_seed(1))
    one, other = torch.ones(10), torch.ones(10)
    sampler.penalize(one)
    fork.penalize(other)
    assert torch.equal(one, other)
    for _ in range(5):
        fork.sample(torch.zeros(10))
    again = torch.ones(10)
    sampler.penalize(again)
    assert torch.equal(one, again)
    assert torch.equal(sampler.generator.get_state(), state)


def test_a_fork_of_a_sampler_without_penalties_has_none():
    fork = Sampler(SamplingOptions(temperature=1.0, seed=0), [3], 10).fork(torch.Generator().manual_seed(1))
    assert (fork.seen, fork.counts) == (None, None)
    assert 0 <= fork.sample(torch.zeros(10)) < 10


def test_a_pick_never_lands_where_there_is_no_weight():
    weights = torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64)
    assert {sample_index(weights, torch.Generator().manual_seed(seed)) for seed in range(20)} == {1}


def test_options_that_say_nothing_are_greedy_and_without_penalties():
    sampler = Sampler(SamplingOptions(), torch.tensor([2]), 4)
    logits = torch.tensor([0.0, 1.0, 3.0, 2.9])
    scores = logits.clone()
    sampler.penalize(scores)
    assert torch.equal(scores, logits)
    assert (sampler.temperature, sampler.repetition_penalty) == (0.0, 1.0)
    assert {sampler.sample(logits.clone()) for _ in range(20)} == {2}
