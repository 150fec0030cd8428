"""Disagreement of a VAE's posterior samples against its likelihood, where the likelihood is right and where it is not.

Notable here:
- three made cases and one real pair of data sets, chosen so that a likelihood succeeds, fails, and is turned around
- the sampler is checked on a Gaussian first, and the effective sample size on held-out data: without that, no score
- two controls for what is no posterior: a run without injected noise, and latent draws that differ between the samples
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.bayes.bayesian_vae import BayesianVAE, Kind
    from pippin.bayes.sghmc import Chain
    from pippin.bayes.vae import VAEConfig


@dataclass(frozen=True)
class Size:
    """Seeds; steps of warm-up, burn-in and between samples; samples; inputs scored; the real pair's side and images."""

    seeds: tuple[int, ...]
    warm_up: int
    burn_in: int
    thin: int
    samples: int
    scored: int
    side: int
    images: int
    ensemble: int = 0


SIZES = {
    "smoke": Size((0,), 60, 20, 3, 4, 60, 14, 400),
    "laptop": Size((0, 1, 2), 3000, 1000, 100, 20, 400, 14, 6000),
    "gpu": Size((0, 1, 2), 10_000, 4000, 100, 50, 2000, 28, 60_000, ensemble=5),
}
KINDS: tuple[Kind, ...] = ("ll", "ess", "entropy", "waic", "variance")
LEARNING_RATE, GAUSSIAN_RATE = 1e-3, 3e-4


