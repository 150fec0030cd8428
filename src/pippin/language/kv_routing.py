r"""Stochastic KV routing (R-CLA): one model that runs with whatever share of its caches a machine has room for.

Notable here:
- training draws, for every layer and pass, whose keys and values it reads: with probability $p$ those of an earlier
  layer, else its own. A cache that stands before another does it, so decoder and loss know nothing of it, and it goes
  together with packed documents, low-rank adaptation and distillation
- at inference nothing is random: some layers lead, and every other reads the nearest leader before it. Which lead, and
  so how large the cache is, is chosen when the model is loaded (`pippin.load(ref, retention=0.25)`)
- a layer reads one of its own kind only: where local and global layers alternate, each kind has its leaders
- that $p$ is the chance to read *another* layer is in its name, `p_cross`, since readings of the paper differ on it

Source: Filippova et al. 2026, arXiv:2604.22782. That every layer draws by itself, anew for every pass, is our reading.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, UntrainedSharing
from pippin.data.batches import TokenBatch
from pippin.language.objectives import NextToken, held_out
from pippin.language.transformer import DecoderConfig
from pippin.nn.cache import EndToEnd, KVCache, New, NoCache, Seen
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear
from pippin.train.objective import Loss, Objective, Stateful, Steps

DROPPED = ("k_proj", "v_proj", "k_norm")
"""What a layer has no use for that reads another one's keys and values."""
_EPS = 1e-9  # what rounding may take from a whole number of leaders


# --- who reads whom ---------------------------------------------------------------------------------------------------


def spread(config: DecoderConfig, retention: float) -> tuple[int, ...]:
    r"""The layers that lead at a retention, evenly spread: $\{0, g, 2g, \ldots\}$ for a retention of $1/g$.

    Args:
        config: of a decoder whose layers do not share yet.
        retention: share of the layers that keep a cache, above 0, at most 1; of $n$ layers of a kind, the $i$-th leads
            if $\lfloor i r \rfloor > \lfloor (i - 1) r \rfloor$: the first always, and $1 + \lfloor (n - 1) r \rfloor$
            of them.

    Raises:
        InvalidArgument: a retention out of its range, layers that share already.
    """
    if not 0.0 < retention <= 1.0:
        raise InvalidArgument(f"retention is the share of layers with a cache, above 0 and at most 1, got {retention}")
    found = [
        layer
        for members in kinds(config)
        for i, layer in enumerate(members)
        if math.floor(i * retention + _EPS) > math.floor((i - 1) * retention + _EPS)
    ]
    return tuple(sorted(found))


def nearest(config: DecoderConfig, leaders: Sequence[int]) -> tuple[int | None, ...]:
    """Which layer each layer reads, None for its own keys and values: leaders their own, others the last leader before.

    Args:
        config: of a decoder whose layers do not share yet.
        leaders: layers in ascending order; the first layer of each kind (window and rotation) must be among them.

    Raises:
        InvalidArgument: leaders out of range, out of order or named twice, a layer without a leader of its kind before
            it, layers that share already.
    """
    groups = kinds(config)
    own = {layer for members in groups for layer in members}
    if wrong := [layer for layer in leaders if layer not in own]:
        raise InvalidArgument(
            f"leaders are layers with keys and values, from 0 to {len(config.layers) - 1}; there is no such layer "
            f"{', '.join(map(str, wrong))}"
        )
    if any(first >= second for first, second in pairwise(leaders)):
        raise InvalidArgument(f"leaders must be in ascending order, each once, got {list(leaders)}")
    found: list[int | None] = [None] * len(config.layers)
    chosen = set(leaders)
    for members in groups:
        if members[0] not in chosen:
            raise InvalidArgument(
                f"layer {members[0]} has no layer of its kind before it to read, so it must be one of the leaders; got "
                f"{list(leaders)}"
            )
        leader = members[0]
        for layer in members:
            leader = layer if layer in chosen else leader
            found[layer] = None if layer == leader else leader
    return tuple(found)


def led(config: DecoderConfig, retention: float | None = None, leaders: Sequence[int] | None = None) -> DecoderConfig:
    """The same decoder with fewer caches.

    Args:
        config: whose layers do not share yet.
        retention: see `spread`.
        leaders: or instead: see `nearest`.

    Raises:
        InvalidArgument: both or neither are given, or as `spread` and `nearest` say.
    """
    if (retention is None) == (leaders is None):
        raise InvalidArgument(f"give either retention or leaders, got retention={retention} and leaders={leaders}")
    return config.reading(nearest(config, spread(config, retention) if retention is not None else leaders or ()))


def warn_untrained(config: DecoderConfig) -> None:
    """Say of a decoder whose layers share, in the name of who called the caller, where it was not trained for it.

    Warns:
        UntrainedSharing: its configuration records no routing.
    """
    followers = sum(layer.attention.source is not None for layer in config.layers)
    if followers and not config.kv_routing:
        warnings.warn(
            f"{followers} of {len(config.layers)} layers read another's cache, and the model's configuration does not "
            "say that it was trained for that (kv_routing): expect worse answers; train it with "
            "`pippin train full --route-caches 0.5`",
            UntrainedSharing,
            stacklevel=3,
        )


