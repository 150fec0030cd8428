"""TarFlow against closed forms: a Gaussian that it can hold exactly, a grid, finite differences, two passes by hand."""

import dataclasses
import itertools
import math

import pytest
import torch
from jaxtyping import TypeCheckError

import pippin
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteSample
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import Generator, HasLikelihood
from pippin.generate.flows.jacobi import Jacobi
from pippin.generate.flows.tarflow import FlowLikelihood, TarFlow, TarFlowConfig, add_training_noise
from pippin.train import AdamW, Trainer

CONFIG = TarFlowConfig((1, 4, 4), layers_per_block=(1, 1), hidden_size=16, num_attention_heads=2)
CLASSES = ConditioningSpec(num_classes=3, null=True)


def disturbed(config, size=0.06, seed=0):
    """A flow away from the identity."""
    flow = TarFlow(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for block in flow.blocks:
            for parameter in (block.proj_out.weight, block.proj_out.bias):
                parameter.normal_(0, size, generator=generator)
        for embedding in flow.embeddings:
            if embedding.classes is not None:
                embedding.classes.normal_(generator=generator)
    return flow.requires_grad_(False)


def pictures(n=3, shape=(1, 4, 4), seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def affine(flow, log_scales, means):
    """Make the flow an affine map of every number: block b has scale exp(log_scales[b]) and mean means[b]."""
    with torch.no_grad():
        for block, log, mean in zip(flow.blocks, log_scales, means, strict=True):
            block.proj_out.weight.zero_()
            block.proj_out.bias.copy_(torch.cat([torch.full((block.inner,), log), torch.full((block.inner,), mean)]))
    return flow.requires_grad_(False)


def gaussian(scale=0.3, mean=0.2, **changes):
    """A flow that is a Gaussian of this mean and scale in every number of an image, exactly."""
    config = dataclasses.replace(CONFIG, start="token", layers_per_block=(1,), **changes)
    return affine(TarFlow(config).initialize(), [math.log(scale)], [mean])


def test_the_density_is_that_of_the_gaussian_that_it_holds():
    x = pictures()
    expected = torch.distributions.Normal(0.2, 0.3).log_prob(x).sum((1, 2, 3))
    torch.testing.assert_close(gaussian().log_prob(x), expected, rtol=1e-5, atol=1e-4)


def test_the_score_is_that_of_the_gaussian_and_denoising_is_its_posterior_mean():
    # clean images N(0.2, 0.3^2 - 0.1^2), so that noisy ones are what the flow holds
    flow, y = gaussian(noise_std=0.1), pictures()
    torch.testing.assert_close(flow.score(y), (0.2 - y) / 0.09, rtol=1e-4, atol=1e-4)
    clean = 0.3**2 - 0.1**2
    posterior = (clean * y + 0.1**2 * 0.2) / (clean + 0.1**2)
    torch.testing.assert_close(flow.denoise(y), posterior, rtol=0, atol=1e-5)
    assert flow.denoise(y, 0.0) is y


@pytest.mark.parametrize("t", [None, 0.15])
def test_a_model_with_a_range_takes_off_the_noise_that_it_sampled_at(t):
    flow = gaussian(noise_std_range=(0.1, 0.2))  # the same density at every level
    level = 0.2 if t is None else t
    noisy = flow.sample(n=3, seed=3, t=t, denoise=False)
    expected = noisy + level**2 * (0.2 - noisy) / 0.09
    torch.testing.assert_close(flow.sample(n=3, seed=3, t=t), expected, rtol=0, atol=1e-5)


def test_the_level_that_is_sampled_at_is_the_largest_where_none_is_given():
    flow = disturbed(dataclasses.replace(CONFIG, noise_std_range=(0.1, 0.5)))
    assert torch.equal(flow.sample(n=2, seed=1), flow.sample(n=2, seed=1, t=0.5))
    assert not torch.allclose(flow.sample(n=2, seed=1, denoise=False), flow.sample(n=2, seed=1, t=0.1, denoise=False))


def test_samples_have_the_mean_and_spread_of_the_gaussian():
    x = gaussian().sample(n=400, seed=3)
    assert x.mean().item() == pytest.approx(0.2, abs=4 * 0.3 / math.sqrt(x.numel()))
    assert x.std().item() == pytest.approx(0.3, rel=4 / math.sqrt(2 * x.numel()))


def test_bits_per_dimension_of_a_uniform_law_of_levels_are_their_number():
    # a very wide Gaussian is level over the images: log2 of its density there, by hand
    flow = gaussian(scale=50.0, mean=0.0)
    images = torch.randint(0, 256, (5, 1, 4, 4), generator=torch.Generator().manual_seed(0))
    density = -math.log2(50 * math.sqrt(2 * math.pi))
    assert flow.bits_per_dim(images).mean().item() == pytest.approx(7 - density, abs=1e-3)
    small = gaussian(scale=50.0, mean=0.0, levels=17)
    assert small.bits_per_dim(images % 17).mean().item() == pytest.approx(math.log2(17 / 2) - density, abs=1e-3)
    flow = gaussian()
    assert torch.equal(flow.bits_per_dim(images, seed=1), flow.bits_per_dim(images, seed=1))
    assert not torch.equal(flow.bits_per_dim(images, seed=1), flow.bits_per_dim(images, seed=2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "start": "token",
            "position_embedding": "rotary",
            "scale": "softplus",
            "soft_clip": 4.0,
            "layers_per_block": (1, 1, 2),
        },
    ],
)
def test_the_log_determinant_is_autograds_and_the_inverse_is_exact(changes):
    flow, x = disturbed(dataclasses.replace(CONFIG, **changes)), pictures()
    z, log_det = flow(x)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v.view(1, 1, 4, 4))[0].flatten(), x[0].flatten())
    torch.testing.assert_close(log_det[0], torch.linalg.slogdet(jacobian)[1], rtol=0, atol=1e-4)
    for solver in (None, Jacobi(3, tolerance=0)):
        back, infos = flow.inverse(z, solver=solver)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
        assert len(infos) == len(flow.blocks)


