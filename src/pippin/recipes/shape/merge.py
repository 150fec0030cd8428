"""Adapter merging: merge LoRA adapters into the weights of their model, or several adapters into one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pippin.core.checks import PositiveInt, checked
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.options import StrPath, paths


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a merge."""

    model: options.Model
    adapter: Annotated[tuple[StrPath, ...], Option("An adapter of this model; may be repeated.", metavar="PATH")]
    out: Annotated[StrPath, Option("Folder of the result.", metavar="PATH")]
    weight: Annotated[tuple[float, ...], Option("Weight of each adapter, in their order; 1 without it.")] = ()
    rank: Annotated[
        PositiveInt | None,
        Option("Leave the model alone and save one adapter of this rank, the nearest to the weighted sum."),
    ] = None
    dtype: Annotated[Literal["float32", "bfloat16"], Option("Of the merged weights.")] = "float32"


@dataclass(frozen=True)
class MergedAdapters:
    """The result of a merge.

    Attributes:
        model: name of the model.
        adapters: names of the adapters' folders.
        out: folder of the merged model or adapter.
        rank: rank of the merged adapter; None for a merged model.
    """

    model: str
    adapters: tuple[str, ...]
    out: Path
    rank: int | None

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return vars(self) | {"out": str(self.out)}


def run(config: Config, *, show_progress: bool = True) -> MergedAdapters:
    """Merge adapters and save the result.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: the number of weights differs from the number of adapters, or the folder holds files.
        ModelNotFound, CheckpointError: the model or an adapter cannot be loaded.
    """
    import pippin
    from pippin.language.adapter_files import load_adapters
    from pippin.shape import lora

    adapters, out = paths(config.adapter), Path(config.out)
    options.refuse_existing(out)
    model = pippin.load(config.model, device="cpu", dtype=config.dtype, pack=False)
    combined = load_adapters(model, "sum", adapters, config.weight or None)
    if config.rank is None:
        lora.merge(model, combined)
        model.save(out)
    else:
        lora.save_sum(out, model, combined, config.rank)
    return MergedAdapters(model.name, tuple(path.name for path in adapters), out, config.rank)
