r"""AWQ: weights of inputs with large activations are scaled up before rounding, which reduces their relative error.

Notable here:
- $W x = (W \operatorname{diag} s)(\operatorname{diag} s^{-1} x)$ for any $s > 0$; the inverse is folded into the layer
  that computes $x$ (a norm, or rows of the value or up projection), so architecture and function are unchanged
- query heads that share values share their scales, which keeps the fold exact
- $s_j = (E x_j^2)^{\alpha / 2}$ with $\alpha$ from a grid that includes 0 (plain rounding), so no fold increases the
  error of the matrices that it scales
- the error of a candidate is computed from second moments, without another forward pass

Source: Lin et al. 2023, arXiv:2306.00978, eq. 4 and 5; it takes mean magnitudes where this takes root mean squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.language.decoder import Decoder
from pippin.language.decoder_layer import DecoderLayer
from pippin.language.language_model import LanguageModel
from pippin.nn.attention.attention import Attention
from pippin.nn.feedforward.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import Bits
from pippin.shape.quantize import rtn
from pippin.shape.quantize.calibration import LayerwiseCalibration, check_calibration
from pippin.shape.quantize.config import QuantizationConfig

_MIN_SCALE = 1e-4  # relative to the largest, for inputs that are always zero


@checked
def quantize(
    model: LanguageModel,
    config: QuantizationConfig,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, Bits] | None = None,
    grid: PositiveInt = 10,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name.

    **The model is changed**: its norms and matrices contain the folded scales that the codes were computed for. Its
    function is unchanged up to rounding in its dtype.

    Args:
        model: a model with float weights (`pippin.load` with ``pack=False``).
        config: bits, levels and groups.
        calibration: token ids, see `calibration_ids`; a few thousand tokens are enough.
        bits: bits of single matrices, if different from the config.
        grid: number of steps of the exponent from 0 to 1, at least 1.
        on_matrix: called with the name of each finished matrix.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit, ids that are
            not valid for the model, a ``grid`` below 1.
    """
    reported: set[str] = set()

    def report_once(name: str) -> None:
        if name not in reported:
            reported.add(name)
            on_matrix(name)

    fold(model.module, config, calibration, bits=bits, grid=grid, on_matrix=report_once)
    return rtn.quantize(model, config, bits=bits, on_matrix=report_once)


