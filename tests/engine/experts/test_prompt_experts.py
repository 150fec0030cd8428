"""Experts that the prompt chooses: answers against a whole pass under explicit masks, and what is read of a file."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.engine.experts.mixture import EXPERTS, SIZE, VOCAB, model_of

from pippin.core import native
from pippin.core.errors import InvalidArgument, Overloaded, UnsupportedModel
from pippin.engine import Engine, Request, SamplingOptions, Token
from pippin.engine.experts import PromptExperts
from pippin.engine.experts.eviction import LeastStale
from pippin.engine.experts.expert_store import ExpertStore
from pippin.engine.experts.prompt_experts import ExpertChoice, swap
from pippin.engine.kv_eviction import SnapKV
from pippin.engine.prompt_extras import PromptEmbeddings
from pippin.engine.speculation import Speculation
from pippin.language import LanguageModel
from pippin.language.memory_placement import Placement
from pippin.language.methods.prompt_experts import PromptRouter, PromptRouterConfig
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.kv_cache import NoCache

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
IDS = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(3)).tolist()
KEEP, EVERY, SWAPS = 3, 10, 2
PROMPTS = [IDS[:45], IDS[50:63], IDS[100:170]]


def router_for(module, depth=1, **options):
    config = PromptRouterConfig.for_decoder(module.config, KEEP, depth=depth, stretch=16, **options)
    router = PromptRouter(config).initialize(seed=5)
    # scores that differ from text to text
    torch.nn.init.normal_(router.inner.weight, 0, 1.0, torch.Generator().manual_seed(6))
    torch.nn.init.normal_(router.outer.weight, 0, 1.0, torch.Generator().manual_seed(7))
    return router


@pytest.fixture(scope="module")
def policy(module):
    return PromptExperts(router_for(module, eps=0.5), reselect_every=EVERY, max_swaps=SWAPS)


def model_with(module, tiny, kind):
    return LanguageModel("m", module, tiny.tokenizer, None) if kind == "torch" else model_of(module, tiny, absent=False)


def answers(engine, prompts, max_tokens=35, **options):
    streams = [
        engine.stream(Request(prompt, SamplingOptions(temperature=0.0, max_tokens=max_tokens), **options))
        for prompt in prompts
    ]
    return [[event.id for event in stream if isinstance(event, Token)] for stream in streams]


@torch.no_grad()
def by_hand(model, policy, prompt, tokens=35):
    """Greedy tokens, each from a whole pass in which every token has the set that served it."""
    module, ids, sets = model.module, list(prompt), []
    while len(ids) < len(prompt) + tokens:
        behind = len(ids) - 1 - len(prompt)
        if not sets or (behind >= 0 and behind // EVERY == len(sets)):
            read = prompt if not sets else ids[len(prompt) + (len(sets) - 1) * EVERY :][:EVERY]
            scores = policy.router.scores(module, torch.tensor(read))
            chosen = scores.topk(KEEP, -1).indices if not sets else swapped(sets[-1][0], scores)
            sets.append((chosen, policy.router.mask(chosen, scores)))
        served = [max(0, (at - len(prompt)) // EVERY) for at in range(len(ids))]
        masks = [(sets[number][1], slice(at, at + 1)) for at, number in enumerate(served)]
        x = module.forward_layers(module.embed(torch.tensor([ids])), NoCache(), experts=masks)
        ids.append(int(module.lm_head(module.norm(x))[0, -1].argmax()))
    return ids[len(prompt) :], [chosen for chosen, _ in sets]


def swapped(chosen, scores):
    """Up to two exchanges in each layer, best for worst, as long as they gain."""
    rows = []
    for kept, row in zip(chosen.tolist(), scores.tolist(), strict=True):
        kept = set(kept)
        for _ in range(SWAPS):
            worst = min(kept, key=lambda e: row[e])
            best = max(set(range(EXPERTS)) - kept, key=lambda e: row[e])
            if row[best] > row[worst]:
                kept = kept - {worst} | {best}
        rows.append(sorted(kept))
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", ["torch", pytest.param("native", marks=needs_kernels)])
def test_answers_are_those_under_explicit_masks(module, tiny, policy, kind):
    model = model_with(module, tiny, "torch")
    expected = [by_hand(model, policy, prompt) for prompt in PROMPTS]
    with Engine(model_with(module, tiny, kind), experts=policy) as engine:
        assert answers(engine, PROMPTS) == [ids for ids, _ in expected]
        everything = ExpertMask(torch.ones(3, EXPERTS, dtype=torch.bool))
        assert answers(engine, PROMPTS[:1], experts=everything) != [expected[0][0]]  # and the choice made a difference
    moved = [not torch.equal(*pair) for _, sets in expected for pair in itertools.pairwise(sets)]
    assert sum(moved) >= 4


@needs_kernels
def test_neighbors_chunks_and_preemptions_change_nothing(module, tiny, policy):
    model = model_with(module, tiny, "native")
    with Engine(model, experts=policy) as engine:
        together = answers(engine, PROMPTS, 100)
        assert [answers(engine, [prompt], 100)[0] for prompt in PROMPTS] == together
        # nothing of it is reused by others, or from others
        plain = answers(engine, PROMPTS, 100, experts=ExpertMask(torch.ones(3, EXPERTS, dtype=torch.bool)))
    with Engine(model) as engine:
        assert answers(engine, PROMPTS, 100) == plain
        assert answers(engine, PROMPTS, 100, experts=policy) == together
    for tokens in (7, 512):  # what is computed anew after a preemption would fit in one pass, over ten sets
        with Engine(model, experts=policy, cache_tokens=256, max_num_batched_tokens=tokens) as engine:
            assert answers(engine, PROMPTS, 100) == together
            assert engine.stats().preempted


def test_one_set_serves_where_nothing_is_chosen_again(module, tiny, policy):
    model = model_with(module, tiny, "torch")
    fixed = PromptExperts(policy.router, reselect_every=0)
    with torch.no_grad():
        mask = ExpertChoice(fixed, model, PROMPTS[0]).mask_at(0)
    with Engine(model) as engine:
        assert answers(engine, PROMPTS[:1], experts=fixed) == answers(engine, PROMPTS[:1], experts=mask)


@given(
    st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([None, 1, 2, 9]), st.sampled_from([0.0, 0.3, math.inf])
)
def test_swaps_exchange_the_worst_for_the_best(seed, kept, most, margin):
    rng = np.random.default_rng(seed)
    scores = rng.permuted(np.tile(np.linspace(0, 1, 6), (2, 1)), axis=1).astype(np.float32)
    chosen = np.sort(np.stack([rng.permutation(6)[:kept] for _ in range(2)]), axis=1)
    found = swap(torch.tensor(chosen), torch.tensor(scores), most, margin).tolist()
    for row, old, new in zip(scores, chosen.tolist(), found, strict=True):
        inside, outside = sorted(old, key=lambda e: row[e]), sorted(set(range(6)) - set(old), key=lambda e: -row[e])
        expected = set(old)
        for number, (worst, best) in enumerate(zip(inside, outside, strict=False)):
            if row[best] > row[worst] + margin and (most is None or number < most):
                expected = expected - {worst} | {best}
        assert new == sorted(expected)


@needs_kernels
def test_a_set_is_read_once_and_a_later_one_costs_its_swaps(module, tiny, stored):
    model = model_of(module, tiny, absent=True)
    policy = PromptExperts(router_for(module, depth=0), reselect_every=EVERY, max_swaps=1)
    prompt, read = PROMPTS[0], []
    with Engine(model, enable_prefix_caching=False) as engine:
        store = ExpertStore(stored, 3 * KEEP * SIZE, LeastStale(), engine._runner.place_expert)
        engine.fetch_experts(store)
        ids = list(prompt)
        for event in engine.stream(Request(prompt, SamplingOptions(temperature=0.0, max_tokens=55), experts=policy)):
            if isinstance(event, Token):
                ids.append(event.id)
                read.append(int(store.stats.bytes_read.sum()))
        store.close()
    choice = ExpertChoice(policy, model_of(module, tiny, absent=False), prompt)
    sets = [choice.mask_at(0).allowed]
    for length in range(len(prompt) + 1, len(ids) + 1):
        if (mask := choice.extend(ids[:length])) is not None:
            sets.append(mask.allowed)
    swaps = [int((one & ~other).sum()) for other, one in itertools.pairwise(sets)]
    assert len(sets) == 6
    assert 0 < sum(swaps) <= 3 * 5
    # a token takes two of a set of three: what a set has is read when a token takes it, and never twice
    assert read[-1] <= (3 * KEEP + sum(swaps)) * SIZE
    assert store.stats.peak <= 3 * KEEP * SIZE
    assert int(store.stats.collisions.sum()) == 0
    between = [later - earlier for earlier, later in itertools.pairwise(read)]
    assert between.count(0) >= 40


def test_bad_input_is_refused_before_anything_is_computed(module, tiny, policy):
    model = model_with(module, tiny, "torch")
    small = PromptRouter(PromptRouterConfig(32, 0, (0, 1, 2), 3, EXPERTS, 2, 2))
    image = PromptEmbeddings(0, torch.zeros(2, 64), b"image")
    with Engine(model) as engine:
        for fields, error, message in [
            ({"experts": PromptExperts(small)}, InvalidArgument, "width 32; this one"),
            ({"experts": PromptExperts(policy.router, keep=1)}, InvalidArgument, "from 2, .* to 8 experts, got 1"),
            ({"experts": PromptExperts(policy.router, keep=9)}, InvalidArgument, "got 9"),
            ({"experts": policy, "speculation": Speculation()}, InvalidArgument, "neither drafts nor embeddings"),
            ({"experts": policy, "embeddings": [image]}, InvalidArgument, "neither drafts nor embeddings"),
            ({"experts": policy, "cache": engine.bounded_cache(SnapKV(budget=128))}, InvalidArgument, "bounded cache"),
        ]:
            with pytest.raises(error, match=message):
                engine.stream(Request(PROMPTS[0], **fields))
        with pytest.raises(InvalidArgument, match="prompt"):
            engine.stream(Request([], experts=policy))
        assert engine.stats().requests == 0
    with pytest.raises(UnsupportedModel, match="0 mixtures"), Engine(tiny, experts=policy):
        pass
    with pytest.raises(InvalidArgument, match="max_swaps"):
        PromptExperts(policy.router, max_swaps=0)


def test_a_prompt_that_is_not_taken_is_not_read(module, tiny, policy, monkeypatch):
    read, scores = [], policy.router.scores
    monkeypatch.setattr(policy.router, "scores", lambda *given: read.append(given) or scores(*given))
    with Engine(model_with(module, tiny, "torch"), experts=policy) as engine:
        assert answers(engine, PROMPTS[:1], 1)
        assert len(read) == 1
    with pytest.raises(Overloaded):
        engine.stream(Request(PROMPTS[0]))
    assert len(read) == 1


def test_a_divided_model_is_refused(module, tiny, policy):
    model = model_with(copy.deepcopy(module), tiny, "torch")
    model.module.collectives = object()  # that of several processes
    with pytest.raises(UnsupportedModel, match="several processes"):
        policy.check(model)


def test_layers_that_read_must_be_in_memory(module, tiny, stored, policy):
    model = model_of(module, tiny, absent=True)
    object.__setattr__(model, "placement", Placement.__new__(Placement))
    for name, value in [("experts", stored), ("files", {})]:
        object.__setattr__(model.placement, name, value)
    with pytest.raises(UnsupportedModel, match="behind 1 layers of mixture, which have experts in storage"):
        policy.check(model)
    PromptExperts(router_for(module, depth=0)).check(model)
