r"""What the matrices of a decoder read: calibration text on its way through it, one layer at a time.

Notable here:
- only hidden states between two layers are kept, so the memory is that of one layer whatever the depth
- what a matrix reads is summed up as its second moments $E[x x^\top]$, which say everything that a squared error of its
  outputs depends on; matrices that read the same input share them
- a pass stops at the last matrix that is asked about, so that asking stage by stage (queries, then the output of
  attention, then the feed-forward layer) costs less than two passes
- layers that read the keys of an earlier layer find them, as in the engine
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder
from pippin.nn.cache import NoCache, Read, causal_mask
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear

_OUTER = ("embed_tokens", "lm_head")


def calibration_ids(
    model: LanguageModel, texts: Iterable[str], *, tokens: int = 16_384, length: int = 512
) -> Int[Tensor, "rows length"]:
    """Text as rows of token ids of equal length; documents follow each other, divided by the end token.

    Args:
        model: whose tokenizer is used.
        texts: documents; no more of them are read than are needed.
        tokens: how many to take at most.
        length: of a row; shorter if the text or the model's context is.

    Raises:
        InvalidInput: the text holds fewer than two tokens.
        InvalidArgument: fewer than two tokens or a length below two were asked for.
    """
    if tokens < 2 or length < 2:
        raise InvalidArgument(f"calibration needs rows of at least 2 tokens; got tokens={tokens}, length={length}")
    end = list(model.tokenizer.eos_ids[:1])
    ids: list[int] = []
    for text in texts:
        ids += model.tokenizer.encode(text) + end
        if len(ids) >= tokens:
            break
    if len(ids) - len(end) < 2:
        raise InvalidInput(f"the calibration text holds {max(0, len(ids) - len(end))} tokens; give some text")
    length = min(length, model.context_size, tokens, len(ids))
    rows = min(tokens, len(ids)) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


def check_calibration(module: Decoder, ids: Tensor) -> None:
    """Raise where ids (rows, length) are no text of this decoder.

    Raises:
        InvalidArgument: no rows, an id outside the vocabulary, or a decoder without ordinary weights or with recurrent
            layers.
    """
    check_dense(module)
    if module.config.recurrent_layers:
        raise InvalidArgument(
            f"layer {module.config.recurrent_layers[0]} is recurrent, and calibration goes through layers that attend; "
            "round such a model to nearest, which needs no text"
        )
    if ids.ndim != 2 or not ids.numel():
        raise InvalidArgument(
            f"calibration ids have shape {tuple(ids.shape)}; give (rows, length), see calibration_ids"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= module.config.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidArgument(f"calibration id {wrong} is outside the vocabulary of {module.config.vocab_size} tokens")


def check_dense(module: Decoder) -> None:
    """Raise where a decoder's weights cannot be quantised as they are.

    Raises:
        InvalidArgument: they are packed, or on the meta device.
    """
    for name, part in module.named_modules():
        if getattr(part, "packed", None) is not None:
            raise InvalidArgument(f"{name} is packed for inference; load the model with pack=False to quantise it")
        if isinstance(part, Linear | Embedding) and part.weight is not None and part.weight.is_meta:
            raise InvalidArgument(f"{name} has no weights: it is on the meta device")


def matrices(module: Decoder) -> dict[str, Linear | Embedding]:
    """Every matrix of a decoder that a quantiser works on, by name, in the order of the layers; the embedding first.

    Routers of experts are left out (they are small, and choose), and so is the output matrix of a tied decoder.
    """
    found: dict[str, Linear | Embedding] = {}
    for name, part in module.named_modules():
        tied = name == "lm_head" and module.config.tied
        if isinstance(part, Linear | Embedding) and not tied and not name.endswith(".mlp.gate"):
            found[name] = part
    return found


def is_outer(name: str) -> bool:
    """Whether a matrix is the embedding or the output matrix, which have a width of their own."""
    return name.partition(".")[0] in _OUTER


def stages(layer: nn.Module) -> list[list[str]]:
    """The matrices of one decoder layer by the order in which they are reached; those of a stage share their inputs.

    Names are relative to the layer.
    """
    order = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    found: list[list[str]] = [[], [], [], []]
    for name, part in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(part, Linear) and leaf in order:
            found[order[leaf]].append(name)
    return [names for names in found if names]


class Walk:
    """Calibration text inside a decoder.

    Args:
        module: float weights; between calls it is as it was.
        ids: calibration text.
        batch: rows that go through a layer at a time.
    """

    def __init__(self, module: Decoder, ids: Int[Tensor, "rows length"], *, batch: int = 4) -> None:
        check_calibration(module, ids)
        self.module = module
        device = module.embed_tokens.device
        with torch.no_grad():
            self.states = [module.embed(rows.to(device)) for rows in ids.split(batch)]
        sources = {spec.attention.source for spec in module.config.layers} - {None}
        self._caches = [_Kept({source for source in sources if source is not None}) for _ in self.states]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A copy of a layer that stands in its place, to be changed; at the end the text passes it, and it goes."""
        original = self.module.layers[index]
        self.module.layers[index] = copied = copy.deepcopy(original)
        try:
            yield copied
            self.advance(index)
        finally:
            self.module.layers[index] = original

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Take the text through one layer."""
        for number, (x, cache) in enumerate(zip(self.states, self._caches, strict=True)):
            self.states[number] = self.module.through(x, cache, layers=range(index, index + 1))

    @torch.no_grad()
    def moments(self, index: int, names: Sequence[str]) -> dict[str, Float[Tensor, "inputs inputs"]]:
        r"""Second moments $E[x x^\top]$ over the tokens, of what some matrices of a layer read.

        Args:
            index: of the layer, which the text must have reached.
            names: of matrices, relative to the layer.

        Returns:
            Float32, by name; matrices of one input share a tensor. An expert that no token chose has zeros.
        """
        layer = self.module.layers[index]
        sums = _Sums({name: layer.get_submodule(name) for name in names})
        try:
            for x, cache in zip(self.states, self._caches, strict=True):
                sums.begin()
                with suppress(_Enough):
                    self.module.through(x, cache, layers=range(index, index + 1))
        finally:
            sums.close()
        return sums.means()

    @torch.no_grad()
    def outer_moments(self) -> Float[Tensor, "width width"]:
        """Second moments of what the output matrix reads, once the text has passed the last layer."""
        rows = [self.module.norm(x).flatten(0, 1).float() for x in self.states]
        total = torch.zeros(rows[0].shape[1], rows[0].shape[1], device=rows[0].device)
        for x in rows:
            total.addmm_(x.T, x)
        return total / sum(len(x) for x in rows)


class _Enough(Exception):
    """Everything that was asked about in this pass has been seen."""


class _Sums:
    """Hooks that add up the second moments of what matrices read."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.same: dict[str, str] = {}  # a matrix that reads the very input of another one
        self.parts = parts
        self.left: set[str] = set()
        self.last: tuple[str, Tensor] | None = None
        self.hooks = [part.register_forward_pre_hook(self._hook(name)) for name, part in parts.items()]

    def begin(self) -> None:
        """A new pass."""
        self.left, self.last = set(self.parts), None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def means(self) -> dict[str, Tensor]:
        """What was added up, by the number of tokens; matrices of one input get one tensor."""
        whole = {name: total / self.counts[name] for name, total in self.sums.items()}
        for name, part in self.parts.items():
            if name not in whole and name not in self.same:
                assert isinstance(part, Linear)
                assert part.weight is not None
                whole[name] = torch.zeros(part.inputs, part.inputs, device=part.weight.device)
        return {name: whole[self.same.get(name, name)] for name in self.parts}

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0]
            if self.last is not None and self.last[1] is x:
                self.same[name] = self.last[0]
            else:
                flat = x.reshape(-1, x.shape[-1]).float()
                if name not in self.sums:
                    self.sums[name] = torch.zeros(flat.shape[1], flat.shape[1], device=flat.device)
                    self.counts[name] = 0
                self.sums[name].addmm_(flat.T, flat)
                self.counts[name] += len(flat)
                self.last = (name, x)
            self.left.discard(name)
            if not self.left:
                raise _Enough

        return hook


class _Kept(NoCache):
    """A pass over whole sequences that keeps the keys and values of the layers which later ones read."""

    def __init__(self, sources: set[int]) -> None:
        super().__init__()
        self.sources = sources
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> Read:
        """Return what came in; keep it where a later layer will ask."""
        if layer in self.sources:
            self.kept[layer] = (k, v)
        return super().append(layer, k, v, window)

    def view(self, layer: int, window: int | None) -> Read:
        """The keys and values of an earlier layer."""
        k, v = self.kept[layer]
        return k, v, causal_mask(0, k.shape[2], window, None, k.device)

    def narrow(self) -> None:
        """Every token is computed, so there is nothing to narrow to."""
