"""Whole answers: token for token as without speculation where that is promised, in distribution where that is."""

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.options import SamplingOptions
from pippin.engine.speculation import CoarseAcceptance, Speculation, TokenGroups

PROMPT = list(range(60, 120)) * 2
FREE = {"max_tokens": 40, "temperature": 0.4, "seed": 3}


@pytest.fixture(scope="module")
def shared(tiny):
    """The tiny model with two more layers that read the keys of the second."""
    from dataclasses import replace

    from pippin.language import Decoder, LanguageModel
    from pippin.nn.attention.attention import AttentionSpec

    upper = replace(tiny.config.layers[0], attention=AttentionSpec(kv_source=1))
    config = replace(tiny.config, layers=(*tiny.config.layers, upper, upper))
    return LanguageModel("shared", Decoder(config).initialize(seed=5).eval(), tiny.tokenizer, None)


@pytest.fixture(scope="module")
def drafting(tiny):
    """A draft model that is right about half of the time: the tiny model with noise on its weights."""
    from copy import deepcopy

    from pippin.language import LanguageModel

    module = deepcopy(tiny.module)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return LanguageModel("drafting", module, tiny.tokenizer, None)


@pytest.fixture(scope="module")
def settle(tiny, drafting):
    """A `Speculation` by the name of its drafter; the draft model's runner is torch's."""
    from pippin.engine.runners.torch_runner import TorchRunner

    def make(draft, **fields):
        if draft != "model":
            return Speculation(draft, **fields)
        speculation = Speculation(drafting, **fields)
        speculation._pool._runner = TorchRunner(drafting, speculation._pool.blocks)
        return speculation

    return make


