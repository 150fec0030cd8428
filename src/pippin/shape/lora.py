r"""Low-rank adaptation (LoRA): training low-rank updates of a frozen model, and merging them into its weights.

Notable here:
- the base model may be quantized: gradients pass through the packed weights without a dense copy, so adapters are
  trained on the weights that inference uses
- only the low-rank factors are parameters, so checkpoints take a few megabytes
- each projection of a fused matrix has its own factors; projections that a layer lacks (KV sharing) have none
- training may start from another adapter (padded to a larger rank without changing its function), or on top of other
  adapters, which are frozen
- packed weights cannot be merged: their codes cannot represent the sum

Source: Hu et al. 2021, arXiv:2106.09685; rank-stabilized scale: Kalajdzievski 2023, arXiv:2312.03732; a higher rate for
B: Hayou et al. 2024, arXiv:2402.12354 (LoRA+); frozen quantized base: Dettmers et al. 2023, arXiv:2305.14314.
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

from pippin.core.checks import FiniteFloat, Fraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import AdapterMismatch, InvalidArgument, InvalidInput
from pippin.language.adapter_files import Factors, TargetModule, attach, save_adapter, target_modules as targets_of
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.language_model import LanguageModel
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.kv_cache import KVCache
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate, combine

ALL: Final = "all"
"""Every matrix of attention and dense feed-forward layers."""

_ALL_ROWS = slice(None)


class LowRankModel(nn.Module):
    r"""A decoder with trainable low-rank updates of its matrices: $y = W x + s B A x$, $s = \alpha / r$.

    Objectives use it like a decoder (`hidden`, `lm_head`, `config`); its only parameters are the factors $A$ and $B$.
    The decoder is frozen in place.

    Args:
        module: the base model's decoder, packed or not.
        rank: $r$, rank of every update.
        alpha: $\alpha$ > 0.
        targets: the matrices to update: `ALL`, or names, of a kind of matrix ("q_proj") or of one matrix
            ("layers.3.mlp.up_proj").
        rslora: $s = \alpha / \sqrt r$ instead, which makes the size of the update independent of the rank.
        dropout: dropout rate of the inputs of $A$ in training, below 1.
        lr_ratio: learning rate of $B$ over that of $A$ (LoRA+; its authors use 16).
        seed: seed of $A$, uniform within $\pm 1 / \sqrt{\text{inputs}}$; $B$ is zero.
        init: initial factors by layer, with the scale included in $B$
            (`pippin.language.adapter_files.read_factors`, `pippin.shape.recovery.residual_pairs`). A smaller rank is
            padded with random rows of $A$ and zeros in $B$; other layers are initialized as usual.
        base_adapters: further adapters that are active and frozen.

    Raises:
        InvalidArgument: a rank above that of a matrix, a target that names no matrix (the message lists all), or
            initial factors that do not fit.

    >>> from pippin.language import DecoderConfig, LayerSpec
    >>> from pippin.nn.attention.attention import AttentionSpec
    >>> from pippin.nn.feedforward.feedforward import FeedForwardSpec
    >>> layer = LayerSpec(AttentionSpec(), FeedForwardSpec(intermediate_size=32))
    >>> config = DecoderConfig("llama", 100, 16, (layer,), num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ...     max_position_embeddings=64)
    >>> adapted = LowRankModel(Decoder(config).initialize(seed=0), rank=2, targets=["q_proj", "down_proj"])
    >>> {name: tuple(map(len, pair)) for name, pair in adapted.pairs().items()}
    {'layers.0.self_attn.q_proj': (2, 16), 'layers.0.mlp.down_proj': (2, 16)}
    >>> sum(p.numel() for p in adapted.parameters())
    160
    """

    @checked
    def __init__(
        self,
        module: Decoder,
        rank: PositiveInt = 32,
        alpha: PositiveFloat = 16.0,
        targets: str | Sequence[str] = ALL,
        *,
        rslora: bool = False,
        dropout: Fraction = 0.0,
        lr_ratio: PositiveFloat = 1.0,
        seed: int = 0,
        init: Mapping[str, Factors] | None = None,
        base_adapters: Sequence[Adapter] = (),
    ) -> None:
        super().__init__()
        self._targets = select_targets(module, targets, rank)
        self.__dict__["base"] = module.requires_grad_(False)  # not registered as a submodule: not in the state dict
        self.rank, self.alpha, self.rslora, self.dropout = rank, float(alpha), rslora, dropout
        self.base_adapters = tuple(base_adapters)
        self.scale = self.alpha / (math.sqrt(rank) if rslora else rank)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)
        for layer, target in self._targets.items():
            down, up = _initial_factors(target, rank, module.embed_tokens.device, generator)
            self.down[_key(layer)], self.up[_key(layer)] = nn.Parameter(down), nn.Parameter(up)
            self.up[_key(layer)].lr_scale = lr_ratio
        if init is not None:
            self._initialize(init)

    base: Decoder

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config."""
        return self.base.config

    @property
    def lm_head(self) -> Linear:
        """The decoder's output matrix, which has no update."""
        return self.base.lm_head

    @property
    def embed_tokens(self) -> TokenEmbedding:
        """The decoder's embedding, which has no update; its device and dtype are the model's."""
        return self.base.embed_tokens

    def forward(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        logits_to_keep: int | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits of the token after each given one; arguments as for `Decoder.forward`."""
        logits: Tensor = self.base(
            ids, cache=cache, padding=padding, logits_to_keep=logits_to_keep, adapters=self._adapter_slices()
        )
        return logits

    def hidden(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
    ) -> Float[Tensor, "batch new width"]:
        """The inputs of the output matrix; arguments as for `Decoder.forward`."""
        return self.base.hidden(ids, cache=cache, padding=padding, adapters=self._adapter_slices())

    def pairs(self) -> dict[str, Factors]:
        """$A$ and $B$ by layer, without the scale, for `save_adapter`."""
        return {layer: (self.down[_key(layer)].detach(), self.up[_key(layer)].detach()) for layer in self._targets}

    def changes(self) -> dict[str, Factors]:
        """$A$ and $s B$ by layer, which may initialize another adapter."""
        return {layer: (down, up * self.scale) for layer, (down, up) in self.pairs().items()}

    def to_adapter(self, name: str, model: LanguageModel) -> Adapter:
        """An adapter with a copy of the current factors, for requests to ``model`` (see ``model.adapters``)."""
        return attach(model, name, self.changes())

    def save(self, path: str | Path, model: LanguageModel, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write the adapter in PEFT's layout, with the hash of its base model.

        Args:
            path: the folder; an adapter in it is replaced.
            model: the base model, with the decoder of this adapter.
            metadata: provenance of the adapter, JSON values.

        Raises:
            DiskFull: there is not enough space; nothing was changed.
        """
        save_adapter(path, self.pairs(), model=model, alpha=self.alpha, rslora=self.rslora, metadata=metadata)

    def _adapter_slices(self) -> list[tuple[Adapter, slice]]:
        """This adapter and the base adapters, each for all rows of a batch."""
        precision = self.base.embed_tokens.dtype
        dropout = self.dropout if self.training else 0.0
        changes: dict[nn.Module, list[LowRankUpdate]] = {}
        for layer, target in self._targets.items():
            down, up = self.down[_key(layer)].to(precision), (self.up[_key(layer)] * self.scale).to(precision)
            changes.setdefault(target.linear, []).append(LowRankUpdate(down, up, target.start, dropout))
        own = Adapter("training", {linear: tuple(parts) for linear, parts in changes.items()})
        return [(adapter, _ALL_ROWS) for adapter in (*self.base_adapters, own)]

    @torch.no_grad()
    def _initialize(self, init: Mapping[str, Factors]) -> None:
        if unknown := sorted(init.keys() - self._targets.keys()):
            raise InvalidArgument(f"initial factors are given for layers that are no targets: {', '.join(unknown)}")
        for layer, (down, up) in init.items():
            ours = self.down[_key(layer)], self.up[_key(layer)]
            rank = down.shape[0]
            expected = (rank, ours[0].shape[1]), (ours[1].shape[0], rank)
            if (tuple(down.shape), tuple(up.shape)) != expected or rank > self.rank:
                raise InvalidArgument(
                    f"{layer} cannot be initialized with factors of {tuple(down.shape)} and {tuple(up.shape)}; it has "
                    f"{tuple(ours[0].shape)} and {tuple(ours[1].shape)}; only a smaller rank is padded"
                )
            ours[0][:rank] = down.to(ours[0])
            ours[1].zero_()[:, :rank] = up.to(ours[1]) / self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowRankModel:
        self.base._apply(fn, recurse)  # type: ignore[no-untyped-call]  # not a submodule
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def select_targets(module: Decoder, targets: str | Sequence[str], rank: int = 1) -> dict[str, TargetModule]:
    """The matrices that the targets name, in the decoder's order.

    Args:
        module: the decoder.
        targets: as for `LowRankModel`.
        rank: rank of the updates.

    Raises:
        InvalidArgument: a target that names no matrix, or a matrix too small for the rank.
    """
    available = dict(targets_of(module))
    names = [targets] if isinstance(targets, str) else list(targets)
    kinds = {layer.rpartition(".")[2] for layer in available}
    unknown = [name for name in names if name != ALL and name not in kinds and name not in available]
    if unknown or not names:
        raise InvalidArgument(
            f"targets that name no matrix of this model: {', '.join(map(repr, unknown)) or 'none given'}; there are: "
            f"{', '.join(sorted(kinds))}, {ALL!r} for all of them, and single layers such as {next(iter(available))!r}"
        )
    requested = set(names)
    selected = {
        layer: target for layer, target in available.items() if requested & {ALL, layer, layer.rpartition(".")[2]}
    }
    for layer, target in selected.items():
        if rank > min(target.outputs, target.linear.inputs):
            raise InvalidArgument(
                f"rank {rank} is more than {layer} can have, a matrix of {target.outputs} x {target.linear.inputs}"
            )
    return selected


@torch.no_grad()
def merge(
    model: LanguageModel, adapter: Adapter, *, weight: float = 1.0, return_originals: bool = False
) -> dict[Linear, Tensor]:
    r"""Add an adapter's update to the weights, in place: $W \leftarrow W + w B A$.

    Several adapters are merged in sequence, or as their sum (`pippin.nn.lora.combine`). The sum is computed in float32,
    then rounded to the weights' dtype.

    Args:
        model: a model with dense weights (``pippin.load(..., pack=False)``).
        adapter: an adapter of this model.
        weight: $w$; with 1 the merged model computes what the model with the adapter does.
        return_originals: return copies of the weights before the merge, for `unmerge`.

    Returns:
        The copies by layer; empty without ``return_originals``.

    Raises:
        InvalidArgument: the weights are packed, or ``weight`` is not finite.
        AdapterMismatch: the adapter changes layers that are not of this model.
        InvalidInput: the adapter holds values that are not finite.
    """
    _check_merge(model, adapter, weight)
    originals = {}
    for linear, changes in adapter.changes.items():
        assert isinstance(linear, Linear)
        if return_originals:
            originals[linear] = linear.weight.detach().clone()
        for change in changes:
            rows = linear.weight.data[change.start : change.start + len(change.up)]
            rows.copy_(rows.float() + weight * (change.up.float() @ change.down.float()))
    return originals


@torch.no_grad()
def unmerge(
    model: LanguageModel, adapter: Adapter, *, weight: float = 1.0, originals: Mapping[Linear, Tensor] | None = None
) -> None:
    """Undo a merge.

    With the originals that `merge` returned, the weights are restored bit for bit. Otherwise the update is subtracted,
    and each weight is off by up to two roundings of its dtype (relative error about 1e-7 in float32, 1 % in bfloat16).

    Args:
        model: the model after ``merge(model, adapter, weight=weight)``.
        adapter: the merged adapter.
        weight: the weight of the merge.
        originals: the return value of the merge with ``return_originals``.

    Raises:
        As `merge`; InvalidArgument also if ``originals`` belong to another adapter.
    """
    if originals is None:
        merge(model, adapter, weight=-weight)
        return
    _check_merge(model, adapter, weight)
    if originals.keys() != adapter.changes.keys():
        raise InvalidArgument(
            f"the originals are of {len(originals)} layers, the adapter {adapter.name!r} changes "
            f"{len(adapter.changes)} others; give the return value of merging this adapter"
        )
    for linear, original in originals.items():
        linear.weight.data.copy_(original)


def save_sum(path: str | Path, model: LanguageModel, adapter: Adapter, rank: int) -> None:
    """Write an adapter, such as a sum of several, as its best approximation of a given rank.

    Args:
        path: the folder; an adapter in it is replaced.
        model: the adapter's model.
        adapter: the adapter, see `pippin.nn.lora.combine`.
        rank: rank of the written adapter; factors of a smaller rank are padded with zeros.

    Raises:
        InvalidArgument: a rank below 1.
        AdapterMismatch: the adapter changes layers that are not of this model.
        DiskFull: there is not enough space; nothing was changed.
    """
    names = {(target.linear, target.start): layer for layer, target in targets_of(model.module)}
    pairs = {}
    for linear, changes in combine(adapter.name, [(adapter, 1.0)], rank=rank).changes.items():
        for change in changes:
            layer = names.get((linear, change.start))  # type: ignore[arg-type]
            if layer is None:
                raise AdapterMismatch(f"the adapter {adapter.name!r} changes a layer that is not of {model.name}")
            missing = rank - len(change.down)  # rows of A and columns of B to pad
            pairs[layer] = F.pad(change.down.float(), (0, 0, 0, missing)), F.pad(change.up.float(), (0, missing))
    save_adapter(path, pairs, model=model, alpha=rank)


@checked
def _check_merge(model: LanguageModel, adapter: Adapter, weight: FiniteFloat) -> None:
    names = {part: name for name, part in model.module.named_modules()}
    if unknown := sum(layer not in names for layer in adapter.changes):
        raise AdapterMismatch(f"the adapter {adapter.name!r} changes {unknown} layers that are not of {model.name}")
    packed = [names[layer] for layer in adapter.changes if getattr(layer, "packed", None) is not None]
    if packed:
        raise InvalidArgument(
            f"{model.name} is packed ({len(packed)} matrices, {packed[0]} first), and codes cannot represent the sum; "
            "load it with pack=False to merge, or use the adapter unmerged"
        )
    for layer, changes in adapter.changes.items():
        if not all(change.down.isfinite().all() and change.up.isfinite().all() for change in changes):
            raise InvalidInput(f"the adapter {adapter.name!r} holds values at {names[layer]} that are not finite")


def _initial_factors(target: TargetModule, rank: int, device: torch.device, generator: torch.Generator) -> Factors:
    """A random A and a B of zeros, float32 for every dtype of the base model."""
    inputs = target.linear.inputs
    up = torch.zeros(target.outputs, rank, device=device)
    if device.type == "meta":
        return torch.empty(rank, inputs, device=device), up
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator).to(device), up


def _key(layer: str) -> str:
    """A parameter name for a layer; parameter names cannot contain dots."""
    return layer.replace(".", "/")