def test_the_density_of_two_numbers_sums_to_one_on_a_grid():
    config = TarFlowConfig(
        (1, 2, 1), patch_size=1, layers_per_block=(1, 1, 1), hidden_size=16, num_attention_heads=2, soft_clip=0.7
    )
    flow = disturbed(config, size=0.15)
    at = torch.linspace(-15, 15, 301)
    x = torch.cartesian_prod(at, at).view(-1, 1, 2, 1)
    mass = flow.log_prob(x).double().exp().sum() * (at[1] - at[0]) ** 2
    assert float(mass) == pytest.approx(1, abs=0.02)
    assert flow.log_prob(x).exp().max() > 1.05 / (2 * math.pi)  # it is not the normal law that it began as


def test_the_score_with_a_noise_level_equals_finite_differences():
    flow = disturbed(dataclasses.replace(CONFIG, noise_std_range=(0.1, 0.5), condition=CLASSES))
    x, condition = pictures(2), Conditioning(labels=torch.tensor([1, -1]))
    score = flow.score(x, condition, 0.3)
    for place in itertools.product(range(2), range(4), (0, 3)):
        step = torch.zeros_like(x)
        step[place[0], 0, place[1], place[2]] = 1e-2
        rise = flow.log_prob(x + step, condition, 0.3) - flow.log_prob(x - step, condition, 0.3)
        assert score[place[0], 0, place[1], place[2]] == pytest.approx(rise[place[0]].item() / 2e-2, rel=1e-2, abs=1e-2)


def test_guidance_of_one_changes_nothing_and_more_moves_away_from_no_condition():
    flow = disturbed(dataclasses.replace(CONFIG, condition=CLASSES))
    condition = Conditioning(labels=torch.tensor([0, 2]))
    plain = flow.sample(condition, seed=5)
    assert torch.equal(flow.sample(condition, guidance=1.0, seed=5), plain)
    null = flow.sample(n=2, seed=5)
    # with guidance 0 and no annealing only the second branch is left
    torch.testing.assert_close(flow.sample(condition, guidance=0.0, seed=5, anneal=False), null, rtol=0, atol=1e-5)
    guided = flow.sample(condition, guidance=2.5, seed=5)
    jacobi = flow.sample(condition, guidance=2.5, seed=5, solver=Jacobi(4, tolerance=0))
    torch.testing.assert_close(jacobi, guided, rtol=0, atol=1e-4)
    assert ((guided - null) * (plain - null)).sum() > (plain - null).square().sum()


def test_temperature_guides_without_a_condition():
    flow = disturbed(CONFIG)
    plain = flow.sample(n=2)
    assert torch.equal(flow.sample(n=2, guidance=1.0, temperature=1.3), plain)
    assert not torch.allclose(flow.sample(n=2, guidance=2.0, temperature=1.3), plain)


def test_a_sample_depends_on_its_own_seed_alone():
    flow = disturbed(CONFIG)
    torch.testing.assert_close(flow.sample(n=3, seed=7)[1:], flow.sample(n=2, seed=8), rtol=0, atol=1e-5)