@claim(
    id="bayesian-vae-ood",
    source="arXiv:1912.05651",
    paper="the effective sample size of a VAE's posterior detects foreign inputs where the likelihood fails: "
    "Fashion-MNIST against MNIST AUROC 0.904 (encoder a point) and 0.921 (sampled), likelihood 0.557",
    setting="SGHMC over the decoder (20 samples, 100 steps apart, 64 importance draws shared by the samples, encoder "
    "frozen after burn-in), MLP of 100 hidden units: scikit-learn digits 0-4 against 5-9, noise and inverted digits; "
    "8x8 gratings of 0-60 degrees against flat grey, gratings of 90-150 degrees and noise; unions of two rectangles on "
    "8x8 against 1 to 4 dots, noise and inverted images; Fashion-MNIST against MNIST at 14x14, 6,000 images",
    accept="3 seeds. sampler: variances of a Gaussian of two dimensions within 5 % of the truth. health: mean "
    "effective share of the samples on held-out inputs between 0.3 and 0.95 in each made case and seed. dots: for 1 "
    "dot the AUROC of ESS is at least 0.03 above that of the likelihood in every seed. power: for 4 dots and for "
    "digits 5-9 the likelihood is above ESS in every seed. noise: ESS above 0.9 for noise and inverted images, digits "
    "and rectangles. failure: flat grey has a likelihood AUROC of at most 0.1, and grey: ESS reaches 0.5 there. "
    "headline: on Fashion-MNIST against MNIST the mean AUROC of ESS is at least 0.8 and 0.2 above the likelihood's. "
    "latent: on rectangles the latent ESS separates codes of held-out images from codes 3 to 5 times as far out, "
    "AUROC >= 0.8",
)
def run(scale: Scale) -> Evidence:
    """The sampler, then every case for every seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    worst = _sampler(evidence)
    for seed in size.seeds:
        _digits(evidence, seed, size)
        _gratings(evidence, seed, size)
        _rectangles(evidence, seed, size)
        _pair(evidence, seed, size)

    def each(case: str, kind: str) -> list[float]:
        return evidence.each(f"{case}, {kind}")

    def above(case: str, one: str, other: str, by: float = 0.0) -> bool:
        return all(a > b + by for a, b in zip(each(case, one), each(case, other), strict=True))

    cases = ("digits", "gratings", "rectangles")
    shares = [share for case in cases for share in evidence.each(f"{case}, effective share, held out")]
    easy = [
        value
        for case in ("digits, noise", "digits, inverted", "rectangles, noise", "rectangles, inverted")
        for value in each(case, "ess")
    ]
    pair = {kind: evidence.mean(f"fashion, mnist, {kind}") for kind in ("ess", "ll")}
    return evidence.accept(
        sampler=worst <= 0.05,
        health=all(0.3 <= share <= 0.95 for share in shares),
        dots=above("rectangles, 1 dots", "ess", "ll", 0.03),
        power=above("rectangles, 4 dots", "ll", "ess") and above("digits, 5-9", "ll", "ess"),
        noise=min(easy) > 0.9,
        failure=max(each("gratings, grey", "ll")) <= 0.1,
        grey=min(each("gratings, grey", "ess")) >= 0.5,
        headline=pair["ess"] >= 0.8 and pair["ess"] >= pair["ll"] + 0.2,
        latent=evidence.mean("rectangles, latent ess, near against far") >= 0.8,
    )


def _sampler(evidence: Evidence) -> float:
    """The largest relative error of a variance, over 4,000 chains in a correlated Gaussian."""
    import torch
    from torch import nn

    from pippin.bayes.sghmc import SGHMC

    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]])
    precision = covariance.inverse()
    theta = nn.Parameter(torch.zeros(4000, 2))
    chain = SGHMC([theta], lr=0.02, n_data=50, friction=0.1, seed=0)
    moments, count = torch.zeros(2, 2), 0
    for step in range(1000):
        if step == 500:
            chain.freeze()
        theta.grad = theta.detach() @ precision
        chain.step()
        if step >= 500 and step % 5 == 0:
            moments += theta.detach().T @ theta.detach() * 50 / len(theta)
            count += 1
    errors = (moments / count - covariance).diagonal().abs() / covariance.diagonal()
    evidence.add("sampler, largest relative error of a variance", errors.max(), seed=0)
    return float(errors.max())


def _chain(size: Size, **changes: Any) -> Chain:
    from pippin.bayes.sghmc import Chain

    how: dict[str, Any] = {"warm_up": size.warm_up, "burn_in": size.burn_in, "samples": size.samples, "thin": size.thin}
    return Chain(**{"lr": LEARNING_RATE, "friction": 0.05, "batch": 64, **how, **changes})


def _fitted(config: VAEConfig, x: Tensor, seed: int, chain: Chain) -> BayesianVAE:
    import warnings

    import torch

    from pippin.bayes.bayesian_vae import BayesianVAE
    from pippin.bayes.vae import VAE
    from pippin.core.errors import InferenceAtRisk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)  # the share is measured on held-out data, and judged
        return BayesianVAE(VAE(config, seed=seed).to(device)).fit(x, chain, seed=seed)


def _score(
    evidence: Evidence, case: str, seed: int, model: BayesianVAE, held: Tensor, foreign: dict[str, Tensor]
) -> None:
    """AUROC of every kind for every foreign set, and the effective share of the samples on what is held out."""
    from pippin.bayes.bayesian_vae import ood_score
    from pippin.bayes.metrics import auroc, fpr_at_tpr

    known = model.log_likelihood(held).cpu()
    evidence.add(f"{case}, effective share, held out", ood_score(known, "ess").mean() / len(model), seed=seed)
    evidence.add(f"{case}, log-likelihood, held out", ood_score(known, "ll").mean(), seed=seed, unit="nats")
    typical = float(ood_score(known[:, ::2], "ll").mean())
    for name, x in foreign.items():
        found = model.log_likelihood(x).cpu()
        for kind in KINDS:
            pair = ood_score(known, kind), ood_score(found, kind)
            evidence.add(f"{case}, {name}, {kind}", auroc(*pair), seed=seed)
        rest, others = (ood_score(row, "typicality", training=typical) for row in (known[:, 1::2], found))
        evidence.add(f"{case}, {name}, typicality", auroc(rest, others), seed=seed)
        ess = ood_score(known, "ess"), ood_score(found, "ess")
        evidence.add(f"{case}, {name}, ess, FPR at 80 % TPR", fpr_at_tpr(*ess, tpr=0.8), seed=seed)


def _digits(evidence: Evidence, seed: int, size: Size) -> None:
    """Digits 0-4 known; 5-9, noise and inverted digits foreign: here the likelihood is right."""
    import torch
    from sklearn.datasets import load_digits

    from pippin.bayes.vae import VAEConfig

    generator = torch.Generator().manual_seed(1000 + seed)
    found = load_digits()
    x, y = torch.tensor(found.data / 16).float(), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    known, others = x[y < 5], x[y >= 5][: size.scored]
    held = known[600 : 600 + size.scored]
    foreign = {"5-9": others, "noise": torch.rand(size.scored, 64, generator=generator), "inverted": 1 - held}
    model = _fitted(VAEConfig((64,), latent=5), known[:600], seed, _chain(size))
    _score(evidence, "digits", seed, model, held, foreign)


def _wave(n: int, degrees: tuple[float, float], contrast: tuple[float, float], generator: Any) -> Tensor:
    """Gratings of 8 by 8, 0.2 cycles a pixel, of any phase, around 0.5, with noise of 0.05."""
    import math

    import torch

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, 1, 1, generator=generator)

    angle, phase, high = between(*degrees) * math.pi / 180, between(0, 2 * math.pi), between(*contrast)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = torch.sin(2 * math.pi * 0.2 * (columns * angle.cos() + rows * angle.sin()) + phase)
    return (0.5 + 0.5 * high * wave + 0.05 * torch.randn(n, 8, 8, generator=generator)).flatten(1)


def _gratings(evidence: Evidence, seed: int, size: Size) -> None:
    """Gratings of one range of orientations known; grey, other orientations and noise foreign."""
    import torch

    from pippin.bayes.vae import VAEConfig

    generator = torch.Generator().manual_seed(2000 + seed)
    count = size.scored
    known = _wave(3000, (0, 60), (0.4, 1.0), generator)
    level = 0.45 + 0.1 * torch.rand(count, 1, generator=generator)
    foreign = {
        "grey": level + 0.05 * torch.randn(count, 64, generator=generator),
        "turned, low contrast": _wave(count, (90, 150), (0.1, 0.2), generator),
        "turned, full contrast": _wave(count, (90, 150), (0.8, 1.0), generator),
        "noise": torch.rand(count, 64, generator=generator),
    }
    config = VAEConfig((64,), latent=6, likelihood="gaussian", noise=0.1)
    # gradients of so narrow a Gaussian are a hundred times those of a Bernoulli: the chain leaves at the other rate
    model = _fitted(config, known, seed, _chain(size, lr=GAUSSIAN_RATE))
    _score(evidence, "gratings", seed, model, _wave(count, (0, 60), (0.4, 1.0), generator), foreign)


def _unions(n: int, generator: Any) -> Tensor:
    """Unions of two filled rectangles with sides of 2 to 5 pixels on 8 by 8."""
    import torch

    places = torch.arange(8)
    x = torch.zeros(n, 8, 8)
    for _ in range(2):
        sides = torch.randint(2, 6, (n, 2), generator=generator)
        corner = (torch.rand(n, 2, generator=generator) * (9 - sides)).long()
        inside = (places >= corner[..., None]) & (places < (corner + sides)[..., None])  # [n, 2, 8]
        x = torch.maximum(x, (inside[:, 0, :, None] & inside[:, 1, None, :]).float())
    return x.flatten(1)


def _dots(n: int, count: int, generator: Any) -> Tensor:
    import torch

    places = torch.rand(n, 64, generator=generator).argsort(1)[:, :count]
    return torch.zeros(n, 64).scatter_(1, places, 1.0)


def _rectangles(evidence: Evidence, seed: int, size: Size) -> None:
    """Unions of rectangles known; few dots, which are likely and foreign, and the controls."""
    import torch

    from pippin.bayes.bayesian_vae import BayesianVAE, ood_score
    from pippin.bayes.metrics import auroc
    from pippin.bayes.vae import VAEConfig

    generator = torch.Generator().manual_seed(3000 + seed)
    known, held = _unions(3000, generator), _unions(size.scored, generator)
    foreign = {f"{count} dots": _dots(size.scored, count, generator) for count in (1, 2, 3, 4)}
    dot = foreign["1 dots"]
    foreign |= {"noise": torch.rand(size.scored, 64, generator=generator).round(), "inverted": 1 - held}
    config = VAEConfig((64,), latent=5)
    model = _fitted(config, known, seed, _chain(size))
    _score(evidence, "rectangles", seed, model, held, foreign)

    def apart(x: Tensor) -> Tensor:
        """ESS with latent draws of its own for each sample."""
        rows = []
        for m in range(len(model)):
            alone = BayesianVAE(model.vae)
            alone.samples = {name: value[m : m + 1] for name, value in model.samples.items()}
            rows.append(alone.log_likelihood(x, seed=m).cpu())
        return ood_score(torch.cat(rows), "ess")

    evidence.add("rectangles, 1 dots, ess, control with draws of its own", auroc(apart(held), apart(dot)), seed=seed)
    if seed == size.seeds[0]:
        still = _fitted(config, known, seed, _chain(size, temperature=0.0))
        value = auroc(still.score(held, "ess").cpu(), still.score(dot, "ess").cpu())
        evidence.add("rectangles, 1 dots, ess, control without noise", value, seed=seed)
        share = still.score(held, "ess").mean() / len(still)
        evidence.add("rectangles, effective share, control without noise", share, seed=seed)
    if size.ensemble:
        short = _chain(size, samples=2, thin=1)
        members = [_fitted(config, known, 100 * seed + i, short).vae for i in range(size.ensemble)]
        together = BayesianVAE.of(members)
        value = auroc(together.score(held, "ess").cpu(), together.score(dot, "ess").cpu())
        evidence.add(f"rectangles, 1 dots, ess, ensemble of {size.ensemble}", value, seed=seed)
    with torch.no_grad():
        near = model.vae.encode(held[: min(100, size.scored)].to(next(model.vae.parameters()).device))[0].cpu()
    direction = torch.randn(near.shape, generator=generator)
    reach = near.norm(dim=1).mean() * (3 + 2 * torch.rand(len(near), 1, generator=generator))
    far = direction / direction.norm(dim=1, keepdim=True) * reach
    inside, outside = (model.latent_score(z, "ess", n_x=10).cpu() for z in (near, far))
    evidence.add("rectangles, latent ess, near against far", auroc(inside, outside), seed=seed)


def _pair(evidence: Evidence, seed: int, size: Size) -> None:
    """Fashion-MNIST known, MNIST foreign, as grey levels from 0 to 1."""
    from pippin.bayes.vae import VAEConfig
    from pippin.core import store
    from pippin.data import images

    def levels(name: str, split: str, limit: int) -> Tensor:
        store.pull(name, show_progress=False)
        found = images.load(name, split=split, size=size.side, limit=limit, show=False).images
        return (found.float() / 255).flatten(1)

    known = levels("fashion-mnist", "train", size.images)
    held = levels("fashion-mnist", "test", size.scored)
    # the smoke run takes turned Fashion-MNIST as foreign, to fetch nothing large
    smoke = size.images < 1000
    foreign = held.view(-1, size.side, size.side).mT.flatten(1) if smoke else levels("mnist", "test", size.scored)
    config = VAEConfig((size.side**2,), latent=10, hidden=(200,))
    if size.ensemble:
        config = VAEConfig((1, size.side, size.side), latent=20, hidden=(32, 64, 256), kind="conv")
        known, held, foreign = (x.view(-1, *config.shape) for x in (known, held, foreign))
    model = _fitted(config, known, seed, _chain(size))
    _score(evidence, "fashion", seed, model, held, {"mnist": foreign})
