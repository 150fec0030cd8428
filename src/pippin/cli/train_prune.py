"""`pippin train prune`: a model whose feed-forward channels are chosen by what it is asked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.data.batches import TokenBatch
    from pippin.language.instruction_pruning import MaskPredictor, StaticMask
    from pippin.language.load import LanguageModel
    from pippin.language.pruned import PrunedModel

LOOKED_AT = 8
"""Batches from which the importance of channels is taken, or in which a prompt is looked for."""


@training.planned()
def prune(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository or folder; or what this verb made, to go on with it.",
            autocompletion=options.complete_model,
        ),
    ],
    plan: training.Plan,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Channels that are left in each layer.")] = None,
    stage: Annotated[
        str, typer.Option(help="continue: the mask from a part of a text, for the next; instruct: from a prompt.")
    ] = "continue",
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What reads the prompt: a new model (nano, small, base), or a trained one with the same tokens; "
            "static for one choice that no prompt changes. nano without it.",
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(help="Parts of a text, in the stage continue.")] = 4,
    eps: Annotated[float | None, typer.Option(help="How soft the choice is at the end; 0.3 without it.")] = None,
    narrow: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of the run, in which the channels fall to --keep; 0.25 without it."),
    ] = None,
    start: Annotated[
        str, typer.Option(help="First scores: importance of the channels on the data, or random.")
    ] = "importance",
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Learn which part of a model each prompt needs; `pippin shape specialize` makes the small models.

    pippin train prune smollm2-135m --keep 512 --data notes.txt --out pruned
    pippin train prune pruned --stage instruct --data questions.jsonl --out tuned
    """
    if stage not in ("continue", "instruct"):
        raise InvalidArgument(f"--stage is {stage!r}; choose continue or instruct")
    if start not in ("importance", "random"):
        raise InvalidArgument(f"--start is {start!r}; choose importance or random")
    if narrow is not None and not 0 <= narrow <= 1:
        raise InvalidArgument(f"--narrow is {narrow}; give a share of the run, from 0 to 1")
    from pippin.language.pruned import is_pruned, load_pruned
    from pippin.language.pruning_objectives import Annealing, ChunkedPretraining, InstructionTuning

    ChunkedPretraining(chunks)  # which refuses a number of them
    show, fresh = not as_json, not is_pruned(model)
    if fresh:
        made = _begin(model, device, keep, eps, predictor, plan.seed)
    else:
        if predictor is not None:
            raise InvalidArgument(f"{model} has a predictor already; leave --predictor out, or begin from its base")
        made = load_pruned(model, device=device, dtype="float32")
        made = _again(made, keep, eps)
    pruned = made.module.requires_grad_(True)
    batches = training.read(plan, _whole(made), show=show)
    share = (0.25 if fresh else 0.0) if narrow is None else narrow
    narrowed = round(share * batches.steps)
    annealing = Annealing(narrowed, round(batches.steps * 0.75) if narrowed else 0, max(1.0, pruned.eps))
    objective, measured = (
        ChunkedPretraining(chunks, how) if stage == "continue" else InstructionTuning(how)
        for how in (annealing, Annealing())
    )
    first = _first(batches)
    if not any(objective.lessons(batch) for batch in first):
        raise InvalidArgument(
            "the data holds no prompts with answers, which --stage instruct learns from; give conversations, or "
            "prompts and completions, or take --stage continue"
        )
    if fresh and start == "importance":
        from pippin.language.instruction_pruning import importance

        pruned.predictor.set_start(importance(pruned.base, first))
    if show:
        terminal.note(f"{made.name}: {pruned.keep} of {pruned.width} channels, {batches.steps} steps")
        if pruned.keep % 32:
            terminal.note(f"small models of {pruned.keep} channels cannot be packed to bits; multiples of 32 can")
    title = f"{made.name}, pruned by the prompt"
    outcome = training.run(plan, pruned, batches, title=title, objective=objective, measured=measured, show=show)
    made.save(plan.out)
    sizes = {"keep": pruned.keep, "width": pruned.width, "stage": stage}
    training.conclude(plan, outcome, as_json=as_json, facts={"model": made.name, **sizes})
    if show:
        terminal.note(f"a small model of it: pippin shape specialize {plan.out} --prompt TEXT --out FOLDER")


def _begin(
    ref: str, device: str | None, keep: int | None, eps: float | None, predictor: str | None, seed: int
) -> PrunedModel:
    """A model with a predictor that knows nothing yet."""
    if keep is None:
        raise InvalidArgument("--keep is missing: how many channels are left in each layer?")
    import pippin
    from pippin.language.pruned import pruned

    loaded = pippin.load(ref, device=device, dtype="float32", pack=False)
    return pruned(loaded, _predictor(loaded, predictor or "nano", seed), keep, 0.3 if eps is None else eps)


def _predictor(model: LanguageModel, name: str, seed: int) -> MaskPredictor | StaticMask:
    import pippin
    from pippin.core.errors import VocabularyMismatch
    from pippin.language.instruction_pruning import StaticMask, width_of
    from pippin.language.presets import SIZES
    from pippin.language.pruned import mask_predictor

    if name == "static":
        static = StaticMask(len(model.module.layers), width_of(model.module))
        return static.initialise(seed=seed).to(model.device)
    if name in SIZES:
        return mask_predictor(model, name, seed=seed)
    reader = pippin.load(name, device=str(model.device), dtype="float32", pack=False)
    if (token := reader.tokenizer.first_difference(model.tokenizer)) is not None:
        raise VocabularyMismatch(
            f"{reader.name} and {model.name} differ in token {token}; the predictor must read the same"
        )
    return mask_predictor(model, reader.module, seed=seed)


def _again(made: PrunedModel, keep: int | None, eps: float | None) -> PrunedModel:
    """The same weights with other settings, where there are any."""
    import dataclasses

    from pippin.language.instruction_pruning import InstructionFollowing

    old = made.module
    keep, eps = old.keep if keep is None else keep, old.eps if eps is None else eps
    return dataclasses.replace(made, module=InstructionFollowing(old.base, old.predictor, keep, eps))


def _whole(made: PrunedModel) -> LanguageModel:
    """The base with its tokenizer."""
    from pippin.language.load import LanguageModel

    return LanguageModel(made.name, made.module.base, made.tokenizer, made.template)


def _first(batches: training.Batches) -> list[TokenBatch]:
    """A few batches, the stream left where it was."""
    cursor: Any = batches.learnt.state_dict()
    found = list(itertools.islice(batches.learnt, LOOKED_AT))
    batches.learnt.load_state_dict(cursor)
    return found
