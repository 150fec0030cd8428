"""AFM's decoder: its published size to the unit, an exact prefill skip, and quality that survives shared caches.

Notable here:
- the skip is measured twice: as published (the layers without a cache see one token) and as the engine does it, where
  the queries of the layer that is read are left out too; both run the same code, in turn, on a warm process
- floating-point operations are counted by torch beside the clock, for machines that others use too
- students of the last part have the architecture that is in question (shared caches), the teacher has not
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pippin.language import Decoder, DecoderConfig

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": tuple(range(6))}


class Size(NamedTuple):
    """How much is measured: tokens of the prompt and runs of it, tokens decoded, steps of training, held-out bytes."""

    prompt: int
    runs: int
    answer: int
    steps: int
    held_out: int


SIZES = {
    "smoke": Size(prompt=64, runs=1, answer=8, steps=2, held_out=1024),
    "laptop": Size(prompt=2048, runs=20, answer=200, steps=400, held_out=65_536),
    "gpu": Size(prompt=2048, runs=20, answer=200, steps=1500, held_out=262_144),
}
SIZE, DRAFT, PAIRS = 3_111_368_064, 48_765_952, 66_633_728
SKIPS = {"published": 10, "engine's": 9}
"""From the queries of which of the 16 layers on only the last token is computed; layer 9 is the one that is read."""
LR = 6e-3
"""Of the byte models: of two rates tried, the better one for 8 layers of their own, seed 0."""
ARMS = {"8 own": (8, 0), "5 own + 3 shared": (8, 3), "5 own": (5, 0)}


@claim(
    id="afm-on-device",
    source="arXiv:2507.13575",
    paper="layers in a ratio of 5:3, the last 37.5 % without a cache of their own: 37.5 % less cache and about 37.5 % "
    "less time to the first token, at equal quality; 2024 (arXiv:2407.21075): distillation helps",
    setting="the full configuration without memory; speed and exactness at width 256 with 10 + 6 layers of random "
    "weights in float32; quality with models of bytes (width 64, steps of 1,024 bytes of Python's standard library), "
    "equal text and seeds: 8 layers, 5 + 3 sharing, and 5; a student of 5 + 3 layers taught with a = 0.9 by the 8",
    accept="sizes: exactly 3,111,368,064 parameters, 48,765,952 in the draft and 66,633,728 in its adapter of rank 32; "
    "exact: logits of the last of the prompt with and without the skip differ by less than 1e-5, 200 greedy tokens are "
    "the same, the cache has 10/16 of the values; fast: prefill of 2,048 tokens with the published skip takes 0.60 to "
    "0.72 of the time without (median of 20), and no longer with the engine's; quality: over the seeds, sharing closes "
    "at least 70 % of the gap in held-out loss between 5 and 8 layers, with the cache of 5; taught: the student's "
    "held-out loss is below that of labels alone on average over the seeds, at equal steps",
)
def run(scale: Scale) -> Evidence:
    """Sizes, exactness and speed once; quality and distillation for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    sizes = _sizes(evidence)
    exact = _exact(evidence, size)
    _speed(evidence, size)
    for seed in SEEDS[scale.name]:
        _quality(evidence, seed, size)
    loss = {arm: evidence.mean(f"held-out loss, {arm}") for arm in (*ARMS, "5 own + 3 shared, taught")}
    gap = loss["5 own"] - loss["8 own"]
    closed = (loss["5 own"] - loss["5 own + 3 shared"]) / gap if gap > 0 else float("-inf")
    evidence.add("gap closed by sharing", 100 * closed, unit="%")
    published, engine = (evidence.mean(f"prefill time, {skip} skip / without") for skip in ("published", "engine's"))
    return evidence.accept(
        sizes=sizes,
        exact=exact,
        fast=0.60 <= published <= 0.72 and engine <= published,
        quality=closed >= 0.70,
        taught=loss["5 own + 3 shared, taught"] < loss["5 own + 3 shared"],
    )


def _sizes(evidence: Evidence) -> bool:
    """Parameters, counted in modules without memory and not by formula."""
    import torch

    from pippin.language import Decoder
    from pippin.language.afm import AFMConfig
    from pippin.nn.linear import Linear

    found = []
    for name, config in (("on device", AFMConfig.on_device_3b()), ("draft", AFMConfig.draft())):
        with torch.device("meta"):
            module = Decoder(config.decoder())
        found.append(sum(parameter.numel() for parameter in module.parameters()))
        evidence.add(f"parameters, {name}", found[-1])
        if name == "on device":
            layers = [part for part in module.layers.modules() if isinstance(part, Linear)]
            found.append(sum(32 * (part.inputs + part.outputs) for part in layers))
            evidence.add("parameters, adapter of rank 32", found[-1])
    return found == [SIZE, PAIRS, DRAFT]


def _config(shared: int) -> DecoderConfig:
    from pippin.claims._byte_text import byte_config

    return byte_config(layers=16, width=256, shared=shared, heads=8, kv_heads=2)


