"""Quantisation-aware training: `prepare` a decoder, train it like any other, `convert` it into codes.

Notable here:
- a prepared layer is the same layer whose ``weight`` is rounded whenever it is read (torch's own parametrisations); the
  full-precision weight goes on being what the optimiser moves, so any objective and the one Trainer will do
- the embedding and a tied output matrix share one rounding, which is computed once per pass
- norms, biases and routers stay exact, and a layer that there is no rule for is refused, never skipped
- what is exported is what was trained, to the bit: codes and scales come from the very code of the forward pass

How to train: from a trained model, at a tenth to a fifth of its pre-training rate (1e-4 to 5e-4 for small models), with
``ema=0.999`` (less for some hundred steps) and a decaying schedule; convert inside the block
``with trainer.ema.applied(module)``, so that the averaged weights are what is evaluated and exported.

Source: arXiv:2507.13575, section on 2-bit quantisation-aware training.
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
from pippin.nn.codes import Codes
from pippin.nn.embedding import Embedding
from pippin.nn.fake_quant import FakeQuantiser, Levels, gain_of
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.shape.quantise import cache
from pippin.shape.quantise.config import QuantisationSettings

CLIPPED = 0.20
"""Share of a matrix beyond the outermost levels above which `prepare` and `convert` warn."""
_MATRICES = (Linear, Embedding, nn.Linear, nn.Embedding)
_TABLES = (Embedding, nn.Embedding)
_EXACT = (RMSNorm, nn.RMSNorm, nn.LayerNorm)
Module = TypeVar("Module", bound=nn.Module)


def prepare(
    module: Module, settings: QuantisationSettings | None = None, *, start: Mapping[str, Codes] | None = None
) -> Module:
    """Make a model round its matrices in every forward pass, in place.

    The embedding and the output matrix get ``embedding_bits`` and a scale for each row, all other matrices what the
    settings say. Each scale has a learnt factor, which is not decayed. Gradients of weights and factors are scaled by
    one over the square root of the number of neurons.

    Args:
        module: a decoder with float weights; other modules made of linear layers, embeddings and norms will do.
        settings: None for the published ones.
        start: begin from these codes (GPTQ's, say), by the names of layers: each weight moves just so far that it
            is rounded to its code, and stays so for a few steps. Layers that are not named begin as the settings say.

    Returns:
        The module.

    Raises:
        UnsupportedLayer: layers that hold parameters and have no rule; all are listed.
        InvalidArgument: weights that are packed, all zero or not finite, a group that does not divide a row (the layer
            is named), a name in ``skip`` that is no layer, codes to start from that do not fit the settings, or a
            module that is prepared already.

    Warns:
        UserWarning: more than a fifth of a matrix is clipped, or one of four levels is not used.
    """
    settings = settings or QuantisationSettings()
    if _prepared(module):
        raise InvalidArgument("the module is prepared already; convert it, or load the model again")
    chosen = _choose(module, settings)
    quantisers: dict[int, FakeQuantiser] = {}
    for name, part in chosen.items():  # nothing is changed before the last of them is known to be possible
        if id(part.weight) not in quantisers:
            quantisers[id(part.weight)] = _quantiser(name, part, settings)
    if start is not None:
        _begin(chosen, quantisers, start)
    _warn({name: (part.weight, quantisers[id(part.weight)]) for name, part in chosen.items()})
    keys = {name: id(part.weight) for name, part in chosen.items()}
    for name, part in chosen.items():
        parametrize.register_parametrization(part, "weight", quantisers[keys[name]], unsafe=True)
    if settings.cache_bits is not None:
        cache.attach(module)
    module.quantisation = settings  # type: ignore[assignment]  # a plain attribute: no parameter and no module
    return module


def convert(module: nn.Module) -> dict[str, Codes]:
    """Codes of every matrix of a prepared model, by the name of its layer; the model is left as it is.

    ``codes.dense()`` of each is to the bit the weight of the forward pass. A tied output matrix is not listed: the
    embedding stands for it. Save them with `pippin.language.quantised.save_quantised`.

    Raises:
        NotPrepared: `prepare` was not called, or the ranges of an 8-bit cache were never observed.
        InvalidArgument: weights that are no longer finite.

    Warns:
        UserWarning: as `prepare`.
    """
    parts = _prepared(module)
    if not parts:
        raise NotPrepared("there is nothing to convert: call prepare(module, settings) first, then train")
    cache.ranges(module)  # which raises where they are missing
    _warn(parts)
    codes: dict[str, Codes] = {}
    for name, (weight, quantiser) in parts.items():
        if not weight.isfinite().all():
            raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be exported")
        codes[name] = quantiser.codes(weight)
    return codes


def note(module: nn.Module) -> dict[str, Any]:
    """What a saved folder should say about how it was made: for ``save_quantised(..., note=note(module))``.

    Raises:
        NotPrepared: as `convert`.
    """
    if not _prepared(module):
        raise NotPrepared("the module was not prepared for quantisation; call prepare(module, settings) first")
    settings: QuantisationSettings = module.quantisation  # type: ignore[assignment]
    found = cache.ranges(module)
    described: dict[str, Any] = {"method": "qat", "settings": asdict(settings)}
    return described if found is None else described | {"cache": found.to_json()}


def bake(module: Module) -> Module:
    """Turn a prepared model into an ordinary one whose weights are the rounded ones, in place: a base for adapters.

    Raises:
        NotPrepared: `prepare` was not called.
    """
    parts = _prepared(module)
    if not parts:
        raise NotPrepared("the module was not prepared for quantisation; call prepare(module, settings) first")
    with torch.no_grad():
        rounded = [(weight, quantiser.codes(weight).dense().to(weight.dtype)) for weight, quantiser in parts.values()]
    for part in list(module.modules()):
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)
    with torch.no_grad():
        for weight, values in rounded:
            weight.copy_(values)
    cache.detach(module)
    return module


def factors(module: nn.Module) -> dict[str, Tensor]:
    """The learnt factor of every scale, by the name of its layer."""
    return {name: quantiser.factors for name, (_, quantiser) in _prepared(module).items()}


def _prepared(module: nn.Module) -> dict[str, tuple[nn.Parameter, FakeQuantiser]]:
    """Full-precision weights and quantisers of the layers of a prepared model; those that are shared, once."""
    found: dict[str, tuple[nn.Parameter, FakeQuantiser]] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        if not parametrize.is_parametrized(part, "weight"):
            continue
        held: Any = part.parametrizations["weight"]
        if isinstance(held[0], FakeQuantiser) and id(held.original) not in seen:
            seen.add(id(held.original))
            found[name] = held.original, held[0]
    return found


def _choose(module: nn.Module, settings: QuantisationSettings) -> dict[str, Any]:
    """The layers to be quantised, by name, those with a shared weight next to each other's."""
    chosen: dict[str, Any] = {}
    without: list[str] = []
    names = dict(module.named_modules())
    if unknown := [name for name in settings.skip if name not in names]:
        raise InvalidArgument(f"skip names {unknown[0]!r}, which is no layer of the model")
    for name, part in names.items():
        if isinstance(part, _MATRICES):
            if part.weight is None:
                raise InvalidArgument(f"{name} is packed for inference; load the model with pack=False to train it")
            outer = isinstance(part, _TABLES) or name == "lm_head"
            exact = name in settings.skip or name.endswith(".mlp.gate") or (outer and settings.embedding_bits is None)
            if not exact:
                chosen[name] = part
        elif not isinstance(part, _EXACT) and next(part.parameters(recurse=False), None) is not None:
            without.append(f"{name} ({type(part).__name__})")
    if without:
        raise UnsupportedLayer(
            f"{len(without)} layers hold parameters and have no rule for quantisation: {', '.join(without)}. "
            f"There are rules for {', '.join(dict.fromkeys(kind.__name__ for kind in (*_MATRICES, *_EXACT)))}"
        )
    if not chosen:
        raise InvalidArgument("the settings leave no matrix to be quantised")
    return chosen


def _quantiser(name: str, part: Any, settings: QuantisationSettings) -> FakeQuantiser:
    outer = isinstance(part, _TABLES) or name == "lm_head"
    bits = settings.embedding_bits if outer else settings.bits
    assert bits is not None
    quantiser = FakeQuantiser(
        part.weight,
        Levels(bits, settings.levels == "balanced"),
        "channel" if outer else settings.granularity,
        settings.group,
        init=settings.init,
        gain=gain_of(part.weight),
        keep=outer,
        name=name,
    )
    quantiser.log_factor.no_decay = True  # type: ignore[attr-defined]
    return quantiser


def _begin(chosen: dict[str, Any], quantisers: dict[int, FakeQuantiser], start: Mapping[str, Codes]) -> None:
    """Move weights and scales to where they give the codes to start from."""
    for name, codes in start.items():
        quantiser = quantisers[id(chosen[name].weight)] if name in chosen else None
        if quantiser is None:
            raise InvalidArgument(f"there are codes to start from for {name!r}, which the settings do not quantise")
        wanted = (codes.shape, codes.bits, codes.zero, tuple(codes.scales.shape))
        levels = quantiser.levels
        ours = (tuple(chosen[name].weight.shape), levels.bits, levels.zero, quantiser.shape)
        if wanted != ours:
            raise InvalidArgument(
                f"the codes to start from for {name} have shape, bits, zero and scales {wanted}, the settings {ours}"
            )
    for name, codes in start.items():
        quantisers[id(chosen[name].weight)].begin(chosen[name].weight, codes)


def _warn(parts: Mapping[str, tuple[Tensor, FakeQuantiser]]) -> None:
    """Say which matrices the levels fit badly."""
    found: dict[int, str] = {}
    for name, (weight, quantiser) in parts.items():
        if id(weight) in found:
            continue
        found[id(weight)] = ""
        clipped = quantiser.clipped(weight)
        if clipped > CLIPPED:
            found[id(weight)] = f"{name} has {clipped:.0%} of its weights clipped"
        elif quantiser.levels.bits == 2:
            used = quantiser.codes(weight).codes.flatten().bincount(minlength=4)
            if not used.all():
                found[id(weight)] = f"{name} does not use level {quantiser.levels.values[int(used.argmin())]}"
    if said := [text for text in found.values() if text]:
        warnings.warn(
            f"the levels fit {len(said)} matrices badly: {'; '.join(said)}. init='newton' or smaller groups may help",
            stacklevel=3,
        )
