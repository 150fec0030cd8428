r"""Low-rank adaptation: training a small change beside a model that stays as it is, and merging it into the weights.

Notable here:
- the base model may be packed: gradients pass through its codes, no dense copy of it is made, and what is learnt fits
  the very weights that will run
- only the pairs are parameters, so a checkpoint holds a few megabytes whatever the model's size
- projections that were fused for speed have a pair each, those that a layer does not have (shared caches) have none
- a task's adapter may begin from another one (a larger rank is filled up so that it begins as the same function), or be
  learnt on top of others, which stay as they are
- merging refuses packed weights: codes cannot hold the sum

Source: Hu et al. 2021, arXiv:2106.09685; rank-stabilised scale: Kalajdzievski 2023, arXiv:2312.03732; a higher rate for
B: Hayou et al. 2024, arXiv:2402.12354 (LoRA+); frozen quantised base: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import AdapterMismatch, InvalidArgument, InvalidInput
from pippin.language.adapters import Pair, Target, attach, save_adapter, targets as targets_of
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder, DecoderConfig
from pippin.nn.cache import KVCache
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRank, combine

ALL: Final = "all"
"""Every matrix of attention and dense feed-forward layers."""

_EVERYTHING = slice(None)


class LowRankModel(nn.Module):
    r"""A decoder with trainable pairs beside its matrices: $y = W x + s B A x$, $s = \alpha / r$.

    It takes part in training as a decoder would (`hidden`, `lm_head`, `config`), and its parameters are the pairs
    alone. The decoder is frozen in place.

    Args:
        module: the base model's decoder, packed or not.
        rank: $r$, of every pair.
        alpha: $\alpha$ > 0.
        targets: which matrices: `ALL`, or names. A name is that of a kind ("q_proj"), or of one layer
            ("layers.3.mlp.up_proj").
        rslora: $s = \alpha / \sqrt r$ instead, which keeps the size of the change the same for every rank.
        dropout: share of the inputs of $A$ that are left out in training, below 1.
        ratio: how many times the learning rate of $A$ that of $B$ is (LoRA+; 16 is its authors' choice).
        seed: of $A$, uniform within $\pm 1 / \sqrt{\text{inputs}}$; $B$ is zero.
        init: begin from these instead: pairs by layer, the scale already in $B$ (`pippin.language.adapters.read_pairs`,
            `pippin.shape.recovery.residual_pairs`). A smaller rank is filled up with random rows of $A$ and zeros in
            $B$; layers that are not named begin as usual.
        beneath: adapters that are active, too, and stay as they are.

    Raises:
        InvalidArgument: a rank below 1 or above what a matrix can have, another argument out of its range, targets that
            name nothing (all are listed), or pairs to begin from that do not fit.

    >>> from pippin.language import DecoderConfig, LayerSpec
    >>> from pippin.nn.attention import AttentionSpec
    >>> from pippin.nn.feedforward import FeedForwardSpec
    >>> layer = LayerSpec(AttentionSpec(), FeedForwardSpec(size=32))
    >>> config = DecoderConfig("llama", 100, 16, (layer,), heads=2, kv_heads=1, head_dim=8, max_context=64)
    >>> adapted = LowRankModel(Decoder(config).initialise(seed=0), rank=2, targets=["q_proj", "down_proj"])
    >>> {name: tuple(map(len, pair)) for name, pair in adapted.pairs().items()}
    {'layers.0.self_attn.q_proj': (2, 16), 'layers.0.mlp.down_proj': (2, 16)}
    >>> sum(p.numel() for p in adapted.parameters())
    160
    """

    def __init__(
        self,
        module: Decoder,
        rank: int = 32,
        alpha: float = 16.0,
        targets: str | Sequence[str] = ALL,
        *,
        rslora: bool = False,
        dropout: float = 0.0,
        ratio: float = 1.0,
        seed: int = 0,
        init: Mapping[str, Pair] | None = None,
        beneath: Sequence[Adapter] = (),
    ) -> None:
        super().__init__()
        _check(rank, alpha, dropout, ratio)
        self._places = choose(module, targets, rank)
        self.__dict__["base"] = module.requires_grad_(False)  # beside the parameters, not among them
        self.rank, self.alpha, self.rslora, self.dropout = rank, float(alpha), rslora, dropout
        self.beneath = tuple(beneath)
        self.scale = self.alpha / (math.sqrt(rank) if rslora else rank)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)
        for layer, place in self._places.items():
            down, up = _fresh(place, rank, module.embed_tokens.device, generator)
            self.down[_key(layer)], self.up[_key(layer)] = nn.Parameter(down), nn.Parameter(up)
            self.up[_key(layer)].lr_scale = ratio
        if init is not None:
            self._begin_from(init)

    base: Decoder

    @property
    def config(self) -> DecoderConfig:
        """The decoder's description."""
        return self.base.config

    @property
    def lm_head(self) -> Linear:
        """The decoder's output matrix, which has no pair."""
        return self.base.lm_head

    @property
    def embed_tokens(self) -> Embedding:
        """The decoder's embedding, which has no pair; it tells device and precision."""
        return self.base.embed_tokens

    def forward(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits of the next token after each of the given ones; arguments as for `Decoder.forward`."""
        logits: Tensor = self.base(ids, cache=cache, padding=padding, last=last, adapters=self._shares())
        return logits

    def hidden(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
    ) -> Float[Tensor, "batch new width"]:
        """What the output matrix reads; arguments as for `Decoder.forward`."""
        return self.base.hidden(ids, cache=cache, padding=padding, adapters=self._shares())

    def pairs(self) -> dict[str, Pair]:
        """$A$ and $B$ by layer, without the scale, as `save_adapter` takes them."""
        return {layer: (self.down[_key(layer)].detach(), self.up[_key(layer)].detach()) for layer in self._places}

    def changes(self) -> dict[str, Pair]:
        """$A$ and $s B$ by layer: what another adapter may begin from."""
        return {layer: (down, up * self.scale) for layer, (down, up) in self.pairs().items()}

    def to_adapter(self, name: str, model: LanguageModel) -> Adapter:
        """A copy of the pairs as they are now, for requests to ``model`` (see ``model.adapters``)."""
        return attach(model, name, self.changes())

    def save(self, folder: str | Path, model: LanguageModel, *, note: Mapping[str, Any] | None = None) -> None:
        """Write the adapter in PEFT's layout, with the hash of the model that it belongs to.

        Args:
            folder: an adapter already in it is replaced.
            model: whose decoder the base is.
            note: how it was made; JSON values.

        Raises:
            DiskFull: there is not enough space; nothing was changed.
        """
        save_adapter(folder, self.pairs(), model=model, alpha=self.alpha, rslora=self.rslora, note=note)

    def _shares(self) -> list[tuple[Adapter, slice]]:
        precision = self.base.embed_tokens.dtype
        dropout = self.dropout if self.training else 0.0
        changes: dict[nn.Module, list[LowRank]] = {}
        for layer, place in self._places.items():
            down, up = self.down[_key(layer)].to(precision), (self.up[_key(layer)] * self.scale).to(precision)
            changes.setdefault(place.linear, []).append(LowRank(down, up, place.start, dropout))
        own = Adapter("training", {linear: tuple(parts) for linear, parts in changes.items()})
        return [(adapter, _EVERYTHING) for adapter in (*self.beneath, own)]

    @torch.no_grad()
    def _begin_from(self, init: Mapping[str, Pair]) -> None:
        if unknown := sorted(init.keys() - self._places.keys()):
            raise InvalidArgument(f"pairs to begin from are of layers that are no targets: {', '.join(unknown)}")
        for layer, (down, up) in init.items():
            ours = self.down[_key(layer)], self.up[_key(layer)]
            rank = down.shape[0]
            wanted = (rank, ours[0].shape[1]), (ours[1].shape[0], rank)
            if (tuple(down.shape), tuple(up.shape)) != wanted or rank > self.rank:
                raise InvalidArgument(
                    f"{layer} cannot begin from factors of {tuple(down.shape)} and {tuple(up.shape)}; it has "
                    f"{tuple(ours[0].shape)} and {tuple(ours[1].shape)}, of which a smaller rank is filled up"
                )
            ours[0][:rank] = down.to(ours[0])
            ours[1].zero_()[:, :rank] = up.to(ours[1]) / self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowRankModel:
        self.base._apply(fn, recurse)  # type: ignore[no-untyped-call] # it moves with the pairs
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def choose(module: Decoder, targets: str | Sequence[str], rank: int = 1) -> dict[str, Target]:
    """The layers that targets name, in the decoder's order.

    Args:
        module: the decoder.
        targets: as for `LowRankModel`.
        rank: that each must be able to have.

    Raises:
        InvalidArgument: a target that names nothing, or a matrix too small for the rank.
    """
    places = dict(targets_of(module))
    names = [targets] if isinstance(targets, str) else list(targets)
    kinds = {layer.rpartition(".")[2] for layer in places}
    unknown = [name for name in names if name != ALL and name not in kinds and name not in places]
    if unknown or not names:
        raise InvalidArgument(
            f"targets that name no matrix of this model: {', '.join(map(repr, unknown)) or 'none given'}; there are: "
            f"{', '.join(sorted(kinds))}, {ALL!r} for all of them, and single layers such as {next(iter(places))!r}"
        )
    wanted = set(names)
    chosen = {layer: place for layer, place in places.items() if wanted & {ALL, layer, layer.rpartition(".")[2]}}
    for layer, place in chosen.items():
        if rank > min(place.outputs, place.linear.inputs):
            raise InvalidArgument(
                f"rank {rank} is more than {layer} can have, a matrix of {place.outputs} x {place.linear.inputs}"
            )
    return chosen


@torch.no_grad()
def merge(model: LanguageModel, adapter: Adapter, *, weight: float = 1.0, keep: bool = False) -> dict[Linear, Tensor]:
    r"""Add an adapter's change to the weights, in place: $W \leftarrow W + w B A$.

    Several are merged one after the other, or as one (`pippin.nn.lora.combine`). Added up in float32, then rounded to
    the weights' own precision.

    Args:
        model: its weights must be dense (``pippin.load(..., pack=False)``).
        adapter: of this model.
        weight: $w$; 1 makes the merged model answer as the model with the adapter does.
        keep: return copies of the weights as they were, for `unmerge`.

    Returns:
        The copies by layer; empty without ``keep``.

    Raises:
        InvalidArgument: the weights are packed, or ``weight`` is not finite.
        AdapterMismatch: the adapter changes layers that are not of this model.
        InvalidInput: the adapter holds values that are not finite.
    """
    _check_merge(model, adapter, weight)
    kept = {}
    for linear, changes in adapter.changes.items():
        assert isinstance(linear, Linear)
        assert linear.weight is not None
        if keep:
            kept[linear] = linear.weight.detach().clone()
        for change in changes:
            rows = linear.weight.data[change.start : change.start + len(change.up)]
            rows.copy_(rows.float() + weight * (change.up.float() @ change.down.float()))
    return kept


@torch.no_grad()
def unmerge(
    model: LanguageModel, adapter: Adapter, *, weight: float = 1.0, kept: Mapping[Linear, Tensor] | None = None
) -> None:
    """Take a merged change out again.

    With what `merge` kept, the weights are what they were, bit for bit. Without, the change is subtracted: each weight
    is off by up to two roundings of its precision (in float32 about 1e-7 of its size, in bfloat16 about 1 %).

    Args:
        model: after ``merge(model, adapter, weight=weight)``.
        adapter: the one that was merged.
        weight: with which.
        kept: what that call returned.

    Raises:
        As `merge`; InvalidArgument also where ``kept`` is not of this adapter.
    """
    if kept is None:
        merge(model, adapter, weight=-weight)
        return
    _check_merge(model, adapter, weight)
    if kept.keys() != adapter.changes.keys():
        raise InvalidArgument(
            f"what was kept is of {len(kept)} layers, the adapter {adapter.name!r} changes {len(adapter.changes)} "
            "others; give what merging this adapter returned"
        )
    for linear, before in kept.items():
        assert linear.weight is not None
        linear.weight.data.copy_(before)


def save_sum(folder: str | Path, model: LanguageModel, adapter: Adapter, rank: int) -> None:
    """Write an adapter that is loaded (a sum of several, say) as one of a rank: the nearest one.

    Args:
        folder: an adapter already in it is replaced.
        model: whose adapter it is.
        adapter: see `pippin.nn.lora.combine`.
        rank: where the adapter's is smaller, it is filled up with zeros.

    Raises:
        InvalidArgument: a rank below 1.
        AdapterMismatch: the adapter changes layers that are not of this model.
        DiskFull: there is not enough space; nothing was changed.
    """
    names = {(place.linear, place.start): layer for layer, place in targets_of(model.module)}
    pairs = {}
    for linear, changes in combine(adapter.name, [(adapter, 1.0)], rank=rank).changes.items():
        for change in changes:
            layer = names.get((linear, change.start))  # type: ignore[arg-type]
            if layer is None:
                raise AdapterMismatch(f"the adapter {adapter.name!r} changes a layer that is not of {model.name}")
            short = rank - len(change.down)
            pairs[layer] = F.pad(change.down.float(), (0, 0, 0, short)), F.pad(change.up.float(), (0, short))
    save_adapter(folder, pairs, model=model, alpha=rank)


def _check_merge(model: LanguageModel, adapter: Adapter, weight: float) -> None:
    if not math.isfinite(weight):
        raise InvalidArgument(f"an adapter is merged with a finite weight, got {weight}")
    names = {part: name for name, part in model.module.named_modules()}
    if unknown := sum(layer not in names for layer in adapter.changes):
        raise AdapterMismatch(f"the adapter {adapter.name!r} changes {unknown} layers that are not of {model.name}")
    packed = [names[layer] for layer in adapter.changes if getattr(layer, "packed", None) is not None]
    if packed:
        raise InvalidArgument(
            f"{model.name} is packed ({len(packed)} matrices, {packed[0]} first), and codes cannot hold the sum; "
            "load it with pack=False to merge, or keep the adapter beside it"
        )
    for layer, changes in adapter.changes.items():
        if not all(change.down.isfinite().all() and change.up.isfinite().all() for change in changes):
            raise InvalidInput(f"the adapter {adapter.name!r} holds values at {names[layer]} that are not finite")


def _check(rank: int, alpha: float, dropout: float, ratio: float) -> None:
    if rank < 1:
        raise InvalidArgument(f"the rank of an adapter must be at least 1, got {rank}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidArgument(f"alpha must be finite and above 0, got {alpha}")
    if not 0.0 <= dropout < 1.0:
        raise InvalidArgument(f"dropout must be from 0 to below 1, got {dropout}")
    if not (math.isfinite(ratio) and ratio > 0):
        raise InvalidArgument(f"ratio must be finite and above 0, got {ratio}")


def _fresh(place: Target, rank: int, device: torch.device, generator: torch.Generator) -> Pair:
    """A random A and a B of zeros, float32 whatever the base model's precision is."""
    inputs = place.linear.inputs
    up = torch.zeros(place.outputs, rank, device=device)
    if device.type == "meta":
        return torch.empty(rank, inputs, device=device), up
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator).to(device), up


def _key(layer: str) -> str:
    """Names of parameters hold no dots."""
    return layer.replace(".", "/")
