"""The model that a measurement of task adapters is about: as it is, or with an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

DTypeName = Literal["auto", "float32", "bfloat16"]


class AdaptedModelConfig(Protocol):
    """The settings that say which model, and where it is computed."""

    @property
    def model(self) -> str:
        """Name or path."""

    @property
    def adapter(self) -> str | None:
        """Folder of an adapter; None for the model itself."""

    @property
    def device(self) -> str | None:
        """Where it is computed."""

    @property
    def dtype(self) -> DTypeName:
        """Of its weights."""


def load_with_adapter(config: AdaptedModelConfig) -> tuple[LanguageModel, str | None]:
    """The model, and the name of its adapter, with which requests use it; None for the model itself.

    Raises:
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    from pippin.language.language_model import load

    model = load(config.model, device=config.device, dtype=config.dtype)
    if config.adapter is None:
        return model, None
    model.load_adapter("evaluated", config.adapter)
    return model, "evaluated"


def title(model: str, adapter: str | None) -> str:
    """Model and adapter in words."""
    return model if adapter is None else f"{model} with {adapter}"
