"""PT-MoE on small byte models: four narrow tracks beside one wide decoder with as many parameters.

Notable here:
- the sums over processes are counted in two real processes, beside those of the wide decoder divided by its matrices
  (tensor parallelism), and made slower there to see what they cost a token
- all decoders have the same layers, but for what an arm changes: windows and positions, experts in every second layer,
  as many parameters in all and for a token; each arm's learning rate is searched alike
- what is published is "about equal" at 13 billion parameters and a visible loss at 6 billion; here a decoder of twice
  the width shows which way the difference goes
- controls: tracks that are joined only once are a mean of narrow decoders; one track has a quarter of the parameters;
  the wide decoder has nothing to lose and saves nothing
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.language import Decoder
    from pippin.language.parallel.pt_moe import PTMoEConfig


class _Size(NamedTuple):
    """Steps of training, of the search for a learning rate, bytes read at the end, and seeds of twice the width."""

    steps: int
    search: int
    held_out: int
    wide_seeds: int


SIZES = Scale.choose(smoke=_Size(2, 1, 2048, 0), laptop=_Size(60, 20, 16_384, 1), long=_Size(300, 60, 65_536, 2))
RATES = Scale.choose(smoke=(6e-3,), laptop=(6e-3,), long=(2e-3, 6e-3, 1.8e-2))
LENGTH, ROWS, FAR = 256, 8, 1024
LAYERS, TRACKS = 8, 4
WIDE = "one decoder"
FAST, SLOW = (f"seconds for a token, sums {delay} ms slower" for delay in (0, 4))
ARMS = ("pt-moe", WIDE, "joined after each layer", "joined once", "one track", "no experts", "rotary everywhere", "sum")


@claim(
    id="pt-moe",
    source="arXiv:2507.13575, arXiv:2602.07306",
    headline="tracks that are joined after every fourth layer need 87.5 % fewer sums over the devices than tensor "
    "parallelism (up to 16 times fewer with eight), at about equal quality from 13 billion parameters on; time for a "
    "token 2 to 12 % less on 8 H100",
    setting="byte models of Python's library (8 layers, sequences of 256, windows of 64 and every fourth layer global "
    "without positions, 4 experts of which 2 are taken in every second layer; one decoder of width 64, four tracks of "
    "width 32, 0.5 million parameters each; twice the width for the direction); two processes connected by gloo",
    method="pt-moe",
    negative_controls=("joined once", "one track", WIDE),
    conditions=[
        Condition(
            "fewer sums over processes",
            "at most 12.5 % of the sums that tensor parallelism needs in a pass, counted",
            lambda e, arm: (
                e.mean("sums over processes in a pass", arm) <= 0.125 * e.mean("sums over processes in a pass", WIDE)
            ),
            headline=True,
        ),
        Condition(
            "about as good",
            "held-out loss at most 1 % above that of one decoder with as many parameters (within 3 %), mean over seeds",
            lambda e, arm: (
                e.mean("held-out loss", arm) <= 1.01 * e.mean("held-out loss", WIDE)
                and abs(e.mean("parameters", arm) / e.mean("parameters", WIDE) - 1) <= 0.03
            ),
            headline=True,
        ),
        Condition(
            "slower links cost less",
            "sums that take 4 ms longer cost a token 4 ms for each sum, within 15 %, with tracks as with tensor "
            "parallelism",
            lambda e, arm: all(
                abs(
                    (e.mean(SLOW, each) - e.mean(FAST, each)) / (0.004 * e.mean("sums over processes in a pass", each))
                    - 1
                )
                <= 0.15
                for each in (arm, WIDE)
            ),
        ),
        Condition(
            "joins pay",
            "loss below that of tracks that are joined once, on every seed, and at least half of what joining after "
            "each layer gains over that",
            lambda e, arm: (
                all(mine < its for mine, its in e.pairs("held-out loss", arm, "joined once"))
                and e.mean("held-out loss", "joined once") - e.mean("held-out loss", arm)
                >= 0.5 * (e.mean("held-out loss", "joined once") - e.mean("held-out loss", "joined after each layer"))
            ),
        ),
        Condition(
            "experts pay",
            "loss below that of tracks without experts with as many parameters for a token, on every seed",
            lambda e, arm: all(mine < its for mine, its in e.pairs("held-out loss", arm, "no experts")),
        ),
        Condition(
            "longer than trained",
            "at four times the trained length the loss rises less (or falls more) than with rotary positions in all "
            "layers, on every seed",
            lambda e, arm: all(
                mine < its for mine, its in e.pairs("loss at four times the length, added", arm, "rotary everywhere")
            ),
        ),
        Condition(
            "the difference falls with size",
            "relative to one decoder, the loss is nearer at twice the width, mean over seeds",
            lambda e, arm: (
                e.mean("held-out loss, twice the width", arm) / e.mean("held-out loss, twice the width", WIDE)
                < e.mean("held-out loss", arm) / e.mean("held-out loss", WIDE)
            ),
        ),
    ],
    reported="the join by sums, and the share of tokens of the experts that are taken most",
)
def run(scale: Scale) -> Evidence:
    """Count and time two processes, then train every arm on each seed."""
    from pippin.claims.worlds.sequences import slow_links

    evidence, size = Evidence(), SIZES[scale]
    divided = (WIDE, "pt-moe") if scale.is_smoke else ("pt-moe", WIDE, "joined once", "joined after each layer")
    for arm, figures in slow_links.measure({arm: config_of(arm) for arm in divided}).items():
        for name, value in figures.items():
            evidence.add(name, value, arm=arm)
    evidence.add("sums over processes in a pass", 0.0, arm="one track")
    for arm in ARMS[:2] if scale.is_smoke else ARMS:
        evidence.add("parameters", config_of(arm).num_parameters, arm=arm)
        evidence.add("parameters for a token", config_of(arm).num_active_parameters, arm=arm)
        rate = _rate(scale, arm)
        for seed in scale.seeds:
            measure = partial(_figures, arm, seed, rate, size)
            for name, value in scale.measured(f"{arm}, {seed}", measure).items():
                evidence.add(name, value, arm=arm, seed=seed)
    for arm in ("pt-moe", WIDE):
        for seed in range(size.wide_seeds):
            measure = partial(_figures, arm, seed, _rate(scale, arm, 2), size, 2)
            found = scale.measured(f"{arm}, {seed}, wide", measure)["held-out loss"]
            evidence.add("held-out loss, twice the width", found, arm=arm, seed=seed, unit="nats")
    return evidence


def config_of(arm: str, widen: int = 1) -> PTMoEConfig:
    """The decoder of an arm.

    Args:
        arm: one of `ARMS`.
        widen: factor of all widths.
    """
    from pippin.claims.worlds.sequences.byte_text import VOCABULARY
    from pippin.language.parallel.pt_moe import PTMoEConfig

    narrow = PTMoEConfig(
        vocab_size=VOCABULARY,
        hidden_size=32 * widen,
        num_hidden_layers=LAYERS,
        num_tracks=TRACKS,
        block_depth=4,
        num_attention_heads=2 * widen,
        num_key_value_heads=widen,
        head_dim=16,
        intermediate_size=96 * widen,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48 * widen,
        window=64,
        rope_theta=10_000.0,
        max_position_embeddings=4096,
    )
    match arm:
        case "one decoder":
            return replace(
                narrow,
                num_tracks=1,
                hidden_size=64 * widen,
                num_attention_heads=4 * widen,
                num_key_value_heads=2 * widen,
                intermediate_size=192 * widen,
                moe_intermediate_size=96 * widen,
            )
        case "joined after each layer":
            return replace(narrow, block_depth=1)
        case "joined once":
            return replace(narrow, block_depth=LAYERS)
        case "one track":
            return replace(narrow, num_tracks=1)
        case "no experts":
            return replace(narrow, experts_every=0)
        case "sum":
            return replace(narrow, join="sum")
    return narrow


def _decoder(arm: str, seed: int, widen: int) -> Decoder:
    from pippin.claims.worlds.sequences.byte_text import byte_decoder
    from pippin.nn.attention.rotary import Rotary

    config = config_of(arm, widen).decoder()
    if arm == "rotary everywhere":
        layers = (replace(each, attention=replace(each.attention, rotary=Rotary())) for each in config.layers)
        config = replace(config, layers=tuple(layers))
    return byte_decoder(config, seed=seed)


def _trained(arm: str, seed: int, rate: float, steps: int, widen: int) -> Decoder:
    from pippin.claims.worlds.sequences.byte_text import train_bytes
    from pippin.language.objectives import NextToken
    from pippin.language.router_losses import RouterLosses

    module, objective = _decoder(arm, seed, widen), NextToken(router_losses=RouterLosses())
    return train_bytes(module, steps=steps, seed=seed, rows=ROWS, length=LENGTH, lr=rate, objective=objective)


def _rate(scale: Scale, arm: str, widen: int = 1) -> float:
    """The learning rate of the lowest validation loss after a short training with another seed."""
    from pippin.claims.worlds.sequences.byte_text import byte_text, held_out_nats
    from pippin.claims.worlds.training import SEARCH_SEED, best_rate

    def validated(rate: float) -> float:
        module = _trained(arm, SEARCH_SEED, rate, SIZES[scale].search, widen)
        return held_out_nats(module, length=LENGTH, limit=16_384, text=byte_text(validation=True))

    return best_rate(
        RATES[scale],
        lambda rate: scale.measured(f"{arm}, {rate}, {widen}", lambda: {"loss": validated(rate)})["loss"],
    )


def _figures(arm: str, seed: int, rate: float, size: _Size, widen: int = 1) -> dict[str, float]:
    """What one training gives."""
    import torch

    from pippin.claims.worlds.sequences.byte_text import byte_text, held_out_nats
    from pippin.language.router_losses import watch_routers

    module = _trained(arm, seed, rate, size.steps, widen)
    near, far = (held_out_nats(module, length=length, limit=size.held_out) for length in (LENGTH, FAR))
    found = {"held-out loss": near, "loss at four times the length, added": far - near, "learning rate": rate}
    with torch.no_grad(), watch_routers(module) as log:
        module(byte_text().held_out[: 4 * LENGTH].view(4, -1))
    if log.shares:
        found["share of the busiest expert"] = max(float(shares.max()) for _, shares in log.shares)
    return found