def _prefill(module: Decoder, ids: Sequence[int], first: int | None) -> tuple[Tensor, int]:
    """Logits after the last token, and how many values the cache holds.

    From the queries of layer ``first`` on, the other tokens are left out; None computes every layer for all of them.
    """
    import torch

    from pippin.engine.paged import PagedPass, PagedStore
    from pippin.engine.runner import BLOCK, Work
    from pippin.nn.cache import Cut

    device = module.embed_tokens.device
    blocks = -(-len(ids) // BLOCK)
    store = PagedStore(module.config, blocks, "float32", device)
    work = Work(ids, 0, list(range(blocks)), [len(ids) - 1])
    with torch.inference_mode():
        rows = torch.tensor([len(ids) - 1], device=device)
        cut = None if first is None else Cut(first, rows)
        x = module.embed(torch.tensor([ids], device=device))
        x = module.through(x, PagedPass(store, [work], torch.float32), cut=cut)
        return module.lm_head(module.norm(x[0, -1:])), store.values.nelement()


def _exact(evidence: Evidence, size: Size) -> bool:
    """With and without the skip; then the engine's answer against a decoder that keeps no cache and skips nothing."""
    import torch

    from pippin.claims._byte_text import END, byte_model, byte_text
    from pippin.engine import Engine, Request, SamplingOptions, Token
    from pippin.language import Decoder

    whole = Decoder(_config(0)).initialise(seed=0).eval().requires_grad_(False)
    module = Decoder(_config(6)).initialise(seed=0).eval().requires_grad_(False)
    ids = byte_text().held_out[: size.prompt // 8].tolist()
    plain, values = _prefill(module, ids, None)
    apart = max(float((_prefill(module, ids, first)[0] - plain).abs().max()) for first in SKIPS.values())
    share = values / _prefill(whole, ids, None)[1]
    wanted = list(ids)
    with torch.inference_mode():
        for _ in range(size.answer):
            wanted.append(int(module(torch.tensor([wanted]), last=1)[0, 0, :END].argmax()))
    with Engine(byte_model(module.pack()), slots=1, cache_tokens=1024, cache_type="float32") as engine:
        options = SamplingOptions(temperature=0.0, max_tokens=size.answer, logit_bias={END: -100.0})
        answer = [event.id for event in engine.stream(Request(ids, options)) if isinstance(event, Token)]
    same = sum(a == b for a, b in zip(answer, wanted[len(ids) :], strict=True))
    evidence.add("largest difference of logits with the skip", apart)
    evidence.add("greedy tokens that agree", 100 * same / size.answer, unit="%")
    evidence.add("values in the cache, sharing / not", share)
    return apart < 1e-5 and same == size.answer and share == 10 / 16


def _speed(evidence: Evidence, size: Size) -> None:
    """Seconds and operations of a prefill without skip and with either, in turn, so that all see the same machine."""
    from torch.utils.flop_counter import FlopCounterMode

    from pippin.claims._byte_text import byte_text
    from pippin.language import Decoder

    module = Decoder(_config(6)).initialise(seed=0).eval().requires_grad_(False)
    ids = byte_text().held_out[: size.prompt].tolist()
    ways = {"without": None, **SKIPS}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(size.runs + 1):
        for way, first in ways.items():
            began = time.perf_counter()
            _prefill(module, ids, first)
            if turn:  # the first is for warming up
                seconds[way].append(time.perf_counter() - began)
    counted = {}
    for way, first in ways.items():
        with FlopCounterMode(display=False) as counter:
            _prefill(module, ids, first)
        counted[way] = counter.get_total_flops()
    base = statistics.median(seconds["without"])
    evidence.add("prefill without skip", base, unit="s")
    for way in SKIPS:
        evidence.add(f"prefill time, {way} skip / without", statistics.median(seconds[way]) / base, unit="x")
        evidence.add(f"prefill operations, {way} skip / without", counted[way] / counted["without"], unit="x")


def _quality(evidence: Evidence, seed: int, size: Size) -> None:
    """The three depths on the same text; then the sharing one again, with the deepest as its teacher."""
    from pippin.claims._byte_text import byte_config, byte_decoder, held_out_nats, train_bytes
    from pippin.language.distillation import Distillation

    def trained(layers: int, shared: int, teacher: Decoder | None = None) -> tuple[Decoder, float]:
        module = byte_decoder(byte_config(layers=layers, shared=shared), seed=seed)
        objective = None if teacher is None else Distillation(teacher, weight=0.9)
        train_bytes(module, steps=size.steps, seed=seed, lr=LR, objective=objective)
        return module, held_out_nats(module, limit=size.held_out)

    teacher: Decoder | None = None
    for arm, (layers, shared) in ARMS.items():
        module, loss = trained(layers, shared)
        teacher = teacher or module
        evidence.add(f"held-out loss, {arm}", loss, seed=seed, unit="nats/byte")
    assert teacher is not None
    _, loss = trained(*ARMS["5 own + 3 shared"], teacher)
    evidence.add("held-out loss, 5 own + 3 shared, taught", loss, seed=seed, unit="nats/byte")
