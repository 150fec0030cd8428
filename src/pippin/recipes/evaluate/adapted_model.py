"""The model that a measurement of task adapters is about: as it is, or with an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pippin.engine.options import Device, DType
    from pippin.language.language_model import LanguageModel


def load_with_adapter(
    reference: str, adapter: str | None, *, device: Device, dtype: DType
) -> tuple[LanguageModel, str | None]:
    """The model, and the name of its adapter, with which requests use it; None for the model itself.

    Args:
        reference: name or path of the model.
        adapter: folder of an adapter; None for the model itself.
        device: where it is computed.
        dtype: of its weights.

    Raises:
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    from pippin.language.language_model import load

    model = load(reference, device=device, dtype=dtype)
    if adapter is None:
        return model, None
    model.load_adapter("evaluated", adapter)
    return model, "evaluated"


def title(model: str, adapter: str | None) -> str:
    """Model and adapter in words."""
    return model if adapter is None else f"{model} with {adapter}"