@checked
def fold(
    module: Decoder,
    config: QuantizationConfig,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, Bits] | None = None,
    grid: PositiveInt = 10,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Rescale a decoder in place to reduce the error of rounding it; the exponent of each fold, by its first reader.

    Arguments and errors as for `quantize`. The decoder may then be quantized with any method.
    """
    check_calibration(module, calibration)
    calibrated, exponents = LayerwiseCalibration(module, calibration), {}
    for index in range(len(module.layers)):
        layer = module.layers[index]
        assert isinstance(layer, DecoderLayer)
        folds = folds_of(module, index)
        moments = calibrated.moments(index, [part.observed for part in folds])
        for part in folds:
            readers = [layer.get_submodule(name) for name in part.readers]
            widths = [rtn.width(f"layers.{index}.{name}", config, bits) for name in part.readers]
            alpha, scale = _search(part, readers, widths, moments[part.observed], config, grid)
            part.apply(layer, scale)
            exponents[f"layers.{index}.{part.readers[0]}"] = alpha
            for name in part.readers:
                on_matrix(f"layers.{index}.{name}")
        calibrated.advance(index)
    return exponents


@dataclass(frozen=True)
class Fold:
    """Activations that can be rescaled without changing the decoder's function.

    Args:
        source: name in the layer of the norm or matrix that computes them.
        readers: names of the quantized matrices that read them.
        exact_readers: names of the matrices that read them and are not quantized.
        heads: KV heads, query heads per KV head and head width, if the readers' inputs repeat the source's outputs.
    """

    source: str
    readers: tuple[str, ...]
    exact_readers: tuple[str, ...] = ()
    heads: tuple[int, int, int] | None = None

    @property
    def observed(self) -> str:
        """The matrix whose inputs are calibrated: the router, which every token passes, or the first reader."""
        return (*self.exact_readers, *self.readers)[0]

    def shared(self, energy: Float[Tensor, inputs]) -> Float[Tensor, outputs]:
        """Mean second moment of each output of the source, over the inputs that repeat it."""
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
        for name in (*self.readers, *self.exact_readers):
            reader = layer.get_submodule(name)
            assert isinstance(reader, Linear)
            reader.weight.mul_(self.spread(scale).to(reader.weight.dtype))
        source = layer.get_submodule(self.source)
        assert isinstance(source, Linear | RMSNorm)
        inverse = scale.reciprocal().to(source.weight.dtype)
        source.weight.mul_(inverse if isinstance(source, RMSNorm) else inverse[:, None])
        if isinstance(source, Linear) and source.bias is not None:
            source.bias.mul_(inverse)


def folds_of(module: Decoder, index: int) -> list[Fold]:
    """The exact folds of one layer.

    Values that a later layer reads (KV sharing), inputs of a nonlinearity (feed-forward layers without gate) and a
    normalized input that is also added to the hidden states (LAuReL) are not folded.
    """
    config, layer = module.config, module.layers[index]
    assert isinstance(layer, DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    shared = {spec.attention.kv_source for spec in config.layers}
    own = config.layers[index].attention.kv_source is None
    names = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
    into_attention = [f"self_attn.{name}" for name in names if hasattr(attention, name)]
    into_mlp, exact = _inputs_of(mlp)
    if config.residual == "parallel":
        folds = [Fold("input_layernorm", (*into_attention, *into_mlp), exact_readers=exact)]
    else:
        before = "post_attention_layernorm" if layer.pre_feedforward_layernorm is None else "pre_feedforward_layernorm"
        folds = [Fold("input_layernorm", tuple(into_attention)), Fold(before, into_mlp, exact_readers=exact)]
    if layer.laurel is not None:
        folds = [fold for fold in folds if fold.source != "input_layernorm"]
    # a norm after a part reads nothing that could be scaled, and layer norms have biases or no weights
    folds = [] if config.residual == "post" else [f for f in folds if isinstance(getattr(layer, f.source), RMSNorm)]
    normed = attention.spec.value_norm or attention.spec.keys_are_values
    if own and index not in shared and isinstance(attention, Attention) and not normed:
        heads = (attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim)
        folds.append(Fold("self_attn.v_proj", ("self_attn.o_proj",), heads=heads))
    if mlp.spec.limit is None:
        folds += [Fold(f"{name}.up_proj", (f"{name}.down_proj",)) for name in _dense_parts(mlp) if mlp.spec.gated]
    return folds


def _dense_parts(mlp: FeedForward | MixtureOfExperts) -> list[str]:
    """Names of the feed-forward layer or of all experts."""
    if isinstance(mlp, FeedForward):
        return ["mlp"]
    shared = [] if mlp.shared_expert is None else ["mlp.shared_expert"]
    return [*(f"mlp.experts.{number}" for number in range(len(mlp.experts))), *shared]


def _inputs_of(mlp: FeedForward | MixtureOfExperts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the matrices that read the input of a feed-forward layer: those that are quantized, and the others."""
    parts = ("gate_proj", "up_proj") if mlp.spec.gated else ("up_proj",)
    found = tuple(f"{name}.{part}" for name in _dense_parts(mlp) for part in parts)
    if isinstance(mlp, FeedForward):
        return found, ()
    gates = (
        ("mlp.gate",) if getattr(mlp, "shared_expert_gate", None) is None else ("mlp.gate", "mlp.shared_expert_gate")
    )
    return found, gates


def _search(
    part: Fold,
    readers: list[nn.Module],
    widths: list[Bits | None],
    moments: Float[Tensor, "inputs inputs"],
    config: QuantizationConfig,
    grid: int,
) -> tuple[float, Tensor]:
    """The exponent with the least error of the readers' outputs, and its scales."""
    rms = part.shared(moments.diagonal()).sqrt()  # root mean square of each input
    best: tuple[float, float, Tensor] | None = None
    weights = [reader.dense_weight().float() for reader in readers if isinstance(reader, Linear)]
    for alpha in [step / grid for step in range(grid + 1)]:
        scale = rms.clamp(min=rms.max() * _MIN_SCALE + torch.finfo(rms.dtype).tiny).pow(alpha)
        scale = scale / (scale.max() * scale.min()).sqrt()
        input_scale = part.spread(scale)
        error = 0.0
        for weight, bits in zip(weights, widths, strict=True):
            if bits is None:
                continue  # not quantized
            difference = rtn.round_weight(weight * input_scale, bits, config).dense() / input_scale - weight
            error += float(((difference @ moments) * difference).sum())
        if best is None or error < best[0]:
            best = (error, alpha, scale)
        if not rms.any():
            break  # an expert without tokens
    assert best is not None
    return best[1], best[2]
