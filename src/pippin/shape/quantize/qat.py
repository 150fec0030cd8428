"""Quantization-aware training: `prepare` a decoder, train it like any other, `convert` it into codes.

Notable here:
- ``weight`` of a prepared layer is a torch parametrization that rounds; the optimizer updates the full-precision
  weight, so any objective and the usual Trainer work
- the embedding and a tied output matrix share one rounding, which is computed once per pass
- norms, biases and routers are not quantized; layers with parameters of an unknown type are an error
- exported weights are bit-identical to those of training: both use the same code for codes and scales

How to train: from a trained model, with a tenth to a fifth of its pre-training learning rate (1e-4 to 5e-4 for small
models), ``ema=0.999`` (less for a few hundred steps) and a decaying schedule; convert inside
``with trainer.ema.applied(module)``, to evaluate and export the averaged weights.

Source: arXiv:2507.13575, section on 2-bit quantization-aware training.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pippin.core.errors import InvalidArgument, NotPrepared, UnsupportedLayer
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.fake_quantize import FakeQuantizer, Levels, gain_of
from pippin.shape.quantize import kv_cache_qat
from pippin.shape.quantize.config import QuantizationConfig

CLIPPED = 0.20
"""Fraction of clipped weights of a matrix above which `prepare` and `convert` warn."""
_MATRICES = (Linear, TokenEmbedding, nn.Linear, nn.Embedding)
_TABLES = (TokenEmbedding, nn.Embedding)
_EXACT = (RMSNorm, nn.RMSNorm, nn.LayerNorm)
Module = TypeVar("Module", bound=nn.Module)


def prepare(
    module: Module, config: QuantizationConfig | None = None, *, start: Mapping[str, Codes] | None = None
) -> Module:
    """Make a model round its matrices in every forward pass, in place.

    The embedding and the output matrix get ``embedding_bits`` and a scale for each row, all other matrices the bits and
    granularity of the config. Each scale has a learned factor without weight decay. Gradients of weights and factors
    are divided by the square root of the number of neurons.

    Args:
        module: a decoder with float weights, or another module of linear layers, embeddings and norms.
        config: the config; None for the published one.
        start: initial codes (such as GPTQ's) by layer name: each weight is moved just far enough to be rounded to its
            code, with a small margin. Other layers are initialized by the config.

    Returns:
        The module.

    Raises:
        UnsupportedLayer: layers that hold parameters and have no rule; all are listed.
        InvalidArgument: weights that are packed, all zero or not finite, a group that does not divide a row (the layer
            is named), a name in ``skip`` that is no layer, initial codes that do not fit the config, or a module that
            is prepared already.

    Warns:
        UserWarning: more than a fifth of a matrix is clipped, or one of four levels is not used.
    """
    config = config or QuantizationConfig()
    if _prepared(module):
        raise InvalidArgument("the module is prepared already; convert it, or load the model again")
    chosen = _choose(module, config)
    quantizers: dict[int, FakeQuantizer] = {}
    for name, part in chosen.items():  # all quantizers are made before the module is changed
        if id(part.weight) not in quantizers:
            quantizers[id(part.weight)] = _quantizer(name, part, config)
    if start is not None:
        _start_from(chosen, quantizers, start)
    _warn({name: (part.weight, quantizers[id(part.weight)]) for name, part in chosen.items()})
    keys = {name: id(part.weight) for name, part in chosen.items()}
    for name, part in chosen.items():
        parametrize.register_parametrization(part, "weight", quantizers[keys[name]], unsafe=True)
    if config.cache_bits is not None:
        kv_cache_qat.attach(module)
    module.quantization = config  # type: ignore[assignment]  # a plain attribute: no parameter and no module
    return module


def convert(module: nn.Module) -> dict[str, Codes]:
    """Codes of every matrix of a prepared model, by the name of its layer; the model is not changed.

    ``codes.dense()`` of each is bit-identical to the weight of the forward pass. A tied output matrix is not listed, as
    the embedding includes it. Save them with `pippin.language.quantized_checkpoint.save_quantized`.

    Raises:
        NotPrepared: `prepare` was not called, or the ranges of an 8-bit cache were never observed.
        InvalidArgument: weights that are no longer finite.

    Warns:
        UserWarning: as `prepare`.
    """
    parts = _prepared(module)
    if not parts:
        raise NotPrepared("there is nothing to convert: call prepare(module, config) first, then train")
    kv_cache_qat.ranges(module)  # which raises where they are missing
    _warn(parts)
    codes: dict[str, Codes] = {}
    for name, (weight, quantizer) in parts.items():
        if not weight.isfinite().all():
            raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be exported")
        codes[name] = quantizer.codes(weight)
    return codes


def metadata(module: nn.Module) -> dict[str, Any]:
    """The provenance of a saved model: method, config and cache ranges, for the metadata of ``save_quantized``.

    Raises:
        NotPrepared: as `convert`.
    """
    if not _prepared(module):
        raise NotPrepared("the module was not prepared for quantization; call prepare(module, config) first")
    config: QuantizationConfig = module.quantization  # type: ignore[assignment]
    found = kv_cache_qat.ranges(module)
    described: dict[str, Any] = {"method": "qat", "settings": asdict(config)}
    return described if found is None else described | {"cache": found.to_json()}


def bake(module: Module) -> Module:
    """Replace the weights of a prepared model by the rounded ones and remove the quantizers, in place.

    Raises:
        NotPrepared: `prepare` was not called.
    """
    parts = _prepared(module)
    if not parts:
        raise NotPrepared("the module was not prepared for quantization; call prepare(module, config) first")
    with torch.no_grad():
        rounded = [(weight, quantizer.codes(weight).dense().to(weight.dtype)) for weight, quantizer in parts.values()]
    for part in list(module.modules()):
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)
    with torch.no_grad():
        for weight, values in rounded:
            weight.copy_(values)
    kv_cache_qat.detach(module)
    return module


def factors(module: nn.Module) -> dict[str, Tensor]:
    """The learned factor of every scale, by the name of its layer."""
    return {name: quantizer.factors for name, (_, quantizer) in _prepared(module).items()}


def _prepared(module: nn.Module) -> dict[str, tuple[nn.Parameter, FakeQuantizer]]:
    """Full-precision weights and quantizers of the layers of a prepared model; shared ones only once."""
    found: dict[str, tuple[nn.Parameter, FakeQuantizer]] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        if not parametrize.is_parametrized(part, "weight"):
            continue
        parametrized: Any = part.parametrizations["weight"]
        if isinstance(parametrized[0], FakeQuantizer) and id(parametrized.original) not in seen:
            seen.add(id(parametrized.original))
            found[name] = parametrized.original, parametrized[0]
    return found


def _choose(module: nn.Module, config: QuantizationConfig) -> dict[str, Any]:
    """The layers to be quantized, by name."""
    chosen: dict[str, Any] = {}
    without: list[str] = []
    names = dict(module.named_modules())
    if unknown := [name for name in config.skip if name not in names]:
        raise InvalidArgument(f"skip names {unknown[0]!r}, which is no layer of the model")
    for name, part in names.items():
        if isinstance(part, _MATRICES):
            if part.weight is None:
                raise InvalidArgument(f"{name} is packed for inference; load the model with pack=False to train it")
            outer = isinstance(part, _TABLES) or name == "lm_head"
            exact = name in config.skip or name.endswith(".mlp.gate") or (outer and config.embedding_bits is None)
            if not exact:
                chosen[name] = part
        elif not isinstance(part, _EXACT) and next(part.parameters(recurse=False), None) is not None:
            without.append(f"{name} ({type(part).__name__})")
    if without:
        raise UnsupportedLayer(
            f"{len(without)} layers hold parameters and have no rule for quantization: {', '.join(without)}. "
            f"There are rules for {', '.join(dict.fromkeys(kind.__name__ for kind in (*_MATRICES, *_EXACT)))}"
        )
    if not chosen:
        raise InvalidArgument("the config leaves no matrix to be quantized")
    return chosen


def _quantizer(name: str, part: Any, config: QuantizationConfig) -> FakeQuantizer:
    outer = isinstance(part, _TABLES) or name == "lm_head"
    bits = config.embedding_bits if outer else config.bits
    assert bits is not None
    quantizer = FakeQuantizer(
        part.weight,
        Levels(bits, config.levels == "balanced"),
        "channel" if outer else config.granularity,
        config.group,
        init=config.init,
        gain=gain_of(part.weight),
        keep=outer,
        name=name,
    )
    quantizer.log_factor.no_decay = True  # type: ignore[attr-defined]
    return quantizer


def _start_from(chosen: dict[str, Any], quantizers: dict[int, FakeQuantizer], start: Mapping[str, Codes]) -> None:
    """Change weights and scales so that they round to the initial codes."""
    for name, codes in start.items():
        quantizer = quantizers[id(chosen[name].weight)] if name in chosen else None
        if quantizer is None:
            raise InvalidArgument(f"there are initial codes for {name!r}, which the config does not quantize")
        given = (codes.shape, codes.bits, codes.zero_point, tuple(codes.scales.shape))
        levels = quantizer.levels
        expected = (tuple(chosen[name].weight.shape), levels.bits, levels.zero, quantizer.shape)
        if given != expected:
            raise InvalidArgument(
                f"the initial codes for {name} have shape, bits, zero and scales {given}, the config {expected}"
            )
    for name, codes in start.items():
        quantizers[id(chosen[name].weight)].begin(chosen[name].weight, codes)


def _warn(parts: Mapping[str, tuple[Tensor, FakeQuantizer]]) -> None:
    """Warn of matrices with many clipped weights or an unused level."""
    found: dict[int, str] = {}
    for name, (weight, quantizer) in parts.items():
        if id(weight) in found:
            continue
        found[id(weight)] = ""
        clipped = quantizer.clipped(weight)
        if clipped > CLIPPED:
            found[id(weight)] = f"{name} has {clipped:.0%} of its weights clipped"
        elif quantizer.levels.bits == 2:
            used = quantizer.codes(weight).codes.flatten().bincount(minlength=4)
            if not used.all():
                found[id(weight)] = f"{name} does not use level {quantizer.levels.values[int(used.argmin())]}"
    if reasons := [text for text in found.values() if text]:
        warnings.warn(
            f"the levels fit {len(reasons)} matrices badly: {'; '.join(reasons)}. "
            "init='newton' or smaller groups may help",
            stacklevel=3,
        )
