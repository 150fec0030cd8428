"""Speed and memory of training, against a loop of transformers and accelerate, and against litgpt.

    python benchmarks/training.py [--quick] [--json]

A decoder of 30.3 million weights (the Llama family: 12 layers of width 384, 6 heads that share 2 pairs of keys and
values, inner width 960, a tied vocabulary of 32,000) is trained on batches of 8 rows of 512 tokens, in float32 and
under bfloat16 autocast, with one thread and with every core. All sides start from the same weights and read the same
batches; their losses must agree step by step, or nothing is printed. Tokens per second are those of whole steps, with
clipping and optimizer. Peak memory is the most that the process ever held, libraries included. litgpt asks for older
versions of other libraries, and works without them: `pip install --no-deps litgpt lightning pytorch-lightning
lightning-utilities torchmetrics jsonargparse`."""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, say, thread_counts
from _sides import Side, peer_version
from _trainers import Accelerate, LitGPT, Ours, Ran, Shape, write_weights

CHECKED = 3
"""Steps whose losses are compared before anything is timed; they warm up, too."""
TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-3}
"""Relative difference of losses that rounding may make."""


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    shape = replace(Shape(), layers=2, rows=2, length=256) if quick else Shape()
    with tempfile.TemporaryDirectory() as place:
        path = str(Path(place) / "weights.safetensors")
        say(f"{write_weights(shape, path) / 1e6:.1f} million weights")
        return [row for precision in TOLERANCE for row in _precision(shape, path, precision, quick)]


def _precision(shape: Shape, weights: str, precision: str, quick: bool) -> list[Row]:
    """Rows of one precision: tokens per second with each number of threads, then memory."""
    steps, repeats = (1, 1) if quick else (2, 5)
    kinds = {"ours": Ours, f"{peer_version('transformers')} + {peer_version('accelerate')}": Accelerate}
    if importlib.util.find_spec("litgpt") is not None:
        kinds[peer_version("litgpt")] = LitGPT
    rows = []
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(kind, shape=shape, weights=weights, precision=precision))
            for name, kind in kinds.items()
        }
        for side in sides.values():
            side.call("threads", thread_counts()[-1])
        _check({name: side.call("run", CHECKED) for name, side in sides.items()}, TOLERANCE[precision])
        peers = [name for name in sides if name != "ours"]
        for threads in thread_counts():
            for side in sides.values():
                side.call("threads", threads)
            with Watch() as watch:
                found = in_turn(
                    {name: lambda side=side: side.call("run", steps) for name, side in sides.items()},
                    repeats,
                    f"{precision}, threads: {threads}",
                )
            rates = {name: [steps * shape.tokens / ran.seconds for ran in runs] for name, runs in found.items()}
            what = f"training, 30M, {precision}, {threads} thread{'s'[: threads > 1]}"
            rows += [
                compared(what, "tokens/s", rates["ours"], name, rates.get(name), 1, note=watch)
                for name in (*peers, *([] if len(peers) > 1 else ["litgpt, not installed"]))
            ]
        peaks = {name: [side.call("peak")] for name, side in sides.items()}
        rows += [
            compared(
                f"peak memory, 30M, {precision}", "MB", peaks["ours"], name, peaks[name], 1, higher_is_better=False
            )
            for name in peers
        ]
    return rows


def _check(ran: dict[str, Ran], tolerance: float) -> None:
    """Refuse to time sides that do not do the same work.

    Raises:
        SystemExit: losses differ by more than rounding.
    """
    ours = ran["ours"].losses
    for name, side in ran.items():
        if any(abs(a - b) > tolerance * abs(b) for a, b in zip(ours, side.losses, strict=True)):
            raise SystemExit(f"{name} has the losses {side.losses}, we have {ours}; nothing was measured")
        say(f"{name}: losses {', '.join(f'{loss:.5f}' for loss in side.losses)}")


if __name__ == "__main__":
    main(measure, __doc__)
