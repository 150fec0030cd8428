r"""Calibration of quantizers: the second moments of every matrix's inputs on text, computed layer by layer.

Notable here:
- only the hidden states between two layers are stored, so memory does not grow with the depth
- the squared error of a matrix's outputs depends on its inputs only through the second moments $E[x x^\top]$; matrices
  with the same input share them
- a pass stops after the last requested matrix, so that four stages (queries, attention output, feed-forward inputs and
  output) cost less than two passes
- layers with KV sharing read the keys and values of their source, as in the engine
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.kv_cache import KeyValues, NoCache, causal_mask
from pippin.nn.linear import Linear
from pippin.nn.parallel.tracks import TrackStream

_OUTER = ("embed_tokens", "lm_head", "per_layer")


@checked
def calibration_ids(
    model: LanguageModel,
    texts: Iterable[str],
    *,
    tokens: Annotated[int, Ge(2)] = 16_384,
    length: Annotated[int, Ge(2)] = 512,
) -> Int[Tensor, "rows length"]:
    """Token ids of text as rows of equal length; documents are concatenated with the end token between them.

    Args:
        model: the model, for its tokenizer.
        texts: documents; only as many as needed are read.
        tokens: maximum number of tokens, at least 2.
        length: tokens per row, at least 2; less if the text or the model's context is shorter.

    Raises:
        InvalidInput: the text holds fewer than two tokens.
        InvalidArgument: fewer than two tokens or a length below two were asked for.
    """
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
    """Check that token ids (rows, length) can calibrate this decoder.

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
        invalid = low if low < 0 else high
        raise InvalidArgument(
            f"calibration id {invalid} is outside the vocabulary of {module.config.vocab_size} tokens"
        )


def check_dense(module: Decoder) -> None:
    """Check that a decoder's weights can be quantized.

    Raises:
        InvalidArgument: weights that are packed, or on the meta device.
    """
    for name, part in module.named_modules():
        if getattr(part, "packed", None) is not None:
            raise InvalidArgument(f"{name} is packed for inference; load the model with pack=False to quantize it")
        if isinstance(part, Linear | TokenEmbedding) and part.weight is not None and part.weight.is_meta:
            raise InvalidArgument(f"{name} has no weights: it is on the meta device")


def matrices(module: Decoder) -> dict[str, Linear | TokenEmbedding]:
    """The matrices of a decoder that are quantized, by name, in the order of the layers; the embedding first.

    Routers of experts (small and sensitive) and a tied output matrix are left out.
    """
    found: dict[str, Linear | TokenEmbedding] = {}
    for name, part in module.named_modules():
        tied = name == "lm_head" and module.config.tie_word_embeddings
        if isinstance(part, Linear | TokenEmbedding) and not tied and not name.endswith(".mlp.gate"):
            found[name] = part
    return found


def is_outer(name: str) -> bool:
    """Whether a matrix is an embedding or the output matrix, whose bits are configured separately."""
    return name.partition(".")[0] in _OUTER


def stages(layer: nn.Module) -> list[list[str]]:
    """The matrices of one decoder layer in the order of computation; the matrices of a stage share their inputs.

    Names are relative to the layer.
    """
    order = (
        ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        ("q_b_proj",),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
        ("laurel.left",),
        ("laurel.right",),
        ("layer_input.gate",),
        ("layer_input.proj",),
    )
    linear = [name for name, part in layer.named_modules() if isinstance(part, Linear)]
    found = [[name for name in linear if f".{name}".endswith(tuple(f".{end}" for end in ends))] for ends in order]
    return [names for names in found if names]


