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

    from pippin.data.scenes import SceneSpec
    from pippin.generate.tarflow import TarFlow


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        seeds: of data, weights and noise.
        net: form of the flows.
        side: of the pictures in pixels.
        steps: of training of each flow of the first comparison.
        noisy_steps: of training of the flow that is denoised and guided.
        batch: pictures of a step.
        held: pictures that bits and errors are measured on.
        samples: pictures that are drawn with each guidance.
        judge_steps: of training of the features and of the classifier.
    """

    seeds: tuple[int, ...]
    net: Net
    side: int
    steps: int
    noisy_steps: int
    batch: int
    held: int
    samples: int
    judge_steps: int


SIZES = {
    "smoke": Size((0,), SMALL, 16, 2, 2, 4, 8, 6, 3),
    "laptop": Size((0, 1, 2), SMALL, 16, 200, 600, 32, 256, 300, 250),
    "gpu": Size((0, 1, 2), LARGE, 32, 1000, 2000, 128, 1024, 2000, 500),
}
NOISE = 0.1
WEIGHTS = (0.0, 1.0, 2.0)
"""w of the guidance: our guidance - 1."""


@claim(
    id="tarflow-ablations",
    source="arXiv:2412.06329",
    paper="blocks of alternating direction, Gaussian noise in training with one step of denoising after sampling, and "
    "guidance each improve what a transformer flow draws",
    setting="grey scenes of 16 by 16 pixels, without end; 4 blocks of 2 layers, 48 wide, patches of 2 by 2. Direction: "
    "1 to 3 objects, 200 steps of 32. Denoising and guidance: one object, its kind (disc, square, diamond) as the "
    "label, noise 0.1, 600 steps of 32, 300 samples of each guidance w = 0, 1, 2 (not annealed)",
    accept="means over 3 seeds: held-out bits per dimension with alternating blocks at least 0.2 below those of blocks "
    "that never turn; mean square error of denoised pictures at most 0.7 of the noise's variance, and the Frechet "
    "distance of samples to true pictures, in features of a small classifier, falls by denoising; the share of samples "
    "whose kind a classifier tells right rises from w = 0 to the better of w = 1 and w = 2; on every seed samples at "
    "w = 0 are bit for bit those without guidance",
)
def run(scale: Scale) -> Evidence:
    """The three comparisons for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    same = True
    for seed in size.seeds:
        _direction(evidence, seed, size, scale.name)
        same &= _denoising_and_guidance(evidence, seed, size, scale.name)
    mean = evidence.mean
    told = [mean(f"kinds told right, w = {w:g}") for w in WEIGHTS]
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


def _denoising_and_guidance(evidence: Evidence, seed: int, size: Size, scale: str) -> bool:
    """One flow of noisy pictures with labels; whether no guidance is no guidance."""
    import torch

    from pippin.claims._flow_pictures import SceneBatches, device, trained
    from pippin.data.scenes import SceneSpec, scenes
    from pippin.evaluate.features import scene_features
    from pippin.evaluate.sample_quality import frechet_distance
    from pippin.generate.condition import Condition

    spec = SceneSpec(size=size.side, objects=(1, 1), radius=(2.2 * size.side / 16, 4.5 * size.side / 16))
    place = device(scale)
    config = size.net.config(size.side, classes=3, noise=NOISE)
    flow = trained(config, SceneBatches(spec, size.batch, seed, labelled=True), size.noisy_steps, seed, place)
    evidence.add("error after denoising / before", _error(flow, spec, seed, size), seed=seed)

    features = scene_features(spec, steps=size.judge_steps)
    true = features(scenes(spec, max(2 * size.samples, 64), seed=3000 + seed).x)
    classify = _classifier(evidence, spec, seed, size)
    wanted = torch.arange(size.samples) % 3
    condition = Condition(labels=wanted.to(place))
    plain: Any = {}
    for denoise in (False, True):
        drawn = _drawn(flow, condition, seed=seed, denoise=denoise)
        plain[denoise] = drawn
        name = "denoised" if denoise else "not denoised"
        evidence.add(f"Frechet distance, {name}", frechet_distance(features(drawn), true), seed=seed)
    same = True
    for w in WEIGHTS:
        drawn = _drawn(flow, condition, seed=seed, guidance=1 + w, anneal=False)
        same &= bool(w) or torch.equal(drawn, plain[True])
        evidence.add(f"kinds told right, w = {w:g}", float((classify(drawn) == wanted).float().mean()), seed=seed)
        evidence.add(f"Frechet distance, w = {w:g}", frechet_distance(features(drawn), true), seed=seed)
    return same


def _drawn(flow: TarFlow, condition: Any, **how: Any) -> Tensor:
    """Samples on the CPU, in windows of tokens where that is quicker."""
    from pippin.generate.jacobi import Jacobi

    solver: Any = Jacobi(64, tolerance=1e-5) if next(flow.parameters()).is_cuda else "sequential"
    return flow.sample(condition, solver=solver, **how).cpu()


def _error(flow: TarFlow, spec: SceneSpec, seed: int, size: Size) -> float:
    """Mean square error of denoised pictures over that of noisy ones."""
    import torch

    from pippin.claims._flow_pictures import kinds
    from pippin.data.scenes import scenes
    from pippin.generate.condition import Condition

    held = scenes(spec, size.held, seed=1000 + seed)
    place = next(flow.parameters()).device
    noise = NOISE * torch.randn(held.x.shape, generator=torch.Generator().manual_seed(seed))
    clean = flow.denoise((held.x + noise).to(place), None, Condition(labels=kinds(held.things).to(place))).cpu()
    return float((clean - held.x).square().mean() / noise.square().mean())


def _classifier(evidence: Evidence, spec: SceneSpec, seed: int, size: Size) -> Any:
    """Tells the kind of the object on each picture; learnt from true pictures of other seeds."""
    from pippin.claims._flow_pictures import kinds
    from pippin.data.scenes import scenes
    from pippin.evaluate.features import learn_features

    known = scenes(spec, max(8 * size.held, 64), seed=4000 + seed)
    judge = learn_features(known.x, kinds(known.things), name="kinds of objects", steps=size.judge_steps, seed=seed)

    def classify(x: Tensor) -> Tensor:
        return judge.told(x.clamp(-1, 1))[:, :3].argmax(1)

    held = scenes(spec, 300, seed=5000 + seed)
    right = (classify(held.x) == kinds(held.things)).float().mean()
    evidence.add("true kinds told right", float(right), seed=seed)
    return classify
