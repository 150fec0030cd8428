r"""Stochastic KV routing (R-CLA): one model that runs with any fraction of its layers' KV caches.

Notable here:
- training samples, for every layer and pass, whose keys and values it reads: with probability $p$ those of an earlier
  layer, else its own. A wrapper around the cache implements it, so decoder and loss are unchanged, and it can be
  combined with packed documents, LoRA and distillation
- inference is deterministic: KV-sharing layers have a cache, and every other layer reads the nearest one before it.
  Their number, and so the size of the cache, is chosen when the model is loaded (`pippin.load(ref,
  transform=fewer_caches(kv_sharing_ratio=0.25))`); their fraction of all layers is the KV-sharing ratio
- a layer reads only layers of its own kind: if local and global layers alternate, each kind has its KV-sharing layers
- the probability $p$ of reading *another* layer is named `p_cross`, since the paper can be read in both ways

Source: Filippova et al. 2026, arXiv:2604.22782. That layers sample independently, in every pass, is Pippin's
interpretation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Gt, Le
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import Probability, checked
from pippin.core.errors import CorruptedFile, InvalidArgument, UntrainedSharing
from pippin.data.token_batches import TokenBatch
from pippin.language.decoder_config import DecoderConfig
from pippin.language.objectives import NextToken, held_out
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.kv_cache import KVCache, New, NoCache, PackedKeyValues, VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.train.objective import AfterStep, Loss, Objective, Stateful

RECORD = "kv_routing"
"""The key of `DecoderConfig.training_methods` under which ``p_cross`` is recorded."""
DROPPED = ("k_proj", "v_proj", "k_norm")
"""Parameters that a layer without its own KV cache does not have."""
_EPS = 1e-9  # tolerance for rounding of an integral number of KV-sharing layers


# --- sources of layers ------------------------------------------------------------------------------------------------


@checked
def evenly_spaced_layers(config: DecoderConfig, kv_sharing_ratio: Annotated[float, Gt(0), Le(1)]) -> tuple[int, ...]:
    r"""The KV-sharing layers of a KV-sharing ratio, evenly spread: $\{0, g, 2g, \ldots\}$ for a ratio of $1/g$.

    Args:
        config: config of a decoder without KV sharing.
        kv_sharing_ratio: fraction of the layers with a cache, above 0, at most 1; the $i$-th of a kind has one
            if $\lfloor i r \rfloor > \lfloor (i - 1) r \rfloor$: the first always, and $1 + \lfloor (n - 1) r \rfloor$
            of them.

    Raises:
        InvalidArgument: layers that share already.
    """
    found = [
        layer
        for members in layer_kinds(config)
        for i, layer in enumerate(members)
        if math.floor(i * kv_sharing_ratio + _EPS) > math.floor((i - 1) * kv_sharing_ratio + _EPS)
    ]
    return tuple(sorted(found))


def nearest_sources(config: DecoderConfig, kv_sharing_layers: Sequence[int]) -> tuple[int | None, ...]:
    """Which layer each layer reads: None (itself) for KV-sharing layers, the last one before it for others.

    Args:
        config: config of a decoder without KV sharing.
        kv_sharing_layers: in ascending order; the first layer of each kind (window and rotary spec) is required.

    Raises:
        InvalidArgument: layers out of range, out of order or named twice, one without a layer of its kind before it,
            layers that share already.
    """
    groups = layer_kinds(config)
    own = {layer for members in groups for layer in members}
    if wrong := [layer for layer in kv_sharing_layers if layer not in own]:
        raise InvalidArgument(
            f"kv_sharing_layers must have keys and values, from 0 to {len(config.layers) - 1}; there is no such layer "
            f"{', '.join(map(str, wrong))}"
        )
    if any(first >= second for first, second in pairwise(kv_sharing_layers)):
        raise InvalidArgument(f"KV-sharing layers must be in ascending order, each once, got {list(kv_sharing_layers)}")
    found: list[int | None] = [None] * len(config.layers)
    chosen = set(kv_sharing_layers)
    for members in groups:
        if members[0] not in chosen:
            raise InvalidArgument(
                f"layer {members[0]} has no layer of its kind before it, so kv_sharing_layers must hold it; got "
                f"{list(kv_sharing_layers)}"
            )
        kv_sharing_layer = members[0]
        for layer in members:
            kv_sharing_layer = layer if layer in chosen else kv_sharing_layer
            found[layer] = None if layer == kv_sharing_layer else kv_sharing_layer
    return tuple(found)


def with_kv_sharing_layers(
    config: DecoderConfig, kv_sharing_ratio: float | None = None, kv_sharing_layers: Sequence[int] | None = None
) -> DecoderConfig:
    """The config with fewer caches.

    Args:
        config: config of a decoder without KV sharing.
        kv_sharing_ratio: see `evenly_spaced_layers`.
        kv_sharing_layers: alternative to the ratio; see `nearest_sources`.

    Raises:
        InvalidArgument: both or neither are given; errors of `evenly_spaced_layers` and `nearest_sources`.
    """
    if (kv_sharing_ratio is None) == (kv_sharing_layers is None):
        raise InvalidArgument(
            f"give either kv_sharing_ratio or kv_sharing_layers, got {kv_sharing_ratio} and {kv_sharing_layers}"
        )
    return config.with_kv_sources(
        nearest_sources(
            config,
            evenly_spaced_layers(config, kv_sharing_ratio) if kv_sharing_ratio is not None else kv_sharing_layers or (),
        )
    )


def fewer_caches(
    kv_sharing_ratio: float | None = None, *, kv_sharing_layers: Sequence[int] | None = None
) -> Callable[[DecoderConfig], DecoderConfig]:
    """A transform for `pippin.load`: the model with fewer caches.

    Key and value projections of layers that read another's are not read from the file. To count memory with
    `pippin.language.availability.memory_needed`, take `with_kv_sharing_layers`, which does not warn.

    Args:
        kv_sharing_ratio: see `evenly_spaced_layers`.
        kv_sharing_layers: alternative to the ratio; see `nearest_sources`.

    Raises:
        InvalidArgument: (when the model is loaded) errors of `with_kv_sharing_layers`.

    Warns:
        UntrainedSharing: (when the model is loaded) fewer caches than layers in a model that was not trained for it.
    """

    def transform(config: DecoderConfig) -> DecoderConfig:
        fewer = with_kv_sharing_layers(config, kv_sharing_ratio, kv_sharing_layers)
        warn_untrained(fewer)
        return fewer

    return transform


def trained_p_cross(config: DecoderConfig) -> float | None:
    """The ``p_cross`` that a decoder was trained with; None if it was trained without KV routing.

    Raises:
        CorruptedFile: the value in its config is not a probability.
    """
    recorded = config.training_methods.get(RECORD)
    if recorded is None:
        return None
    p_cross = recorded.get("p_cross") if isinstance(recorded, Mapping) else None
    if not isinstance(p_cross, int | float) or not 0.0 <= p_cross <= 1.0:
        raise CorruptedFile(f"training_methods has {RECORD} = {recorded!r}; it must have a p_cross from 0 to 1")
    return p_cross


def warn_untrained(config: DecoderConfig) -> None:
    """Warn about a decoder with fewer caches that was not trained with KV routing.

    Warns:
        UntrainedSharing: its config has no record of KV routing.
    """
    followers = sum(layer.attention.kv_source is not None for layer in config.layers)
    if followers and not trained_p_cross(config):
        warnings.warn(
            f"{followers} of {len(config.layers)} layers read another's cache, and the model's configuration does not "
            "say that it was trained for that (kv_routing): expect worse answers; train it with "
            "`pippin train full --route-caches 0.5`",
            UntrainedSharing,
            stacklevel=3,
        )


def layer_kinds(config: DecoderConfig) -> list[list[int]]:
    """The layers with keys and values, grouped by kind: layers of one window and one rotary spec may read each other.

    Raises:
        InvalidArgument: layers that share already, or lie in parallel tracks.
    """
    if config.tracks is not None:
        raise InvalidArgument("layers of parallel tracks cannot read each other's caches; take a model without tracks")
    sharing = sum(layer.attention.kv_source is not None for layer in config.layers)
    if sharing:
        raise InvalidArgument(
            f"{sharing} of {len(config.layers)} layers share a cache already; take the model that this one was made of"
        )
    groups: dict[Any, list[int]] = {}
    for index in config.cached_layers:
        spec = config.layers[index].attention
        groups.setdefault((spec.window, spec.rotary), []).append(index)
    return list(groups.values())


# --- training ---------------------------------------------------------------------------------------------------------


def sample_sources(config: DecoderConfig, p_cross: float, generator: torch.Generator) -> tuple[int | None, ...]:
    """Sample the source of each layer for one pass: with probability ``p_cross`` an earlier layer of its kind.

    None means its own keys and values. If ``p_cross`` is 0, no random numbers are used. The result is on the host, so
    that a recomputed pass reads the same.
    """
    found: list[int | None] = [None] * len(config.layers)
    if p_cross == 0.0:
        return tuple(found)
    chances, choices = torch.rand(2, len(found), generator=generator, device=generator.device).tolist()
    for members in layer_kinds(config):
        for count, layer in enumerate(members):
            if count and chances[layer] < p_cross:
                found[layer] = members[int(choices[layer] * count)]
    return tuple(found)


class RoutedCache:
    """A wrapper around a cache in which each layer reads the keys and values of its source.

    Every layer still computes keys and values, and gradients flow into those that are read. Those that no layer reads
    in this pass get gradients of zero instead of None, so that an optimizer updates all layers in every step.

    Args:
        cache: the cache, or a pass without one (`pippin.nn.kv_cache.NoCache`, `PackedDocuments`).
        sources: for each layer an earlier one, or None for its own keys and values.

    Raises:
        InvalidArgument: a source that is a later layer.
    """

    def __init__(self, cache: KVCache, sources: Sequence[int | None]) -> None:
        self.cache = cache
        self.sources = tuple(layer if source is None else source for layer, source in enumerate(sources))
        for layer, source in enumerate(self.sources):
            if not 0 <= source <= layer:
                raise InvalidArgument(f"layer {layer} cannot read layer {source}, only earlier ones")
        self._read = set(self.sources)
        self._seen: dict[int, VisibleKeyValues] = {}

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.cache.length

    @property
    def positions(self) -> Int[Tensor, new] | None:
        """The position of each new token; None if they are consecutive."""
        return self.cache.positions

    def append(self, layer: int, k: New, v: New, window: int | None) -> VisibleKeyValues:
        """Add the new tokens of one layer; return the keys and values of its source."""
        self._seen[layer] = self.cache.append(layer, k, v, window)
        seen = self._seen[self.sources[layer]]
        if layer in self._read or not torch.is_grad_enabled():
            return seen
        return _with_gradients(seen, k, v)

    def advance(self, new: int) -> None:
        """Make the tokens that were appended to every layer permanent."""
        self.cache.advance(new)
        self._seen.clear()


class RoutedModel(nn.Module):
    """A decoder whose layers read the caches of others, for an objective or a measure.

    No weight is removed or copied, so the loss of a set of KV-sharing layers is measured without building that model:

    ```py
    held_out(batches)(RoutedModel(decoder, nearest_sources(decoder.config, [0, 4])))
    ```

    Args:
        model: a `Decoder`, or a module with its interface (`pippin.shape.lora.LowRankModel`).
        sources: see `RoutedCache`.

    Raises:
        InvalidArgument: layers with KV sharing, recurrent layers, another number of sources than layers, a source of
            another kind.
    """

    def __init__(self, model: nn.Module, sources: Sequence[int | None]) -> None:
        super().__init__()
        self.model: Any = model
        self.sources = tuple(sources)
        self.training = model.training
        kind = {layer: index for index, members in enumerate(_routable(self.config)) for layer in members}
        if len(self.sources) != len(kind):
            raise InvalidArgument(f"{len(self.sources)} sources were given for {len(kind)} layers")
        for layer, source in enumerate(self.sources):
            if source is not None and kind.get(source) != kind[layer]:
                raise InvalidArgument(
                    f"layer {layer} cannot read layer {source}, which is of another window or rotation"
                )

    @property
    def config(self) -> DecoderConfig:
        """The config of the decoder."""
        config: DecoderConfig = self.model.config
        return config

    @property
    def lm_head(self) -> Linear:
        """The decoder's output matrix."""
        head: Linear = self.model.lm_head
        return head

    @property
    def embed_tokens(self) -> TokenEmbedding:
        """The decoder's embedding."""
        embedding: TokenEmbedding = self.model.embed_tokens
        return embedding

    def forward(
        self, ids: Int[Tensor, "batch new"], *, cache: KVCache | None = None, padding: Int[Tensor, batch] | None = None
    ) -> Float[Tensor, "batch new vocab"]:
        """Logits of the next token after each of the given ones; arguments as for `Decoder.forward`."""
        logits: Tensor = self.model(ids, cache=self._routed(cache, padding), padding=padding)
        return logits

    def hidden(
        self, ids: Int[Tensor, "batch new"], *, cache: KVCache | None = None, padding: Int[Tensor, batch] | None = None
    ) -> Float[Tensor, "batch new width"]:
        """Hidden states after the last norm; arguments as for `Decoder.forward`."""
        hidden: Tensor = self.model.hidden(ids, cache=self._routed(cache, padding), padding=padding)
        return hidden

    def _routed(self, cache: KVCache | None, padding: Tensor | None) -> RoutedCache:
        return RoutedCache(NoCache(padding) if cache is None else cache, self.sources)


