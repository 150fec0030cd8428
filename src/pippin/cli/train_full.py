"""`pippin train full`: train all weights of a model, further or from nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal, training

RETENTIONS = (1.0, 0.5, 0.25)
"""Sizes of the cache that a model with routed caches is measured at when it is trained."""

if TYPE_CHECKING:
    from pippin.language.kv_routing import KVRouting
    from pippin.language.load import LanguageModel
    from pippin.train.parallel import Parallel


@training.planned(injects=True)
def full(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    plan: training.Plan,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with random weights; only tokenizer and form are the model's.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Begin with random weights of another form: nano, small or base; nano-gru or nano-lstm is recurrent.",
        ),
    ] = None,
    route_caches: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Let each layer read an earlier one's keys and values with this probability, 0.5 say: the model can "
            "then be opened with a smaller cache (--retention).",
        ),
    ] = None,
    ray: training.Ray = False,
    workers: training.Workers = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train all weights of a model on data of yours, and save a model that opens like any other.

    pippin train full smollm2-135m --data notes.txt --out mine --steps 100
    """
    settings: dict[str, Any] = {"plan": plan.to_json(), "model": model, "device": device, "show": not as_json}
    settings |= {"fresh": fresh, "preset": preset, "route": route_caches}
    made = training.launch(train, settings, ray=ray, workers=workers)
    if made is not None:
        training.tell(made, as_json=as_json)


def train(settings: dict[str, Any], parallel: Parallel | None) -> dict[str, Any]:
    """The run that these settings (JSON values) describe, in this process or in one of several; a summary of it."""
    plan = training.Plan.from_json(settings["plan"])
    fresh, preset = settings["fresh"], settings["preset"]
    device = settings["device"] if parallel is None else parallel.device
    routing = _routing(settings["route"])
    model = model_of(settings["model"], device, fresh=fresh, preset=preset, seed=plan.seed)
    if routing is not None:
        routing.record(model.module)
    first = parallel is None or parallel.rank == 0
    show = settings["show"] and first
    batches = training.read(plan, model, processes=1 if parallel is None else parallel.size, show=show)
    parameters = sum(p.numel() for p in model.module.parameters())
    if show:
        terminal.note(f"{model.name}: {parameters / 1e6:.1f} million parameters, {batches.steps} steps")
    title = f"{model.name}, all weights"
    outcome = training.run(plan, model.module, batches, title=title, objective=routing, parallel=parallel, show=show)
    if first:
        model.save(plan.out)
    facts: dict[str, Any] = {"model": model.name, "parameters": parameters, "fresh": fresh or preset is not None}
    if routing is not None and batches.measured is not None:
        facts["held_out_by_retention"] = _by_retention(model, batches.measured, show=show)
    return training.summary(plan, outcome, facts)


def _routing(p_cross: float | None) -> KVRouting | None:
    """The next token, learnt with caches that are routed at random; None where that was not asked for.

    Raises:
        InvalidArgument: no probability.
    """
    from pippin.language.kv_routing import KVRouting

    return None if p_cross is None else KVRouting(p_cross)


def _by_retention(model: LanguageModel, measured: list[Any], *, show: bool) -> dict[str, float]:
    """What the model loses with half and a quarter of its caches, in nats a token."""
    from pippin.language.kv_routing import RoutedModel, nearest, spread
    from pippin.language.objectives import held_out

    measure, found = held_out(measured), {}
    for retention in RETENTIONS:
        routed = RoutedModel(model.module, nearest(model.config, spread(model.config, retention)))
        found[str(retention)] = measure(routed)["loss"]
        if show:
            terminal.note(f"held-out loss with {retention:.0%} of the caches: {found[str(retention)]:.4f} nats/token")
    return found


def model_of(ref: str, device: str | None, *, fresh: bool, preset: str | None, seed: int) -> LanguageModel:
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
