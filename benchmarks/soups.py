"""Instantiating specialists of a soup of experts: memory and time, against a sum of state dictionaries in torch.

    python benchmarks/soups.py [--quick] [--json]

A decoder of 30.3 million weights (the Llama family: 12 layers of width 384, a tied vocabulary of 32,000) has 4
experts, dense ones or of rank 16. Each side makes 8 specialists for 8 mixtures in a process of its own, and keeps
them. Memory is what the process holds at its peak above what the soup itself takes; beside it stands the memory of as
many copies of the model, a lower bound. The sequential sum adds one expert after another, as in model soups
(arXiv:2203.05482), and loads the result into a copy. Both must give the same parameters, or nothing is printed.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from _rows import Row, Watch, compared, in_turn, main, say
from _sides import Side
from _trainers import Shape

from pippin.core import memory

SPECIALISTS, EXPERTS, DOMAINS = 8, 4, 16
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Made:
    """Seconds for all specialists, bytes at the peak above the soup, and the sum of each parameter of the last."""

    seconds: float
    peak: int
    mark: list[float]


class Ours:
    """`SoupOfExperts.instantiate`."""

    def __init__(self, shape: Shape, rank: int | None) -> None:
        from pippin.language import Decoder
        from pippin.language.methods.soup_of_experts.model import SoupOfExperts

        torch.set_num_threads(1)
        module = Decoder(_config(shape)).initialize(seed=0)
        self.soup = SoupOfExperts(module, EXPERTS, DOMAINS, rank=rank, seed=0).eval()

    def one(self, weights: torch.Tensor) -> Any:
        """One specialist."""
        return self.soup.instantiate(weights)

    def run(self, count: int) -> Made:
        """Make specialists and keep them all until the last; what the allocator held of earlier ones is given back."""
        gc.collect()
        memory.trim()
        kept = []
        with _Peak() as peak:
            began = time.perf_counter()
            for index in range(count):
                kept.append(self.one(torch.nn.functional.one_hot(torch.tensor(index % DOMAINS), DOMAINS).float()))
            seconds = time.perf_counter() - began
        return Made(seconds, peak.bytes, [float(p.detach().double().sum()) for p in kept[-1].parameters()])


class Plain(Ours):
    """A copy of the model, and a state dictionary that the experts are added to one after another."""

    @torch.no_grad()
    def one(self, weights: torch.Tensor) -> Any:
        """One specialist."""
        soup = self.soup
        alpha = soup.coefficients(weights)
        total = {name: parameter.clone() for name, parameter in soup.base.named_parameters()}
        for j in range(EXPERTS):
            for name in total:
                key = name.replace(".", "/")
                expert = soup.dense[key][j] if key in soup.dense else soup.left[key][j] @ soup.right[key][j]
                total[name] = total[name] + alpha[j] * expert
        module = copy.deepcopy(soup.base)
        module.load_state_dict(total, strict=False)
        return module


class _Peak:
    """The most memory that the process held within the block, above what it held before, seen every millisecond."""

    def __enter__(self) -> _Peak:
        self.process, self.bytes, self.ended = psutil.Process(), 0, threading.Event()
        self.before = self.process.memory_info().rss
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _look(self) -> None:
        while True:
            done = self.ended.wait(0.001)
            self.bytes = max(self.bytes, self.process.memory_info().rss - self.before)
            if done:
                break


def _config(shape: Shape) -> Any:
    from pippin.language.decoder_config import DecoderConfig, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(960))
    return DecoderConfig(
        "llama",
        32_000,
        384,
        (layer,) * shape.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    from dataclasses import replace

    from pippin.language import Decoder

    shape = replace(Shape(), layers=2) if quick else Shape()
    with torch.device("meta"):
        copies = SPECIALISTS * 4 * sum(p.numel() for p in Decoder(_config(shape)).parameters())
    rows = []
    for rank in (None, 16):
        name = "dense experts" if rank is None else f"experts of rank {rank}"
        with Side(Ours, shape=shape, rank=rank) as ours, Side(Plain, shape=shape, rank=rank) as plain, Watch() as watch:
            sides = {"ours": ours, "plain": plain}
            marks = [side.call("run", 2).mark for side in sides.values()]
            if any(abs(a - b) > TOLERANCE * max(1.0, abs(b)) * 1e3 for a, b in zip(*marks, strict=True)):
                raise SystemExit("the two sides make different specialists; nothing was measured")
            found = in_turn(
                {key: lambda side=side: side.call("run", SPECIALISTS) for key, side in sides.items()},
                1 if quick else 5,
                name,
            )
        peaks = [made.peak / 1e6 for made in found["ours"]]
        theirs = [made.peak / 1e6 for made in found["plain"]]
        rates = {key: [SPECIALISTS / made.seconds for made in runs] for key, runs in found.items()}
        what = f"{SPECIALISTS} specialists, {name}, peak memory"
        low = {"higher_is_better": False}
        rows += [
            compared(what, "MB", peaks, f"{SPECIALISTS} copies of the model", [copies / 1e6], 0.9, **low, note=watch),
            compared(what, "MB", peaks, "sequential sum", theirs, 1, **low, note=watch),
            compared(
                f"specialists, {name}, 1 thread", "1/s", rates["ours"], "sequential sum", rates["plain"], 1, note=watch
            ),
        ]
        say(f"{name}: done")
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