class KVRouting:
    """Wraps an objective: the decoder's layers read sources that are sampled for each pass.

    All processes of a distributed run sample the same sources: with sharded weights, all must gather them in the same
    order, which is that of the gradients and depends on the sources.

    An objective for `pippin.train.Trainer`, which passes the generator: the same seed gives the same sources. From the
    first update on, the model's config records the method (`DecoderConfig.training_methods`), also when saved. The
    metric "rerouted" is the fraction of layers that read another one.

    Args:
        p_cross: probability that a layer reads an earlier one's keys and values; with 0 the result is bit-identical to
            the wrapped objective. 0.25 to 0.5 are good values.
        objective: the wrapped objective; None for `NextToken`.

    Raises:
        InvalidArgument: (when called) errors of `RoutedModel`.

    Source: arXiv:2604.22782, section on training.
    """

    @checked
    def __init__(self, p_cross: Probability = 0.5, objective: Objective | None = None) -> None:
        self.p_cross = p_cross
        self.objective: Any = NextToken() if objective is None else objective
        self.unit: str = getattr(self.objective, "unit", "units")

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The wrapped objective's loss of a batch, with sources sampled from ``generator``."""
        module: Any = model
        sources = sample_sources(module.config, self.p_cross, _common(generator) if self.p_cross else generator)
        loss: Loss = self.objective(RoutedModel(model, sources), batch, generator)
        others = sum(source is not None for source in sources) / len(sources)
        return Loss(loss.total, loss.count, {**loss.metrics, "rerouted": others * loss.count})

    def after_step(self, model: nn.Module, step: int) -> None:
        """Record the method in the config, then call the wrapped objective's `after_step`."""
        self.record(model)
        if isinstance(self.objective, AfterStep):
            self.objective.after_step(model, step)

    def record(self, model: nn.Module) -> None:
        """Write ``p_cross`` into the config of the decoder, or of the base of an adapter.

        Raises:
            InvalidArgument: a decoder that cannot be trained with KV routing.
        """
        decoder: Any = getattr(model, "base", model)
        _routable(decoder.config)
        if trained_p_cross(decoder.config) != self.p_cross:
            recorded = {**decoder.config.training_methods, RECORD: {"p_cross": self.p_cross}}
            decoder.config = replace(decoder.config, training_methods=recorded)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped objective."""
        return self.objective.state_dict() if isinstance(self.objective, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the wrapped objective."""
        if isinstance(self.objective, Stateful):
            self.objective.load_state_dict(state)


