"""Latent attention: where its matrices lie in folders and in GGUF, and the keys that describe it there.

Notable here:
- rotated dimensions are stored as interleaved pairs, after those of a head or of a latent vector that are not rotated
- folders have the rows for keys and values of a head in one matrix, as older GGUF files do; newer ones, and folders of
  mlx-lm, have a matrix of each, that of the keys transposed, as it is multiplied with the queries
- llama.cpp multiplies scores by what one key says of YaRN (``mscale_all_dim``), and nothing else with it

Source: DeepSeek-V2, arXiv:2405.04434; the keys of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Fields, TensorRule, pair_order, rename
from pippin.language.families.gguf_layout import GGUFHeader
from pippin.nn.attention.attention import LatentSpec

_OF_MLX: Final = ("self_attn.embed_q", "self_attn.unembed_out")
_LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
_LOG_WEIGHT: Final = 0.1  # that of the logarithm in YaRN's multiplier, which this key includes


def latent_of(config: DecoderConfig) -> LatentSpec:
    """The sizes of the layers with latent attention, which are the same in all."""
    return next(layer.attention.latent for layer in config.layers if layer.attention.latent is not None)


def rotated_rules(latent: LatentSpec, stored: Mapping[str, str]) -> list[TensorRule]:
    """Rules of the matrices with rotated rows, by Pippin's names of them."""
    periods = {"kv_a_proj_with_mqa": (latent.kv_rank + latent.rotated_dim, latent.kv_rank)}
    usual = latent.plain_dim + latent.rotated_dim, latent.plain_dim
    return [
        _last_interleaved(theirs, f"self_attn.{ours}", *periods.get(ours, usual)) for ours, theirs in stored.items()
    ]


def keys_and_values(config: DecoderConfig, stored: str = "self_attn.kv_b_proj") -> TensorRule:
    """The matrices from latent vectors to keys and values, in one: of each head the rows of both.

    Args:
        config: the decoder.
        stored: name of the stored matrix.
    """
    latent = latent_of(config)
    heads, sizes = config.num_attention_heads, [latent.plain_dim, latent.value_dim]
    return TensorRule(
        stored,
        _KEYS_AND_VALUES,
        lambda tensor, config: [part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split(sizes, 1)],
        lambda parts, config: torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1),
    )


def keys_and_values_apart(config: DecoderConfig, stored: tuple[str, str] = _OF_MLX) -> list[TensorRule]:
    """The same matrices, one for keys and one for values, of each head by itself; that for keys is transposed.

    Args:
        config: the decoder.
        stored: names of the stored matrices; mlx-lm's if not given.
    """
    heads = config.num_attention_heads
    keys, values = _KEYS_AND_VALUES
    return [
        TensorRule(
            stored[0],
            (keys,),
            lambda tensor, config: [tensor.mT.flatten(0, 1)],
            lambda parts, config: parts[0].unflatten(0, (heads, -1)).mT,
            across=True,
        ),
        TensorRule(
            stored[1],
            (values,),
            lambda tensor, config: [tensor.flatten(0, 1)],
            lambda parts, config: parts[0].unflatten(0, (heads, -1)),
        ),
    ]


_KEYS_AND_VALUES = ("self_attn.k_b_proj", "self_attn.v_b_proj")


def _last_interleaved(stored: str, ours: str, period: int, kept: int) -> TensorRule:
    """A rule for rows of which, in every ``period``, those after the first ``kept`` are interleaved pairs."""
    rotated = pair_order(interleaved=True, dims=period - kept, head_dim=period - kept)
    order = torch.cat([torch.arange(kept), kept + rotated])

    def reordered(rows: Tensor, order: Tensor) -> Tensor:
        parts: Tensor = rows.unflatten(0, (-1, period))
        return parts.index_select(1, order.to(rows.device)).flatten(0, 1)

    return TensorRule(
        stored,
        (ours,),
        lambda tensor, config: [reordered(tensor, order)],
        lambda parts, config: reordered(parts[0], order.argsort()),
    )


# --- GGUF -------------------------------------------------------------------------------------------------------------


def latent_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    """The fields of a `config.json` with the sizes of latent attention, and its rotary encoding.

    Raises:
        CorruptedFile: heads with fewer dimensions than are rotated.
        UnsupportedModel: a multiplier of scores that the decoder does not have.
    """
    of_heads = "_mla" if "attention.key_length_mla" in header else ""
    rotated, size = header.get("rope.dimension_count", int), header.get(f"attention.key_length{of_heads}", int)
    if not 0 < rotated < size:
        raise CorruptedFile(f"{header.where}: {rotated} of {size} dimensions of a head are rotated")
    for key in ("attention.temperature_scale", "rope.scaling.attn_factor"):
        if (value := header.get(key, float, 1.0 if key.endswith("factor") else 0.0)) not in (0.0, 1.0):
            raise UnsupportedModel(f"{header.where}: {key} {value} is not supported with latent attention")
    rope = dict(fields["rope_parameters"])
    if rope["rope_type"] == "yarn":
        weight = header.get(_LOG_MULTIPLIER, float, 0.0) / _LOG_WEIGHT
        if weight <= 0:
            raise UnsupportedModel(f"{header.where}: yarn without {_LOG_MULTIPLIER} is not supported here")
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {
        "kv_lora_rank": header.get("attention.kv_lora_rank", int),
        "q_lora_rank": header.get("attention.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": header.get(f"attention.value_length{of_heads}", int),
        "rope_parameters": rope,
    }


def latent_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that `latent_from_gguf` and llama.cpp read."""
    latent, rotary = latent_of(config), config.layers[0].attention.rotary
    fields: dict[str, Any] = {
        "attention.key_length": latent.kv_rank + latent.rotated_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": latent.plain_dim + latent.rotated_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.q_lora_rank": latent.q_rank,
        "rope.dimension_count": latent.rotated_dim,
    }
    if rotary is not None and rotary.scaling == "yarn":
        fields |= {
            "rope.scaling.yarn_beta_fast": float(rotary.high),
            "rope.scaling.yarn_beta_slow": float(rotary.low),
            _LOG_MULTIPLIER: _LOG_WEIGHT * rotary.mscale_all_dim,
        }
    return fields


def latent_gguf_rules(config: DecoderConfig, *, rotated: bool = True) -> list[TensorRule]:
    """Rules of the matrices and norms of latent attention in GGUF.

    Args:
        config: the decoder.
        rotated: whether what is called rotated dimensions is rotated, and so stored as interleaved pairs.
    """
    latent = latent_of(config)
    names = {"q_proj": "attn_q", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa"}
    return [
        *(rotated_rules(latent, names) if rotated else rename(**{f"self_attn__{ours}": names[ours] for ours in names})),
        *rename(self_attn__q_a_proj="attn_q_a", self_attn__q_a_layernorm="attn_q_a_norm"),
        *rename(self_attn__kv_a_layernorm="attn_kv_a_norm"),
        *keys_and_values_apart(config, ("attn_k_b", "attn_v_b")),
        keys_and_values(config, "attn_kv_b"),
    ]
