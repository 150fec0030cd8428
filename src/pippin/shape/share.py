"""Fewer caches: layers of an ordinary checkpoint are made to read the keys and values of an earlier layer.

Notable here:
- nothing is added: the key and value projections of the sharing layers are dropped, all other weights are kept
- the last layers reading one layer (as in AFM and Gemma 3n) leave no trace in the cache, so the engine computes them
  for the last token of a prompt only; neighbours sharing in groups (cross-layer attention) save memory alone
- a layer reads one of its own kind: where local and global layers alternate, each kind has its source
- what the cut breaks, a short distillation from the uncut model repairs: see `pippin.language.distillation`
- a model that was trained with stochastic routing (`pippin.language.kv_routing`) takes any leaders, and nothing breaks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.kv_routing import DROPPED, led, warn_untrained
from pippin.language.transformer import Decoder, DecoderConfig

Start = Literal["own", "mean"]


def sources(config: DecoderConfig, shared: int | None = None, *, group: int | None = None) -> tuple[int | None, ...]:
    """Which layer each layer reads, None for its own keys and values.

    Args:
        config: of a decoder whose layers all have keys and values of their own.
        shared: how many layers at the end read the last layer of their kind (window and rotation) before them.
        group: or instead: of how many consecutive layers all read the first.

    Raises:
        InvalidArgument: sharing by ``shared`` layers is not from 1 to one less than there are; a group below 2 or
            larger than the decoder; both or neither are given; layers that share already; a layer without an earlier
            one of its kind.

    Source: AFM: arXiv:2507.13575; groups: Brandon et al. 2024, arXiv:2405.12981.
    """
    kinds = [(layer.attention.window, layer.attention.rotary) for layer in config.layers]
    count = len(kinds)
    if len(config.cached_layers) < count:
        raise InvalidArgument(f"{count - len(config.cached_layers)} of {count} layers share a cache already")
    if (shared is None) == (group is None):
        raise InvalidArgument(f"give either shared or group, got shared={shared} and group={group}")
    if shared is not None and not 1 <= shared < count:
        raise InvalidArgument(
            f"shared must be from 1 to {count - 1}, so that one of {count} layers keeps keys and values, got {shared}"
        )
    if group is not None and not 2 <= group <= count:
        raise InvalidArgument(f"group must be from 2 to {count}, the layers of the model, got {group}")
    found: list[int | None] = []
    for index, kind in enumerate(kinds):
        if shared is not None:
            within = range(count - shared if index >= count - shared else 0)
            earlier = [other for other in within if kinds[other] == kind][-1:]
        else:
            assert group is not None
            earlier = [other for other in range(index - index % group, index) if kinds[other] == kind][:1]
        if shared is not None and within and not earlier:
            raise InvalidArgument(f"layer {index} has no layer of its kind before layer {count - shared} to read")
        found.append(earlier[0] if earlier else None)
    return tuple(found)


def share_caches(
    module: Decoder, shared: int | None = None, *, group: int | None = None, start: Start = "mean"
) -> Decoder:
    """A copy of a decoder in which layers read the keys and values of others; in need of training.

    Args:
        module: not packed; it is left as it is.
        shared: see `sources`.
        group: see `sources`.
        start: the key and value projections of a layer that is read: its "own", or the "mean" of its own and those of
            all layers that read it, from which less is left to repair.

    Raises:
        InvalidArgument: as `sources` says; a packed decoder.
    """
    return _reading(module, module.config.reading(sources(module.config, shared, group=group)), start)


def share(module: Decoder, retention: float | None = None, *, leaders: Sequence[int] | None = None) -> Decoder:
    """A copy of a decoder in which followers read the nearest leader before them; their own projections are dropped.

    The copy computes what the decoder computed in training when those sources were drawn. Saved, it is a model for one
    size of the cache alone; the decoder itself keeps all others open.

    Args:
        module: trained with `pippin.language.kv_routing.KVRouting`; not packed; it is left as it is.
        retention: share of the layers that keep a cache, above 0, at most 1, spread evenly.
        leaders: or instead: which do, in ascending order; `pippin.language.kv_routing.select_leaders` finds some.

    Raises:
        InvalidArgument: both or neither are given, out of range, or the first layer of a kind does not lead; layers
            that share already; a packed decoder.

    Warns:
        UntrainedSharing: the decoder was not trained for it.

    Source: arXiv:2604.22782.
    """
    config = led(module.config, retention, leaders)
    warn_untrained(config)
    return _reading(module, config, "own")


def _reading(module: Decoder, config: DecoderConfig, start: Start) -> Decoder:
    """A copy with another configuration, whose layers read what it says."""
    read = [layer.attention.source for layer in config.layers]
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if "embed_tokens.weight" not in weights:
        raise InvalidArgument("a packed decoder cannot be changed; load the model with pack=False")
    with torch.device("meta"):
        student = Decoder(config)
    kept: dict[str, Tensor] = {}
    for name in student.state_dict():
        parts = name.split(".")
        alike = [weights[name]]
        if start == "mean" and len(parts) > 3 and parts[3] in DROPPED:
            own = int(parts[1])
            alike += [weights[_of(name, index)] for index, source in enumerate(read) if source == own]
        kept[name] = torch.stack(alike).mean(0) if len(alike) > 1 else alike[0].clone()
    student.load_state_dict(kept, assign=True)
    student.tie()
    return student.train(module.training)


def _of(name: str, layer: int) -> str:
    """The name of the same tensor in another layer."""
    first, _, rest = name.split(".", 2)
    return f"{first}.{layer}.{rest}"
