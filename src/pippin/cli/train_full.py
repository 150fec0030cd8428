"""`pippin train full`: train all weights of a model, further or from nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal, training

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.train.parallel import Parallel


def full(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    data: training.Data,
    out: training.Out,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with random weights; only tokenizer and form are the model's.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Begin with random weights of another form: nano, small or base."),
    ] = None,
    field: training.Field = None,
    learn: training.Learn = "assistant",
    held_out: training.HeldOut = "0.05",
    length: training.Length = 512,
    steps: training.Steps = None,
    epochs: training.Epochs = 1.0,
    lr: training.LR = 3e-4,
    rows: training.Rows = 8,
    accumulate: training.Accumulate = 1,
    precision: training.Precision = "float32",
    every: training.Every = None,
    seed: training.Seed = 0,
    resume: training.Resume = False,
    ray: training.Ray = False,
    workers: training.Workers = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train all weights of a model on data of yours, and save a model that opens like any other.

    pippin train full smollm2-135m --data notes.txt --out mine --steps 100
    """
    plan = training.Plan(
        data=data,
        out=out,
        length=length,
        rows=rows,
        lr=lr,
        steps=steps,
        epochs=epochs,
        accumulate=accumulate,
        precision=precision,
        every=every,
        seed=seed,
        resume=resume,
        held_out=held_out,
        learn=learn,
        fields=field or (),
    )
    settings = {"plan": plan.to_json(), "model": model, "device": device, "fresh": fresh, "preset": preset}
    made = training.launch(train, settings | {"show": not as_json}, ray=ray, workers=workers)
    if made is not None:
        training.tell(made, as_json=as_json)


def train(settings: dict[str, Any], parallel: Parallel | None) -> dict[str, Any]:
    """The run that these settings (JSON values) describe, in this process or in one of several; a summary of it."""
    plan = training.Plan.from_json(settings["plan"])
    fresh, preset = settings["fresh"], settings["preset"]
    device = settings["device"] if parallel is None else parallel.device
    model = _model(settings["model"], device, fresh=fresh, preset=preset, seed=plan.seed)
    first = parallel is None or parallel.rank == 0
    show = settings["show"] and first
    batches = training.read(plan, model, processes=1 if parallel is None else parallel.size, show=show)
    parameters = sum(p.numel() for p in model.module.parameters())
    if show:
        terminal.note(f"{model.name}: {parameters / 1e6:.1f} million parameters, {batches.steps} steps")
    title = f"{model.name}, all weights"
    outcome = training.run(plan, model.module, batches, title=title, parallel=parallel, show=show)
    if first:
        model.save(plan.out)
    facts = {"model": model.name, "parameters": parameters, "fresh": fresh or preset is not None}
    return training.summary(plan, outcome, facts)


def _model(ref: str, device: str | None, *, fresh: bool, preset: str | None, seed: int) -> LanguageModel:
    """The model to be trained, in float32."""
    import pippin

    loaded = pippin.load(ref, device=device, dtype="float32", pack=False)
    if not (fresh or preset):
        loaded.module.requires_grad_(True)
        return loaded
    from pippin.language import presets
    from pippin.language.transformer import Decoder

    config = loaded.config if preset is None else presets.preset(preset, loaded.config.vocab_size)
    module = Decoder(config).initialise(seed=seed).to(loaded.device)
    name = f"{loaded.name} anew" if preset is None else f"{preset} with the tokenizer of {loaded.name}"
    return dataclasses.replace(loaded, name=name, module=module, source=None, adapters={})
