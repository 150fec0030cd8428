"""KV sharing: layers of an existing checkpoint are converted to read the keys and values of an earlier layer.

Notable here:
- no parameters are added: the key and value projections of the sharing layers are removed, other weights are unchanged
- if the last layers share (as in AFM and Gemma 3n), they write nothing to the cache, so the engine computes them for
  the last token of a prompt only; sharing in groups of neighbors (cross-layer attention) saves memory, not compute
- a layer reads one with the same window and rotation: local and global layers have separate sources
- the loss of quality is recovered by distillation from the original model: see
  `pippin.language.methods.distillation`
- a model trained with stochastic routing (`pippin.language.methods.kv_routing`) needs no distillation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.methods.kv_routing import DROPPED, warn_untrained, with_kv_sharing_layers

Start = Literal["own", "mean"]


def sharing_sources(
    config: DecoderConfig, num_kv_shared_layers: int | None = None, *, group_size: int | None = None
) -> tuple[int | None, ...]:
    """The layer whose keys and values each layer reads; None for its own.

    Args:
        config: config of a decoder in which no layers share keys and values.
        num_kv_shared_layers: number of last layers that read the last layer of their kind (window and rotation) before
            them, from 1 to one less than the number of layers.
        group_size: instead of ``num_kv_shared_layers``: consecutive layers per group, of which all read the first; from
            2 to the number of layers.

    Raises:
        InvalidArgument: a number out of range; both or neither are given; layers that share already; a layer without
            an earlier one of its kind.

    Source: AFM: arXiv:2507.13575; groups: Brandon et al. 2024, arXiv:2405.12981.
    """
    kinds = [(layer.attention.window, layer.attention.rotary) for layer in config.layers]
    count = len(kinds)
    if len(config.cached_layers) < count:
        raise InvalidArgument(f"{count - len(config.cached_layers)} of {count} layers share a cache already")
    if (num_kv_shared_layers is None) == (group_size is None):
        raise InvalidArgument(
            f"give either num_kv_shared_layers or group_size, got {num_kv_shared_layers} and {group_size}"
        )
    if num_kv_shared_layers is not None and not 1 <= num_kv_shared_layers < count:
        raise InvalidArgument(
            f"num_kv_shared_layers must be from 1 to {count - 1}, so that one of {count} layers keeps keys and values, "
            f"got {num_kv_shared_layers}"
        )
    if group_size is not None and not 2 <= group_size <= count:
        raise InvalidArgument(f"group_size must be from 2 to {count}, the layers of the model, got {group_size}")
    found: list[int | None] = []
    for index, kind in enumerate(kinds):
        if num_kv_shared_layers is not None:
            within = range(count - num_kv_shared_layers if index >= count - num_kv_shared_layers else 0)
            earlier = [other for other in within if kinds[other] == kind][-1:]
        else:
            assert group_size is not None
            earlier = [other for other in range(index - index % group_size, index) if kinds[other] == kind][:1]
        if num_kv_shared_layers is not None and within and not earlier:
            raise InvalidArgument(
                f"layer {index} has no layer of its kind before layer {count - num_kv_shared_layers} to read"
            )
        found.append(earlier[0] if earlier else None)
    return tuple(found)


def share_last_layers(
    module: Decoder, num_kv_shared_layers: int | None = None, *, group_size: int | None = None, init: Start = "mean"
) -> Decoder:
    """A copy of a decoder in which layers read the keys and values of others; it needs training.

    Args:
        module: the decoder, not packed; it is not changed.
        num_kv_shared_layers: see `sharing_sources`.
        group_size: see `sharing_sources`.
        init: the key and value projections of a layer that is read: its "own", or the "mean" of its own and those of
            all layers that read it, which starts closer to the original model.

    Raises:
        InvalidArgument: as for `sharing_sources`; a packed decoder.
    """
    return _with_sources(
        module,
        module.config.with_kv_sources(sharing_sources(module.config, num_kv_shared_layers, group_size=group_size)),
        init,
    )


def share_kv(
    module: Decoder, kv_sharing_ratio: float | None = None, *, kv_sharing_layers: Sequence[int] | None = None
) -> Decoder:
    """A copy of a decoder in which other layers read the nearest KV-sharing layer before them, without own projections.

    The copy computes what the decoder computed in training when those sources were sampled. It has one fixed cache
    size; the original decoder supports all of them.

    Args:
        module: a decoder trained with `pippin.language.methods.kv_routing.KVRouting`, not packed; it is not changed.
        kv_sharing_ratio: fraction of the layers with a cache, above 0, at most 1, spread evenly.
        kv_sharing_layers: instead of ``kv_sharing_ratio``: the indices of the layers with a cache, ascending;
            `pippin.language.methods.kv_routing.greedy_layers` selects them.

    Raises:
        InvalidArgument: both or neither are given, a value out of range, or the first layer of a kind has no cache;
            layers that share already; a packed decoder.

    Warns:
        UntrainedSharing: the decoder was not trained with KV routing.

    Source: arXiv:2604.22782.
    """
    config = with_kv_sharing_layers(module.config, kv_sharing_ratio, kv_sharing_layers)
    warn_untrained(config)
    return _with_sources(module, config, "own")


def _with_sources(module: Decoder, config: DecoderConfig, init: Start) -> Decoder:
    """A copy of the decoder with the KV sources of another config."""
    sources = [layer.attention.kv_source for layer in config.layers]
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if "embed_tokens.weight" not in weights:
        raise InvalidArgument("a packed decoder cannot be changed; load the model with pack=False")
    with torch.device("meta"):
        student = Decoder(config)
    tensors: dict[str, Tensor] = {}
    for name in student.state_dict():
        parts = name.split(".")
        averaged = [weights[name]]
        if init == "mean" and len(parts) > 3 and parts[3] in DROPPED:
            own = int(parts[1])
            averaged += [weights[_of(name, index)] for index, source in enumerate(sources) if source == own]
        tensors[name] = torch.stack(averaged).mean(0) if len(averaged) > 1 else averaged[0].clone()
    student.load_state_dict(tensors, assign=True)
    student.tie_weights()
    return student.train(module.training)


def _of(name: str, layer: int) -> str:
    """The name of the same tensor in another layer."""
    first, _, rest = name.split(".", 2)
    return f"{first}.{layer}.{rest}"
