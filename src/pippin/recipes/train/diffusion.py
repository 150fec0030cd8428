"""Masked diffusion: convert an autoregressive language model to one that fills masked tokens in any order.

Notable here:
- losses are upper bounds in nats per token; they are not comparable with those of next-token training
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pippin.core import progress
from pippin.core.checks import NonNegativeInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.train.text_training import TextTrainingConfig, TextTrainingResult, read_batches, train

if TYPE_CHECKING:
    from pippin.language.methods.masked_diffusion.model import MaskedDiffusionLM


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """The settings of a run; ``model`` may be a masked diffusion model, which is then trained further."""

    anneal_steps: Annotated[
        NonNegativeInt,
        Option("Steps over which attention grows from causal to bidirectional; 0 for bidirectional at once."),
    ] = 0
    shift: Annotated[
        bool, Option("Predict a masked token from the position before it, as the autoregressive model did.")
    ] = True
    mask_token: Annotated[str | None, Option("The mask token; without it one is added.", metavar="TOKEN")] = None


@dataclass(frozen=True, kw_only=True)
class MaskedDiffusionResult(TextTrainingResult):
    """The result of a run; its losses are upper bounds.

    Attributes:
        mask_id: token id of the mask token.
        shift: whether a masked token is predicted from the position before it.
    """

    mask_id: int
    shift: bool


def run(config: Config, *, show_progress: bool = True) -> MaskedDiffusionResult:
    """Train a model to fill masked tokens, and save it for `pippin infill` and `pippin.load`.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.language.objectives import held_out

    options.refuse_existing_run(config.out, config.resume)
    lm = _load(config)
    lm.module.requires_grad_(True)
    batches = read_batches(config, lm.model, show_progress=show_progress)
    progress.note(
        f"{lm.name}: mask token {lm.mask_id}, {batches.steps} steps; losses are bounds", show_progress=show_progress
    )
    outcome = train(
        config,
        lm.module,
        batches,
        title=f"{lm.name}, masked diffusion (bounds)",
        objective=lm.objective(anneal_steps=config.anneal_steps),
        measure=held_out(batches.held_out, lm.objective()) if batches.held_out else None,
        show_progress=show_progress,
    )
    lm.save(config.out_path)
    return MaskedDiffusionResult(
        model=lm.name,
        out=config.out_path,
        parameters=sum(p.numel() for p in lm.module.parameters()),
        mask_id=lm.mask_id,
        shift=lm.shift,
        **vars(outcome),
    )


def _load(config: Config) -> MaskedDiffusionLM:
    import pippin
    from pippin.core.formats.checkpoint import model_type
    from pippin.language import MaskedDiffusionLM, to_diffusion

    if model_type(config.model) == MaskedDiffusionLM.model_type:
        if not config.shift or config.mask_token is not None:
            raise InvalidArgument(
                f"{config.model} is a masked diffusion model already: shift and mask_token cannot be changed"
            )
        return MaskedDiffusionLM.load(config.model, device=config.device, dtype="float32", pack=False)
    base = pippin.load(config.model, device=config.device, dtype="float32", pack=False)
    return to_diffusion(base, config.mask_token, shift=config.shift)
