"""Experts chosen by the prompt: train the router of a mixture, alone or together with the mixture.

Notable here:
- "forecast" leaves the mixture as it is: the router learns which experts its tokens will take, in minutes
- "together" trains both, so that the mixture learns to do with few experts; the number of experts comes down from all
  to ``keep`` over the first part of the run
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.train.text_training import TextTrainingConfig, TextTrainingResult, read_batches, train

ROUTER = "router"
"""Name of the folder of the router within that of a model which is trained together with it."""
_SOFTNESS = 0.3


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """The settings of a run."""

    keep: Annotated[PositiveInt, Option("Experts of each mixture that a prompt chooses.", metavar="N")]
    stage: Annotated[
        Literal["forecast", "together"],
        Option("forecast: the router alone, for the mixture as it is; together: the router and the mixture."),
    ] = "forecast"
    stretch: Annotated[PositiveInt, Option("Tokens that are read together.", metavar="TOKENS")] = 64
    depth: Annotated[
        NonNegativeInt | None,
        Option("Leading layers that read; by default all before the first mixture.", metavar="LAYERS"),
    ] = None
    balance: Annotated[NonNegativeFloat, Option("Weight of the balance loss, in the stage together.")] = 0.01


@dataclass(frozen=True, kw_only=True)
class PromptRouterResult(TextTrainingResult):
    """The result of a run.

    Attributes:
        router: folder of the router.
        keep: experts of each mixture that are chosen.
        experts: experts of each mixture.
        stage: "forecast" or "together".
    """

    router: Path
    keep: int
    experts: int
    stage: str


def run(config: Config, *, show_progress: bool = True) -> PromptRouterResult:
    """Train a router, and the mixture where that was asked for, and save them.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: ``keep`` that is out of range, or texts of at most one stretch.
        UnsupportedModel: a model without mixtures.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    import pippin
    from pippin.language.methods.instruction_pruning.loss import PruningSchedule
    from pippin.language.methods.prompt_experts import (
        ExpertForecast,
        PromptRoutedDecoder,
        PromptRouter,
        PromptRouterConfig,
        PromptRouting,
    )
    from pippin.language.objectives import held_out

    options.refuse_existing_run(config.out, config.resume)
    if config.max_length <= config.stretch:
        raise InvalidArgument(
            f"max_length (--max-length) is {config.max_length}, and texts of one stretch (--stretch {config.stretch}) "
            "have no next one to choose experts for"
        )
    together = config.stage == "together"
    # a mixture that stays as it is needs no more memory than its file
    how: dict[str, Any] = {"dtype": "float32", "pack": False} if together else {}
    model = pippin.load(config.model, device=config.device, **how)
    sizes = PromptRouterConfig.for_decoder(
        model.config, config.keep, depth=config.depth, stretch=config.stretch, eps=_SOFTNESS if together else 0.0
    )
    router = PromptRouter(sizes).initialize(seed=config.seed).to(model.device)
    module = PromptRoutedDecoder(
        model.module.requires_grad_(together), router, router_lr_scale=0.1 if together else 1.0
    )
    batches = read_batches(config, model, show_progress=show_progress)
    schedule = PruningSchedule(batches.steps // 2, batches.steps * 3 // 4, 1.0)
    objective = PromptRouting(balance=config.balance, schedule=schedule) if together else ExpertForecast()
    measured = PromptRouting(balance=0.0) if together else ExpertForecast()
    progress.note(
        f"{model.name}: {config.keep} of {sizes.num_experts} experts, {batches.steps} steps",
        show_progress=show_progress,
    )
    outcome = train(
        config,
        module,
        batches,
        title=f"{model.name}, experts chosen by the prompt",
        objective=objective,
        measure=held_out(batches.held_out, measured) if batches.held_out else None,
        show_progress=show_progress,
    )
    if together:
        model.save(config.out_path)
    folder = config.out_path / ROUTER if together else config.out_path
    router.save(folder)
    return PromptRouterResult(
        model=model.name,
        out=config.out_path,
        router=folder,
        parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
        keep=config.keep,
        experts=sizes.num_experts,
        stage=config.stage,
        **vars(outcome),
    )