def unread(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor (named by us) makes keys or values in a layer that reads another's."""
    parts = name.split(".")
    if len(parts) < 4 or parts[0] != "layers" or parts[3] not in DROPPED or int(parts[1]) >= len(config.layers):
        return False
    return config.layers[int(parts[1])].attention.source is not None


def kinds(config: DecoderConfig) -> list[list[int]]:
    """The layers with keys and values, those together that may read one another: of one window and one rotation.

    Raises:
        InvalidArgument: layers that share already.
    """
    sharing = sum(layer.attention.source is not None for layer in config.layers)
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


def draw(config: DecoderConfig, p_cross: float, generator: torch.Generator) -> tuple[int | None, ...]:
    """Whose keys and values each layer reads in one pass: with probability ``p_cross`` any earlier one's of its kind.

    None stands for its own. Nothing is drawn where ``p_cross`` is 0. The draw is brought to the host at once, so a pass
    that is computed again reads the same.
    """
    found: list[int | None] = [None] * len(config.layers)
    if p_cross == 0.0:
        return tuple(found)
    chances, places = torch.rand(2, len(found), generator=generator, device=generator.device).tolist()
    for members in kinds(config):
        for count, layer in enumerate(members):
            if count and chances[layer] < p_cross:
                found[layer] = members[int(places[layer] * count)]
    return tuple(found)


class Routed:
    """A cache before another, in which each layer reads what the layer given for it would have read.

    Every layer still computes keys and values, and gradients flow into those that are read. Those that nobody reads in
    this pass get gradients of zero rather than none, so that an optimiser treats all layers alike in every step.

    Args:
        cache: what keeps keys and values, or a pass without (`pippin.nn.cache.NoCache`, `Documents`).
        sources: for each layer an earlier one, or None for its own keys and values.

    Raises:
        InvalidArgument: a layer that is to read a later one.
    """

    def __init__(self, cache: KVCache, sources: Sequence[int | None]) -> None:
        self.cache = cache
        self.sources = tuple(layer if source is None else source for layer, source in enumerate(sources))
        for layer, source in enumerate(self.sources):
            if not 0 <= source <= layer:
                raise InvalidArgument(f"layer {layer} cannot read layer {source}, only earlier ones")
        self._read = set(self.sources)
        self._seen: dict[int, Seen] = {}

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.cache.length

    @property
    def positions(self) -> Int[Tensor, new] | None:
        """The position of each new token, where they do not simply follow each other."""
        return self.cache.positions

    def append(self, layer: int, k: New, v: New, window: int | None) -> Seen:
        """Add the new tokens of one layer; return what its source may look at."""
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
    """A decoder whose layers read the caches of others, in the place of the decoder in an objective or a measure.

    No weight is dropped or copied, so a loss with this or that set of leaders is measured without making that model:

    ```py
    held_out(batches)(RoutedModel(decoder, nearest(decoder.config, [0, 4])))
    ```

    Args:
        model: a `Decoder`, or what takes its place (`pippin.shape.lora.LowRankModel`).
        sources: see `Routed`.

    Raises:
        InvalidArgument: layers that share already, recurrent layers, another number of sources than layers, a source of
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
        """The decoder's description."""
        config: DecoderConfig = self.model.config
        return config

    @property
    def lm_head(self) -> Linear:
        """The decoder's output matrix."""
        head: Linear = self.model.lm_head
        return head

    @property
    def embed_tokens(self) -> Embedding:
        """The decoder's embedding."""
        embedding: Embedding = self.model.embed_tokens
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
        """What the output matrix reads; arguments as for `Decoder.forward`."""
        hidden: Tensor = self.model.hidden(ids, cache=self._routed(cache, padding), padding=padding)
        return hidden

    def _routed(self, cache: KVCache | None, padding: Tensor | None) -> Routed:
        return Routed(NoCache(padding) if cache is None else cache, self.sources)


class KVRouting:
    """Another objective, taken of a decoder whose layers read what was drawn for this pass.

    Processes that train together draw the same: where each holds a part of the weights, all must gather them in one
    order, that in which gradients come back, and who read whom decides it.

    An objective for `pippin.train.Trainer`, which gives the generator: the same seed draws the same sources. From the
    first update on the model's configuration says what it is trained for (`DecoderConfig.kv_routing`), and so does a
    saved model. The metric "rerouted" is the share of layers that read another one.

    Args:
        p_cross: chance of a layer to read an earlier one's keys and values; 0 is the other objective, bit for bit.
            0.25 to 0.5 are good values.
        objective: what is learnt; None for `NextToken`.

    Raises:
        InvalidArgument: ``p_cross`` outside 0 to 1; when called, a model as `RoutedModel` says.

    Source: arXiv:2604.22782, section on training.
    """

    def __init__(self, p_cross: float = 0.5, objective: Objective | None = None) -> None:
        if not 0.0 <= p_cross <= 1.0:
            raise InvalidArgument(f"p_cross is a probability, from 0 to 1, got {p_cross}")
        self.p_cross = p_cross
        self.objective: Any = NextToken() if objective is None else objective
        self.unit: str = getattr(self.objective, "unit", "units")

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The other objective's loss of a batch, with the sources that ``generator`` draws for it."""
        module: Any = model
        sources = draw(module.config, self.p_cross, _common(generator) if self.p_cross else generator)
        loss: Loss = self.objective(RoutedModel(model, sources), batch, generator)
        others = sum(source is not None for source in sources) / len(sources)
        return Loss(loss.total, loss.count, {**loss.metrics, "rerouted": others * loss.count})

    def after_step(self, model: nn.Module, step: int) -> None:
        """Let the configuration say how it is trained; then what the other objective does after a step."""
        self.record(model)
        if isinstance(self.objective, Steps):
            self.objective.after_step(model, step)

    def record(self, model: nn.Module) -> None:
        """Write ``p_cross`` into the configuration of the decoder, or of the one that an adapter is trained for.

        Raises:
            InvalidArgument: a decoder that cannot be trained so.
        """
        decoder: Any = getattr(model, "base", model)
        _routable(decoder.config)
        if decoder.config.kv_routing != self.p_cross:
            decoder.config = replace(decoder.config, kv_routing=self.p_cross)

    def state_dict(self) -> dict[str, Any]:
        """What the other objective remembers."""
        return self.objective.state_dict() if isinstance(self.objective, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the other objective back what it remembers."""
        if isinstance(self.objective, Stateful):
            self.objective.load_state_dict(state)


# --- choosing leaders -------------------------------------------------------------------------------------------------


def select_leaders(
    model: nn.Module,
    batches: Iterable[TokenBatch],
    count: int,
    method: str = "stride",
    *,
    objective: Objective | None = None,
) -> list[int]:
    r"""Which layers should keep their caches, where there is room for so many.

    Args:
        model: a decoder.
        batches: what "greedy" measures the loss on; gone through once for every choice, up to $L$ times ``count``.
        count: layers with a cache; at least one for each kind of layer, at most all.
        method: "stride" spreads them evenly, the published form, and reads no batch; "greedy" begins with the first
            layer of each kind and adds, one after the other, the one that lowers the loss the most.
        objective: what is measured; None for `NextToken`.

    Returns:
        Layers in ascending order: as many as asked for; "stride" gives fewer where kinds of layers cannot be spread so.

    Raises:
        InvalidArgument: a count or method out of range, layers that share already, batches that hold no target.
    """
    module: Any = model
    groups = kinds(module.config)
    total = sum(map(len, groups))
    if not len(groups) <= count <= total:
        raise InvalidArgument(f"from {len(groups)} to {total} layers of this model can lead, got {count}")
    if method == "stride":
        sizes = (spread(module.config, share / total) for share in range(count, 0, -1))
        return list(next((leaders for leaders in sizes if len(leaders) <= count), [members[0] for members in groups]))
    if method != "greedy":
        raise InvalidArgument(f"method is {method!r}; choose stride or greedy")
    measure = held_out(list(batches), objective)

    def loss(leaders: list[int]) -> float:
        return measure(RoutedModel(model, nearest(module.config, leaders)))["loss"]

    found = sorted(members[0] for members in groups)
    while len(found) < count:
        tried = [sorted([*found, layer]) for members in groups for layer in members if layer not in found]
        found = min(tried, key=loss)
    return found


# --- inside -----------------------------------------------------------------------------------------------------------


def _routable(config: DecoderConfig) -> list[list[int]]:
    """The kinds of layers, if caches of all layers can be routed."""
    if config.recurrent_layers:
        raise InvalidArgument(f"layers {list(config.recurrent_layers)} are recurrent, and have no cache to route")
    return kinds(config)


def _common(generator: torch.Generator) -> torch.Generator:
    """A generator on the host that is the same in all processes of a run: the first one's says how it begins."""
    number = torch.randint(1 << 62, (1,), generator=generator, device=generator.device)
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(number, src=0)
    return torch.Generator().manual_seed(int(number))


def _with_gradients(seen: Seen, k: Tensor, v: Tensor) -> Seen:
    """What a layer reads, with gradients of zero for keys and values that it has and nobody reads."""
    if isinstance(seen, EndToEnd):
        (keys, values, mask), *others = seen.reads
        return EndToEnd(seen.counts, [(_Beside.apply(keys, k, v), values, mask), *others])  # type: ignore[no-untyped-call]
    if isinstance(seen, tuple):
        keys, values, mask = seen
        return _Beside.apply(keys, k, v), values, mask  # type: ignore[no-untyped-call]
    return seen


class _Beside(torch.autograd.Function):
    """The first of several tensors, unchanged; the others get zeros."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return slopes[0], *zeros