def test_text_is_read_in_the_last_block_as_a_prefix():
    flow = disturbed(dataclasses.replace(CONFIG, condition=ConditioningSpec(text_dim=5, null=True)))
    assert [block.spec.text for block in flow.blocks] == [False, True]
    text = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    condition = Conditioning(text=text, text_mask=mask)
    x = pictures(2)
    z, _ = flow(x, condition)
    torch.testing.assert_close(flow.inverse(z, condition)[0], x, rtol=0, atol=1e-4)
    away = torch.tensor([1.0, -1.0, 0.0])[:, None].expand(2, -1, 5)
    other = Conditioning(text=text + away, text_mask=mask)  # other tokens, whose mean is the same
    assert not torch.allclose(flow(x, other)[0][0], z[0], atol=1e-4)
    padded = torch.where(mask[..., None], text, 9.0)
    torch.testing.assert_close(flow(x, Conditioning(text=padded, text_mask=mask))[0], z)
    assert flow.sample(condition, guidance=2.0).isfinite().all()


def test_steps_are_told_token_by_token_and_an_error_in_a_callback_ends_the_sampling():
    flow = disturbed(CONFIG)
    steps = []
    flow.sample(n=1, on_step=lambda step: steps.append((step.done, step.total, step.estimate().shape)))
    assert steps == [(done, 8, (1, 1, 4, 4)) for done in range(1, 9)]

    def stop(step):
        steps.append(step.done)
        raise KeyboardInterrupt

    steps.clear()
    with pytest.raises(KeyboardInterrupt):
        flow.sample(n=1, on_step=stop, solver="jacobi")
    assert steps == [4]


def test_training_lowers_the_loss_to_the_entropy_of_a_gaussian():
    scale = 0.25
    config = TarFlowConfig(
        (1, 2, 2),
        patch_size=1,
        layers_per_block=(1,),
        hidden_size=16,
        num_attention_heads=2,
        start="token",
        noise_std=0.05,
    )

    class Data:
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                yield Samples(scale * torch.randn(256, 1, 2, 2, generator=generator))

    flow = TarFlow(config).initialize()
    objective = FlowLikelihood()
    Trainer(flow, objective, Data(), steps=120, optimizer=AdamW(lr=2e-2), show_progress=False).fit()
    spread = math.hypot(scale, 0.05)
    entropy = math.log(spread * math.sqrt(2 * math.pi * math.e))
    loss = objective(flow, next(iter(Data())), torch.Generator().manual_seed(1))
    assert float(loss.total.detach()) / loss.count == pytest.approx(entropy, abs=0.05)


def test_noise_is_that_of_the_configuration():
    generator = torch.Generator().manual_seed(0)
    levels = torch.arange(256).view(1, 1, 16, 16).expand(4, 1, 16, 16)
    x, t = add_training_noise(levels / 127.5 - 1, TarFlowConfig((1, 16, 16)), generator)
    assert t is None
    assert torch.equal(((x + 1) * 128).floor().long().clamp(max=255), levels)
    assert (x >= -1).all()
    assert (x <= 1).all()
    x, t = add_training_noise(
        torch.zeros(2000, 1, 4, 4), dataclasses.replace(CONFIG, noise_std_range=(0.1, 0.5)), generator
    )
    assert t.min() >= 0.1
    assert t.max() <= 0.5
    assert t.mean().item() == pytest.approx(0.3, abs=0.02)
    assert (x / t[:, None, None, None]).std().item() == pytest.approx(1, abs=0.03)
    x, t = add_training_noise(torch.zeros(2000, 1, 4, 4), dataclasses.replace(CONFIG, noise_std=0.2), generator)
    assert t is None
    assert x.std().item() == pytest.approx(0.2, rel=0.03)


def test_the_loss_of_a_range_is_weighted_by_the_noise():
    flow = disturbed(dataclasses.replace(CONFIG, noise_std_range=(0.1, 0.5)))
    batch = Samples(pictures(6))
    loss = FlowLikelihood()(flow, batch, torch.Generator().manual_seed(4))
    x, t = add_training_noise(batch.x, flow.config, torch.Generator().manual_seed(4))
    torch.testing.assert_close(loss.total, -(t * flow.log_prob(x, t=t)).sum() / 16)


def test_dropped_conditions_are_learned_as_none():
    flow = disturbed(dataclasses.replace(CONFIG, condition=CLASSES, noise_std=0.1))
    x, condition = pictures(4), Conditioning(labels=torch.tensor([0, 1, 2, 0]))
    every = FlowLikelihood(condition_dropout=1.0)(flow, Samples(x, condition), torch.Generator().manual_seed(0)).total
    generator = torch.Generator().manual_seed(0)
    torch.rand(4, generator=generator)
    y, _ = add_training_noise(x, flow.config, generator)
    torch.testing.assert_close(every, -flow.log_prob(y).sum() / 16)