class LayerwiseCalibration:
    """The hidden states of calibration text in a decoder, advanced layer by layer.

    Args:
        module: a decoder with float weights; it is not changed.
        ids: token ids of the calibration text.
        batch_size: rows per forward pass.
    """

    def __init__(self, module: Decoder, ids: Int[Tensor, "rows length"], *, batch_size: int = 4) -> None:
        check_calibration(module, ids)
        self.module = module
        device = module.embed_tokens.device
        with torch.no_grad():
            self.states = [module.embed(rows.to(device)) for rows in ids.split(batch_size)]
            self._inputs = [
                module.per_layer_inputs(rows.to(device), x)
                for rows, x in zip(ids.split(batch_size), self.states, strict=True)
            ]
        tracks = module.config.tracks
        self._streams = [None if tracks is None else TrackStream(tracks) for _ in self.states]
        sources = {spec.attention.kv_source for spec in module.config.layers} - {None}
        self._caches = [_SourceCache({source for source in sources if source is not None}) for _ in self.states]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Replace a layer by a copy that may be changed, advance the text through it at the end, and restore it."""
        original = self.module.layers[index]
        self.module.layers[index] = copied = copy.deepcopy(original)
        try:
            yield copied
            self.advance(index)
        finally:
            self.module.layers[index] = original

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Compute the hidden states after one layer."""
        for number, stream in enumerate(self._streams):
            self.states[number] = self._forward(number, index, stream)

    def _forward(self, number: int, index: int, stream: TrackStream | None) -> Tensor:
        """The hidden states of one batch after a layer."""
        return self.module.forward_layers(
            self.states[number],
            self._caches[number],
            layers=range(index, index + 1),
            per_layer=self._inputs[number],
            stream=stream,
        )

    @torch.no_grad()
    def moments(self, index: int, names: Sequence[str]) -> dict[str, Float[Tensor, "inputs inputs"]]:
        r"""Second moments $E[x x^\top]$ of the inputs of matrices of a layer, over the tokens.

        Args:
            index: index of the layer after the layers advanced so far.
            names: names of matrices, relative to the layer.

        Returns:
            Float32 by name; matrices with the same input share a tensor. It is zero for an expert without tokens.
        """
        layer = self.module.layers[index]
        sums = _Sums({name: layer.get_submodule(name) for name in names})
        try:
            for number, stream in enumerate(self._streams):
                sums.begin()
                with suppress(_AllSeen):
                    self._forward(number, index, copy.copy(stream))
        finally:
            sums.close()
        return sums.means()

    @torch.no_grad()
    def outer_moments(self) -> Float[Tensor, "width width"]:
        """Second moments of the inputs of the output matrix, after the last layer."""
        rows = [self.module.norm(x).flatten(0, 1).float() for x in self.states]
        total = torch.zeros(rows[0].shape[1], rows[0].shape[1], device=rows[0].device)
        for x in rows:
            total.addmm_(x.T, x)
        return total / sum(len(x) for x in rows)


class _AllSeen(Exception):
    """All requested matrices were reached, so the pass can stop."""


class _Sums:
    """Hooks that sum the second moments of the inputs of matrices."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.same: dict[str, str] = {}  # matrix -> an earlier one with the identical input tensor
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
        """The means over the tokens; matrices with the same input share a tensor."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        for name, part in self.parts.items():
            if name not in means and name not in self.same:
                assert isinstance(part, Linear)
                means[name] = torch.zeros(part.inputs, part.inputs, device=part.weight.device)
        return {name: means[self.same.get(name, name)] for name in self.parts}

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
                raise _AllSeen

        return hook


class _SourceCache(NoCache):
    """Stores the keys and values of whole sequences for the layers that later ones read."""

    def __init__(self, sources: set[int]) -> None:
        super().__init__()
        self.sources = sources
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> KeyValues:
        """Return the new keys and values; store them if a later layer reads them."""
        if layer in self.sources:
            self.stored[layer] = (k, v)
        return super().append(layer, k, v, window)

    def view(self, layer: int, window: int | None) -> KeyValues:
        """The keys and values of an earlier layer."""
        k, v = self.stored[layer]
        return k, v, causal_mask(0, k.shape[2], window, None, k.device)

    def narrow(self) -> None:
        """Do nothing, as every token is computed."""
