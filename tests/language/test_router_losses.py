"""Balancing of experts; the oracle of the balance loss is transformers'."""

from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import TokenBatch
from pippin.language import Decoder, presets
from pippin.language.objectives import NextToken
from pippin.language.router_losses import RouterLosses, move_biases, watch_routers
from pippin.nn.feedforward.feedforward import MixtureOfExperts, Router
from pippin.nn.feedforward.routing import RouterSpec
from pippin.train import AdamW, Trainer

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
BATCH = TokenBatch(IDS, IDS.roll(-1, 1))


def mixture(**router):
    config = presets.preset("nano-moe", 64)
    layer = config.layers[0]
    spec = replace(layer.feedforward, router=RouterSpec(**router))
    return Decoder(replace(config, layers=(replace(layer, feedforward=spec),) * 2)).initialize(seed=0)


def logits_of(model):
    found, handles = [], []
    for part in model.modules():
        if isinstance(part, Router):
            handles.append(part.register_forward_hook(lambda _, __, out: found.append(out.reshape(-1, 8))))
    model.hidden(IDS)
    for handle in handles:
        handle.remove()
    return found


def test_the_balance_loss_is_that_of_transformers():
    model = mixture()
    with watch_routers(model) as log:
        model.hidden(IDS)
    assert len(log.balance) == 2
    for ours, logits in zip(log.balance, logits_of(model), strict=True):
        # which divides the shares of the two choices by the tokens, not by the choices
        torch.testing.assert_close(2 * ours, load_balancing_loss_func((logits,), num_experts=8, top_k=2))


def test_the_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials():
    model = mixture()
    with watch_routers(model) as log:
        model.hidden(IDS)
    for ours, logits in zip(log.z, logits_of(model), strict=True):
        torch.testing.assert_close(ours, logits.exp().sum(-1).log().pow(2).mean())


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sparsemixer"])
def test_equal_affinities_cost_one(scores):
    model = mixture(scores=scores)
    for part in model.modules():
        if isinstance(part, Router):
            part.weight.data.zero_()
    with watch_routers(model) as log:
        model.hidden(IDS)
    torch.testing.assert_close(torch.stack(log.balance), torch.ones(2))


def test_two_experts_that_get_everything_cost_half_of_all_experts():
    router = next(part for part in mixture().modules() if isinstance(part, Router))
    router.weight.data.zero_()[:2] = 1
    with watch_routers(router) as log:
        router(torch.ones(3, 128))
    torch.testing.assert_close(log.balance[0], torch.tensor(4.0))


def test_losses_are_added_for_each_token_and_reach_the_routers_alone():
    model = mixture()
    plain = NextToken()(model, BATCH)
    loss = NextToken(router_losses=RouterLosses(balance=0.5, z=0.25))(model, BATCH)
    with watch_routers(model) as log:
        model.hidden(IDS)
    extra = 0.5 * torch.stack(log.balance).mean() + 0.25 * torch.stack(log.z).mean()
    torch.testing.assert_close(loss.total, plain.total + loss.count * extra)
    torch.testing.assert_close(loss.metrics["cross_entropy"], plain.total.detach())
    assert loss.metrics["accuracy"] == plain.metrics["accuracy"]
    loss.total.backward()
    assert all(part.weight.grad.abs().sum() > 0 for part in model.modules() if isinstance(part, Router))


def test_a_model_without_experts_has_the_plain_loss():
    model = Decoder(presets.preset("nano", 64)).initialize(seed=0)
    objective = NextToken(router_losses=RouterLosses())
    assert objective(model, BATCH).total == NextToken()(model, BATCH).total
    objective.after_step(model, 1)


def largest_share(model):
    with watch_routers(model) as log, torch.no_grad():
        model.hidden(IDS)
    return max(float(shares.max()) for _, shares in log.shares)


@pytest.mark.parametrize(
    ("losses", "balanced"),
    [
        (None, False),
        (RouterLosses(balance=0.0, z=0.001), False),
        (RouterLosses(balance=1.0, z=0.0), True),
        (RouterLosses(balance=0.0, z=0.0, bias_step=0.008), True),
    ],
)
def test_experts_that_got_most_tokens_share_them_where_they_are_balanced(losses, balanced):
    model = mixture(scores="sigmoid", choice_bias=True)
    for part in model.modules():
        if isinstance(part, MixtureOfExperts):  # two experts get nearly all
            part.gate.weight.data.mul_(2)  # tokens differ in what they like
            part.gate.e_score_correction_bias[:2] += 0.5
    before = largest_share(model)
    assert before > 0.4
    objective = NextToken(router_losses=losses)
    Trainer(model, objective, [BATCH] * 100, steps=100, optimizer=AdamW(lr=3e-3), show_progress=False).fit()
    after = largest_share(model)
    assert (after < 0.3) == balanced, (before, after)


def test_biases_move_towards_equal_shares():
    model = mixture(choice_bias=True)
    with watch_routers(model) as log:
        model.hidden(IDS)
    move_biases(log, 0.1)
    for router, shares in log.shares:
        torch.testing.assert_close(router.e_score_correction_bias, 0.1 * (0.125 - shares).sign())


def test_hooks_are_gone_after_an_error():
    model = mixture()
    with pytest.raises(IndexError), watch_routers(model):
        model.hidden(IDS + 64)
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("wrong", [{"balance": -1.0}, {"z": float("nan")}, {"bias_step": -0.1}])
def test_weights_below_zero_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        RouterLosses(**wrong)
