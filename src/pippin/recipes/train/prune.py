"""Instruction-following pruning: train a predictor of the feed-forward channels that each prompt needs.

Notable here:
- two stages: "continue" predicts the mask from a chunk of text, for the next chunk; "instruct" from a prompt
- the number of channels is annealed from all to ``keep`` over the first part of a new run, for stability
- `pippin.recipes.shape.specialize` extracts the small model for a prompt
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pippin.core import progress
from pippin.core.checks import PositiveFloat, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.train.text_training import (
    TextTrainingConfig,
    TextTrainingResult,
    TrainingBatches,
    read_batches,
    train,
)

if TYPE_CHECKING:
    from pippin.data.token_batches import TokenBatch
    from pippin.language.language_model import LanguageModel
    from pippin.language.methods.instruction_pruning.model import MaskPredictor, StaticMask
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel

FIRST_BATCHES = 8
"""Number of batches on which the channel importance is computed, and which must contain a prompt."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """The settings of a run; ``model`` may be a pruned model, which is then trained further."""

    keep: Annotated[
        PositiveInt | None, Option("Channels that are left in each layer; required for a new model.", metavar="N")
    ] = None
    stage: Annotated[
        Literal["continue", "instruct"],
        Option("continue: the mask from a part of a text, for the next part; instruct: from a prompt."),
    ] = "continue"
    predictor: Annotated[
        str | None,
        Option(
            "What reads the prompt: a new model (nano, small, base), or a trained one with the same tokens; static "
            "for one mask that no prompt changes. nano without it.",
            metavar="NAME",
        ),
    ] = None
    chunks: Annotated[PositiveInt, Option("Parts that a text is divided into, in the stage continue.")] = 4
    eps: Annotated[
        PositiveFloat | None, Option("Temperature of the soft mask at the end of the run; 0.3 without it.")
    ] = None
    narrow: Annotated[
        Probability | None,
        Option(
            "Share of the run over which the number of channels falls to --keep; 0.25 without it, 0 for a pruned "
            "model.",
            metavar="SHARE",
        ),
    ] = None
    start: Annotated[
        Literal["importance", "random"],
        Option("Initial scores of the channels: their importance on the data, or random."),
    ] = "importance"


@dataclass(frozen=True, kw_only=True)
class InstructionPruningResult(TextTrainingResult):
    """The result of a run.

    Attributes:
        keep: number of channels that remain in each layer.
        width: number of channels before pruning.
        stage: "continue" or "instruct".
    """

    keep: int
    width: int
    stage: str


def run(config: Config, *, show_progress: bool = True) -> InstructionPruningResult:
    """Train a mask predictor and the model together, and save both.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model, or data without prompts in
            the stage "instruct".
        VocabularyMismatch: the predictor's tokens are not those of the model.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.core.formats.checkpoint import model_type
    from pippin.language.language_model import LanguageModel
    from pippin.language.methods.instruction_pruning.loss import ChunkedPretraining, InstructionTuning, PruningSchedule
    from pippin.language.methods.instruction_pruning.model import channel_importance
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel
    from pippin.language.objectives import held_out

    options.refuse_existing_run(config.out, config.resume)
    fresh = model_type(config.model) != PrunedModel.model_type
    model = _new(config) if fresh else _further(config)
    pruned = model.module.requires_grad_(True)
    base = LanguageModel(model.name, pruned.base, model.tokenizer, model.template)
    batches = read_batches(config, base, show_progress=show_progress)
    share = (0.25 if fresh else 0.0) if config.narrow is None else config.narrow
    narrowed = round(share * batches.steps)
    schedule = PruningSchedule(narrowed, round(batches.steps * 0.75) if narrowed else 0, max(1.0, pruned.eps))
    objective, evaluation_objective = (
        ChunkedPretraining(config.chunks, schedule) if config.stage == "continue" else InstructionTuning(schedule)
        for schedule in (schedule, PruningSchedule())
    )
    first = _first(batches)
    if not any(objective.examples(batch) for batch in first):
        raise InvalidArgument(
            "the data holds no prompts with answers, which stage='instruct' (--stage instruct) trains on; give "
            "conversations, or prompts and completions, or take stage='continue'"
        )
    if fresh and config.start == "importance":
        pruned.predictor.set_initial_scores(channel_importance(pruned.base, first))
    progress.note(
        f"{model.name}: {pruned.keep} of {pruned.intermediate_size} channels, {batches.steps} steps",
        show_progress=show_progress,
    )
    if pruned.keep % 32:
        progress.note(
            f"small models of {pruned.keep} channels cannot be packed to bits; multiples of 32 can",
            show_progress=show_progress,
        )
    outcome = train(
        config,
        pruned,
        batches,
        title=f"{model.name}, pruned by the prompt",
        objective=objective,
        measure=held_out(batches.held_out, evaluation_objective) if batches.held_out else None,
        show_progress=show_progress,
    )
    model.save(config.out_path)
    return InstructionPruningResult(
        model=model.name,
        out=config.out_path,
        parameters=sum(p.numel() for p in pruned.parameters()),
        keep=pruned.keep,
        width=pruned.intermediate_size,
        stage=config.stage,
        **vars(outcome),
    )


def _new(config: Config) -> PrunedModel:
    """Create a pruned model with an untrained predictor."""
    import pippin
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel

    if config.keep is None:
        raise InvalidArgument("keep (--keep) is missing: how many channels are left in each layer?")
    loaded = pippin.load(config.model, device=config.device, dtype="float32", pack=False)
    predictor = _predictor(loaded, config.predictor or "nano", config.seed)
    return PrunedModel.from_language_model(loaded, predictor, config.keep, 0.3 if config.eps is None else config.eps)


def _further(config: Config) -> PrunedModel:
    """Load a pruned model, with the number of channels and the temperature of the config, if given."""
    from pippin.language.methods.instruction_pruning.model import InstructionFollowingPruning
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel

    if config.predictor is not None:
        raise InvalidArgument(
            f"{config.model} has a predictor already; leave predictor (--predictor) out, or begin from its base"
        )
    model = PrunedModel.load(config.model, device=config.device, dtype="float32")
    old = model.module
    keep = old.keep if config.keep is None else config.keep
    eps = old.eps if config.eps is None else config.eps
    return dataclasses.replace(model, module=InstructionFollowingPruning(old.base, old.predictor, keep, eps))


def _predictor(model: LanguageModel, name: str, seed: int) -> MaskPredictor | StaticMask:
    import pippin
    from pippin.core.errors import VocabularyMismatch
    from pippin.language.methods.instruction_pruning.model import StaticMask, prunable_intermediate_size
    from pippin.language.methods.instruction_pruning.pruned_model import mask_predictor
    from pippin.language.presets import SIZES

    if name == "static":
        static = StaticMask(len(model.module.layers), prunable_intermediate_size(model.module))
        return static.initialize(seed=seed).to(model.device)
    if name in SIZES:
        return mask_predictor(model, cast(Any, name), seed=seed)
    reader = pippin.load(name, device=str(model.device), dtype="float32", pack=False)
    if (token := reader.tokenizer.first_difference(model.tokenizer)) is not None:
        raise VocabularyMismatch(
            f"{reader.name} and {model.name} differ in token {token}; the predictor must read the same"
        )
    return mask_predictor(model, reader.module, seed=seed)


def _first(batches: TrainingBatches) -> list[TokenBatch]:
    """The first batches; the position in the stream is restored."""
    position: Any = batches.training.state_dict()
    first = list(itertools.islice(batches.training, FIRST_BATCHES))
    batches.training.load_state_dict(position)
    return first
