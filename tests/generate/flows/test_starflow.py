"""Flows of videos against autograd's Jacobian, products of Gaussians, and the inverse taken token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

import pippin
from pippin.core.errors import InvalidArgument, InvalidInput, JacobiUnconverged, NonFiniteSample
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import Generator, HasLikelihood, SamplingStep
from pippin.generate.flows.block import linear_guidance
from pippin.generate.flows.decoding import gaussian_guidance
from pippin.generate.flows.jacobi import Jacobi
from pippin.generate.flows.starflow.config import StarFlowConfig
from pippin.generate.flows.starflow.loss import LikelihoodAndScore
from pippin.generate.flows.starflow.model import StarFlow
from pippin.generate.flows.starflow.score_network import ScoreConfig

CLIP = StarFlowConfig(
    (4, 1, 8, 8), hidden_size=24, num_attention_heads=2, layers_per_block=(1, 1, 2), score=ScoreConfig(2, 24, 2, 2)
)
EXACT = Jacobi(window=4, tolerance=0)


def made(config: StarFlowConfig = CLIP, seed: int = 0, size: float = 0.06) -> StarFlow:
    """A model that is far from the identity, as a trained one is."""
    model = StarFlow(config).initialize(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj_out" in name or "head" in name or name.startswith("embedding"):
                parameter.normal_(0.0, size, generator=generator)
    return model.requires_grad_(False).eval()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the flow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 1, 4, 4)])
def test_log_prob_is_that_of_the_jacobian(shape):
    model = made(
        StarFlowConfig(shape, hidden_size=12, num_attention_heads=2, layers_per_block=(1, 1, 1), score=None)
    ).double()
    x = normal(2, *shape).double()

    def noise(flat: torch.Tensor) -> torch.Tensor:
        return model(model.to_latents(flat.view(1, *shape))).z.flatten()

    for one, told in zip(x, model.log_prob(x), strict=True):
        jacobian = torch.autograd.functional.jacobian(noise, one.flatten())
        logdet = float(torch.linalg.slogdet(jacobian).logabsdet)
        assert abs(logdet) > 0.05
        gauss = -0.5 * float((noise(one.flatten()) ** 2).sum()) - 0.5 * one.numel() * math.log(2 * math.pi)
        assert float(told) == pytest.approx(gauss + logdet, abs=1e-5)


@pytest.mark.parametrize("solver", [None, EXACT, Jacobi(window=3, tolerance=1e-6)])
@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (1, 8, 8)])
def test_the_inverse_undoes_the_pass(shape, solver):
    model = made(StarFlowConfig(shape, hidden_size=24, num_attention_heads=2, layers_per_block=(1, 1, 2), score=None))
    latents = model.to_latents(normal(2, *shape))
    back, solves = model.invert(model(latents).z, solver=solver)
    torch.testing.assert_close(back, latents, rtol=0, atol=2e-4)
    assert len(solves) == model.config.frames + 2
    torch.testing.assert_close(model.from_latents(back), normal(2, *shape), rtol=0, atol=2e-4)


def test_frames_depend_on_earlier_frames_alone():
    model, loose = (
        made(),
        made(
            StarFlowConfig(
                (4, 1, 8, 8), hidden_size=24, num_attention_heads=2, layers_per_block=(1, 1, 2), within_frames=False
            )
        ),
    )
    x = normal(2, 4, 1, 8, 8)
    moved = x.clone()
    moved[:, 2] += normal(2, 1, 8, 8, seed=1)
    for flow, causal in ((model, True), (loose, False)):
        before, after = flow(flow.to_latents(x)), flow(flow.to_latents(moved))
        change = [float((a - b)[:, :2].abs().max()) for a, b in zip(before[:2], after[:2], strict=True)]
        assert (max(change) < 1e-6) == causal, change
        assert float((before.z - after.z)[:, 2].abs().max()) > 0.1
    # what later frames are made of reaches the score of the frame before it, and no further
    off = (model.denoise(x) - model.denoise(moved)).abs().amax((0, 2, 3, 4))
    assert float(off[0]) < 1e-6
    assert float(off[1]) > 1e-3
    assert float(model.shallow_pass(model.to_tokens(model.to_latents(x)))[1].std()) > 0


def test_the_shallow_blocks_of_one_frame_are_those_of_a_picture():
    model = made()
    tokens = model.to_tokens(model.to_latents(normal(2, 4, 1, 8, 8)))
    u, logdet = model.shallow_pass(tokens)
    apart = [model.shallow_pass(tokens[:, k : k + 1]) for k in range(4)]
    torch.testing.assert_close(u, torch.cat([one for one, _ in apart], 1))
    torch.testing.assert_close(logdet, sum(part for _, part in apart))


# --- guidance ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.2, 2), st.floats(0, 1.5), st.floats(-1, 6))
def test_guidance_is_the_product_of_gaussians(mean, null, sigma, wider, w):
    null_sigma = sigma * math.exp(wider)
    told, log = gaussian_guidance(
        *(torch.tensor(v, dtype=torch.float64) for v in (mean, math.log(sigma), null, math.log(null_sigma))), w
    )

    # log density (1 + w) log N_c - w log N_u is a parabola: its vertex and curvature by differences
    def log_density(x: float) -> float:
        conditional = -((x - mean) ** 2) / (2 * sigma**2)
        return (1 + w) * conditional + w * (x - null) ** 2 / (2 * null_sigma**2)

    low, middle, high = (log_density(x) for x in (-1.0, 0.0, 1.0))
    curvature = low - 2 * middle + high
    vertex = -(high - low) / (2 * curvature)
    assert math.exp(float(log)) == pytest.approx((-1 / curvature) ** 0.5, rel=1e-6)
    assert float(told) == pytest.approx(vertex, abs=1e-6 * (1 + abs(vertex)))


def test_guidance_of_none_and_of_much():
    generator = torch.Generator().manual_seed(0)
    mean, log, null_mean, null_log = (torch.randn(1000, generator=generator, dtype=torch.float64) for _ in range(4))
    same, same_log = gaussian_guidance(mean, log, null_mean, null_log, 0.0)
    assert torch.equal(same, mean)
    assert torch.equal(same_log, log)
    far, far_log = gaussian_guidance(mean, log, null_mean, null_log, 20.0)
    assert bool(far.isfinite().all() & far_log.isfinite().all())
    assert bool((far_log <= log + 1e-9).all())
    # the linear rule on scales themselves, not on their logarithms, is negative for some of them
    _, linear = linear_guidance(mean, log.exp(), null_mean, null_log.exp(), torch.tensor(20.0, dtype=torch.float64))
    assert bool((linear < 0).any())
    # where the conditional one is the wider one, its width stays, and the mean moves as in the linear rule
    wide, wide_log = gaussian_guidance(mean, log, null_mean, log - 1, 3.0)
    torch.testing.assert_close(wide, 4 * mean - 3 * null_mean)
    torch.testing.assert_close(wide_log, log)
    # a weight of -1 is no condition at all, but for the wider of the two scales
    unsaid, unsaid_log = gaussian_guidance(mean, log, null_mean, null_log, -1.0)
    torch.testing.assert_close(unsaid, null_mean)
    torch.testing.assert_close(unsaid_log, torch.maximum(log, null_log))


CLASSES = StarFlowConfig(
    (3, 1, 8, 8),
    hidden_size=24,
    num_attention_heads=2,
    layers_per_block=(1, 2),
    score=None,
    condition=ConditioningSpec(num_classes=3, text_dim=5, null=True),
)


def condition(n: int = 2) -> Conditioning:
    return Conditioning(labels=torch.arange(n), text=normal(n, 3, 5), text_mask=torch.tensor([[True, True, False]] * n))


def test_only_the_deep_block_reads_the_condition_and_is_guided_by_it():
    model = made(CLASSES)
    latents = model.to_latents(normal(2, 3, 1, 8, 8))
    with_it, without = model(latents, condition()), model(latents)
    assert torch.equal(with_it.u, without.u)
    assert float((with_it.z - without.z).abs().max()) > 0.05
    z = normal(2, 3, 4, 16)
    plain, _ = model.invert(z, condition(), solver=None)
    guided, _ = model.invert(z, condition(), guidance=2.5, solver=None)
    quick, _ = model.invert(z, condition(), guidance=2.5, solver=EXACT)
    torch.testing.assert_close(quick, guided, rtol=0, atol=1e-4)
    assert float((guided - plain).abs().max()) > 0.05
    # the guided u of the first token, by hand
    stats = [
        model.deep.stats(z.flatten(1, 2), model.embedding(c, 2), cos_sin=model.config.rotary_tables(3, z.device))
        for c in (condition(), condition().null())
    ]
    mean, log = gaussian_guidance(*stats[0], *stats[1], 1.5)
    first = mean[:, 0] + log[:, 0].exp() * z[:, 0, 0]
    u = model.shallow_pass(model.to_tokens(guided))[0][:, 0, 0]
    torch.testing.assert_close(u, first, rtol=0, atol=1e-4)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_jacobi_gives_what_token_by_token_gives_and_its_residual_bounds_the_error():
    model = made(size=0.1)
    z = normal(3, 4, 4, 16)
    right, ones = model.invert(z, solver=None)
    assert all(info.total == 4 for info in ones)
    exact, solves = model.invert(z, solver=EXACT)
    assert float((exact - right).abs().max()) < 1e-4
    assert all(max(info.iterations) <= 4 for info in solves)
    for warm in (False, True):
        near, solves = model.invert(z, solver=Jacobi(4, 1e-3), warm_start=warm)
        assert float((near - right).abs().max()) < 1e-2
        assert all(bool(info.converged.all()) for info in solves)
    with pytest.warns(JacobiUnconverged):
        model.sample(n=2, steps=1)


def test_a_stream_has_the_frames_of_the_whole_clip():
    model = made()
    options = {"n": 2, "seed": 3, "solver": Jacobi(4, 1e-5)}
    for frames, context in ((4, None), (7, 2)):
        whole = model.sample(frames=frames, context_frames=context, **options)
        pieces = list(model.stream(frames=frames, context_frames=context, **options))
        torch.testing.assert_close(torch.stack(pieces, 1), whole, rtol=0, atol=1e-4)
        assert whole.shape == (2, frames, 1, 8, 8)
    endless = model.stream(n=2, seed=3, solver=Jacobi(4, 1e-5), context_frames=2)
    first = [next(endless) for _ in range(6)]
    torch.testing.assert_close(torch.stack(first, 1), whole[:, :6], rtol=0, atol=1e-4)
    # a sample is that of its seed, whatever it is drawn with
    alone = model.sample(n=1, seed=4, solver=Jacobi(4, 1e-5))
    torch.testing.assert_close(alone[0], model.sample(**options)[1], rtol=0, atol=1e-4)


def test_a_clip_that_outgrows_the_model_sees_the_frames_that_are_kept():
    model = made()
    z = normal(2, 5, 4, 16)
    latents, _ = model.invert(z, solver=None, context_frames=2)
    u = model.shallow_pass(model.to_tokens(latents))[0]
    # the fifth frame follows the third and the fourth as if they were the first two
    cos_sin = model.config.rotary_tables(3, z.device)
    mean, log = model.deep.stats(u[:, 2:].flatten(1, 2), model.embedding(None, 2), cos_sin=cos_sin)
    torch.testing.assert_close(u[:, 4], (mean + log.exp() * z[:, 2:].flatten(1, 2))[:, 8:], rtol=0, atol=2e-4)


def test_given_frames_come_back_to_the_noise_and_are_gone_on_from():
    model = made()
    given = normal(2, 2, 1, 8, 8, seed=7).clamp(-1, 1)
    whole = model.sample(given=given, seed=1, denoise=False, solver=None)
    assert whole.shape == (2, 4, 1, 8, 8)
    off = whole[:, :2] - given
    assert float(off.std()) == pytest.approx(0.3, abs=0.05)
    # what follows has the density of the flow: its noise is what was drawn
    passed = model(model.to_latents(whole))
    plain = model(model.to_latents(model.sample(given=given, seed=1, denoise=False, solver=EXACT)))
    torch.testing.assert_close(passed.z, plain.z, rtol=0, atol=1e-3)
    other = model.sample(given=given.flip(0), seed=1, denoise=False, solver=None)
    assert float((other - whole)[:, 2:].abs().max()) > 0.01
    pieces = torch.stack(list(model.stream(given=given, frames=7, seed=1, solver=Jacobi(4, 1e-5))), 1)
    torch.testing.assert_close(
        pieces, model.sample(given=given, frames=7, seed=1, solver=Jacobi(4, 1e-5)), rtol=0, atol=1e-4
    )


def test_a_source_is_read_and_left_out():
    model = made(
        StarFlowConfig(
            (5, 1, 8, 8),
            hidden_size=24,
            num_attention_heads=2,
            layers_per_block=(1, 2),
            source=2,
            score=ScoreConfig(1, 24, 2),
        )
    )
    source = normal(2, 2, 1, 8, 8)
    target = model.sample(given=source, seed=2)
    assert target.shape == (2, 3, 1, 8, 8)
    torch.testing.assert_close(torch.stack(list(model.stream(given=source, seed=2)), 1), target, rtol=0, atol=1e-3)
    with pytest.raises(InvalidArgument, match="a source of 2 frames; give them"):
        model.sample()
    with pytest.raises(InvalidArgument, match="a source of 1 frames; the model was trained with 2"):
        model.sample(given=source[:, :1])
    with pytest.raises(InvalidArgument, match="6 frames would lose the source"):
        model.sample(given=source, frames=6)


def test_steps_are_told_and_end_the_drawing():
    model = made()
    seen: list[SamplingStep] = []
    x = model.sample(n=2, on_step=seen.append, solver=Jacobi(2, 1e-4), denoise=False)
    assert [step.done for step in seen] == list(range(1, seen[0].total + 1))
    assert seen[0].total == 4 * 2 + 2
    torch.testing.assert_close(seen[-1].estimate(), x, rtol=0, atol=1e-3)

    class Enough(Exception):
        pass

    shapes = []

    def stop(step: SamplingStep) -> None:
        shapes.append(step.estimate().shape)
        if step.done == 3:
            raise Enough

    with pytest.raises(Enough):
        model.sample(n=2, on_step=stop, solver=Jacobi(2, 1e-4))
    assert shapes == [x.shape] * 3


def test_a_model_comes_back_from_its_folder(tmp_path):
    model = made(CLASSES)
    model.metadata["classes"] = ["disc", "square", "diamond"]
    model.save(tmp_path / "flow")
    again = pippin.load(tmp_path / "flow", device="cpu")
    assert isinstance(again, Generator)
    assert isinstance(again, HasLikelihood)
    assert again.metadata == model.metadata
    x = normal(2, 3, 1, 8, 8)
    assert torch.equal(again.log_prob(x, condition()), model.log_prob(x, condition()))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StarFlowConfig((1, 10, 8)), "10 by 8 pixels cannot be halved 1 times and cut into patches of 2"),
        (lambda: StarFlowConfig((8, 8)), r"shape is \(8, 8\)"),
        (lambda: StarFlowConfig(layers_per_block=()), "layers_per_block is empty"),
        (lambda: StarFlowConfig(noise_std=-0.1), "noise_std must be"),
        (lambda: StarFlowConfig(hidden_size=20, num_attention_heads=4), "hidden_size=20 with num_attention_heads=4"),
        (lambda: StarFlowConfig(condition=ConditioningSpec(map_channels=1)), "reads no map"),
        (lambda: StarFlowConfig(source=1), "source is 1 of 1 frames"),
        (lambda: ScoreConfig(window=0), "window must be"),
        (lambda: LikelihoodAndScore(condition_dropout=1.0), "condition_dropout must be"),
        (lambda: LikelihoodAndScore(weight=0.0), "weight must be"),
    ],
)
def test_bad_configurations_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_bad_requests_are_named():
    model, picture = (
        made(),
        made(StarFlowConfig((1, 8, 8), hidden_size=12, num_attention_heads=2, layers_per_block=(1, 1), score=None)),
    )
    frame = torch.zeros(2, 1, 1, 8, 8)
    for call, message in (
        (lambda: model.sample(guidance=-1.0), "guidance must be"),
        (lambda: model.sample(guidance=2.0), "guidance=2.0 compares"),
        (lambda: model.sample(frames=0), "frames is 0"),
        (lambda: picture.sample(frames=3), "leave it None for a model of images"),
        (lambda: picture.stream(), "a stream is of videos"),
        (lambda: model.sample(context_frames=4), "keep 1 to 3 frames"),
        (lambda: model.sample(context_frames=0), "context_frames must be at least 1"),
        (lambda: model.sample(steps=0), "steps must be"),
        (lambda: model.sample(steps=3, solver=None), "needs a solver"),
        (lambda: model.sample(given=frame[:, 0]), r"given frames of shape|f32\[2,1,8,8\]"),
        (lambda: model.sample(given=frame, n=3), "for 3 samples"),
        (lambda: model.sample(given=frame.expand(2, 4, 1, 8, 8)), "4 given frames of 4"),
        (lambda: model.log_prob(torch.zeros(2, 1, 8, 8)), "samples of shape"),
        (lambda: picture.denoise(torch.zeros(2, 1, 8, 8)), "no score network"),
        (lambda: model.denoise(torch.zeros(2, 4, 1, 8, 8), method="best"), "'best'"),
        (
            lambda: made(
                StarFlowConfig((2, 1, 8, 8), hidden_size=12, num_attention_heads=2, within_frames=False)
            ).sample(),
            "see whole videos",
        ),
    ):
        with pytest.raises((InvalidArgument, TypeCheckError), match=message):  # ours, or before it that of types
            call()
    with pytest.raises(InvalidInput, match="must be finite"):
        model.log_prob(torch.full((2, 4, 1, 8, 8), torch.nan))
    with pytest.raises((InvalidInput, TypeCheckError), match=r"torch\.int64|i64\["):
        model.log_prob(torch.zeros(2, 4, 1, 8, 8, dtype=torch.long))
    batch = Samples(frame.expand(2, 4, 1, 8, 8), Conditioning(labels=torch.zeros(2, dtype=torch.long)))
    labeled = StarFlow(StarFlowConfig((4, 1, 8, 8), condition=ConditioningSpec(num_classes=2)))
    with pytest.raises(InvalidArgument, match="null=True"):
        LikelihoodAndScore(condition_dropout=0.5)(labeled, batch, torch.Generator())


def test_a_result_that_is_not_finite_names_block_frame_and_token():
    model = made()
    z = normal(2, 4, 4, 16)
    z[1, 2, 3] = torch.inf
    with pytest.raises(NonFiniteSample, match="sample 1 is not finite in block 2, token 3 of frame 2") as caught:
        model.invert(z, solver=None)
    assert (caught.value.block, caught.value.token) == (2, 3)
    with torch.no_grad():
        model.shallow[0].proj_out.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteSample, match="in block 0, frame 0"):
        model.invert(normal(2, 4, 4, 16), solver=None)
