"""Parallel tracks with experts (PT-MoE): Pippin's own format, since no other library has one.

Notable here:
- lists by layer are those of one track, since all tracks are alike; tensors are numbered by the layers of all
  tracks, in the order of `DecoderConfig.layers`
- how the tracks are joined is part of the model: a file that names another join would be another model
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import (
    Family,
    Fields,
    activation_of,
    expert_fields,
    layer_types,
    read_decoder,
    read_rotary,
)
from pippin.language.families.sizes import MAX_LAYERS, check_size
from pippin.nn.attention.attention import QKNorm
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.nn.parallel.tracks import Tracks, of_first_track, side_by_side


def _read(config: Fields) -> DecoderConfig:
    tracks = Tracks(config["num_tracks"], config["track_block_depth"], config["track_join"])
    rotates, kinds = config["no_rope_layers"], config["mlp_layer_types"]

    def rotary(index: int, local: bool) -> Rotary | None:
        return read_rotary(config, local) if rotates[index] else None

    def feedforward(index: int) -> FeedForwardSpec:
        if kinds[index] == "dense":
            return FeedForwardSpec(config["intermediate_size"], activation_of(config))
        return FeedForwardSpec(
            config["moe_intermediate_size"],
            activation_of(config),
            num_experts=config["num_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            norm_topk_prob=config["norm_topk_prob"],
            router=RouterSpec(softcap=config.get("router_logit_softcapping")),
        )

    norm: QKNorm | None = "head" if config.get("use_qk_norm") else None
    one = read_decoder(FAMILY, config, rotary=rotary, feedforward=feedforward, qk_norm=norm)
    check_size("num_hidden_layers of all tracks", len(one.layers) * tracks.num_tracks, MAX_LAYERS)
    return replace(one, layers=side_by_side(one.layers, tracks), tracks=tracks)


def _write(config: DecoderConfig) -> dict[str, Any]:
    assert config.tracks is not None
    layers = of_first_track(config.layers, config.tracks)
    one = replace(config, layers=layers, tracks=None)
    inner = [layer.feedforward for layer in layers]
    dense = [spec.intermediate_size for spec in inner if not spec.num_experts]
    fields: dict[str, Any] = {
        "num_tracks": config.tracks.num_tracks,
        "track_block_depth": config.tracks.block_depth,
        "track_join": config.tracks.join,
        "num_hidden_layers": len(layers),
        "intermediate_size": next(iter(dense), None),
        "layer_types": layer_types(one),
        "no_rope_layers": [int(layer.attention.rotary is not None) for layer in layers],
        "mlp_layer_types": ["sparse" if spec.num_experts else "dense" for spec in inner],
    }
    experts = next((spec for spec in inner if spec.num_experts), inner[0])
    fields |= {"use_qk_norm": config.qk_norm is not None, "router_logit_softcapping": experts.router.softcap}
    return fields | expert_fields(experts)


FAMILY = "pt_moe"
PT_MOE = Family(FAMILY, "PTMoEForCausalLM", _read, _write, expert_rules(router="mlp.gate"), pippin_only=True)
"""Decoders with tracks."""
