"""What a family of checkpoints is: how its `config.json` is read and written, and where its tensors lie in the file.

Notable here:
- a family is one small file with a `Family`: a function from the fields of a `config.json` to a `DecoderConfig`, the
  fields that go back, and rules for the tensors whose names or layouts are not Pippin's own
- Pippin's names are those of Llama in Hugging Face's library, so most families need few rules or none
- pairs of interleaved rotary dimensions, and heads that are rotated in part, become plain halves by the order of the
  rows of queries and keys: every kernel computes them, and attention is the same
- a rule works on shapes alone, too (on torch's meta device), so a file is compared with its configuration before a
  weight is read
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.gguf_layout import GGUFLayout
from pippin.language.families.sizes import MAX_LAYERS, check_size
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import Activation, FeedForwardSpec

Fields = Mapping[str, Any]
"""The contents of a `config.json`."""
Split = Callable[[Tensor, DecoderConfig], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor], DecoderConfig], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    "quick_gelu": "gelu_sigmoid",
}


def same(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """The split of a tensor that differs in its name only."""
    return [tensor]


@dataclass(frozen=True)
class TensorRule:
    """A stored tensor that is one or more of Pippin's, under other names or in another layout.

    Args:
        stored: its name in the checkpoint without "layers.N." and without ".weight" or ".bias".
        ours: Pippin's names of its parts, likewise.
        split: the parts of the stored tensor; of a weight as of a bias.
        join: the stored tensor of the parts.
        leaves: which of a layer's tensors the rule is about.
        whole: the stored name has no ".weight" or ".bias" at its end.
        across: whether weights move from one row to another, so that blocks of a row are taken apart before.
    """

    stored: str
    ours: tuple[str, ...]
    split: Split = same
    join: Join = lambda parts, config: parts[0]
    leaves: tuple[str, ...] = ("weight", "bias")
    whole: bool = False
    across: bool = False


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Args:
        model_type: its name in `config.json`.
        architecture: the class in Hugging Face's library.
        read: the decoder that the fields of a `config.json` describe.
        write: the fields of `config.json` that `common_fields` does not write; they override those it writes.
        rules: the rules of a decoder's tensors; names without a rule are the same in the file.
        prefix: what all stored names but that of the output matrix begin with.
        layers: the stored name of "layers".
        eps: the stored name of the epsilon of norms.
        shares_kv: whether layers may read the keys and values of others in this family's own format.
        predicts_more: whether files may hold layers after the last that predict further tokens; they are not read.
        omitted: fields that `common_fields` writes and the family must not have.
        gguf: how llama.cpp stores the family; None for one that it does not have.
        pippin_only: whether only Pippin has such models.
        mlx_lm: what mlx-lm changes in weights that are no convolutions; see `MLXLayout`.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]] = field(default=lambda config: {})
    rules: Callable[[DecoderConfig], Sequence[TensorRule]] = field(default=lambda config: ())
    prefix: str = "model."
    layers: str = "layers"
    eps: str = "rms_norm_eps"
    shares_kv: bool = False
    predicts_more: bool = False
    omitted: tuple[str, ...] = ()
    gguf: GGUFLayout | None = None
    pippin_only: bool = False
    mlx_lm: Literal["nothing", "norms as they multiply", "multipliers in weights"] = "nothing"


# --- reading a configuration ------------------------------------------------------------------------------------------


def read_decoder(
    family: str,
    config: Fields,
    *,
    eps: str = "rms_norm_eps",
    feedforward: FeedForwardSpec | Callable[[int], FeedForwardSpec] | None = None,
    rotary: Callable[[int, bool], Rotary | None] | None = None,
    local: Callable[[int], bool] | None = None,
    softcap: float | None = None,
    attention: AttentionSpec | None = None,
    layer: Callable[[int], LayerSpec] | None = None,
    tied: bool = False,
    **fields: Any,
) -> DecoderConfig:
    """A decoder from the fields that most families share.

    Args:
        family: the family's model type.
        config: the contents of `config.json`.
        eps: name of the epsilon of norms.
        feedforward: feed-forward layer, or that of each layer; None for a gated one of ``intermediate_size``.
        rotary: rotary encoding of a layer, by its index and whether it attends locally; None to read the usual fields.
        local: whether a layer attends within the window; None to read ``layer_types``.
        softcap: bound of attention scores.
        attention: what else the attention of every layer has; window and rotary encoding are those of the layer.
        layer: each layer as a whole, in place of the five above.
        tied: whether embedding and output matrix are one where the file does not say so.
        fields: further fields of the `DecoderConfig`.
    """
    check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    kinds = config.get("layer_types")
    window = config.get("sliding_window")

    def is_local(index: int) -> bool:
        if local is not None:
            return local(index)
        return kinds is not None and kinds[index] == "sliding_attention"

    def usual(index: int) -> LayerSpec:
        here = is_local(index)
        turning = read_rotary(config, here) if rotary is None else rotary(index, here)
        inner = feedforward(index) if callable(feedforward) else feedforward
        if inner is None:
            inner = FeedForwardSpec(config["intermediate_size"], activation_of(config))
        every = AttentionSpec(softcap=softcap) if attention is None else attention
        return LayerSpec(replace(every, window=window if here else None, rotary=turning), inner)

    return DecoderConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=width,
        layers=tuple((layer or usual)(index) for index in range(config["num_hidden_layers"])),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get(eps, 1e-6),
        tie_word_embeddings=config.get("tie_word_embeddings", tied),
        training_methods=dict(config.get("training_methods", {})),
        **fields,
    )


def activation_of(config: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The nonlinearity that a configuration names.

    Raises:
        UnsupportedModel: one that the decoder does not have.
    """
    found = config.get(name) or default
    if found not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {found!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def read_rotary(config: Fields, local: bool = False, *, theta: float = 10_000.0) -> Rotary:
    """The rotary encoding, from the older fields (rope_theta, rope_scaling) or the newer one (rope_parameters).

    Args:
        config: the contents of `config.json`.
        local: whether the layer attends within a window, for families with two encodings.
        theta: base where the file names none.

    Raises:
        UnsupportedModel: a way to extend the context that the decoder does not have.
    """
    rope = dict(config.get("rope_parameters") or {})
    kind = "sliding_attention" if local else "full_attention"
    rope = dict(rope[kind]) if kind in rope else rope
    scaling: dict[str, Any] = rope or dict(config.get("rope_scaling") or {})
    base: Any = rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", theta)))
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dims = None if part == 1.0 else int(head_dim * part)
    how = scaling.get("rope_type", scaling.get("type", "default"))
    original: Any = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if how == "default":
        return Rotary(base, dims=dims)
    if how == "linear":
        return Rotary(base, "linear", scaling["factor"], dims=dims)
    if how == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return Rotary(base, "llama3", scaling["factor"], original, low, high, dims=dims)
    if how == "yarn":
        return Rotary(
            base,
            "yarn",
            scaling["factor"],
            original,
            low=scaling.get("beta_slow") or 1.0,
            high=scaling.get("beta_fast") or 32.0,
            attention_factor=scaling.get("attention_factor"),
            truncate=scaling.get("truncate", True),
            mscale=scaling.get("mscale") or 0.0,
            mscale_all_dim=scaling.get("mscale_all_dim") or 0.0,
            dims=dims,
        )
    raise UnsupportedModel(f"rope type {how!r} is not supported; supported are default, linear, llama3 and yarn")


def refuse(family: str, config: Fields, *flags: str) -> None:
    """Refuse settings of a family that the decoder does not have.

    Raises:
        UnsupportedModel: one of the flags is set.
    """
    for flag in flags:
        if config.get(flag):
            raise UnsupportedModel(f"{flag}={config[flag]!r} is not supported for the {family} family")


# --- writing a configuration ------------------------------------------------------------------------------------------


def common_fields(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The fields of `config.json` that most families share."""
    first = config.layers[0]
    windows = {layer.attention.window for layer in config.layers} - {None}
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == first.feedforward.activation)
    fields: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feedforward.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        family.eps: config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": activation,
        "sliding_window": next(iter(windows), None),
        **rope_fields(config),
    }
    if windows:
        fields["layer_types"] = layer_types(config)
        fields["use_sliding_window"] = True
    if config.training_methods:
        fields["training_methods"] = dict(config.training_methods)
    return fields


def layer_types(config: DecoderConfig) -> list[str]:
    """Which layers attend to all earlier tokens and which within a window."""
    return ["full_attention" if layer.attention.window is None else "sliding_attention" for layer in config.layers]


def expert_fields(spec: FeedForwardSpec) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    if not spec.num_experts:
        return {}
    return {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "norm_topk_prob": spec.norm_topk_prob,
        "moe_intermediate_size": spec.intermediate_size,
    }


def rope_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of rotary encodings, in a format that old and new versions of transformers read.

    Raises:
        UnsupportedModel: frequencies that have no such fields.
    """
    rotaries = {
        layer.attention.window is None: layer.attention.rotary for layer in config.layers if layer.attention.rotary
    }
    main = rotaries.get(True) or rotaries.get(False) or Rotary()
    if main.divisors is not None and main.long_divisors is None:
        raise UnsupportedModel("rotary frequencies given as a table have no Hugging Face configuration")
    fields: dict[str, Any] = {"rope_theta": main.theta}
    if main.dims is not None:
        fields["partial_rotary_factor"] = main.dims / config.head_dim
    scaling: dict[str, Any] = {"rope_type": main.scaling, "factor": main.factor}
    if main.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = main.original_max_position_embeddings
    if main.scaling == "llama3":
        scaling |= {"low_freq_factor": main.low, "high_freq_factor": main.high}
    if main.scaling == "yarn":
        scaling |= {"beta_slow": main.low, "beta_fast": main.high}
        optional = {"attention_factor": main.attention_factor, "mscale": main.mscale}
        scaling |= {name: value for name, value in optional.items() if value} | {"truncate": main.truncate}
        if main.mscale_all_dim:
            scaling["mscale_all_dim"] = main.mscale_all_dim
    if main.scaling != "none":
        fields["rope_scaling"] = scaling
    return fields


# --- rules ------------------------------------------------------------------------------------------------------------


def rename(**names: str) -> list[TensorRule]:
    """Rules for tensors that differ only in name: Pippin's, with "__" for ".", and the stored one."""
    return [TensorRule(stored, (ours.replace("__", "."),)) for ours, stored in names.items()]


def fused(stored: str, ours: Iterable[str], rows: Callable[[DecoderConfig], Sequence[int]]) -> TensorRule:
    """A rule for a stored matrix (and bias) that holds several of Pippin's one after the other.

    Args:
        stored: its name.
        ours: Pippin's names of the parts.
        rows: their numbers of rows.
    """
    return TensorRule(
        stored,
        tuple(ours),
        lambda tensor, config: tensor.split(list(rows(config))),
        lambda parts, config: torch.cat(list(parts)),
    )


def fused_qkv(stored: str) -> TensorRule:
    """Query, key and value rows in one matrix, in this order."""

    def rows(config: DecoderConfig) -> list[int]:
        keys = config.num_key_value_heads * config.head_dim
        return [config.num_attention_heads * config.head_dim, keys, keys]

    return fused(stored, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), rows)


def fused_rotated_qkv(stored: str, *, interleaved: bool) -> TensorRule:
    """Query, key and value rows in one matrix, with the rotated pairs of `rotated_rows`."""
    plain = fused_qkv(stored)

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        q, k, v = plain.split(tensor, config)
        return [to_halves(rows, config, interleaved=interleaved) for rows in (q, k)] + [v]

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        q, k, v = parts
        return torch.cat([*(from_halves(rows, config, interleaved=interleaved) for rows in (q, k)), v])

    return TensorRule(stored, plain.ours, split, join)


def fused_gate_up(stored: str = "mlp.gate_up_proj") -> TensorRule:
    """Gate and up rows in one matrix, in this order."""
    return fused(
        stored,
        ("mlp.gate_proj", "mlp.up_proj"),
        lambda config: [config.layers[0].feedforward.intermediate_size] * 2,
    )


def one_added(*names: str) -> list[TensorRule]:
    """Norm weights that are stored minus one (their biases are not)."""
    return [
        TensorRule(
            name,
            (name,),
            lambda tensor, config: [tensor.float() + 1.0],
            lambda parts, config: parts[0] - 1.0,
            leaves=("weight",),
        )
        for name in names
    ]


def rotated_rows(*, interleaved: bool, norms: bool = False) -> list[TensorRule]:
    """Rules for queries and keys whose rotated pairs are not the halves of a head.

    Args:
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + dims / 2) for ``dims`` rotated dimensions.
        norms: whether queries and keys have norms before the rotation, whose weights are in the same order.
    """
    return [
        TensorRule(
            f"self_attn.{name}",
            (f"self_attn.{name}",),
            lambda tensor, config: [to_halves(tensor, config, interleaved=interleaved)],
            lambda parts, config: from_halves(parts[0], config, interleaved=interleaved),
        )
        for name in ("q_proj", "k_proj", *(("q_norm", "k_norm") if norms else ()))
    ]


def to_halves(rows: Tensor, config: DecoderConfig, *, interleaved: bool = False) -> Tensor:
    """Rows of queries or keys in Pippin's order, where rotated pairs are (i, i + head_dim / 2)."""
    return _reordered(rows, config.head_dim, _order(config, interleaved))


def from_halves(rows: Tensor, config: DecoderConfig, *, interleaved: bool = False) -> Tensor:
    """The inverse of `to_halves`."""
    return _reordered(rows, config.head_dim, _order(config, interleaved).argsort())


def _order(config: DecoderConfig, interleaved: bool) -> Tensor:
    dims = next((layer.attention.rotary.dims for layer in config.layers if layer.attention.rotary), None)
    return pair_order(interleaved=interleaved, dims=dims or config.head_dim, head_dim=config.head_dim)


def _reordered(rows: Tensor, head_dim: int, order: Tensor) -> Tensor:
    heads: Tensor = rows.unflatten(0, (-1, head_dim))
    return heads.index_select(1, order.to(rows.device)).flatten(0, 1)


def pair_order(*, interleaved: bool, dims: int, head_dim: int) -> Tensor:
    """Indices of a head's stored dimensions in Pippin's order, where the pairs are (i, i + head_dim / 2).

    >>> pair_order(interleaved=True, dims=4, head_dim=8).tolist()
    [0, 2, 4, 5, 1, 3, 6, 7]
    >>> pair_order(interleaved=False, dims=4, head_dim=8).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    rotated = torch.arange(dims)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    rest_first, rest_second = torch.arange(dims, head_dim).chunk(2) if dims < head_dim else (rotated[:0], rotated[:0])
    return torch.cat([first, rest_first, second, rest_second])
