"""What a model of transformers keeps of a sequence, found by a few passes when it is loaded.

Notable here:
- later tokens must not change the logits of earlier ones, or the model is refused
- a sequence in pieces, with its keys in blocks, must have the logits of the sequence as a whole. Many recurrent models
  of transformers take one token after others, but not several; and where the cache is of an unknown kind, or changes
  the logits, every pass begins at the first token
- two sequences of different lengths, padded, must have the logits that each has alone; else each is decoded alone
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import cache_utils as kinds

from pippin.core.errors import UnsupportedModel
from pippin.language.transformers_models.cache import CachePass, VectorStore
from pippin.language.transformers_models.network import LayerCache, TransformersConfig, TransformersNetwork

_PIECES: Final = (14, 1, 9)
_STEPS: Final = (20, 1, 1, 1, 1)
_BLOCK: Final = 16


def probed(model: Any, max_position_embeddings: int) -> TransformersNetwork:
    """A model with what its layers keep.

    Args:
        model: a `transformers.PreTrainedModel` with logits, on its device.
        max_position_embeddings: longest sequence, in tokens.

    Raises:
        UnsupportedModel: it cannot be computed from tokens alone, or it is not causal.
    """
    family = model.config.model_type
    network = TransformersNetwork(model, TransformersConfig(family, 0, max_position_embeddings))
    rows = model.get_input_embeddings().weight.shape[0]
    count = min(sum(_PIECES), max_position_embeddings)
    ids = torch.randint(rows, (1, count), generator=torch.Generator().manual_seed(0))
    try:
        whole, begin = network.logits(ids), network.logits(ids[:, : count // 2])
    except Exception as error:  # whatever its code raises
        raise UnsupportedModel(
            f"transformers cannot compute this {family!r} model from tokens alone: {error}"
        ) from error
    if not alike(whole[:, : count // 2], begin):
        raise UnsupportedModel(f"this {family!r} model is not causal: later tokens change the logits of earlier ones")
    plain = replace(network.config, vocab_size=whole.shape[-1])
    if "cache" not in inspect.signature(model.forward).parameters:
        network.config = replace(plain, uncached="it takes no cache")
        return network
    try:
        network.config = replace(plain, layers=_layers(network, ids))
        continues = _same_in_pieces(network, ids, whole, _PIECES)
        if continues or _same_in_pieces(network, ids, whole, _STEPS):
            network.config = replace(network.config, continues=continues, batched=_batches(network, ids))
        else:
            network.config = replace(plain, uncached="the cache changes its logits")
    except Exception as error:  # a cache of another kind, or a model that does not take one
        network.config = replace(plain, uncached=f"{type(error).__name__}: {error}")
    return network


def alike(one: Float[Tensor, "*logits"], other: Float[Tensor, "*logits"]) -> bool:
    """Whether two computations of the same logits differ by no more than rounding, on average over the tokens.

    In bfloat16 single tokens differ by a tenth of the spread of their logits, the average by a few hundredths; with a
    cache that is wrong, by a third and more.
    """
    tolerance = 1e-4 if one.dtype == torch.float32 else 0.15
    one, other = one.float(), other.float()
    spread = (one - one.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((one - other).norm(dim=-1) / spread.clamp(min=1e-30)).mean() <= tolerance)


def _layers(network: TransformersNetwork, ids: Int[Tensor, "1 tokens"]) -> tuple[LayerCache, ...]:
    """What each layer keeps, from a pass with a cache of transformers' own.

    Raises:
        KeyError: a layer of an unknown kind.
    """
    # of sliding windows the whole context is kept: masks hide it, in models that have such windows at all
    cache = kinds.Cache(layers=[_whole(layer) for layer in kinds.DynamicCache(config=network.model.config).layers])
    network.logits(ids, cache)
    return tuple(map(_kept, cache.layers))


def _whole(layer: Any) -> Any:
    """A new layer of a cache, of the kind that keeps the whole context."""
    hybrid = kinds.LinearAttentionAndFullAttentionLayer
    whole: Any = {
        kinds.DynamicLayer: kinds.DynamicLayer,
        kinds.DynamicSlidingWindowLayer: kinds.DynamicLayer,
        kinds.DynamicIndexedLayer: kinds.DynamicIndexedLayer,
        kinds.DummyLayer: kinds.DummyLayer,
        kinds.LinearAttentionLayer: kinds.LinearAttentionLayer,
        hybrid: hybrid,
        kinds.LinearAttentionAndSlidingWindowAttentionLayer: hybrid,
    }[type(layer)]
    return whole(number_of_states=getattr(layer, "number_of_states", 1))


def _kept(layer: Any) -> LayerCache:
    """What one layer of a cache keeps."""
    found = (getattr(layer, "keys", None), getattr(layer, "values", None))
    vectors = [(tensor.shape[1], tensor.shape[3]) for tensor in found if tensor is not None]
    indexer = getattr(layer, "indexer_keys", None)
    states = [
        (kind, number, tuple(state.shape[1:]), state.dtype)
        for kind in ("conv", "recurrent")
        for number, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    ]
    begun = [number for number, there in getattr(layer, "has_previous_state", {}).items() if there]
    extra = [] if indexer is None else [(1, indexer.shape[2])]
    return LayerCache((*vectors, *extra), tuple(states), tuple(begun))


def _store(network: TransformersNetwork, blocks: int) -> VectorStore:
    return VectorStore(network.config, blocks, _BLOCK, network.dtype, network.device)


def _sequence(ids: Tensor, start: int, stop: int, table: list[int], states: dict[int, Tensor]) -> Any:
    """Some tokens of a sequence as input of a pass."""
    tokens = ids[0, start:stop].tolist()
    return SimpleNamespace(token_ids=tokens, num_computed_tokens=start, block_table=table, states=states)


def _same_in_pieces(
    network: TransformersNetwork,
    ids: Int[Tensor, "1 tokens"],
    whole: Float[Tensor, "1 tokens vocab"],
    pieces: Sequence[int],
) -> bool:
    """Whether a sequence in pieces, in two blocks out of order, has the logits of the whole behind the first."""
    store, states, logits = _store(network, 3), dict[int, Tensor](), []
    bounds = [stop for stop in accumulate(pieces, initial=0) if stop <= ids.shape[1]]
    for start, stop in pairwise(bounds):
        view = CachePass(store, network.config, [_sequence(ids, start, stop, [2, 0], states)])
        logits.append(network.logits(ids[:, start:stop], view.cache))
        view.remember()
    return alike(whole[:, bounds[1] : bounds[-1]], torch.cat(logits[1:], 1))


def _batches(network: TransformersNetwork, ids: Int[Tensor, "1 tokens"]) -> bool:
    """Whether a padded pass over two sequences gives the logits of each alone."""
    lengths = (ids.shape[1] - 1, ids.shape[1] // 3)
    store = _store(network, 5)
    states: tuple[dict[int, Tensor], ...] = ({}, {})
    tables = ([2, 0], [4, 3])
    for length, table, state in zip(lengths, tables, states, strict=True):
        view = CachePass(store, network.config, [_sequence(ids, 0, length, table, state)])
        network.logits(ids[:, :length], view.cache)
        view.remember()
    inputs = [
        _sequence(ids, length, length + 1, table, state)
        for length, table, state in zip(lengths, tables, states, strict=True)
    ]
    view = CachePass(store, network.config, inputs)
    new = torch.tensor([each.token_ids for each in inputs])
    try:
        together = network.logits(new, view.cache, mask=view.mask)
    except Exception:  # its code does not take padding
        return False
    alone = torch.cat([network.logits(ids[:, : length + 1])[:, -1:] for length in lengths])
    return alike(alone, together)
