"""The image backend of each kind of generator."""

from __future__ import annotations

from typing import Any, Literal

from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.generate.conditions import Conditioning
from pippin.generate.contract import Generator
from pippin.generate.diffusion.diffusion import Diffusion
from pippin.kits.image.diffusion_backends import ComposedBackend, DiffusionBackend, FixedCompositionBackend
from pippin.kits.image.flow_backends import DartBackend, StarFlowBackend, TarFlowBackend
from pippin.kits.image.job import ImageBackend


def backend_of(model: Generator, *, background: Conditioning | Literal["null"] | None = None) -> ImageBackend:
    """The backend of a model.

    Args:
        model: one of the library's generators.
        background: if given, concepts are composed over it instead of joined to one text; for a `Diffusion`.

    Raises:
        UnsupportedModel: another kind of model.
        InvalidArgument: a background for a model that does not compose.
    """
    name = type(model).__name__
    if background is not None:
        if not isinstance(model, Diffusion) or model.condition.empty:
            raise InvalidArgument(f"only a Diffusion with a condition composes its concepts, and no {name}")
        return ComposedBackend(model, background)
    kinds: dict[str, type[Any]] = {
        "Diffusion": DiffusionBackend,
        "Composed": FixedCompositionBackend,
        "TarFlow": TarFlowBackend,
        "StarFlow": StarFlowBackend,
        "DART": DartBackend,
    }
    if name not in kinds:
        raise UnsupportedModel(f"no backend draws with a {name}; there are those for {', '.join(kinds)}")
    backend: ImageBackend = kinds[name](model)
    return backend