CASES = {
    "greedy": {"max_tokens": 60},
    "greedy with penalties": {"max_tokens": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "greedy with a bias": {"max_tokens": 40, "logit_bias": {65: 0.3, 66: 0.3}, "presence_penalty": 0.2},
    "greedy with log-probabilities": {"max_tokens": 30, "logprobs": 3},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


def same(one, other):
    """Whether two answers agree: ids and texts exactly, log-probabilities but for the rounding of other shapes."""
    assert [(token.id, token.text) for token in one] == [(token.id, token.text) for token in other]
    for a, b in zip(one, other, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [id for id, _ in a.top_logprobs] == [id for id, _ in b.top_logprobs]


@pytest.mark.parametrize("draft", ["ngram", "model", "self"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_the_same_token_for_token(shared, settle, write, draft, case):
    options = SamplingOptions(**CASES[case])
    plain, last, _ = write(shared, PROMPT, options=options)
    tokens, end, drafts = write(shared, PROMPT, options=options, speculation=settle(draft, num_speculative_tokens=5))
    same(tokens, plain)
    assert (end.finish_reason, end.text, end.answer_tokens) == (last.finish_reason, last.text, last.answer_tokens)
    assert end.drafted == sum(len(one.tokens) for one in drafts if one is not None)
    assert 0 <= end.accepted <= end.drafted
    assert end.exact == "token"
    assert (last.drafted, last.accepted, last.exact) == (0, 0, "token")


@pytest.mark.parametrize(
    "options",
    [FREE, {**FREE, "top_k": 5, "presence_penalty": 0.5}, {**FREE, "logprobs": 2, "top_p": 0.8, "temperature": 1.0}],
)
def test_seeded_answers_with_a_look_up_are_the_same_token_for_token(tiny, write, options):
    # a bias on few letters makes repetitions, and with them guesses, likely
    options = SamplingOptions(**options, logit_bias=dict.fromkeys(range(65, 70), 8.0))
    plain, last, _ = write(tiny, PROMPT, options=options)
    tokens, end, _ = write(tiny, PROMPT, options=options, speculation=Speculation("ngram", num_speculative_tokens=4))
    same(tokens, plain)
    assert (end.finish_reason, end.text) == (last.finish_reason, last.text)
    assert 0 < end.accepted < end.drafted


@pytest.mark.parametrize("draft", ["ngram", "model", "self"])
def test_a_stop_string_ends_the_answer_inside_a_draft(shared, settle, write, draft):
    bias = dict.fromkeys(range(97, 100), 9.0)
    free, _, _ = write(shared, PROMPT, options=SamplingOptions(max_tokens=40, logit_bias=bias))
    text = "".join(token.text for token in free)
    for at in (3, 9, 17):
        options = SamplingOptions(max_tokens=40, logit_bias=bias, stop=[text[at : at + 2]])
        plain, last, _ = write(shared, PROMPT, options=options)
        tokens, end, _ = write(shared, PROMPT, options=options, speculation=settle(draft, num_speculative_tokens=8))
        assert (tokens, end.finish_reason, end.text) == (plain, last.finish_reason, last.text)
        assert end.finish_reason == "stop"


SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["anna", "anton", "bert"]}, "maxItems": 6}},
    "required": ["names"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("draft", ["ngram", "model", "self"])
def test_constrained_answers_are_the_same_token_for_token(shared, settle, write, draft, logprobs):
    options = SamplingOptions(max_tokens=60, logprobs=logprobs, temperature=0.8 if draft == "ngram" else 0, seed=1)
    for grammar in (Grammar.json_schema(SCHEMA), Grammar.regex("(ab|ac)+d")):
        plain, last, _ = write(shared, PROMPT, options=options, grammar=grammar)
        tokens, end, _ = write(shared, PROMPT, options=options, grammar=grammar, speculation=settle(draft))
        same(tokens, plain)
        assert (end.finish_reason, end.text) == (last.finish_reason, last.text)
        if draft != "ngram":
            assert end.drafted > 0


@pytest.mark.parametrize("draft", ["model", "self"])
def test_sampled_answers_under_a_constraint_satisfy_it(shared, settle, write, draft):
    grammar = Grammar.json_schema(SCHEMA)
    for seed in range(8):
        options = SamplingOptions(temperature=1.0, seed=seed, max_tokens=100)
        tokens, end, _ = write(shared, PROMPT, options=options, grammar=grammar, speculation=settle(draft))
        assert grammar.allows("".join(token.text for token in tokens) + end.text)
        assert end.finish_reason == "stop"


def test_a_draft_equal_to_the_model_is_accepted_to_the_last_token(tiny, write):
    from pippin.engine.runners.torch_runner import TorchRunner

    speculation = Speculation(tiny, num_speculative_tokens=6)
    speculation._pool._runner = TorchRunner(tiny, speculation._pool.blocks)
    _, end, drafts = write(tiny, PROMPT, options=SamplingOptions(max_tokens=50), speculation=speculation)
    assert end.accepted == end.drafted >= 40
    assert {len(one.tokens) for one in drafts[:5]} == {6}


def test_the_same_seed_gives_the_same_answer(drafting, tiny, settle, write):
    options = SamplingOptions(max_tokens=30, temperature=1.0, seed=7)
    answers = [write(tiny, PROMPT, options=options, speculation=settle("model"))[0] for _ in range(2)]
    assert answers[0] == answers[1]


# --- distributions
# -------------------------------------------------------------------------------------------------------------

RUNS = 1000


def answers(model, write, memo_runner, speculation, draft, options, **fields):
    """Many short answers with fresh random numbers."""
    runner = memo_runner(model)
    if draft is not None:
        speculation._pool._runner = memo_runner(draft, speculation._pool.blocks)
    found, accepted, drafted = [], 0, 0
    for seed in range(RUNS):
        seeded = SamplingOptions(**options, max_tokens=3, seed=seed)
        tokens, end, _ = write(model, [0, 1], runner=runner, options=seeded, speculation=speculation, **fields)
        found.append(tuple(token.id for token in tokens))
        accepted, drafted = accepted + end.accepted, drafted + end.drafted
    assert 0 < accepted < drafted
    return found, accepted / drafted


def compare(found, distribution, chi_square):
    keys = list(distribution)
    assert set(found) <= set(keys)
    assert sum(distribution.values()) == pytest.approx(1)
    assert chi_square([found.count(key) for key in keys], [distribution[key] for key in keys]) > 0.001


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.5},
        {"temperature": 1.0, "top_k": 3, "frequency_penalty": 1.0, "logit_bias": {2: 1.0}},
    ],
)
def test_answers_with_a_draft_model_follow_the_distribution_of_the_model(
    make_small, memo_runner, law_of_answers, chi_square, write, options
):
    model, draft = make_small(0), make_small(1)
    found, _ = answers(model, write, memo_runner, Speculation(draft, num_speculative_tokens=2), draft, options)
    compare(found, law_of_answers(model, [0, 1], 3, SamplingOptions(**options)), chi_square)


def test_answers_of_self_speculation_follow_the_distribution_of_the_model(
    make_small, law_of_answers, chi_square, write, memo_runner
):
    model = make_small(2, layers=3, sources=(None, 0, 0))
    found, _ = answers(
        model, write, memo_runner, Speculation("self", num_speculative_tokens=2), None, {"temperature": 1.0}
    )
    compare(found, law_of_answers(model, [0, 1], 3, SamplingOptions(temperature=1.0)), chi_square)


