r"""Activation steering: an affine change of the hidden states at chosen places of a decoder, for single requests.

Notable here:
- as with adapters, the object lies beside the model and changes none of its weights; a batch may use several
- a site is a norm, whose output is changed, or a layer, after which the residual stream is changed (control vectors)
- the strength multiplies the change and not the hidden states, so that 0 is the model itself

Source: Turner et al. 2023, arXiv:2308.10248 (vectors added to the residual stream); Monteiro Paes et al. 2025,
arXiv:2512.15926 (affine maps at every norm, with a strength).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class SteeringChange:
    r"""The change of one site: $h' = h + \omega (a \odot h + b)$ with the strength $\omega$.

    Args:
        scale: $a$; None for none.
        shift: $b$; None for none.
    """

    scale: Float[Tensor, width] | None = None
    shift: Float[Tensor, width] | None = None


@dataclass(frozen=True, eq=False)
class Steering:
    """Changes of hidden states by site.

    Args:
        changes: by the name of the module in the decoder: a norm ("layers.3.input_layernorm", "norm"), or a layer
            ("layers.3").
        strength: multiplier on all changes; may be negative.

    Raises:
        InvalidArgument: no site, a change of nothing, or a number that is not finite.
    """

    changes: Mapping[str, SteeringChange]
    strength: float = 1.0
    _ready: dict[tuple[str, torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise InvalidArgument(f"the strength of a steering must be finite, got {self.strength}")
        if not self.changes:
            raise InvalidArgument("a steering needs at least one site, such as 'layers.3.input_layernorm'")
        for site, change in self.changes.items():
            parts = [part for part in (change.scale, change.shift) if part is not None]
            if not parts or not all(part.ndim == 1 and bool(part.isfinite().all()) for part in parts):
                raise InvalidArgument(
                    f"the steering of {site!r} needs a scale or a shift, each one finite vector of the model's width"
                )

    def with_strength(self, strength: float) -> Steering:
        """The same changes with another strength."""
        return replace(self, strength=strength, _ready={})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its changes and its strength, as hexadecimal digits: equal ones change hidden states equally."""
        found = hashlib.sha256(repr(self.strength).encode())
        for site, change in sorted(self.changes.items()):
            for name, part in (("scale", change.scale), ("shift", change.shift)):
                if part is not None:
                    found.update(f"\n{site} {name} {len(part)}\n".encode())
                    found.update(part.detach().cpu().float().contiguous().numpy().tobytes())
        return found.hexdigest()

    def check(self, module: nn.Module, width: int) -> None:
        """Check that it can be used with a decoder.

        Args:
            module: the decoder.
            width: size of its hidden states.

        Raises:
            InvalidArgument: a site that the decoder does not have, or a vector of another size.
        """
        known = steering_sites(module)
        for site, change in self.changes.items():
            if site not in known:
                raise InvalidArgument(
                    f"the steering changes {site!r}, and this model has no such norm or layer; its sites are "
                    f"{', '.join(known[:3])}, ..., {known[-1]}"
                )
            for part in (change.scale, change.shift):
                if part is not None and len(part) != width:
                    raise InvalidArgument(
                        f"the steering of {site!r} has {len(part)} elements, and this model's hidden states {width}"
                    )

    def at(self, site: str, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Factor and summand of a site, in the precision and on the device of a tensor; None for no change."""
        change = self.changes.get(site)
        if change is None:
            return None
        key = (site, like.dtype, like.device)
        if key not in self._ready:
            part = change.shift if change.scale is None else change.scale
            assert part is not None
            zero = torch.zeros(len(part))
            scale = zero if change.scale is None else change.scale.detach().float().cpu()
            shift = zero if change.shift is None else change.shift.detach().float().cpu()
            factor, summand = 1 + self.strength * scale, self.strength * shift
            self._ready[key] = factor.to(like.device, like.dtype), summand.to(like.device, like.dtype)
        return self._ready[key]


# Steerings, each with the tokens that it applies to: a slice of all tokens of the flattened batch.
SteeringSlices = Sequence[tuple[Steering, slice]]


def steering_sites(module: nn.Module) -> list[str]:
    """Names of all sites of a decoder: the norms and the end of each layer, and the last norm."""
    found = []
    for index, layer in enumerate(module.layers):  # type: ignore[arg-type]  # of a decoder
        norms = [name for name, part in layer.named_children() if name.endswith("layernorm") and part is not None]
        found += [f"layers.{index}.{name}" for name in norms] + [f"layers.{index}"]
    return [*found, "norm"]


def steer(
    x: Float[Tensor, "*batch width"], site: str, steerings: SteeringSlices | None
) -> Float[Tensor, "*batch width"]:
    """Apply the changes of one site to the tokens of each steering; the input is not modified.

    >>> up = Steering({"norm": SteeringChange(shift=torch.ones(2))}, strength=0.5)
    >>> steer(torch.zeros(1, 3, 2), "norm", [(up, slice(1, 3))])[0, :, 0]
    tensor([0.0000, 0.5000, 0.5000])
    """
    changed = None
    for steering, tokens in steerings or ():
        change = steering.at(site, x)
        if change is not None:
            if changed is None:  # a row for each token, with all streams of its hidden states where there are several
                changed = (x.flatten(0, 1) if x.ndim > 3 else x.reshape(-1, x.shape[-1])).clone()
            changed[tokens] = changed[tokens] * change[0] + change[1]
    return x if changed is None else changed.view_as(x)
