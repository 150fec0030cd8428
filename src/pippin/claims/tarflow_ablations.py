"""What TarFlow's parts are good for: blocks that take turns, denoising, guidance; each against the flow without it.

Notable here:
- both flows of the first comparison have the same parameters, steps, seed and batches; one never turns round
- denoising is judged where the clean picture is known, and then on samples
- what samples show is told by a classifier that was trained on true pictures with other seeds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim
from pippin.claims._flow_pictures import LARGE, SMALL, Net

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.generate.tarflow import TarFlow


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        seeds: of data, weights and noise.
        net: form of the flows.
        side: of the pictures in pixels.
        steps: of training of each flow of the first comparison.
        noisy_steps: of training of the flow that is denoised.
        digit_steps: of training of the flow that is guided.
        batch: pictures of a step.
        held: pictures that bits and errors are measured on.
        samples: pictures that are drawn of each kind.
        judge_steps: of training of the features and of the classifier.
    """

    seeds: tuple[int, ...]
    net: Net
    side: int
    steps: int
    noisy_steps: int
    digit_steps: int
    batch: int
    held: int
    samples: int
    judge_steps: int


SIZES = {
    "smoke": Size((0,), SMALL, 16, 2, 2, 2, 4, 8, 10, 3),
    "laptop": Size((0, 1, 2), SMALL, 16, 200, 400, 600, 32, 256, 400, 250),
    "gpu": Size((0, 1, 2), LARGE, 32, 1000, 2000, 2000, 128, 1024, 2000, 500),
}
NOISE, LEVELS = 0.1, 17
WEIGHTS = (0.0, 1.0, 2.0)
"""w of the guidance: our guidance - 1."""


@claim(
    id="tarflow-ablations",
    source="arXiv:2412.06329",
    paper="blocks of alternating direction, Gaussian noise in training with one step of denoising after sampling, and "
    "guidance each improve what a transformer flow draws",
    setting="grey scenes of 16 by 16 pixels with 1 to 3 objects, without end; 4 blocks of 2 layers, 48 wide, patches "
    "of 2 by 2. Direction: 200 steps of 32. Denoising: noise 0.1, 400 steps of 32, 400 samples. Guidance: digits of "
    "scikit-learn, 8 by 8, with labels, noise 0.1, 600 steps of 64, 400 samples of each w = 0, 1, 2 (not annealed)",
    accept="means over 3 seeds: held-out bits per dimension with alternating blocks at least 0.2 below those of blocks "
    "that never turn; mean square error of denoised pictures at most 0.7 of the noise's variance, and the Frechet "
    "distance of samples to true pictures, in features of a small classifier, falls by denoising; the share of samples "
    "whose digit a classifier tells right rises from w = 0 to the better of w = 1 and w = 2; on every seed samples at "
    "w = 0 are bit for bit those without guidance",
)
def run(scale: Scale) -> Evidence:
    """The three comparisons for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    same = True
    for seed in size.seeds:
        _direction(evidence, seed, size, scale.name)
        _denoising(evidence, seed, size, scale.name)
        same &= _guidance(evidence, seed, size, scale.name)
    mean = evidence.mean
    told = [mean(f"digits told right, w = {w:g}") for w in WEIGHTS]
    return evidence.accept(
        direction=mean("bits/dim, alternating") <= mean("bits/dim, one direction") - 0.2,
        denoising=mean("error after denoising / before") <= 0.7,
        samples=mean("Frechet distance, denoised") < mean("Frechet distance, not denoised"),
        guidance=max(told[1:]) > told[0],
        no_guidance=same,
    )


def _direction(evidence: Evidence, seed: int, size: Size, scale: str) -> None:
    """Blocks that take turns, and blocks that all go the same way."""
    from pippin.claims._flow_pictures import SceneBatches, bits, device, trained
    from pippin.data.scenes import SceneSpec, scenes

    spec = SceneSpec(size=size.side)
    held = scenes(spec, size.held, seed=1000 + seed).images
    for name, alternate in (("alternating", True), ("one direction", False)):
        config = size.net.config(size.side, alternate=alternate)
        flow = trained(config, SceneBatches(spec, size.batch, seed), size.steps, seed, device(scale))
        evidence.add(f"bits/dim, {name}", bits(flow, held, seed), seed=seed)


def _denoising(evidence: Evidence, seed: int, size: Size, scale: str) -> None:
    """A flow of noisy scenes: its error where the clean one is known, and how far its samples are from true ones."""
    import torch

    from pippin.claims._flow_pictures import SceneBatches, device, trained
    from pippin.data.scenes import SceneSpec, scenes
    from pippin.evaluate.features import scene_features
    from pippin.evaluate.sample_quality import frechet_distance

    spec, place = SceneSpec(size=size.side), device(scale)
    data = SceneBatches(spec, size.batch, seed)
    flow = trained(size.net.config(size.side, noise=NOISE), data, size.noisy_steps, seed, place)
    held = scenes(spec, size.held, seed=1000 + seed).x
    noise = NOISE * torch.randn(held.shape, generator=torch.Generator().manual_seed(seed))
    clean = flow.denoise((held + noise).to(place)).cpu()
    evidence.add("error after denoising / before", float((clean - held).square().mean() / NOISE**2), seed=seed)

    features = scene_features(spec, steps=size.judge_steps)
    true = features(scenes(spec, max(2 * size.samples, 64), seed=3000 + seed).x)
    for name, denoise in (("not denoised", False), ("denoised", True)):
        drawn = _drawn(flow, n=size.samples, seed=seed, denoise=denoise)
        evidence.add(f"Frechet distance, {name}", frechet_distance(features(drawn), true), seed=seed)


def _guidance(evidence: Evidence, seed: int, size: Size, scale: str) -> bool:
    """A flow of digits with labels; whether no guidance is no guidance."""
    import torch

    from pippin.claims._flow_pictures import SMALL, SetBatches, device, digits, trained
    from pippin.evaluate.features import learn_features
    from pippin.generate.condition import Condition

    known, labels, held, right = digits(seed)
    config = SMALL.config(8, LEVELS, classes=10, noise=NOISE)
    flow = trained(config, SetBatches(known, labels, LEVELS, 64, seed), size.digit_steps, seed, device(scale))

    def pictures(images: Tensor) -> Tensor:
        return images * (2 / (LEVELS - 1)) - 1

    # the judge and the flow share no weights and no random numbers
    judge = learn_features(pictures(known), labels, name="digits", steps=size.judge_steps, seed=500 + seed)

    def share(x: Tensor, wanted: Tensor) -> float:
        return float((judge.told(x)[:, :10].argmax(1) == wanted).float().mean())

    evidence.add("held-out digits told right", share(pictures(held), right), seed=seed)
    wanted = torch.arange(size.samples) % 10
    condition = Condition(labels=wanted.to(device(scale)))
    plain, same = _drawn(flow, condition, seed=seed), True
    for w in WEIGHTS:
        drawn = _drawn(flow, condition, seed=seed, guidance=1 + w, anneal=False)
        same &= bool(w) or torch.equal(drawn, plain)
        evidence.add(f"digits told right, w = {w:g}", share(drawn, wanted), seed=seed)
    return same


def _drawn(flow: TarFlow, condition: Any = None, **how: Any) -> Tensor:
    """Samples on the CPU, in windows of tokens where that is quicker."""
    from pippin.generate.jacobi import Jacobi

    solver: Any = Jacobi(64, tolerance=1e-5) if next(flow.parameters()).is_cuda else "sequential"
    return flow.sample(condition, solver=solver, **how).cpu()