# --- choosing KV-sharing layers --------------------------------------------------------------------------------------


def stride_layers(config: DecoderConfig, num_kv_sharing_layers: int) -> tuple[int, ...]:
    """At most ``num_kv_sharing_layers`` layers, evenly spaced, as in the paper.

    Args:
        config: config of a decoder without KV sharing.
        num_kv_sharing_layers: number of layers with a cache; at least one for each kind of layer, at most all. The
            result has fewer if kinds of layers cannot be spaced evenly.

    Raises:
        InvalidArgument: a number that is not possible, layers with KV sharing.
    """
    groups = _checked_kinds(config, num_kv_sharing_layers)
    total = sum(map(len, groups))
    sizes = (evenly_spaced_layers(config, share / total) for share in range(num_kv_sharing_layers, 0, -1))
    return next(
        (kv_sharing_layers for kv_sharing_layers in sizes if len(kv_sharing_layers) <= num_kv_sharing_layers),
        tuple(group[0] for group in groups),
    )


def greedy_layers(
    model: nn.Module, batches: Iterable[TokenBatch], num_kv_sharing_layers: int, *, objective: Objective | None = None
) -> tuple[int, ...]:
    r"""``num_kv_sharing_layers`` layers by greedy selection: each time the one that lowers the loss the most.

    Args:
        model: a decoder.
        batches: held-out batches; the loss is measured up to $L$ times ``num_kv_sharing_layers``.
        num_kv_sharing_layers: number of layers with a cache, which always include the first layer of each kind.
        objective: the objective that is measured; None for `NextToken`.

    Raises:
        InvalidArgument: a number that is not possible, layers with KV sharing, batches without targets.
    """
    module: Any = model
    groups = _checked_kinds(module.config, num_kv_sharing_layers)
    measure = held_out(list(batches), objective)

    def loss(kv_sharing_layers: list[int]) -> float:
        return measure(RoutedModel(model, nearest_sources(module.config, kv_sharing_layers)))["loss"]

    found = sorted(members[0] for members in groups)
    while len(found) < num_kv_sharing_layers:
        tried = [sorted([*found, layer]) for members in groups for layer in members if layer not in found]
        found = min(tried, key=loss)
    return tuple(found)


