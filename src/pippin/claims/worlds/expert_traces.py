"""Synthetic traces of a mixture's experts: some stay from pass to pass, the others follow a law of each layer."""

from __future__ import annotations

import numpy as np

from pippin.engine.experts import ExpertTrace


def zipf_trace(
    seed: int,
    *,
    passes: int = 60,
    layers: int = 16,
    experts: int = 64,
    active: int = 8,
    stay: float = 0.3,
    accuracy: float = 0.85,
    depth: int = 8,
) -> ExpertTrace:
    """Passes of one token, as in decoding, with predictions that are right in part.

    Each layer keeps each of its experts for the next pass with probability ``stay`` and takes the others by Zipf's law
    over an order of its own. A prediction has each expert with probability ``accuracy``, and others at random.

    Args:
        seed: of everything.
        passes: number of passes.
        layers: number of layers.
        experts: experts of a layer, each of size 1.
        active: experts that a token takes.
        stay: probability that an expert is needed in the next pass as well, before others are drawn.
        accuracy: probability that a needed expert is predicted.
        depth: layers ahead for which the same prediction is made.
    """
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1)
    law = [rng.permutation(weights / weights.sum()) for _ in range(layers)]
    predicted = np.full((passes, depth, layers, experts), np.nan, dtype=np.float16)
    needed: list[list[list[int]]] = []
    last: list[list[int]] = [[] for _ in range(layers)]
    for number in range(passes):
        for layer in range(layers):
            kept = [expert for expert in last[layer] if rng.random() < stay]
            last[layer] = _filled(kept, active, lambda layer=layer: int(rng.choice(experts, p=law[layer])))
            seen = [expert for expert in last[layer] if rng.random() < accuracy]
            guess = _filled(seen, active, lambda: int(rng.integers(experts)))
            predicted[number, :, layer, guess] = 1 - np.arange(active)[:, None] / (2 * active)
        needed.append([list(each) for each in last])
    return ExpertTrace.of(needed, np.ones((layers, experts), dtype=np.int64), predicted=predicted)


def _filled(some: list[int], count: int, another) -> list[int]:  # type: ignore[no-untyped-def]
    while len(some) < count:
        expert = another()
        if expert not in some:
            some.append(expert)
    return some
