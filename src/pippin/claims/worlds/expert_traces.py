"""Traces of a mixture's experts: synthetic ones, and a mixture to record some from; policies that must not win.

Notable here:
- in a synthetic trace some experts stay from pass to pass, and the others follow a law of each layer
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pippin.claims.worlds.sequences.byte_text import byte_config, byte_decoder, byte_model, train_bytes
from pippin.engine.experts import CachedExperts, Clock, ExpertTrace
from pippin.engine.experts.eviction import Ranks
from pippin.language import LanguageModel
from pippin.language.objectives import NextToken
from pippin.language.router_losses import RouterLosses
from pippin.nn.feedforward.feedforward import FeedForwardSpec


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


class LowestLayerFirst:
    """The wrong reading of Least-Stale: of experts that are alike current, that of the lowest layer leaves first."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `pippin.engine.experts.EvictionPolicy`."""
        ranks: Ranks = np.where(cached.last_pass == now.pass_index, now.layers, 0) + cached.layer
        return ranks


class StaticSet:
    """What came first stays: the one that was fetched last leaves."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `pippin.engine.experts.EvictionPolicy`."""
        ranks: Ranks = -cached.fetched
        return ranks


def train_mixture(seed: int, steps: int, *, layers: int = 8, experts: int = 32, active: int = 2) -> LanguageModel:
    """A mixture of bytes, trained on source code with a balance loss and packed for the native kernels.

    Args:
        seed: of everything.
        steps: optimizer steps.
        layers: number of layers.
        experts: experts of a layer.
        active: experts that a token takes.
    """
    config = byte_config(layers=layers, width=128)
    feedforward = FeedForwardSpec(64, num_experts=experts, num_experts_per_tok=active)
    config = replace(config, layers=tuple(replace(layer, feedforward=feedforward) for layer in config.layers))
    module = byte_decoder(config, seed=seed)
    train_bytes(module, steps=steps, seed=seed, objective=NextToken(router_losses=RouterLosses()))
    return byte_model(module.eval().pack(), "trained mixture")
