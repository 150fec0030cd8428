"""TarFlow's density: that it is one, and that it is a better one than a Gaussian's, on pictures that it has not seen.

Notable here:
- the supply of scenes has no end, so nothing is learnt by heart; digits are few, and those that count are held out
- the Gaussian has a full covariance, fitted on as many pictures and more, and is dequantised alike
- exactness is measured on trained flows: an untrained one is the identity
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        net: form of the flows of scenes.
        side: of the scenes in pixels.
        steps: of training on scenes.
        batch: scenes of a step.
        digit_steps: of training on digits, of 64 each.
        toy_steps: of training of the two smallest flows.
        held: scenes that count.
        known: scenes that the Gaussian is fitted on.
    """

    seeds: tuple[int, ...]
    net: Net
    side: int
    steps: int
    batch: int
    digit_steps: int
    toy_steps: int
    held: int
    known: int


SIZES = {
    "smoke": Size((0,), SMALL, 16, 2, 4, 2, 5, 8, 600),
    "laptop": Size((0, 1, 2), SMALL, 16, 300, 48, 900, 300, 512, 6000),
    "gpu": Size((0, 1, 2), LARGE, 32, 1500, 128, 1500, 300, 2048, 20_000),
}
DIGIT_BATCH = 64
LEVELS = 17
GRID = 121
"""Points on each axis of the grid on which the density of two numbers is summed."""


@claim(
    id="tarflow-density",
    source="arXiv:2412.06329",
    paper="a transformer flow of pictures has an exact density: 2.99 bits per dimension on ImageNet-64, the best when "
    "it was published",
    setting="grey scenes of 16 by 16 pixels with 1 to 3 objects, without end (300 steps of 48), and scikit-learn's "
    "digits, 8 by 8 pixels of 17 levels, 360 of 1,797 held out (900 steps of 64); 4 blocks of 2 layers, 48 wide, "
    "patches of 2 by 2; uniform dequantisation",
    accept="on trained flows, every seed: |inverse(forward(x)) - x| < 1e-4; the log-determinant of a flow of 4 tokens "
    "is that of autograd's Jacobian within 1e-4; the density of two numbers sums to 1 within 0.02 on a grid. Bits per "
    "dimension on held-out pictures, means over the seeds: at least 0.5 below the Gaussian of full covariance on "
    "scenes and on digits. The class under which a held-out digit is most likely is the right one for at least 90%, in "
    "the mean",
)
def run(scale: Scale) -> Evidence:
    """Exactness, bits per dimension and classes for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    for seed in size.seeds:
        _scenes(evidence, seed, size, scale.name)
        _digits(evidence, seed, size, scale.name)
        _determinant(evidence, seed, size)
        _mass(evidence, seed, size)
    each, mean = evidence.each, evidence.mean
    return evidence.accept(
        invertible=max(each("error of the inverse")) < 1e-4,
        determinant=max(each("error of the log-determinant")) < 1e-4,
        normalised=all(abs(mass - 1) <= 0.02 for mass in each("mass on the grid")),
        scenes=mean("scenes, flow") <= mean("scenes, Gaussian") - 0.5,
        digits=mean("digits, flow") <= mean("digits, Gaussian") - 0.5,
        classes=mean("digits told by their density") >= 0.9,
    )


def _scenes(evidence: Evidence, seed: int, size: Size, scale: str) -> None:
    """Bits of held-out scenes, and the inverse of the flow that was trained on them."""
    from pippin.claims._flow_pictures import SceneBatches, bits, device, gaussian_bits, trained
    from pippin.data.scenes import SceneSpec, scenes

    spec = SceneSpec(size=size.side)
    held = scenes(spec, size.held, seed=1000 + seed).images
    known = scenes(spec, size.known, seed=2000 + seed).images
    evidence.add("scenes, Gaussian", gaussian_bits(known, held, 256, seed), seed=seed, unit="bits/dim")
    data = SceneBatches(spec, size.batch, seed)
    flow = trained(size.net.config(size.side), data, size.steps, seed, device(scale))
    evidence.add("scenes, flow", bits(flow, held, seed), seed=seed, unit="bits/dim")
    evidence.add("error of the inverse", _inverse_error(flow, held[:16]), seed=seed)


def _inverse_error(flow: TarFlow, images: Tensor) -> float:
    """The largest error of any pixel, forth and back."""
    import torch

    x = (images + 0.5) / 128 - 1
    x = x.to(next(flow.parameters()).device)
    with torch.no_grad():
        z, _ = flow(x)
    back, _ = flow.inverse(z)
    return float((back - x).abs().max())


def _digits(evidence: Evidence, seed: int, size: Size, scale: str) -> None:
    """Bits of held-out digits, without labels; then which label makes each most likely."""
    import torch

    from pippin.claims._flow_pictures import SetBatches, bits, device, digits, gaussian_bits, trained
    from pippin.generate.condition import Condition

    known, labels, held, right = digits(seed)
    place = device(scale)
    evidence.add("digits, Gaussian", gaussian_bits(known, held, LEVELS, seed), seed=seed, unit="bits/dim")
    data = SetBatches(known, None, LEVELS, DIGIT_BATCH, seed)
    flow = trained(SMALL.config(8, LEVELS), data, size.digit_steps, seed, place)
    evidence.add("digits, flow", bits(flow, held, seed), seed=seed, unit="bits/dim")

    data = SetBatches(known, labels, LEVELS, DIGIT_BATCH, seed)
    flow = trained(SMALL.config(8, LEVELS, classes=10), data, size.digit_steps, seed, place)
    told = [
        flow.bits_per_dim(held.to(place), Condition(labels=torch.full((len(held),), label, device=place)), seed=seed)
        for label in range(10)
    ]
    share = (torch.stack(told).argmin(0).cpu() == right).float().mean()
    evidence.add("digits told by their density", float(share), seed=seed)


def _determinant(evidence: Evidence, seed: int, size: Size) -> None:
    """Of a flow of four tokens, trained on the middle of digits, against autograd's."""
    import torch

    from pippin.claims._flow_pictures import SetBatches, digits, trained

    known, _, held, _ = digits(seed)
    data = SetBatches(known[:, :, 2:6, 2:6], None, LEVELS, DIGIT_BATCH, seed)
    flow = trained(SMALL.config(4, LEVELS), data, size.toy_steps, seed).double()
    errors = []
    for x in (held[:4, :, 2:6, 2:6] + 0.5) * (2 / LEVELS) - 1:
        x = x[None].double()
        _, log_det = flow(x)
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v.view(1, 1, 4, 4))[0].flatten(), x.flatten())
        errors.append(abs(float(log_det - torch.linalg.slogdet(jacobian)[1])))
    evidence.add("error of the log-determinant", max(errors), seed=seed, unit="nats")


