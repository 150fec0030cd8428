"""Neurons of ReLU layers in storage: against loading layers whole, and against each part of the method left out.

Notable here:
- bytes are counted where a file is read, around the page cache, and seconds are those of whole tokens
- the windows of a text are counted once more, from the sets of neurons alone
- controls: no window; rows and columns apart; always the same neurons; half of each layer loaded for each token
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from pippin.claims import Condition, Evidence, Scale, claim

TOGETHER = (1, 4, 16)
ARMS = ("all", "no window", "unbundled", "static neurons", "naive")
LOSS, BYTES, NEURONS, SECONDS = "held-out loss", "bytes read for a token", "bytes of neurons for a token", "seconds"
USEFUL, PEAK = "useful bytes in a second of reading", "most bytes of neurons in memory"


class _Size(NamedTuple):
    """Of the model, its training and that of the predictor, and the texts."""

    width: int
    neurons: int
    layers: int
    steps: int
    predictor_steps: int
    texts: int
    length: int
    rates: tuple[float, ...] = (3e-3,)


SIZES = Scale.choose(
    smoke=_Size(64, 256, 1, 2, 2, 1, 72),
    laptop=_Size(512, 4096, 2, 250, 400, 6, 256),
    long=_Size(512, 8192, 4, 400, 800, 12, 384, (1.5e-3, 3e-3)),
)


@claim(
    id="llm-in-a-flash",
    source="Alizadeh et al. 2024, LLM in a flash, arXiv:2312.11514, sections 3 and 4",
    headline="a model twice as large as the memory for it answers 4 to 5 times as fast on a CPU as if layers were "
    "loaded for each token: neurons that fire are predicted, those of the last 5 tokens stay, and a neuron's row and "
    "column lie together; answers are as good",
    setting="byte models with plain ReLU layers (width 512, 2 layers of 4,096 neurons; at long 4 layers of 8,192), "
    "trained on Python's modules until few neurons fire; half of the neurons' bytes as room, direct reads on 8 "
    "threads; held-out text behind prompts of 64 bytes, byte by byte",
    method="all",
    negative_controls=("no window", "unbundled", "static neurons", "naive"),
    conditions=[
        Condition(
            "faster than loading layers",
            "a token takes at most a quarter of the time that it takes where half of each layer is loaded for it, "
            "every seed",
            lambda e, arm: all(4 * mine <= its for mine, its in e.pairs(SECONDS, arm, "naive")),
            headline=True,
        ),
        Condition(
            "as good",
            "held-out loss less than 0.02 nats above that of the whole model, every seed, with at least 95 % of the "
            "neurons found that fire in any layer",
            lambda e, arm: (
                all(mine < its + 0.02 for mine, its in e.pairs(LOSS, arm, "whole"))
                and e.min("least recall", "all") >= 0.95
            ),
            headline=True,
        ),
        Condition(
            "there is something to lose",
            "always the same neurons, as many as are predicted, cost at least 0.05 nats, every seed",
            lambda e, arm: all(its >= whole + 0.05 for its, whole in e.pairs(LOSS, "static neurons", "whole")),
        ),
        Condition(
            "exact where nothing is predicted",
            "with the matrix in memory whose sign decides, no logit differs by more than 0.00001 of the largest one",
            lambda e, arm: e.max("greatest difference", "exact") <= 1e-5,
        ),
        Condition(
            "the predictor reads what fires",
            "without a window at most 1.5 times the neurons that fire are needed for a token, every seed",
            lambda e, arm: all(
                needed <= 1.5 * fires for needed, fires in e.pairs("neurons for a token", "no window", "firing")
            ),
        ),
        Condition(
            "the window halves it",
            "at most half of the bytes are read that are read without a window, every seed",
            lambda e, arm: all(2 * mine <= its for mine, its in e.pairs(BYTES, arm, "no window")),
        ),
        Condition(
            "what sets of neurons foretell",
            "neurons read for a token are within 10 % of the growth of the sets from 5 tokens to 6, every seed",
            lambda e, arm: all(
                abs(mine - foretold) <= 0.1 * foretold for mine, foretold in e.pairs(NEURONS, arm, "sets of neurons")
            ),
        ),
        Condition(
            "bundles pay",
            "at least 1.5 times as many useful bytes come in a second as with rows and columns apart, every seed",
            lambda e, arm: all(mine >= 1.5 * its for mine, its in e.pairs(USEFUL, arm, "unbundled")),
        ),
        Condition(
            "within its room",
            "never more than half of the neurons' bytes in memory, and all reads direct",
            lambda e, arm: e.max(PEAK, arm) <= e.mean("room", "all") and e.min("direct reads", arm) == 1,
        ),
    ],
    reported="loss and bytes of every arm, the share of neurons that fire, the time of a token of the whole model, and "
    "how fast neurons come that lie together, 1 to 16 in a read",
)
def run(scale: Scale) -> Evidence:
    """Train a model of each seed, and go through texts with each way to bring its neurons."""
    evidence, rate = Evidence(), _rate(scale)
    for seed in scale.seeds:
        for name, value in scale.measured(f"seed {seed}", partial(_figures, seed, rate, SIZES[scale])).items():
            named, _, arm = name.partition(" | ")
            evidence.add(named, value, arm=arm, seed=seed)
    return evidence


def _rate(scale: Scale) -> float:
    """The learning rate of the lowest validation loss after a short training with another seed."""
    from pippin.claims.worlds.sequences.byte_text import byte_text, held_out_nats
    from pippin.claims.worlds.sequences.sparse_neurons import train
    from pippin.claims.worlds.training import SEARCH_SEED, best_rate

    size = SIZES[scale]

    def validated(rate: float) -> dict[str, float]:
        module = train(
            SEARCH_SEED, width=size.width, neurons=size.neurons, layers=size.layers, steps=size.steps // 4, rate=rate
        )
        return {"loss": held_out_nats(module, limit=8_192, text=byte_text(validation=True))}

    return best_rate(size.rates, lambda rate: scale.measured(f"rate {rate}", partial(validated, rate))["loss"])


def _figures(seed: int, rate: float, size: _Size) -> dict[str, float]:
    """What one model gives; behind a bar stands the arm."""
    import torch

    from pippin.claims.worlds.sequences import sparse_neurons as world
    from pippin.language.methods.neuron_prediction import evaluate_neuron_predictor

    module = world.train(seed, width=size.width, neurons=size.neurons, layers=size.layers, steps=size.steps, rate=rate)
    with world.in_storage(module, predictor_steps=size.predictor_steps, seed=seed) as sparse:
        texts = world.texts(size.texts, size.length)
        walks = {arm: world.Walk() for arm in ("whole", "exact", *ARMS)}
        for ids in texts:
            for arm, walk in walks.items():
                world.go_through(sparse, arm, ids, walk)
        quality = evaluate_neuron_predictor(sparse.predictor, module, sparse.stored, torch.tensor(texts))
        found = {f"{name} | {arm}": value for arm, walk in walks.items() for name, value in walk.figures().items()}
        whole, exact = torch.cat(walks["whole"].logits), torch.cat(walks["exact"].logits)
        bundle, stored = sparse.stored.bundle_bytes(0), sparse.stored
        found |= {
            "least recall | all": min(quality.recall),
            "greatest difference | exact": float((whole - exact).abs().max() / whole.abs().max()),
            "room | all": stored.nbytes / 2,
            "neurons for a token | no window": sum(quality.predicted) * size.neurons,
            "neurons for a token | firing": sum(quality.active) * size.neurons,
            f"{NEURONS} | sets of neurons": world.new_neurons(walks["all"].active, world.WINDOW, bundle),
        }
        for together in TOGETHER:
            found[f"bytes in a second, {together} to a read | file"] = world.bytes_in_a_second(stored, together)
        return found
