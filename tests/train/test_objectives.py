"""One interface for very different methods: each of these is a known answer reached through the same loop."""

import itertools
import math

import pytest
import torch
from torch import nn

from pippin.train import AdamW, Checkpoints, ConstantSchedule, CosineSchedule, LinearSchedule, Loss, Trainer


def perceptron(*widths, seed=0):
    torch.manual_seed(seed)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


class Rows:
    """Endless batches of one tensor, drawn anew for each from torch's global generator, which the trainer seeds."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        while True:
            yield self.draw()


def test_flow_matching_finds_the_velocity_of_a_gaussian():
    """From N(0, 1) to N(m, s²) along straight paths the wanted velocity has a closed form (arXiv:2210.02747)."""
    mean, spread = 2.0, 0.5

    def flow_matching(model, x, generator):
        noise = torch.randn(x.shape, generator=generator)
        t = torch.rand(x.shape, generator=generator)
        velocity = model(torch.cat([(1 - t) * noise + t * x, t], 1))
        return Loss((velocity - (x - noise)).square().sum(), len(x))

    model = perceptron(2, 48, 48, 1)
    data = Rows(lambda: mean + spread * torch.randn(512, 1))
    trainer = Trainer(
        model, flow_matching, data, steps=500, optimizer=AdamW(lr=5e-3, weight_decay=0.0), ema=0.98, show_progress=False
    )
    trainer.fit()
    x, t = torch.meshgrid(torch.linspace(-0.5, 2, 6), torch.linspace(0.1, 0.9, 5), indexing="ij")
    variance = (1 - t) ** 2 + (t * spread) ** 2
    likely = (x - t * mean).abs() < 1.5 * variance.sqrt()
    exact = mean + (t * spread**2 - (1 - t)) / variance * (x - t * mean)
    with trainer.ema.applied(model), torch.no_grad():
        found = model(torch.stack([x, t], -1).view(-1, 2)).view_as(x)
        sample = torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
        for step in range(50):
            sample = sample + model(torch.cat([sample, torch.full_like(sample, step / 50)], 1)) / 50
    assert (found - exact)[likely].abs().max() < 0.25
    assert sample.mean().item() == pytest.approx(mean, abs=0.1)
    assert sample.std().item() == pytest.approx(spread, abs=0.1)


class JointEmbedding:
    """Predict the embedding of one view from the other; the target network follows the model (arXiv:2301.08243)."""

    def __init__(self, model, decay):
        self.decay = decay
        self.target = {name: p.detach().clone() for name, p in model.encoder.named_parameters()}

    def __call__(self, model, batch, generator):
        left, right = batch
        with torch.no_grad():
            wanted = torch.func.functional_call(model.encoder, self.target, (right,))
        return Loss((model(left) - wanted).square().mean(1).sum(), len(left))

    def after_step(self, model, step):
        for name, parameter in model.encoder.named_parameters():
            self.target[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self):
        return self.target

    def load_state_dict(self, state):
        self.target = state


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = perceptron(4, 16, 6), perceptron(6, 16, 6, seed=1)

    def forward(self, x):
        return self.predictor(self.encoder(x))


def test_a_moving_target_follows_in_closed_form_and_survives_a_restart(tmp_path):
    def make(steps, folder):
        model = Views()
        data = Rows(lambda: (x := torch.randn(16, 4), x + 0.1 * torch.randn(16, 4)))
        objective = JointEmbedding(model, decay=0.8)
        where = Checkpoints(folder, save_every=100) if folder else None
        return Trainer(
            model, objective, data, steps=steps, schedule=ConstantSchedule(), checkpoints=where, show_progress=False
        )

    trainer = make(12, None)
    history = [trainer.model.encoder[0].weight.detach().clone()]
    for _ in range(12):
        trainer.advance(1)
        history.append(trainer.model.encoder[0].weight.detach().clone())
    expected = 0.8**12 * history[0] + sum(0.2 * 0.8 ** (12 - i) * history[i] for i in range(1, 13))
    torch.testing.assert_close(trainer.objective.target["0.weight"], expected)
    make(5, tmp_path).fit()
    resumed = make(12, tmp_path)
    assert resumed.fit().losses == trainer.result.losses
    assert torch.equal(resumed.objective.target["0.weight"], trainer.objective.target["0.weight"])


def test_two_trainers_take_turns_and_the_generator_learns_the_data():
    """A generator of one shift against a critic with a gradient penalty: the shift must become the data's mean."""
    generator_model, critic = nn.Linear(1, 1), perceptron(1, 32, 32, 1)
    nn.init.ones_(generator_model.weight)
    nn.init.zeros_(generator_model.bias)

    def judge(model, real, generator):
        with torch.no_grad():
            fake = generator_model(torch.randn(real.shape, generator=generator))
        between = torch.lerp(fake, real, torch.rand(real.shape, generator=generator)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = 0.5 * slope.square()
        return Loss((model(fake) - model(real) + penalty).sum(), len(real))

    def fool(model, real, generator):
        return Loss(-critic(model(torch.randn(real.shape, generator=generator))).sum(), len(real))

    data = Rows(lambda: 3 + torch.randn(64, 1))
    rest = {"schedule": LinearSchedule(min_lr_ratio=0.0), "max_grad_norm": None, "show_progress": False}
    critics = Trainer(critic, judge, data, steps=600, optimizer=AdamW(0.01, (0.5, 0.9), weight_decay=0.0), **rest)
    generators = Trainer(
        generator_model, fool, data, steps=200, optimizer=AdamW(0.05, (0.5, 0.9), weight_decay=0.0), seed=1, **rest
    )
    while generators.step < generators.steps:
        assert len(critics.advance(3)) == 3
        assert len(generators.advance(1)) == 1
    assert critics.step == 600
    assert critics.advance(1) == []
    assert generator_model.bias.item() == pytest.approx(3.0, abs=0.3)


def test_data_may_be_what_the_model_does_now():
    """REINFORCE on a bandit: batches are rollouts of the current policy, and it learns the best arm."""
    policy = nn.Linear(1, 4, bias=False)
    nn.init.zeros_(policy.weight)
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.2])

    def rollouts():
        chosen = torch.multinomial(policy(torch.ones(1)).softmax(-1), 32, replacement=True)
        return chosen, rewards[chosen]

    def reinforce(model, batch, generator):
        chosen, reward = batch
        log_likelihood = model(torch.ones(1)).log_softmax(-1)[chosen]
        return Loss(-(log_likelihood * (reward - reward.mean())).sum(), len(chosen), {"reward": reward.sum()})

    with torch.no_grad():
        first = policy(torch.ones(1)).softmax(-1)[1].item()
    training = Trainer(
        policy, reinforce, Rows(rollouts), steps=100, optimizer=AdamW(lr=0.1, weight_decay=0.0), show_progress=False
    ).fit()
    assert first == pytest.approx(0.25)
    assert training.steps[-1].metrics["reward"] == pytest.approx(0.9, abs=0.05)
    assert policy(torch.ones(1)).softmax(-1)[1].item() > 0.9


