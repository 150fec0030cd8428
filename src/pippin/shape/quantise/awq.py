r"""AWQ: inputs that carry much are made large in the weights, where rounding then hurts them less.

Notable here:
- $W x = (W \operatorname{diag} s)(\operatorname{diag} s^{-1} x)$ for any $s > 0$; the inverse is folded into whatever
  makes $x$ (a norm, the rows of the values, the rows of the gated half), so the decoder stays the decoder that it was
  and its function stays the same
- where query heads share values, they share the scales too, which keeps that fold exact
- $s_j = (E x_j^2)^{\alpha / 2}$ with $\alpha$ from a grid: 0 is plain rounding, so no fold makes its readers worse
- the error of a candidate is computed from second moments, without another pass of the text

Source: Lin et al. 2023, arXiv:2306.00978, eq. 4 and 5; it takes mean magnitudes where this takes root mean squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder, DecoderLayer
from pippin.nn.codes import Codes
from pippin.nn.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.shape.quantise import rtn
from pippin.shape.quantise.calibration import Walk, check_calibration
from pippin.shape.quantise.config import QuantisationSettings

_FLOOR = 1e-4  # of a scale, so that an input that is always zero divides by nothing worse


def quantise(
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, int] | None = None,
    grid: int = 10,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name.

    **The model is changed**: its norms and matrices carry the folded scales, which the codes belong to. What it
    computes is the same, up to rounding in its precision.

    Args:
        model: float weights (`pippin.load` with ``pack=False``).
        settings: bits, levels and groups.
        calibration: token ids, see `calibration_ids`; a few thousand tokens are enough.
        bits: the width of single matrices, where it is not that of the settings.
        grid: how many exponents between 0 and 1 are tried.
        on_matrix: told the name of each matrix that is done.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit, ids that are
            no text of the model, an empty grid.
    """
    told: set[str] = set()

    def once(name: str) -> None:
        if name not in told:
            told.add(name)
            on_matrix(name)

    fold(model.module, settings, calibration, bits=bits, grid=grid, on_matrix=once)
    return rtn.quantise(model, settings, bits=bits, on_matrix=once)


