"""`pippin train diffusion`: make a model that fills gaps of one that continues text, or train such a model further."""

from __future__ import annotations

from typing import Annotated

import typer

from pippin.cli import options, terminal, training


@training.planned()
def diffusion(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file; or a diffusion model, to go on with it.",
            autocompletion=options.complete_model,
        ),
    ],
    plan: training.Plan,
    anneal: Annotated[
        int, typer.Option(help="Updates over which attention grows from causal to full; 0 for full at once.")
    ] = 0,
    no_shift: Annotated[
        bool, typer.Option("--no-shift", help="Predict a masked token from its own place, not from the one before.")
    ] = False,
    mask_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="What stands for a masked token; without it one is added.")
    ] = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train a model to fill masked tokens in any order, and save it for `pippin infill`.

    The losses are bounds of nats per token: they are not to be compared with those of `pippin train full`.

    pippin train diffusion smollm2-135m --data notes.txt --out filler --steps 200
    """
    import pippin
    from pippin.core.errors import InvalidArgument
    from pippin.language import load_diffusion, to_diffusion
    from pippin.language.diffusion import is_diffusion

    further = is_diffusion(model)
    if further and (no_shift or mask_token is not None):
        raise InvalidArgument(f"{model} is a diffusion model already: --no-shift and --mask-token are settled")
    if further:
        lm = load_diffusion(model, device=device, dtype="float32", pack=False)
    else:
        base = pippin.load(model, device=device, dtype="float32", pack=False)
        lm = to_diffusion(base, mask_token, shift=not no_shift)
    lm.module.requires_grad_(True)
    objective = lm.objective(anneal=anneal)
    batches = training.read(plan, lm.model, show=not as_json)
    if not as_json:
        terminal.note(f"{lm.name}: mask token {lm.mask_id}, {batches.steps} steps; losses are bounds")
    outcome = training.run(
        plan,
        lm.module,
        batches,
        title=f"{lm.name}, masked diffusion (bounds)",
        objective=objective,
        measured=lm.objective(),
        show=not as_json,
    )
    lm.save(plan.out)
    facts = {"model": lm.name, "mask_id": lm.mask_id, "shift": lm.shift, "anneal": anneal, "losses": "bounds"}
    training.conclude(plan, outcome, as_json=as_json, facts=facts)
