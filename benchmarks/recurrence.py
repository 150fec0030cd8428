"""Nonlinear recurrent cells over whole sequences: parallel solver, sequential scan, and torch's GRU and LSTM.

One pass forward and backward of one layer, 4 sequences, width 128, float32, from 2^8 to 2^16 steps; on a GPU where
there is one, else on one thread of the CPU. Measurements alternate, and the median is taken (beyond 2^14 steps,
of one). "Sequential scan, autograd" is the cell in a Python loop under autograd, with input projections computed
beforehand; it is left out where it would take too long. "Sequential scan" is `mode="sequential"`: the same loop without
a graph, and the gradient by one scan.

    python benchmarks/recurrence.py --plot build/recurrence.png
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # torch's waiting threads soon sleep: other programs keep their share

import torch
from _rows import Row, Watch, compared, in_turn, parser, say, show
from torch import Tensor, nn

from pippin.core.threads import use_threads
from pippin.nn.recurrent.cells import ParaGRU, ParaLSTM

BATCH, WIDTH = 4, 128
LONGEST_LOOP = 1 << 13
"""Steps beyond which the loop under autograd is left out."""
GOAL = 1.5


def loop(cell: Any, x: Tensor) -> Tensor:
    """The cell in plain torch, in a Python loop."""
    pre, state = cell._pre(x), cell.initial_state(len(x), x.device)
    matrices, states = cell._recurrence(pre.dtype), []
    for one in pre.unbind(1):
        state = cell._after(one, state, matrices)
        states.append(state)
    return cell._out(torch.stack(states, 1))


def timed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], float]:
    """Milliseconds of a pass forward and backward."""

    def measure() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        forward(x).square().sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    return measure


def ways(kind: type[ParaGRU] | type[ParaLSTM], steps: int, device: str) -> dict[str, Callable[[], float]]:
    """What is compared at one length."""
    torch.manual_seed(0)
    cell = kind(WIDTH, WIDTH).to(device)
    peer = (nn.GRU if kind is ParaGRU else nn.LSTM)(WIDTH, WIDTH, batch_first=True).to(device)
    x = torch.randn(BATCH, steps, WIDTH, device=device, requires_grad=True)

    def ours(mode: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            cell.mode = mode
            return cell(x)[0]

        return forward

    found = {
        "solved": timed(ours("parallel"), x),
        "sequential scan": timed(ours("sequential"), x),
        f"torch.nn.{type(peer).__name__}": timed(lambda x: peer(x)[0], x),
    }
    if steps <= LONGEST_LOOP:
        found["sequential scan, autograd"] = timed(lambda x: loop(cell, x), x)
    return found


def plot(found: dict[tuple[str, int], dict[str, list[float]]], path: Path, device: str) -> None:
    """Milliseconds over steps, one panel for each cell."""
    from statistics import median

    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    for panel, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        lengths = [steps for name, steps in found if name == kind]
        for way in found[kind, lengths[0]]:
            points = [(steps, median(found[kind, steps][way])) for steps in lengths if way in found[kind, steps]]
            style = {"solved": "o-", "sequential scan, autograd": "s:", "sequential scan": "s-"}.get(way, "^--")
            panel.plot(*zip(*points, strict=True), style, label=way, markersize=4)
        panel.set(
            xscale="log", yscale="log", xlabel="steps", ylabel="ms, forward and backward", title=f"{kind}, {device}"
        )
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Every length, both cells."""
    words = parser(__doc__)
    words.add_argument("--plot", type=Path, help="file for a plot of the curves")
    options = words.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        use_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "one thread of a CPU"
    exponents = (8, 9, 10) if options.quick else range(8, 17)
    rows, everything = list[Row](), dict[tuple[str, int], dict[str, list[float]]]()
    for kind in (ParaGRU, ParaLSTM):
        ahead: list[int] = []
        for steps in (1 << exponent for exponent in exponents):
            repeats = 2 if options.quick else 5 if steps <= 4096 else 3 if steps <= 16_384 else 1
            with Watch() as watch:
                found = in_turn(ways(kind, steps, device), repeats, f"{kind.__name__}, {steps} steps")
            everything[kind.__name__, steps] = found
            for way in (way for way in found if way != "solved"):
                what = f"{kind.__name__}, {steps} steps"
                goal = GOAL if way == "sequential scan, autograd" else 1.0
                rows.append(
                    compared(
                        what,
                        "ms",
                        found["solved"],
                        way,
                        found[way],
                        goal,
                        higher_is_better=False,
                        note=f"{where}; {watch}",
                    )
                )
            peer = next(row for row in reversed(rows) if row.peer.startswith("torch.nn"))
            if (peer.ratio or 0) >= 1:
                ahead.append(steps)
        say(f"{kind.__name__} solved is ahead of torch's own at: {', '.join(map(str, ahead)) or 'no length'}")
    if options.plot:
        plot(everything, options.plot, where)
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