def _mass(evidence: Evidence, seed: int, size: Size) -> None:
    """The density of two numbers, learnt from points on a ring, summed over a grid."""
    import torch

    from pippin.claims._flow_pictures import trained
    from pippin.generate.condition import Samples
    from pippin.generate.tarflow import TarFlowConfig

    class Ring:
        def __iter__(self):  # type: ignore[no-untyped-def]
            generator = torch.Generator().manual_seed(seed)
            while True:
                angle = 2 * torch.pi * torch.rand(256, generator=generator)
                yield Samples(0.7 * torch.stack([angle.cos(), angle.sin()], 1).view(-1, 1, 2, 1))

    config = TarFlowConfig((1, 2, 1), patch=1, layers=(1, 1, 1, 1), width=32, heads=1, noise=0.15)
    flow = trained(config, Ring(), size.toy_steps, seed)
    at = torch.linspace(-3, 3, GRID)
    grid = torch.cartesian_prod(at, at).view(-1, 1, 2, 1)
    with torch.no_grad():
        density = torch.cat([flow.log_prob(part).double().exp() for part in grid.split(8192)])
    evidence.add("mass on the grid", float(density.sum() * (at[1] - at[0]) ** 2), seed=seed)
    evidence.add("density at the centre / on the ring", _contrast(flow), seed=seed)


def _contrast(flow: TarFlow) -> float:
    """How much less likely the hole is than the ring: that the flow has learnt something."""
    import torch

    points = torch.tensor([[0.0, 0.0], [0.7, 0.0], [0.0, 0.7], [-0.7, 0.0], [0.0, -0.7]]).view(-1, 1, 2, 1)
    with torch.no_grad():
        density = flow.log_prob(points).exp()
    return float(density[0] / density[1:].mean())
