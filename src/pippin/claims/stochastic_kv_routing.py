"""Stochastic KV routing: one training, every size of the cache; beside ordinary training and fixed groups of two.

Notable here:
- sharing is measured on the model that `pippin.shape.share` makes, whose followers have no projections: nothing is
  computed again in secret
- models that were not trained for a retention are cut in the same way, which is what one would have to do with them
- bytes are those that an engine holds after an answer, and its answer is compared with a pass that keeps nothing
- what a cache is for, looking back, is measured too: how much less bytes cost that have just been read
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, NamedTuple

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pippin.data.batches import TokenBatch
    from pippin.language import Decoder, DecoderConfig
    from pippin.train.objective import Loss, Objective

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": tuple(range(5))}


class Size(NamedTuple):
    """How much is trained and measured: steps, steps on top of the base, held-out bytes, tokens of an answer."""

    steps: int
    tuning: int
    held_out: int
    answer: int


SIZES = {
    "smoke": Size(steps=1, tuning=1, held_out=512, answer=8),
    "laptop": Size(steps=400, tuning=150, held_out=32_768, answer=100),
    "gpu": Size(steps=3000, tuning=1500, held_out=262_144, answer=500),
}
ARMS = ("base", "groups of two", "routed")
RETENTIONS = (1.0, 0.5, 0.25, 0.125)
P_CROSS, LR = 0.5, 3e-3


@claim(
    id="stochastic-kv-routing",
    source="arXiv:2604.22782",
    paper="trained with stochastic routing, one model keeps its quality at 50 % and 25 % of the caches, where the same "
    "training without it nearly collapses; the loss at full retention rises slightly (2.424 to 2.461)",
    setting="models of bytes (8 layers, width 64, steps of 512 bytes of Python's standard library), equal text, seeds "
    "and steps: ordinary training, fixed groups of two (CLA@2), routing with p_cross = 0.5; and the first trained on "
    "for three eighths as many steps, with routing and without. To be cut to a retention is to lose the projections of "
    "all followers",
    accept="quality: on average over the seeds the routed model at 25 % is within 0.03 nats a byte of its own full "
    "retention, the base loses at least 0.2 there, and the routed one at full retention is within 0.05 of the base; "
    "robust: at 12.5 % it is below both others; tuned: at 25 %, a base that is trained a little further with routing "
    "is at least 0.1 below one that is trained so without; exact: the engine's greedy answer at every retention is "
    "that of a routed pass without cache, token for token; bytes: the engine's cache is the retention times the full "
    "one, to the byte",
)
def run(scale: Scale) -> Evidence:
    """Every arm for each seed and retention; cache and answers of the first routed model."""
    evidence, size = Evidence(), SIZES[scale.name]
    engines: tuple[bool, bool] | None = None
    for seed in SEEDS[scale.name]:
        for arm in ARMS:
            module = _text(evidence, arm, seed, size)
            if arm != "groups of two":
                _recall(evidence, arm, module, seed, size)
            if arm == "base":
                _tune(evidence, module, seed, size)
            if arm == "routed" and engines is None:
                engines = _engines(evidence, module, size)
    assert engines is not None
    base, routed = ({r: evidence.mean(_loss(arm, r)) for r in RETENTIONS} for arm in ("base", "routed"))
    groups = evidence.mean(_loss("groups of two", 0.125))
    tuned = {arm: evidence.mean(_loss(f"{arm} on top of the base", 0.25)) for arm in ("base", "routed")}
    evidence.add("base, lost at 25 %", base[0.25] - base[1.0], unit="nats/byte")
    evidence.add("routed, lost at 25 %", routed[0.25] - routed[1.0], unit="nats/byte")
    evidence.add("routed - base at 100 %", routed[1.0] - base[1.0], unit="nats/byte")
    return evidence.accept(
        quality=routed[0.25] - routed[1.0] <= 0.03
        and base[0.25] - base[1.0] >= 0.2
        and routed[1.0] - base[1.0] <= 0.05,
        robust=routed[0.125] < min(groups, base[0.125]),
        tuned=tuned["routed"] <= tuned["base"] - 0.1,
        exact=engines[0],
        bytes=engines[1],
    )


def _loss(arm: str, retention: float) -> str:
    return f"held-out loss, {arm}, {retention:.1%} of the caches"


def _objective(arm: str, config: DecoderConfig) -> Objective:
    """What an arm learns: fixed groups are routing that draws nothing."""
    from pippin.language.kv_routing import KVRouting, RoutedModel, nearest, spread
    from pippin.language.objectives import NextToken

    sources, plain = nearest(config, spread(config, 0.5)), NextToken()

    def groups(model: nn.Module, batch: TokenBatch, generator: torch.Generator) -> Loss:
        return plain(RoutedModel(model, sources), batch, generator)

    found: dict[str, Objective] = {"base": plain, "groups of two": groups, "routed": KVRouting(P_CROSS)}
    return found[arm]


def _cut(module: Decoder, retention: float) -> Decoder:
    """The model with a share of its caches, whatever it was trained for."""
    from pippin.core.errors import UntrainedSharing
    from pippin.shape.share import share

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedSharing)
        return share(module, retention).eval().requires_grad_(False)


def _text(evidence: Evidence, arm: str, seed: int, size: Size) -> Decoder:
    """Train one arm on text, and measure it with every share of its caches."""
    from pippin.claims._byte_text import byte_config, byte_decoder, held_out_nats, train_bytes

    config = byte_config(layers=8)
    module = byte_decoder(config, seed=seed)
    objective = _objective(arm, config)
    train_bytes(module, steps=size.steps, seed=seed, rows=8, length=64, lr=LR, objective=objective)
    for retention in RETENTIONS:
        if arm == "groups of two" and retention == 1.0:
            continue  # its followers' own projections were never trained
        loss = held_out_nats(_cut(module, retention), length=65, limit=size.held_out)
        evidence.add(_loss(arm, retention), loss, seed=seed, unit="nats/byte")
    return module


def _tune(evidence: Evidence, module: Decoder, seed: int, size: Size) -> None:
    """Train a model that was never routed a little further, with and without, and measure both at 25 %."""
    from pippin.claims._byte_text import held_out_nats, train_bytes

    for arm in ("base", "routed"):
        tuned = copy.deepcopy(module)
        objective = _objective(arm, tuned.config)
        train_bytes(tuned, steps=size.tuning, seed=100 + seed, rows=8, length=64, lr=LR / 2, objective=objective)
        for retention in (1.0, 0.25):
            loss = held_out_nats(_cut(tuned, retention), length=65, limit=size.held_out)
            evidence.add(_loss(f"{arm} on top of the base", retention), loss, seed=seed, unit="nats/byte")


def _recall(evidence: Evidence, arm: str, module: Decoder, seed: int, size: Size) -> None:
    """How much less 32 bytes cost after a first reading of them than after 32 others, in nats a byte."""
    import torch

    from pippin.claims._byte_text import byte_text

    once = byte_text().held_out[: size.held_out // 32 * 32].view(-1, 32)[::4]
    known, new = (torch.cat([before, once], 1) for before in (once, once.roll(1, 0)))
    for retention in RETENTIONS:
        cut = _cut(module, retention)
        with torch.inference_mode():
            said = [
                cut(rows[:, :-1])[:, 31:].log_softmax(-1).gather(-1, once[..., None]).mean() for rows in (known, new)
            ]
        saved = float(said[0] - said[1])
        evidence.add(f"saved by a second reading, {arm}, {retention:.1%}", saved, seed=seed, unit="nats/byte")


def _engines(evidence: Evidence, module: Decoder, size: Size) -> tuple[bool, bool]:
    """Whether the engine's answers are those of passes without a cache, and its bytes the share of the full ones."""
    import torch

    from pippin.claims._byte_text import END, byte_model, byte_text
    from pippin.engine import Engine, Request, SamplingOptions, Token
    from pippin.language.kv_routing import RoutedModel, nearest, spread

    ids = byte_text().held_out[:64].tolist()
    options = SamplingOptions(temperature=0.0, max_tokens=size.answer, logit_bias={END: -100.0})
    same, held = [], []
    for retention in RETENTIONS:
        whole = RoutedModel(module, nearest(module.config, spread(module.config, retention)))
        wanted = list(ids)
        with torch.inference_mode():
            for _ in range(size.answer):
                wanted.append(int(whole(torch.tensor([wanted]))[0, -1, :END].argmax()))
        with Engine(
            byte_model(_cut(module, retention).pack()), slots=1, cache_tokens=1024, cache_type="float32"
        ) as engine:
            answer = [event.id for event in engine.stream(Request(ids, options)) if isinstance(event, Token)]
            held.append(engine.stats().cache_bytes_used)
        same.append(sum(a == b for a, b in zip(answer, wanted[len(ids) :], strict=True)) / size.answer)
        evidence.add(f"cache of the engine, {retention:.1%}", held[-1], unit="bytes")
        evidence.add(f"greedy tokens that agree, {retention:.1%}", 100 * same[-1], unit="%")
    exact = all(share == 1.0 for share in same)
    return exact, all(part == retention * held[0] for part, retention in zip(held, RETENTIONS, strict=True))