def fold(
    module: Decoder,
    settings: QuantisationSettings,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, int] | None = None,
    grid: int = 10,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Rescale a decoder in place, so that rounding it to nearest hurts less; the exponent of each fold, by its readers.

    Arguments and errors as for `quantise`. Other methods may quantise the decoder afterwards.
    """
    if grid < 1:
        raise InvalidArgument(f"grid is {grid}; at least one exponent must be tried")
    check_calibration(module, calibration)
    walk, exponents = Walk(module, calibration), {}
    for index in range(len(module.layers)):
        layer = module.layers[index]
        assert isinstance(layer, DecoderLayer)
        folds = folds_of(module, index)
        moments = walk.moments(index, [part.observed for part in folds])
        for part in folds:
            readers = [layer.get_submodule(name) for name in part.readers]
            widths = [rtn.width(f"layers.{index}.{name}", settings, bits) for name in part.readers]
            alpha, scale = _search(part, readers, widths, moments[part.observed], settings, grid)
            part.apply(layer, scale)
            exponents[f"layers.{index}.{part.readers[0]}"] = alpha
            for name in part.readers:
                on_matrix(f"layers.{index}.{name}")
        walk.advance(index)
    return exponents


@dataclass(frozen=True)
class Fold:
    """One place where inputs can be rescaled without changing the decoder.

    Args:
        source: what makes the inputs: a norm or a matrix, by its name in the layer.
        readers: the matrices that read them and are quantised.
        also: matrices that read them and are not.
        heads: kv heads, query heads of each and width of a head, where the readers' inputs repeat the source's outputs.
    """

    source: str
    readers: tuple[str, ...]
    also: tuple[str, ...] = ()
    heads: tuple[int, int, int] | None = None

    @property
    def observed(self) -> str:
        """The matrix whose inputs are looked at: the router, which every token passes, or the first reader."""
        return (*self.also, *self.readers)[0]

    def shared(self, energy: Float[Tensor, inputs]) -> Float[Tensor, outputs]:
        """Mean energy of each output of the source, over the inputs that repeat it."""
        return energy if self.heads is None else energy.view(self.heads).mean(1).flatten()

    def spread(self, scale: Float[Tensor, outputs]) -> Float[Tensor, inputs]:
        """The scale of each input of the readers."""
        if self.heads is None:
            return scale
        kv_heads, repeats, width = self.heads
        return scale.view(kv_heads, 1, width).expand(-1, repeats, -1).flatten()

    @torch.no_grad()
    def apply(self, layer: nn.Module, scale: Float[Tensor, outputs]) -> None:
        """Multiply the readers' inputs by the scale, and divide the source's outputs by it."""
        for name in (*self.readers, *self.also):
            reader = layer.get_submodule(name)
            assert isinstance(reader, Linear)
            assert reader.weight is not None
            reader.weight.mul_(self.spread(scale).to(reader.weight.dtype))
        source = layer.get_submodule(self.source)
        assert isinstance(source, Linear | RMSNorm)
        assert source.weight is not None
        inverse = scale.reciprocal().to(source.weight.dtype)
        source.weight.mul_(inverse if isinstance(source, RMSNorm) else inverse[:, None])
        if isinstance(source, Linear) and source.bias is not None:
            source.bias.mul_(inverse)


def folds_of(module: Decoder, index: int) -> list[Fold]:
    """The folds of one layer that are exact.

    Values are left alone where a later layer reads them too, and what enters a nonlinearity (the plain feed-forward
    layer) always is.
    """
    config, layer = module.config, module.layers[index]
    assert isinstance(layer, DecoderLayer)
    shared = {spec.attention.source for spec in config.layers}
    own = config.layers[index].attention.source is None
    names = ("q_proj", "k_proj", "v_proj") if own else ("q_proj",)
    folds = [Fold("input_layernorm", tuple(f"self_attn.{name}" for name in names))]
    if own and index not in shared:
        heads = (config.kv_heads, config.heads // config.kv_heads, config.head_dim)
        folds.append(Fold("self_attn.v_proj", ("self_attn.o_proj",), heads=heads))
    norm = "post_attention_layernorm" if layer.pre_feedforward_layernorm is None else "pre_feedforward_layernorm"
    if isinstance(layer.mlp, FeedForward):
        gated = layer.mlp.gate_proj is not None
        folds.append(Fold(norm, ("mlp.gate_proj", "mlp.up_proj") if gated else ("mlp.up_proj",)))
        return [*folds, Fold("mlp.up_proj", ("mlp.down_proj",))] if gated else folds
    assert isinstance(layer.mlp, MixtureOfExperts)
    experts = [f"mlp.experts.{number}" for number in range(len(layer.mlp.experts))]
    inner = tuple(f"{name}.{part}" for name in experts for part in ("gate_proj", "up_proj"))
    folds.append(Fold(norm, inner, also=("mlp.gate",)))
    return [*folds, *(Fold(f"{name}.up_proj", (f"{name}.down_proj",)) for name in experts)]


def _search(
    part: Fold,
    readers: list[nn.Module],
    widths: list[int | None],
    moments: Float[Tensor, "inputs inputs"],
    settings: QuantisationSettings,
    grid: int,
) -> tuple[float, Tensor]:
    """The exponent of least error of the readers' outputs, and its scales."""
    energy = part.shared(moments.diagonal()).sqrt()
    best: tuple[float, float, Tensor] | None = None
    weights = [reader.dense_weight().float() for reader in readers if isinstance(reader, Linear)]
    for alpha in [step / grid for step in range(grid + 1)]:
        scale = energy.clamp(min=energy.max() * _FLOOR + torch.finfo(energy.dtype).tiny).pow(alpha)
        scale = scale / (scale.max() * scale.min()).sqrt()
        across = part.spread(scale)
        error = 0.0
        for weight, bits in zip(weights, widths, strict=True):
            if bits is None:
                continue  # left exact
            wrong = rtn.round_weight(weight * across, bits, settings).dense() / across - weight
            error += float(((wrong @ moments) * wrong).sum())
        if best is None or error < best[0]:
            best = (error, alpha, scale)
        if not energy.any():
            break  # no token came here: nothing to go by
    assert best is not None
    return best[1], best[2]
