"""Diffusion sampling against the schedulers of diffusers: same network, noise and number of steps.

    python benchmarks/diffusion_samplers.py [--quick] [--json]

Both sides sample 4 images of 3 by 32 by 32 with one U-Net of random weights in 20 steps: DDIM and DPM-Solver++(2M)
with v-prediction on the linear-beta schedule, at the times that diffusers visits; Euler and Heun on the straight path.
Before anything is measured both must end in the same images within 1e-4, or nothing is printed. The overhead is what
a step costs outside of the network: there the network is replaced by one that returns what it was given, for small
images (where calls cost) and for batches of latents of 16 by 4 by 64 by 64 (where arithmetic does).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from _rows import Row, Watch, compared, in_turn, main, say
from torch import Tensor

from pippin.generate.conditions import ConditioningSpec
from pippin.generate.diffusion.prediction import Estimate, estimate
from pippin.generate.diffusion.samplers import Method, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.diffusion.unet import UNetConfig

TOLERANCE = 1e-4
TRAINED = 1000
"""Steps that a scheduler of diffusers counts in."""
SMALL, LARGE = (4, 3, 32, 32), (16, 4, 64, 64)


@dataclass(frozen=True)
class Pair:
    """One sampler on both sides: our method and schedule, the peer's class and its settings."""

    name: str
    method: Method
    schedule: NoiseSchedule
    kind: str
    peer: str
    settings: dict[str, Any]


def pairs() -> list[Pair]:
    """All samplers."""
    vp, flow = NoiseSchedule.vp_linear(), NoiseSchedule.flow()
    signal = [vp.a(i / TRAINED) ** 2 for i in range(TRAINED + 1)]
    betas = [1 - after / before for before, after in pairwise(signal)]
    trained = {"trained_betas": betas, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    ddim = {**trained, "clip_sample": False, "set_alpha_to_one": True}
    solver = {**trained, "algorithm_type": "dpmsolver++", "solver_order": 2, "final_sigmas_type": "zero"}
    return [
        Pair("DDIM", "ddim", vp, "v", "DDIMScheduler", ddim),
        Pair("DPM-Solver++(2M)", "dpm++2m", vp, "v", "DPMSolverMultistepScheduler", solver),
        Pair("Euler", "euler", flow, "flow", "FlowMatchEulerDiscreteScheduler", {}),
        Pair("Heun", "heun", flow, "flow", "FlowMatchHeunDiscreteScheduler", {}),
    ]


Network = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def ours(pair: Pair, network: Network, z: Tensor, steps: int) -> Tensor:
    """Our samples."""
    ones = torch.ones(len(z))

    def denoiser(x: Tensor, t: float) -> Estimate:
        return estimate(network(x, t * ones), x, t, pair.kind, pair.schedule)  # type: ignore[arg-type]

    grid = pair.schedule.grid(steps)
    if pair.kind == "flow":  # the peer's times on the straight path
        grid = [1 - i / max(steps - 1, 1) * (1 - 1 / TRAINED) for i in range(steps)] + [0.0]
    return integrate(denoiser, pair.schedule, z, grid, method=pair.method)


@torch.no_grad()
def theirs(pair: Pair, network: Network, z: Tensor, steps: int) -> Tensor:
    """The peer's samples, as its documentation shows the loop."""
    import diffusers

    scheduler = _schedulers.get(pair.name)
    if scheduler is None:
        scheduler = _schedulers[pair.name] = getattr(diffusers, pair.peer)(**pair.settings)
    scheduler.set_timesteps(steps)
    x, ones, counted = z, torch.ones(len(z)), pair.kind == "v"
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, (t + counted) / TRAINED * ones), t, x).prev_sample
    return x


_schedulers: dict[str, Any] = {}


def _network() -> Network:
    """A U-Net with random weights and outputs of about unit scale."""
    generator = torch.Generator().manual_seed(0)
    net = UNetConfig(base_channels=32, num_levels=3).build(SMALL[1:], ConditioningSpec()).initialize(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return net.requires_grad_(False).eval()


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    try:
        import diffusers
    except ImportError as error:
        raise SystemExit("diffusers is not installed: pip install --no-deps diffusers") from error
    torch.set_num_threads(1)
    steps, repeats, rounds = (10, 3, 5) if quick else (20, 9, 20)
    network, peer = _network(), f"diffusers {diffusers.__version__}"
    noise = {shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in (SMALL, LARGE)}
    rows = []
    for pair in pairs():
        apart = float(
            (ours(pair, network, noise[SMALL], steps) - theirs(pair, network, noise[SMALL], steps)).abs().max()
        )
        say(f"{pair.name}: largest difference {apart:.2g}")
        if not apart <= TOLERANCE or math.isnan(apart):
            raise SystemExit(f"{pair.name}: the two sides sample different images ({apart:.3g}); nothing was measured")
        sides = {"ours": ours, "theirs": theirs}
        with Watch() as watch:
            draws = {
                key: partial(_seconds, partial(run, pair, network, noise[SMALL], steps)) for key, run in sides.items()
            }
            whole = in_turn(draws, repeats, pair.name)
        note = f"{watch}; images differ by at most {apart:.1e}"
        what = f"{pair.name}, {steps} steps, 4 images of 32 by 32"
        rows.append(compared(what, "s", whole["ours"], peer, whole["theirs"], 0.98, higher_is_better=False, note=note))
        for shape in (SMALL, LARGE):
            with Watch() as watch:
                bare = {key: partial(_overhead, run, pair, noise[shape], steps, rounds) for key, run in sides.items()}
                alone = in_turn(bare, repeats, f"{pair.name}, no network, {shape}")
            what = f"{pair.name}, overhead of a step, {' by '.join(map(str, shape))}"
            rows.append(
                compared(what, "us", alone["ours"], peer, alone["theirs"], 1.0, higher_is_better=False, note=watch)
            )
    return rows


def _overhead(run: Callable[..., Tensor], pair: Pair, z: Tensor, steps: int, rounds: int) -> float:
    """Microseconds of a step around a network that costs nothing."""
    took = _seconds(lambda: [run(pair, lambda x, t: x, z, steps) for _ in range(rounds)])
    return 1e6 * took / rounds / steps


if __name__ == "__main__":
    main(measure, __doc__)