def test_it_is_saved_and_loaded_with_its_noise(tmp_path):
    flow = disturbed(dataclasses.replace(CONFIG, condition=CLASSES, noise_std_range=(0.1, 0.5), soft_clip=4.0))
    flow.metadata["classes"] = ["a", "b", "c"]
    flow.save(tmp_path)
    again = pippin.load(tmp_path, device="cpu")
    assert isinstance(again, TarFlow)
    assert isinstance(again, Generator)
    assert isinstance(again, HasLikelihood)
    assert again.config == flow.config
    assert again.metadata == flow.metadata
    x = pictures()
    assert torch.equal(again.log_prob(x, t=0.2), flow.log_prob(x, t=0.2))


def test_a_token_that_is_not_finite_is_named():
    flow = affine(TarFlow(CONFIG).initialize(), [0.0, 0.0], [0.0, 0.0])
    with torch.no_grad():
        flow.blocks[1].proj_out.bias[0] = 200.0  # exp of it is infinite; the first token in its order passes
    for solver in ("sequential", "jacobi"):
        with pytest.raises(NonFiniteSample, match="block 1 made token 2 of sample 0") as caught:
            flow.sample(n=2, solver=solver)
        assert (caught.value.block, caught.value.token, caught.value.step) == (1, 2, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": (1, 5, 4)}, "patches of 2"),
        ({"shape": (1, 2, 2)}, "1 tokens"),
        ({"layers_per_block": ()}, "0 blocks"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"noise_std": -0.1}, "noise_std must be"),
        ({"levels": 1}, "levels must be"),
        ({"noise_std_range": (0.0, 0.3)}, r"noise_std_range\[0\] must be"),
        ({"noise_std_range": (0.3, 0.1)}, "noise_std_range"),
        ({"noise_std_range": (0.1, 0.3), "noise_std": 0.1}, "must be 0 with it"),
        ({"condition": ConditioningSpec(map_channels=1)}, "reads no map"),
    ],
)
def test_forms_that_cannot_be_are_named(values, message):
    with pytest.raises(InvalidArgument, match=message):
        dataclasses.replace(CONFIG, **values)


def test_what_a_model_cannot_do_is_refused_before_any_work():
    flow, x = disturbed(CONFIG), pictures()
    ranged = disturbed(dataclasses.replace(CONFIG, noise_std_range=(0.1, 0.5)))
    labeled = disturbed(dataclasses.replace(CONFIG, condition=CLASSES))
    refused = [
        (lambda: flow.log_prob(pictures(shape=(1, 4, 6))), "samples of shape"),
        (lambda: flow.log_prob(x, t=0.1), "takes no t"),
        (lambda: ranged.log_prob(x), "give t, the standard deviation"),
        (lambda: ranged.log_prob(x, t=0.6), "t is 0.6"),
        (lambda: ranged.log_prob(x, t=torch.ones(2)), "one number, or one for each"),
        (lambda: ranged.bits_per_dim(torch.zeros(1, 1, 4, 4).int()), "mean nothing"),
        (lambda: gaussian(noise_std=0.1).bits_per_dim(torch.zeros(1, 1, 4, 4).int()), "mean nothing"),
        (lambda: flow.denoise(x), "sigma is None"),
        (lambda: flow.denoise(x, -1.0), "sigma is -1"),
        (lambda: flow.sample(guidance=2.0), "compares a condition with none"),
        (lambda: flow.sample(guidance=-1.0, temperature=2.0), "guidance must be"),
        (lambda: labeled.sample(Conditioning(labels=torch.tensor([3]))), "label 3 is outside"),
        (lambda: flow.sample(steps=4), "steps is 4"),
        (lambda: FlowLikelihood(condition_dropout=2.0), "condition_dropout must be"),
    ]
    for call, message in refused:
        with pytest.raises(InvalidArgument, match=message):
            call()
    for call, message in [
        (lambda: flow.log_prob(x * torch.nan), "NaN or infinite"),
        (lambda: flow.bits_per_dim(torch.full((1, 1, 4, 4), 256)), "levels from 256 to 256"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            call()
    # where the annotations are checked, as here, they speak first
    with pytest.raises((InvalidArgument, TypeCheckError), match="'newton'"):
        flow.sample(solver="newton")
    with pytest.raises((InvalidInput, TypeCheckError), match=r"samples of type|i32\[1,1,4,4\]"):
        flow.log_prob(torch.zeros(1, 1, 4, 4).int())
    with pytest.raises((InvalidInput, TypeCheckError), match=r"integer levels|f32\[3,1,4,4\]"):
        flow.bits_per_dim(x)


def test_the_budget_of_steps_bounds_the_rounds():
    flow = disturbed(CONFIG)
    rounds = []
    with pytest.warns(UserWarning, match="after 1 iterations"):
        flow.sample(n=1, solver=Jacobi(4, tolerance=1e-9), steps=1, on_step=lambda step: rounds.append(step.done))
    assert rounds == [4, 8]
