"""Experts chosen by the prompt: what is read, what serves which token, gradients, forecasts, saved routers."""

from dataclasses import replace

import pytest
import torch

from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language import Decoder
from pippin.language.methods.instruction_pruning import PruningSchedule
from pippin.language.methods.prompt_experts import (
    ExpertForecast,
    PromptRoutedDecoder,
    PromptRouter,
    PromptRouterConfig,
    PromptRouting,
)
from pippin.language.presets import preset
from pippin.nn.feedforward.feedforward import FeedForwardSpec, MixtureOfExperts
from pippin.nn.kv_cache import NoCache
from pippin.nn.soft_top_k import soft_top_k

VOCAB, LAYERS, EXPERTS, ACTIVE, KEEP, STRETCH = 60, 3, 8, 2, 3, 8


def decoder(seed=0):
    """A dense layer that reads, and two mixtures."""
    config = replace(preset("nano", VOCAB), hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    mixture = FeedForwardSpec(16, num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    first, *_ = config.layers
    dense = replace(first, feedforward=FeedForwardSpec(48))
    module = Decoder(replace(config, layers=(dense, *[replace(first, feedforward=mixture)] * (LAYERS - 1))))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        else:
            parameter.data.fill_(1.0)
    return module


def routed(seed=0, eps=0.5, **options):
    base = decoder(seed)
    router = PromptRouter(PromptRouterConfig.for_decoder(base.config, KEEP, stretch=STRETCH, eps=eps, **options))
    router.initialize(seed=seed)
    torch.nn.init.normal_(router.outer.weight, 0, 0.5, torch.Generator().manual_seed(seed))
    return PromptRoutedDecoder(base, router)


def ids_of(*counts, seed=0):
    return torch.randint(VOCAB, (sum(counts),), generator=torch.Generator().manual_seed(seed)).split(counts)


def batch_of(*texts):
    targets = [torch.cat([text[1:], torch.tensor([IGNORE])]) for text in texts]
    return TokenBatch(torch.cat(texts)[None], torch.cat(targets)[None], tuple(len(text) for text in texts))


def by_hand(model, text, targets):
    """Summed loss and its tokens: each token under the set that was chosen from the stretch before its own."""
    router, base = model.router, model.base
    stretches = [text[at : at + STRETCH] for at in range(0, len(text) - 1, STRETCH)]
    sets = []
    for stretch in [each for each in stretches if len(each) == STRETCH]:
        x = base.forward_layers(base.embed(stretch[None]), NoCache(), layers=range(1))
        states = torch.nn.functional.rms_norm(x.float(), x.shape[-1:]).mean(1)
        scores = router(states)[0]
        sets.append(router.mask(scores.topk(KEEP, -1).indices.sort(-1).values, scores))
    serving = [sets[min(max(0, at // STRETCH - 1), len(sets) - 1)] for at in range(len(text))]
    masks = [(each, slice(at, at + 1)) for at, each in enumerate(serving)]
    x = base.forward_layers(base.embed(text[None]), NoCache(), experts=masks)
    logits = base.lm_head(base.norm(x))[0]
    scored = torch.arange(len(text)) >= STRETCH - 1
    scored &= targets != IGNORE
    total = torch.nn.functional.cross_entropy(logits[scored], targets[scored], reduction="sum")
    return total, int(scored.sum())


@pytest.mark.parametrize("counts", [(20, 20), (17, 30, 5, 8, 9), (33,)])
def test_each_stretch_is_served_by_the_set_of_the_one_before(counts):
    model, texts = routed(), ids_of(*counts)
    batch = batch_of(*texts)
    loss = PromptRouting(balance=0.0)(model, batch)
    parts = [
        by_hand(model, text, torch.cat([text[1:], torch.tensor([IGNORE])])) for text in texts if len(text) > STRETCH
    ]
    assert loss.count == sum(count for _, count in parts)
    torch.testing.assert_close(loss.total, sum(total for total, _ in parts), rtol=1e-5, atol=1e-4)


def test_documents_shorter_than_a_stretch_have_no_loss():
    for objective in (PromptRouting(), ExpertForecast()):
        loss = objective(routed(), batch_of(*ids_of(5, STRETCH)))
        assert loss.count == 0
        loss.total.backward()


def test_the_language_models_loss_leads_the_router():
    """Against numerical derivatives."""
    model, batch = routed(), batch_of(*ids_of(20, 26))
    objective, bias = PromptRouting(balance=0.1, stability=0.2), model.router.outer.bias
    objective(model, batch).total.backward()
    direction = bias.grad / bias.grad.norm()
    with torch.no_grad():
        values = []
        for step in (5e-3, -5e-3):
            bias.add_(direction, alpha=step)
            values.append(float(objective(model, batch).total))
            bias.sub_(direction, alpha=step)
    expected = (values[0] - values[1]) / 1e-2
    assert float(bias.grad.norm()) == pytest.approx(expected, rel=0.03)
    assert expected > 1


def test_a_set_does_not_see_what_it_serves():
    (text,) = ids_of(4 * STRETCH)
    other = text.clone()
    other[3 * STRETCH :] = (other[3 * STRETCH :] + 1) % VOCAB
    found = [PromptRouting().stretches(batch_of(each), STRETCH) for each in (text, other)]
    assert torch.equal(found[0].whole, found[1].whole)
    assert [span.stop for span in found[0].spans[0]] == [2 * STRETCH, 3 * STRETCH, 4 * STRETCH]


@torch.no_grad()
def test_fewer_experts_and_other_numbers_in_turn():
    model, batch = routed(), batch_of(*ids_of(30, 30))
    narrowed = PromptRouting(balance=0.0, schedule=PruningSchedule(keep_steps=4, eps_steps=4, initial_eps=1.0))
    losses = []
    for step in range(5):
        losses.append(float(narrowed(model, batch).total))
        narrowed.after_step(model, step + 1)
    assert losses[-1] == pytest.approx(float(PromptRouting(balance=0.0)(model, batch).total))
    assert losses[0] != pytest.approx(losses[-1])
    in_turn = PromptRouting(balance=0.0, keeps=(3, 8))
    first = float(in_turn(model, batch).total)
    in_turn.load_state_dict({"step": torch.tensor(1)})
    assert float(in_turn(model, batch).total) != pytest.approx(first)
    assert first == pytest.approx(losses[-1])


@pytest.mark.parametrize("count", [STRETCH, 5, 3 * STRETCH + 3])
def test_a_text_is_read_in_stretches_each_alone(count):
    model, (text,) = routed(), ids_of(count)
    states = [model.router.read(model.base, part[None])[0] * len(part) for part in text.split(STRETCH)]
    expected = model.router((sum(states) / count)[None])[0]
    torch.testing.assert_close(model.router.scores(model.base, text), expected)


def test_weights_are_those_of_the_soft_choice():
    router = routed().router
    scores = torch.randn(LAYERS - 1, EXPERTS, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[0, 1, 2], [2, 5, 7]])
    mask = router.mask(chosen, scores)
    assert mask.allowed[0].all()
    for row, (kept, own) in enumerate(zip(chosen, soft_top_k(scores, KEEP, 0.5), strict=True), 1):
        assert mask.allowed[row].nonzero()[:, 0].tolist() == kept.tolist()
        torch.testing.assert_close(mask.weights[row][kept], own[kept])
    assert router.mask(chosen, scores, eps=0.0).weights is None


def test_a_forecast_covers_what_is_needed():
    """A mixture whose routers look at one feature of the tokens, which the text tells."""
    model = routed()
    embeddings, base = model.base.embed_tokens.weight.data, model.base
    embeddings[: VOCAB // 2, 0], embeddings[VOCAB // 2 :, 0] = 30.0, -30.0
    for mixture in (part for part in base.modules() if isinstance(part, MixtureOfExperts)):
        mixture.gate.weight.data *= 0.1
        mixture.gate.weight.data[:, 0] = torch.tensor([1.0, 0.9, 0.8, 0.1, -0.1, -0.8, -0.9, -1.0])
    generator = torch.Generator().manual_seed(3)

    def batch():
        half = torch.randint(2, (8, 1), generator=generator) * (VOCAB // 2)
        ids = half + torch.randint(VOCAB // 2, (8, 5 * STRETCH), generator=generator)
        return TokenBatch(ids[:, :-1], ids[:, 1:])

    objective = ExpertForecast()
    optimizer = torch.optim.Adam(model.router.parameters(), 1e-2)
    before = objective(model, batch())
    for _ in range(40):
        loss = objective(model, batch())
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    after = objective(model, batch())
    assert all(parameter.grad is None for parameter in base.parameters())
    covered = [float(each.metrics["covered"]) / each.count for each in (before, after)]
    assert covered[0] < 0.7
    assert covered[1] > 0.95


def test_saved_and_read(tmp_path):
    model, (text,) = routed(), ids_of(30)
    model.router.save(tmp_path / "router")
    again = PromptRouter.load(tmp_path / "router")
    assert again.config == model.router.config
    torch.testing.assert_close(again.scores(model.base, text), model.router.scores(model.base, text))
    (tmp_path / "router" / "config.json").write_text('{"model_type": "pippin_prompt_router"}')
    with pytest.raises(CorruptedFile):
        PromptRouter.load(tmp_path / "router")


def test_decoders_that_have_nothing_to_choose_are_refused():
    with pytest.raises(UnsupportedModel, match="0 mixtures from layer 0 on"):
        PromptRouterConfig.for_decoder(preset("nano", VOCAB), 2)
    config = decoder().config
    with pytest.raises(UnsupportedModel, match="0 mixtures from layer 3"):
        PromptRouterConfig.for_decoder(config, 2, depth=3)
    uneven = replace(config.layers[1], feedforward=FeedForwardSpec(16, num_experts=4, num_experts_per_tok=2))
    with pytest.raises(UnsupportedModel, match="2 sizes"):
        PromptRouterConfig.for_decoder(replace(config, layers=(*config.layers, uneven)), 2)
    for keep in (1, 9):
        with pytest.raises(InvalidArgument, match=f"got {keep}"):
            PromptRouterConfig.for_decoder(config, keep)
    with pytest.raises(InvalidArgument, match="without tokens"):
        routed().router.scores(decoder(), torch.tensor([], dtype=torch.long))
    with pytest.raises(InvalidArgument, match="width 32"):
        PromptRoutedDecoder(Decoder(preset("nano-moe", VOCAB)), routed().router)
