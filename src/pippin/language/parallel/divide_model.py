"""A decoder in several processes: each has tracks of its own, or a part of every matrix (tensor parallelism).

Notable here:
- a part is a `Decoder` with the sizes of the part, so caches, engine and training see nothing new; the sums over the
  processes are in the joins of its tracks, or behind its attention and feed-forward layers
- tracks of n processes need one sum for a block of D layers, tensor parallelism two for each layer
- embeddings, norms and the output matrix are whole in every process, and so are their gradients

Source: Parallel Track Transformers, arXiv:2602.07306, section 3; Shoeybi et al. 2019, arXiv:1909.08053, section 3
(tensor parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.decoder_layer import DecoderLayer
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.packed_layers import PackedLinear
from pippin.nn.parallel.collectives import Collectives
from pippin.nn.parallel.tracks import Tracks

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_ROWS: Final = re.compile(r"(q|k|v|gate|up)_proj\.(weight|bias)$|sinks$")
_COLUMNS: Final = re.compile(r"(o|down)_proj\.weight$")
_ONCE: Final = re.compile(r"(o|down)_proj\.bias$")


def divide(model: LanguageModel, collectives: Collectives) -> LanguageModel:
    """The part of a model that one process computes: some of its tracks, or without tracks some of every matrix.

    Rank 0 gives its part to an `Engine`, the others to `pippin.engine.follow`.

    Args:
        model: a model that `pippin.load(..., pack=False)` returned, the same in all processes.
        collectives: connects the processes.

    Raises:
        InvalidArgument: the processes cannot divide it, or its matrices are packed.
        UnsupportedModel: the model is computed by transformers.
    """
    decoder = model.module
    divided = tensor_parallel if decoder.config.tracks is None else share_tracks
    return replace(model, network=divided(decoder, collectives), adapters={})


def share_tracks(decoder: Decoder, collectives: Collectives) -> Decoder:
    """The part of a decoder with the tracks of this process; it shares its weights.

    Args:
        decoder: a decoder with tracks.
        collectives: connects the processes.

    Raises:
        InvalidArgument: the decoder has no tracks, or the processes cannot divide them.
    """
    tracks, config = decoder.config.tracks, decoder.config
    if tracks is None:
        raise InvalidArgument(
            f"this {config.family} decoder has no tracks to share; tensor_parallel divides its matrices"
        )
    layers = own_layers(config, collectives)
    each = replace(tracks, num_tracks=len(_own(tracks, collectives)))
    part = _empty(replace(config, layers=tuple(config.layers[index] for index in layers), tracks=each), decoder)
    part.layers = nn.ModuleList(decoder.layers[index] for index in layers)
    part.collectives = collectives
    return part.train(decoder.training)


def own_layers(config: DecoderConfig, collectives: Collectives) -> list[int]:
    """The layers of a decoder with tracks that a process computes, by their index in the whole decoder.

    Args:
        config: of the whole decoder.
        collectives: connects the processes.

    Raises:
        InvalidArgument: the processes cannot divide the tracks.
    """
    assert config.tracks is not None
    own = _own(config.tracks, collectives)
    return [index for index in range(len(config.layers)) if config.tracks.place(index).track in own]


def _own(tracks: Tracks, collectives: Collectives) -> range:
    """The tracks of a process."""
    if tracks.num_tracks % collectives.size:
        raise InvalidArgument(
            f"{collectives.size} processes cannot divide {tracks.num_tracks} tracks; their number must divide that of "
            "the tracks"
        )
    each = tracks.num_tracks // collectives.size
    return range(collectives.rank * each, (collectives.rank + 1) * each)


def tensor_parallel(decoder: Decoder, collectives: Collectives) -> Decoder:
    """The part of a decoder with some heads of every attention and some inner dimensions of every feed-forward layer.

    It is for inference: gradients are not exchanged.

    Args:
        decoder: a decoder of attention and feed-forward layers, dense or mixtures.
        collectives: connects the processes.

    Raises:
        InvalidArgument: the processes cannot divide its heads or inner dimensions, or it has layers of other kinds.
    """
    config = decoder.config
    if any(isinstance(part, PackedLinear) for part in decoder.modules()):
        raise InvalidArgument("packed matrices cannot be divided; load the model with pack=False")
    _check_divisible(config, collectives.size)
    layers = tuple(_part_of(layer, collectives.size) for layer in config.layers)
    heads, kv_heads = (n // collectives.size for n in (config.num_attention_heads, config.num_key_value_heads))
    part = _empty(replace(config, layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads), decoder)
    for to, layer in zip(part.layers, decoder.layers, strict=True):
        assert isinstance(to, DecoderLayer)
        tensors = {name: _share(name, tensor, collectives) for name, tensor in layer.state_dict().items()}
        to.load_state_dict(tensors, assign=True)
        for inner in (to.self_attn, to.mlp):
            assert isinstance(inner, nn.Module)
            inner.register_forward_hook(_summed(collectives))
    part.collectives = collectives
    part.layers.requires_grad_(False)  # what is outside of them is the whole decoder's, too
    return part.train(decoder.training)


def _empty(config: DecoderConfig, whole: Decoder) -> Decoder:
    """A decoder with the parts of another that are outside of layers, and layers without memory."""
    with torch.device("meta"):
        part = Decoder(config)
    for name in ("embed_tokens", "embed_positions", "norm", "lm_head"):
        setattr(part, name, getattr(whole, name))
    return part


def _check_divisible(config: DecoderConfig, size: int) -> None:
    if config.tracks is not None:
        raise InvalidArgument("a decoder with tracks is divided by them; see share_tracks")
    others = {
        "latent attention": any(layer.attention.latent for layer in config.layers),
        "recurrent layers": bool(config.recurrent_layers),
        "layers without attention or feed-forward layer": any(
            not layer.attends or not layer.feedforward.intermediate_size for layer in config.layers
        ),
        "experts beside a dense layer": any(layer.experts for layer in config.layers),
        "norms over all heads": config.qk_norm == "full",
        "sparse activations": any(layer.feedforward.activation_sparsity for layer in config.layers),
        "inputs of layers": bool(config.per_layer_size or config.laurel_rank or config.num_streams > 1),
    }
    if found := [name for name, there in others.items() if there]:
        raise InvalidArgument(f"tensor parallelism does not divide {' and '.join(found)}")
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    for layer in config.layers:
        sizes |= {
            "num_key_value_heads of a layer": layer.attention.num_key_value_heads or config.num_key_value_heads,
            "intermediate_size": layer.feedforward.intermediate_size,
            "shared_intermediate_size": layer.feedforward.shared_intermediate_size,
        }
        for name, value in sizes.items():
            if value % size:
                raise InvalidArgument(f"{size} processes cannot divide {name} {value}")


def _part_of(layer: LayerSpec, size: int) -> LayerSpec:
    """The spec of a process's part of a layer."""
    own, inner = layer.attention.num_key_value_heads, layer.feedforward
    feedforward: FeedForwardSpec = replace(
        inner,
        intermediate_size=inner.intermediate_size // size,
        shared_intermediate_size=inner.shared_intermediate_size // size,
    )
    attention = replace(layer.attention, num_key_value_heads=None if own is None else own // size)
    return replace(layer, attention=attention, feedforward=feedforward)


def _share(name: str, tensor: Tensor, collectives: Collectives) -> Tensor:
    """A process's part of one of a layer's tensors, in memory of its own."""
    if _ROWS.search(name):
        return tensor.chunk(collectives.size)[collectives.rank].clone()
    if _COLUMNS.search(name):
        return tensor.chunk(collectives.size, 1)[collectives.rank].clone()
    if _ONCE.search(name) and collectives.rank:
        return torch.zeros_like(tensor)
    return tensor.clone()


def _summed(collectives: Collectives) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that sums what the processes' parts of a layer compute."""

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # of attention, which also gives what it read
            return (collectives.sum(output[0]), *output[1:])
        return collectives.sum(output)

    return leave