def test_a_simulator_that_can_be_differentiated_is_an_objective():
    """The speed that throws a ball to a target 20 m away at 45 degrees: v² = g d, through 50 steps of Euler."""

    class Throw(nn.Module):
        def __init__(self):
            super().__init__()
            self.speed = nn.Parameter(torch.tensor(5.0))

        def forward(self, distance):
            velocity = self.speed * torch.tensor([math.sqrt(0.5), math.sqrt(0.5)])
            flight = 2 * velocity[1] / 9.81
            place = torch.zeros(2)
            for _ in range(50):
                place = place + velocity * flight / 50 - torch.tensor([0.0, 9.81]) * (flight / 50) ** 2 / 2
                velocity = velocity - torch.tensor([0.0, 9.81]) * flight / 50
            return place[0] - distance

    model = Throw()
    Trainer(
        model,
        lambda model, distance, generator: Loss(model(distance).square(), 1),
        [torch.tensor(20.0)] * 60,
        steps=60,
        optimizer=AdamW(lr=1.0, weight_decay=0.0),
        schedule=CosineSchedule(warmup_steps=0, min_lr_ratio=0.0),
        max_grad_norm=None,
        show_progress=False,
    ).fit()
    assert model.speed.item() == pytest.approx(math.sqrt(9.81 * 20), rel=0.02)
