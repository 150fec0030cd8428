"""Pruning by the prompt: against weights that are cut by hand, against transformers, and what each loss may see."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument, UnsupportedLayer, VocabularyMismatch
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.methods.instruction_pruning.loss import ChunkedPretraining, InstructionTuning, PruningSchedule
from pippin.language.methods.instruction_pruning.model import (
    InstructionFollowingPruning,
    MaskPredictor,
    StaticMask,
    channel_importance,
)
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.train import AdamW, ConstantSchedule, Trainer

VOCAB, WIDTH, KEEP = 61, 24, 7


def decoder(*, seed=0, layers=2, **feedforward):
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(WIDTH, **feedforward))
    config = DecoderConfig(
        "llama",
        VOCAB,
        16,
        (layer,) * layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    module = Decoder(config).initialize(seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
    return module


def model(keep=KEEP, eps=0.3, *, static=False, gated=True):
    base = decoder(gated=gated)
    predictor = StaticMask(2, WIDTH) if static else MaskPredictor(decoder(seed=1, layers=1), 2, WIDTH, hidden_size=8)
    made = InstructionFollowingPruning(base, predictor.initialize(seed=2), keep, eps)
    with torch.no_grad():
        if static:
            predictor.scaled_scores.mul_(10)
        else:
            predictor.outer.weight.mul_(10)
    return made.eval()


def several_streams(**feedforward):
    """A decoder as of Gemma 3n: streams of hidden states, a low-rank residual path, inputs of each layer."""
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(WIDTH, **feedforward))
    config = DecoderConfig(
        "gemma3n_text",
        VOCAB,
        16,
        (layer,) * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        num_streams=3,
        laurel_rank=4,
        per_layer_size=6,
    )
    return Decoder(config).initialize(seed=0)


def random_ids(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def cut_by_hand(base, mask):
    """The base with the columns of its down projections multiplied: no hook, no gathering."""
    copied = copy.deepcopy(base)
    with torch.no_grad():
        for layer, weights in zip(copied.layers, mask, strict=True):
            layer.mlp.down_proj.weight.mul_(weights)
    return copied


def batch(rows=3, length=12, documents=None, seed=0):
    ids = random_ids(rows, length + 1, seed=seed)
    return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), documents)


@pytest.mark.parametrize("gated", [True, False])
def test_each_row_is_computed_with_its_own_channels_and_no_others(gated):
    pruned, prompts, ids = model(gated=gated), random_ids(4, 5, seed=3), random_ids(4, 9)
    with torch.no_grad():
        masks = pruned.masks(prompts)
        logits = pruned(ids, masks)
        assert (masks > 0).sum(-1).eq(KEEP).all()
        assert len({tuple((row > 0).flatten().tolist()) for row in masks}) == 4
        for row in range(4):
            by_hand = cut_by_hand(pruned.base, masks[row])(ids[row : row + 1])[0]
            torch.testing.assert_close(logits[row], by_hand, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(pruned.base(ids), logits, atol=1e-2)  # and the hooks are gone again


def test_texts_end_to_end_are_those_of_each_alone():
    pruned, prompts, texts = model(), [random_ids(n, seed=n) for n in (3, 1, 6)], [random_ids(n) for n in (4, 9, 2)]
    with torch.no_grad():
        masks = pruned.masks(torch.cat(prompts)[None], [3, 1, 6])
        hidden = pruned.hidden(torch.cat(texts)[None], masks, [4, 9, 2])[0]
        for mask, prompt, text, part in zip(masks, prompts, texts, hidden.split([4, 9, 2]), strict=True):
            torch.testing.assert_close(mask, pruned.masks(prompt[None])[0])
            torch.testing.assert_close(part, cut_by_hand(pruned.base, mask).hidden(text[None])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_the_small_model_is_the_masked_one_and_shares_what_is_not_pruned(static, gated):
    pruned, prompt, ids = model(static=static, gated=gated), random_ids(5, seed=3), random_ids(1, 30)
    small = pruned.specialize(prompt)
    with torch.no_grad():
        torch.testing.assert_close(small(ids), pruned(ids, pruned.masks(prompt[None])), atol=1e-5, rtol=1e-5)
    assert {layer.mlp.down_proj.weight.shape for layer in small.layers} == {(16, KEEP)}
    assert (
        small.layers[0].self_attn.q_proj.weight.data_ptr() == pruned.base.layers[0].self_attn.q_proj.weight.data_ptr()
    )
    assert small.lm_head.weight is small.embed_tokens.weight


def test_half_of_the_channels_cost_what_the_formula_says():
    """Operations of a pass fall as attention + head + k / F of the feed-forward layers."""
    from torch.utils.flop_counter import FlopCounterMode

    def operations(module):
        with FlopCounterMode(display=False) as counter:
            module(random_ids(1, 10))
        return counter.get_total_flops()

    pruned = model(keep=WIDTH // 2)
    feedforward = 2 * 3 * 2 * 16 * WIDTH * 10
    assert operations(pruned.base) - operations(pruned.specialize(random_ids(3))) == feedforward // 2


def by_chunks(pruned, ids, targets, chunks):
    """The loss of one text, written down directly: one pass of a model cut by hand for each pair of chunks."""
    count = min(chunks, len(ids))
    bounds = [round(len(ids) * part / count) for part in range(count + 1)]
    total = torch.zeros((), dtype=torch.float64)
    sequence = torch.cat([ids, targets[-1:]])
    for j in range(count - 1):
        mask = pruned.masks(ids[None, bounds[j] : bounds[j + 1]])[0]
        logits = cut_by_hand(pruned.base, mask)(ids[None])[0].double().log_softmax(-1)
        stop = len(sequence) if j == count - 2 else bounds[j + 2]
        for place in range(bounds[j + 1], stop):
            total -= logits[place - 1, sequence[place]]
    return total


@pytest.mark.parametrize("documents", [None, (5, 7, 12, 1, 3, 8)])
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_chunks_are_judged_as_written_down(chunks, documents):
    pruned, data = model(), batch(documents=documents)
    counts = documents or (12, 12, 12)
    with torch.no_grad():
        loss = ChunkedPretraining(chunks)(pruned, data)
        texts = zip(data.ids.flatten().split(counts), data.targets.flatten().split(counts), strict=True)
        wanted = sum(by_chunks(pruned, ids, targets, chunks) for ids, targets in texts if len(ids) > 1)
    assert float(loss.total) == pytest.approx(float(wanted), abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=5), st.integers(2, 6))
def test_no_mask_sees_what_it_is_judged_on_and_all_after_the_first_chunk_is_learned_once(lengths, chunks):
    """Ids are places in the row, so what a prompt holds and what is judged can be read off."""
    ids = torch.arange(sum(lengths))[None]
    data = TokenBatch(ids, ids + 1, tuple(lengths))
    judged = []
    for group in ChunkedPretraining(chunks).examples(data):
        for lesson in group:
            found = lesson.targets[lesson.targets != IGNORE]
            assert int(found.min()) == int(lesson.prompt.max()) + 1
            assert torch.equal(lesson.ids[lesson.targets != IGNORE] + 1, found)
            judged += found.tolist()
    start, wanted = 0, []
    for length in lengths:
        count = min(chunks, length)
        wanted += range(start + round(length / count), start + length + 1) if count > 1 else []
        start += length
    assert sorted(judged) == wanted


def test_answers_are_learned_under_the_mask_of_what_stands_before_the_first():
    ids = random_ids(20)
    targets = torch.full((20,), IGNORE)
    targets[[3, 4, 5]], targets[[9, 10]] = ids[[4, 5, 6]], ids[[10, 11]]  # two turns of one conversation
    targets[14:19] = ids[15:20]  # a conversation whose prompt is token 12 to 14
    data = TokenBatch(ids[None], targets[None], (12, 8))
    pruned = model()
    [group] = InstructionTuning().examples(data)
    assert [lesson.prompt.tolist() for lesson in group] == [ids[:4].tolist(), ids[12:15].tolist()]
    with torch.no_grad():
        loss = InstructionTuning()(pruned, data)
        wanted = 0.0
        for text, aims in zip(ids.split([12, 8]), targets.split([12, 8]), strict=True):
            first = int((aims != IGNORE).nonzero()[0])
            logits = cut_by_hand(pruned.base, pruned.masks(text[None, : first + 1])[0])(text[None])[0]
            wanted += float(F.cross_entropy(logits, aims, ignore_index=IGNORE, reduction="sum"))
    assert float(loss.total) == pytest.approx(wanted, abs=1e-4)
    assert loss.count == 10


def test_texts_without_a_prompt_teach_nothing():
    pruned = model()
    loss = InstructionTuning()(pruned, batch())
    assert (loss.count, loss.total.item()) == (0.0, 0.0)
    assert loss.total.requires_grad


def test_both_parts_learn_and_the_union_is_logged():
    """Gradients reach base and predictor; a run narrows from all channels to keep; its log tells what is used."""
    pruned = model(keep=4, eps=0.2).train()
    objective = ChunkedPretraining(3, PruningSchedule(keep_steps=10, eps_steps=10))
    objective(pruned, batch()).total.backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in pruned.predictor.parameters())  # all are kept yet
    pruned.zero_grad()
    before = copy.deepcopy(pruned.state_dict())
    training = Trainer(
        pruned, objective, [batch()] * 30, steps=30, optimizer=AdamW(lr=3e-3), schedule=ConstantSchedule()
    ).fit()
    losses = training.losses
    kept = [step.metrics["kept"] for step in training.steps]
    assert kept[0] == 1.0
    assert kept[10:] == pytest.approx([4 / WIDTH] * 20)
    assert 4 / WIDTH <= training.steps[-1].metrics["in use"] <= 1
    assert losses[-1] < 0.7 * losses[0]
    moved = {name for name, value in pruned.state_dict().items() if not torch.equal(value, before[name])}
    assert {
        "base.layers.1.mlp.down_proj.weight",
        "predictor.outer.weight",
        "predictor.reader.embed_tokens.weight",
    } <= moved


def test_annealing_goes_on_where_a_run_was_stopped():
    first, second = (ChunkedPretraining(2, PruningSchedule(keep_steps=4)) for _ in range(2))
    first.after_step(model(), 3)
    second.load_state_dict(first.state_dict())
    assert second.schedule.at(second.step, intermediate_size=24, keep=4, eps=0.3) == (9, 0.3)


def test_importance_finds_the_channels_that_give_most():
    base = decoder()
    with torch.no_grad():
        base.layers[0].mlp.down_proj.weight[:, 5] *= 100
        base.layers[1].mlp.up_proj.weight[3] *= 100
        base.layers[1].mlp.down_proj.weight[:, 8] = 0
    scores = channel_importance(base, [batch(), batch(seed=1)])
    assert scores.argmax(-1).tolist() == [5, 3]
    assert int(scores[1].argmin()) == 8
    torch.testing.assert_close(scores.std(-1), torch.ones(2))
    pruned = model()
    pruned.predictor.set_initial_scores(scores)
    pruned.predictor.outer.weight.data.zero_()
    fixed = StaticMask(2, WIDTH)
    fixed.set_initial_scores(scores)
    for predictor in (pruned.predictor, fixed):
        torch.testing.assert_close(predictor(random_ids(2, 3)), scores.expand(2, -1, -1))


def mixture():
    return decoder(num_experts=2, num_experts_per_tok=1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: model(keep=0), InvalidArgument, "k must be at least 1, got 0"),
        (lambda: model(keep=25), InvalidArgument, "got 25"),
        (lambda: model(eps=0.0), InvalidArgument, "eps must be above 0"),
        (
            lambda: InstructionFollowingPruning(mixture(), StaticMask(2, WIDTH), 4),
            UnsupportedLayer,
            "found layer 0: MixtureOfExperts, layer 1: MixtureOfExperts",
        ),
        (lambda: InstructionFollowingPruning(decoder().pack(), StaticMask(2, WIDTH), 4), InvalidArgument, "pack=False"),
        (
            lambda: InstructionFollowingPruning(decoder(), StaticMask(3, WIDTH), 4),
            InvalidArgument,
            "scores 3 layers of 24",
        ),
        (lambda: model().specialize(random_ids(0)), InvalidArgument, "the prompt has no tokens"),
        (lambda: ChunkedPretraining(1), InvalidArgument, "num_chunks must be at least 2"),
        (lambda: PruningSchedule(keep_steps=-1), InvalidArgument, "keep_steps must be at least 0"),
        (lambda: PruningSchedule(initial_eps=0.0), InvalidArgument, "initial_eps must be above 0"),
        (lambda: channel_importance(decoder(), []), InvalidArgument, "at least one batch"),
        (lambda: MaskPredictor(decoder(), 2, WIDTH, hidden_size=0), InvalidArgument, "hidden_size must be at least 1"),
    ],
)
def test_what_cannot_be_pruned_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_scores_that_are_not_numbers_and_other_vocabularies_are_refused():
    pruned = model()
    pruned.predictor.outer.bias.data[3] = float("nan")
    with pytest.raises(InvalidArgument, match="1 of 48 scores are not finite"):
        pruned.specialize(random_ids(3))
    config = DecoderConfig(
        "llama",
        99,
        16,
        decoder().config.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    with pytest.raises(VocabularyMismatch, match="reads 99 different tokens, the base 61"):
        InstructionFollowingPruning(decoder(), MaskPredictor(Decoder(config), 2, WIDTH), 4)


def test_a_small_model_with_several_streams_has_the_logits_of_the_masked_one():
    predictor = StaticMask(2, WIDTH).initialize(seed=2)
    pruned = InstructionFollowingPruning(several_streams(), predictor, KEEP, 0.3).eval()
    ids = random_ids(1, 12)
    with torch.no_grad():
        predictor.scaled_scores.mul_(10)
        for parameter in pruned.base.parameters():
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
        whole, masked = pruned.base(ids), pruned(ids, pruned.masks(ids))
        small = pruned.specialize(ids[0])
        torch.testing.assert_close(small(ids), masked, rtol=1e-4, atol=1e-4)
    assert (whole - masked).abs().max() > 0.1
    assert small.layers[0].mlp.up_proj.weight.shape == (KEEP, 16)
    importance = channel_importance(pruned.base, [TokenBatch(ids, torch.full_like(ids, IGNORE))])
    assert importance.shape == (2, WIDTH)


def test_gates_that_are_cut_by_their_distribution_are_refused_with_the_family():
    with pytest.raises(UnsupportedLayer, match=r"gemma3n_text .* 2 of its feed-forward layers, from layer 0 on"):
        InstructionFollowingPruning(several_streams(activation_sparsity=0.8), StaticMask(2, WIDTH), KEEP)
