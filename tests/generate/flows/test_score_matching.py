"""The joint losses against autograd on the plain ones, and the score of a flow whose density is known."""

from __future__ import annotations

import pytest
import torch

from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.flows.starflow.config import StarFlowConfig
from pippin.generate.flows.starflow.loss import LikelihoodAndScore
from pippin.generate.flows.starflow.model import StarFlow
from pippin.generate.flows.starflow.score_network import ScoreConfig, ScoreNetwork, frame_mask
from pippin.train import AdamW, Trainer

SPEC = ConditioningSpec(num_classes=3, null=True)
CONFIG = StarFlowConfig(
    (3, 1, 8, 8),
    hidden_size=24,
    num_attention_heads=2,
    layers_per_block=(1, 2),
    condition=SPEC,
    score=ScoreConfig(2, 24, 2, 2),
    noise_std=0.4,
)


def batch(n: int = 4) -> Samples:
    x = torch.randn(n, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Samples(x, Conditioning(labels=torch.arange(n) % 3))


def shaken(model: StarFlow) -> StarFlow:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_one_backward_pass_gives_the_gradients_of_both_losses():
    model = shaken(StarFlow(CONFIG).initialize(0))
    loss = LikelihoodAndScore(condition_dropout=0.5, weight=0.7)(model, batch(), torch.Generator().manual_seed(3))
    loss.total.backward()
    joint = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    # the same from the plain definitions
    model.zero_grad()
    generator = torch.Generator().manual_seed(3)
    kept = torch.rand(4, generator=generator) >= 0.5
    condition = batch().condition.dropped(kept)
    latents = model.to_latents(batch().x)
    noisy = (latents + 0.4 * torch.randn(latents.shape, generator=generator)).requires_grad_()
    nll = -model.latent_log_prob(noisy, condition).sum()
    (slope,) = torch.autograd.grad(nll, noisy, retain_graph=True)
    (nll / 192).backward()
    guess = model.score_network(model.to_tokens(noisy.detach()), condition)
    off = (guess - model.to_tokens(0.4 * slope)).square().sum() / 192
    (0.7 * off).backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert joint.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(joint[name], value, rtol=1e-4, atol=1e-5)
    assert float(loss.total.detach()) == pytest.approx(float((nll / 192 + 0.7 * off).detach()), rel=1e-5)
    assert float(loss.metrics["score"]) == pytest.approx(float(off.detach()), rel=1e-5)
    assert loss.count == 4


def test_an_untrained_flow_is_a_gaussian_whose_score_the_network_learns():
    model = StarFlow(CONFIG).initialize(0)
    objective = LikelihoodAndScore()
    generator = torch.Generator().manual_seed(2)
    noisy = model.to_latents(batch().x) + 0.4 * torch.randn(4, 3, 4, 4, 4, generator=generator)
    with torch.no_grad():  # as an evaluation does
        before = objective(model, batch(), torch.Generator().manual_seed(2)).metrics
    # -log p is half of the squares, so its slope is the sample itself, and a network of zeros misses all of it
    assert float(before["score"]) / 4 == pytest.approx(float((0.4 * noisy).square().mean()), rel=1e-5)
    x = batch().x
    torch.testing.assert_close(model.denoise(x, batch().condition, method="tweedie"), (1 - 0.4**2) * x)
    torch.testing.assert_close(model.denoise(x, batch().condition), x)
    for parameter in model.flow_parameters():
        parameter.requires_grad_(False)
    state = {name: p.clone() for name, p in model.named_parameters()}
    Trainer(model, objective, [batch()] * 25, steps=25, optimizer=AdamW(lr=2e-2), show_progress=False).fit()
    after = objective(model, batch(), torch.Generator().manual_seed(2)).metrics
    assert float(after["score"]) < 0.6 * float(before["score"])
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters() if "score_network" not in name)


def test_without_a_score_network_the_loss_is_the_likelihood_alone():
    model = StarFlow(
        StarFlowConfig((1, 8, 8), hidden_size=24, num_attention_heads=2, layers_per_block=(1, 2), score=None)
    ).initialize(0)
    x = torch.zeros(2, 1, 8, 8)
    loss = LikelihoodAndScore()(model, Samples(x), torch.Generator().manual_seed(0))
    drawn = torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = -float(model.latent_log_prob(0.3 * drawn).sum()) / 64
    assert float(loss.total.detach()) == pytest.approx(plain, rel=1e-5)
    assert set(loss.metrics) == {"nll"}
    loss.total.backward()


def test_a_score_looks_back_as_far_as_it_says_and_one_frame_ahead():
    config = ScoreConfig(3, 24, 2, window=2)
    network = ScoreNetwork(config, 5, (2, 2), ConditioningSpec()).initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.randn(1, 9, 4, 5, generator=torch.Generator().manual_seed(2))
    tokens.requires_grad_()
    network(tokens)[0, 5].square().sum().backward()
    felt = tokens.grad[0].abs().amax((1, 2)) > 0
    assert felt.tolist() == [5 - config.past <= frame <= 6 for frame in range(9)]
    # where a video begins does not matter: places are told by their distance
    with torch.no_grad():
        whole, part = network(tokens), network(tokens[:, 2:7])
    torch.testing.assert_close(part[:, 3], whole[:, 5], rtol=0, atol=1e-5)


def test_masks_by_frame():
    seen = frame_mask(4, 2, 2)[0, 0]
    for query in range(8):
        frame = query // 2
        assert seen[query].tolist() == [frame - 1 <= key // 2 <= frame for key in range(8)]