# --- inside -----------------------------------------------------------------------------------------------------------


def _routable(config: DecoderConfig) -> list[list[int]]:
    """The kinds of layers, if caches of all layers can be routed."""
    if config.recurrent_layers:
        raise InvalidArgument(f"layers {list(config.recurrent_layers)} are recurrent, and have no cache to route")
    return layer_kinds(config)


def _checked_kinds(config: DecoderConfig, num_kv_sharing_layers: int) -> list[list[int]]:
    """The kinds of layers, after a check of the number of KV-sharing layers."""
    groups = layer_kinds(config)
    total = sum(map(len, groups))
    if not len(groups) <= num_kv_sharing_layers <= total:
        raise InvalidArgument(
            f"num_kv_sharing_layers must be from {len(groups)} to {total} for this model, got {num_kv_sharing_layers}"
        )
    return groups


def _common(generator: torch.Generator) -> torch.Generator:
    """A generator on the host that is the same in all processes of a run, seeded by the first process."""
    number = torch.randint(1 << 62, (1,), generator=generator, device=generator.device)
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(number, src=0)
    return torch.Generator().manual_seed(int(number))


def _with_gradients(seen: VisibleKeyValues, k: Tensor, v: Tensor) -> VisibleKeyValues:
    """The keys and values that a layer reads, with zero gradients for its own ones, which no layer reads."""
    if isinstance(seen, PackedKeyValues):
        (keys, values, mask), *others = seen.reads
        return PackedKeyValues(seen.counts, [(_WithZeroGradients.apply(keys, k, v), values, mask), *others])  # type: ignore[no-untyped-call]
    if isinstance(seen, tuple):
        keys, values, mask = seen
        return _WithZeroGradients.apply(keys, k, v), values, mask  # type: ignore[no-untyped-call]
    return seen


class _WithZeroGradients(torch.autograd.Function):
    """Returns the first of several tensors; the others get zero gradients."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return slopes[0], *zeros
