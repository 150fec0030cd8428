"""`pippin reason`: ask a latent reasoner (LaDiR), optionally showing its thoughts.

Notable here:
- `--steps` sets the compute for each thought, `--samples` and `--diversity` the number and variety of attempts
- on a terminal, `--show-thoughts` decodes the latent vectors after every step, while they still change
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.common import inputs, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidInput
from pippin.engine.options import Device, Seed

if TYPE_CHECKING:
    from pippin.language.methods.ladir.model import LatentReasoner
    from pippin.language.methods.ladir.sample import DenoisingStep, ReasonerAnswer


@with_options
def reason(
    path: Annotated[Path, typer.Argument(help="Folder that `pippin train reasoner` saved.")],
    question: Annotated[str | None, typer.Argument(help="The question; by default, standard input.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of each block of thought.")] = 30,
    samples: Annotated[int, typer.Option(help="Number of sampled answers.")] = 1,
    diversity: Annotated[
        float, typer.Option(help="Repulsion between samples, such as 0.3 to 0.5; needs three samples or more.")
    ] = 0.0,
    init_std: Annotated[float, typer.Option(help="Standard deviation of the initial noise.")] = 1.0,
    guidance: Annotated[float, typer.Option(help="Guidance scale; 1 for none.")] = 1.0,
    max_blocks: Annotated[
        int | None, typer.Option(help="Most blocks of thought; by default, the model's limit.")
    ] = None,
    show_thoughts: Annotated[bool, typer.Option("--show-thoughts", help="Decode the thoughts and print them.")] = False,
    seed: Seed = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a model that reasons in latent vectors.

    pippin reason thinker "3,8,5=6" --samples 16 --diversity 0.4
    """
    prompt = inputs.read_stdin() if question is None else question
    if prompt is None or not prompt.strip():
        raise InvalidInput('no question was given; for example: pippin reason FOLDER "3,8,5=6", or pipe it in')
    from pippin.language.methods.ladir.model import LatentReasoner

    reasoner = LatentReasoner.load(path, device=device)
    options: dict[str, Any] = {"steps": steps, "samples": samples, "diversity": diversity, "init_std": init_std}
    options |= {"guidance": guidance, "max_blocks": max_blocks, "seed": seed}
    live = show_thoughts and samples == 1 and not as_json and terminal.watched(sys.stdout)
    options["return_thoughts"] = show_thoughts
    if live:
        answers = _watched(reasoner, prompt.strip(), options)
    else:
        answers = _think(reasoner, prompt.strip(), options, show_progress=not as_json)
    if as_json:
        terminal.write(terminal.to_json({"question": prompt.strip(), "answers": list(map(_record, answers))}) + "\n")
    else:
        _show(answers, thoughts=show_thoughts and not live)
    if not all(answer.complete for answer in answers):
        terminal.note("--max-blocks ended a chain of thoughts before the model chose to answer")


def _think(
    reasoner: LatentReasoner, question: str, options: dict[str, Any], *, show_progress: bool
) -> list[ReasonerAnswer]:
    """Generate, counting the steps; how many there will be is known only when the model ends its thought."""
    with progress.bar(None, "thinking", unit="steps", show_progress=show_progress) as shown:

        def on_step(now: DenoisingStep) -> None:
            shown.say(f"block {now.block + 1}, step {now.step} of {now.steps}")
            shown.advance(1)

        return reasoner.generate([question], **options, on_step=on_step)


def _watched(reasoner: LatentReasoner, question: str, options: dict[str, Any]) -> list[ReasonerAnswer]:
    """Generate, showing the thoughts while they are denoised."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    lines: list[str] = []
    with Live(console=Console(), refresh_per_second=12) as live:

        def on_step(now: DenoisingStep) -> None:
            del lines[now.block :]
            lines.append(terminal.plain(reasoner.vae.decode(now.estimate[:1])[0]))
            live.update(Text("\n".join([*lines, f"step {now.step} of {now.steps}"]), style="dim"))

        answers = reasoner.generate([question], **options, on_step=on_step)
        live.update(Text("\n".join(map(terminal.plain, answers[0].thoughts)), style="dim"))
    return answers


def _show(answers: list[ReasonerAnswer], *, thoughts: bool) -> None:
    """Print each distinct answer with its count, after the thoughts of its first sample."""
    first: dict[str, ReasonerAnswer] = {}
    for answer in answers:
        first.setdefault(answer.text, answer)
    for text, count in Counter(answer.text for answer in answers).most_common():
        if thoughts:
            terminal.write("".join(f"  {line}\n" for line in first[text].thoughts))
        terminal.write(f"{text}\n" if len(answers) == 1 else f"{count}/{len(answers)}  {text}\n")


def _record(answer: ReasonerAnswer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "sample": answer.sample,
        "blocks": answer.blocks,
        "complete": answer.complete,
        "thoughts": list(answer.thoughts),
    }