def test_constrained_answers_follow_the_constrained_law(make_small, memo_runner, law_of_answers, chi_square, write):
    model, draft = make_small(0), make_small(1)
    grammar = Grammar.regex("(ab|ba|[cd][ab])[a-d]*")

    def allowed(answer):
        constraint = grammar.start(model.tokenizer)
        for token in answer:
            constraint.accept(token)
        return [token for token in range(5) if constraint.allows(token)]

    found, _ = answers(
        model,
        write,
        memo_runner,
        Speculation(draft, num_speculative_tokens=2),
        draft,
        {"temperature": 1.2},
        grammar=grammar,
    )
    compare(found, law_of_answers(model, [0, 1], 3, SamplingOptions(temperature=1.2), allowed=allowed), chi_square)


def test_coarse_acceptance_keeps_the_distribution_of_groups_accepts_more_and_says_so(
    make_small, memo_runner, law_of_answers, chi_square, write
):
    model, draft = make_small(0), make_small(1)
    groups = TokenGroups.from_embeddings(torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])], 0.5)  # ab, cd, the end
    speculation = Speculation(draft, num_speculative_tokens=2, acceptance=CoarseAcceptance(groups))
    options = SamplingOptions(temperature=1.0)
    found, rate = answers(model, write, memo_runner, speculation, draft, {"temperature": 1.0})
    _, exact = answers(
        model, write, memo_runner, Speculation(draft, num_speculative_tokens=2), draft, {"temperature": 1.0}
    )
    assert rate > exact + 0.05
    # the first token is the model's own; what follows it, in groups, is exact given the tokens before
    distribution = law_of_answers(model, [0, 1], 2, options)
    coarse = {}
    for answer, p in distribution.items():
        key = (*answer[:1], *(token // 2 for token in answer[1:]))
        coarse[key] = coarse.get(key, 0.0) + p
    seen = [(*answer[:1], *(token // 2 for token in answer[1:2])) for answer in found]
    compare(seen, coarse, chi_square)
    _, end, _ = write(model, [0, 1], runner=memo_runner(model), options=options, speculation=speculation)
    assert end.exact == "group"


def test_coarse_acceptance_keeps_to_the_constraint(tiny, settle, write, drafting):
    """Groups hold tokens that the grammar forbids; what is left of them is what it allows."""
    groups = TokenGroups.from_embeddings(torch.eye(26)[torch.arange(260) // 10], 0.5)
    speculation = settle("model", acceptance=CoarseAcceptance(groups))
    grammar = Grammar.regex("[b-y]{5,60}")
    accepted = 0
    for seed in range(6):
        options = SamplingOptions(temperature=1.0, seed=seed, max_tokens=40)
        tokens, end, _ = write(tiny, PROMPT, options=options, grammar=grammar, speculation=speculation)
        assert all("b" <= char <= "y" for char in "".join(token.text for token in tokens) + end.text)
        accepted += end.accepted
    assert accepted > 0


# --- cost and errors --------------------------------------------------------------------------------------------------


def test_a_request_without_speculation_asks_for_nothing(tiny):
    from pippin.engine.output_processor import OutputProcessor
    from pippin.engine.request import Request

    output = OutputProcessor(tiny, Request(PROMPT), 2048)
    assert output.propose((), 8) is None  # not even the tokens are looked at
    assert not output.drafts_with_target


def test_drafts_fit_the_room_that_is_left(tiny, settle, write):
    for draft in ("ngram", "model"):
        for most in (3, 4, 7):
            options = SamplingOptions(max_tokens=most)
            _, end, drafts = write(
                tiny, PROMPT, options=options, speculation=settle(draft, num_speculative_tokens=16), room=5
            )
            assert end.answer_tokens == most
            assert all(one is None or len(one.tokens) <= min(5, most - 1) for one in drafts)


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_outside_its_range_is_refused(length):
    with pytest.raises(InvalidArgument, match="num_speculative_tokens must be from 1 to 64"):
        Speculation(num_speculative_tokens=length)


def test_self_speculation_of_a_model_without_shared_keys_is_refused(tiny):
    with pytest.raises(InvalidArgument, match="tiny cannot draft for itself: its last layer has keys"):
        Speculation("self").check(tiny)


def test_groups_of_another_vocabulary_are_refused(tiny):
    groups = TokenGroups.from_embeddings(torch.eye(3), 0.5)
    with pytest.raises(InvalidArgument, match="3 tokens, the model's vocabulary has 260"):
        Speculation(acceptance=CoarseAcceptance(groups)).check(tiny)
