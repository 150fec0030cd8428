"""Specialization: extract a small standard model for one prompt, task or kind of text from a larger one.

Notable here:
- from a model trained with `pippin.recipes.train.prune`, the channels that a prompt needs are selected
- from a soup of experts trained with `pippin.recipes.train.soup`, the weighted sum for a mixture of domains is computed
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes.options import StrPath, paths, refuse_existing

if TYPE_CHECKING:
    from pippin.core.report import Report


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings: a pruned model takes ``prompt``, a soup ``documents`` or ``weights``."""

    model: Annotated[StrPath, Option("Folder that `pippin train prune` or `pippin train soup` made.", positional=True)]
    out: Annotated[StrPath, Option("Folder of the small model, which opens like any other.", metavar="PATH")]
    prompt: Annotated[
        str | None, Option("For a pruned model: the task, or the first message of the user.", metavar="TEXT")
    ] = None
    documents: Annotated[
        tuple[StrPath, ...], Option("For a soup: texts of the wanted kind; may be repeated.", metavar="PATH")
    ] = ()
    weights: Annotated[
        str | None, Option("For a soup, instead: shares of its domains, which sum to 1.", metavar="A=X,B=Y")
    ] = None
    device: Device = None


@dataclass(frozen=True)
class SpecializationResult:
    """The result of a specialization.

    Attributes:
        model: name of the large model's folder.
        out: folder of the small model.
        figures: sizes of both models; for a soup, the weights of domains and experts.
    """

    model: str
    out: Path
    figures: Mapping[str, float]

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"out": str(self.out), **self.figures}

    def report(self) -> Report:
        """Report the figures."""
        from pippin.core.report import Report, Row

        return Report(f"{self.model}, specialized", [Row(name, value) for name, value in self.figures.items()])


def run(config: Config, *, show_progress: bool = True) -> SpecializationResult:
    """Create the small model and save it.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: the folder contains neither type of model, a setting is for the other type, or the folder of
            the result holds files.
    """
    from pippin.core.formats.checkpoint import model_type
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts

    path, out = Path(config.model), Path(config.out)
    refuse_existing(out)
    if model_type(path) == PrunedModel.model_type:
        if config.documents or config.weights is not None:
            raise InvalidArgument(f"{path} is pruned by its prompt: give prompt, not documents or weights")
        figures = _by_prompt(path, config.prompt, out, config.device)
    elif model_type(path) == SoupOfExperts.model_type:
        if config.prompt is not None:
            raise InvalidArgument(f"{path} is a soup of experts: give documents or weights, not prompt")
        figures = _by_domains(config, path, out)
    else:
        raise InvalidArgument(
            f"{path} is neither a model that `pippin train prune` made nor a soup of `pippin train soup`; to make "
            "any model smaller, see `pippin shape quantize`"
        )
    return SpecializationResult(path.name, out, figures)


def _by_prompt(path: Path, prompt: str | None, out: Path, device: str | None) -> dict[str, float]:
    from pippin.engine.measure.measure_speed import weight_bytes
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel

    large = PrunedModel.load(path, device=device)
    start = time.perf_counter()
    small = large.specialize(prompt)
    seconds = time.perf_counter() - start
    small.save(out)
    before, after = (sum(p.numel() for p in module.parameters()) for module in (large.module.base, small.module))
    return {
        "channels of a layer before": large.module.intermediate_size,
        "channels of a layer after": large.module.keep,
        "parameters before": before,
        "parameters after": after,
        "bytes read for a token, after / before": weight_bytes(small.module) / weight_bytes(large.module.base),
        "seconds to choose and gather": seconds,
    }


def _by_domains(config: Config, path: Path, out: Path) -> dict[str, float]:
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts, domain_weights_of

    soup = SoupOfExperts.load(path, device=config.device)
    documents = list(paths(config.documents)) or None
    shares = domain_weights_of(soup, documents=documents, weights=config.weights)
    model = soup.instantiate(shares)
    model.save(out)
    figures = {
        f"share of {name}": share for name, share in zip(soup.domains.names, shares.tolist(), strict=True) if share > 0
    }
    figures |= {f"weight of expert {i}": value for i, value in enumerate(soup.coefficients(shares).tolist())}
    return figures | {"parameters": sum(p.numel() for p in model.module.parameters())}
