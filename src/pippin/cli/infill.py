"""`pippin infill`: fill the gaps of a text with a masked diffusion model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli.common import inputs, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core.text_files import check_text
from pippin.engine.options import Device, TopP

if TYPE_CHECKING:
    from rich.text import Text

    from pippin.language.methods.masked_diffusion.model import MaskedDiffusionLM
    from pippin.language.methods.masked_diffusion.sample import UnmaskingStep

_GAP = "░"


@with_options
def infill(
    path: Annotated[Path, typer.Argument(help="Folder that `pippin train diffusion` saved.")],
    text: Annotated[
        str | None, typer.Argument(help="The text, where [[12]] is a gap of twelve tokens; by default, standard input.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Most denoising steps; more are slower and better.")] = 64,
    order: Annotated[str, typer.Option(help="confidence (most confident tokens first) or random.")] = "confidence",
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Device = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the text, the filled gaps and every step.")
    ] = False,
) -> None:
    """Fill the gaps of a text.

    pippin infill filler "The cat[[4]] on the mat."
    """
    from pippin.core.errors import InvalidInput
    from pippin.language import MaskedDiffusionLM, UnmaskingOptions

    options = UnmaskingOptions(steps, cast(Any, order), temperature, top_p)
    given = inputs.read_stdin() if text is None else check_text(text, "the text")
    if given is None:
        raise InvalidInput('no text was given; for example: pippin infill FOLDER "The cat[[4]] on the mat."')
    lm = MaskedDiffusionLM.load(path, device=device)
    ids, masked = lm.parse_gaps(given)
    start, taken = time.perf_counter(), list["UnmaskingStep"]()
    filling = lm.steps(ids, masked, options, seed=seed)
    if as_json or not terminal.watched(sys.stdout):
        taken += filling
    else:
        from rich.live import Live

        with Live(refresh_per_second=12, transient=True) as live:
            for step in filling:
                taken.append(step)
                live.update(_shown(lm, step))
    seconds, filled = time.perf_counter() - start, taken[-1].ids[0]
    completed = lm.tokenizer.decode(filled.tolist())
    if not as_json:
        terminal.write(completed + "\n")
        if terminal.watched(sys.stderr):
            terminal.note(f"{int(masked.sum())} tokens in {len(taken)} passes, {seconds:.2f} s")
        return
    gaps = [lm.tokenizer.decode(filled[gap].tolist()) for gap in _runs(masked[0].tolist())]
    states = [{"step": step.step, "text": _shown(lm, step).plain} for step in taken]
    record = {"text": completed, "gaps": gaps, "masked": int(masked.sum()), "passes": len(taken), "seconds": seconds}
    terminal.write(terminal.to_json(record | {"steps": states}) + "\n")


def _runs(masked: list[bool]) -> list[slice]:
    """Slices of the masked runs of tokens."""
    edges = [i for i in range(len(masked) + 1) if [*masked, False][i] != [False, *masked][i]]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _shown(lm: MaskedDiffusionLM, step: UnmaskingStep) -> Text:
    """The text after a step, with new tokens highlighted and masked tokens shaded."""
    from rich.text import Text

    shown = Text()
    for id, gap, new in zip(step.ids[0].tolist(), step.masked[0].tolist(), step.fixed[0].tolist(), strict=True):
        word = _GAP if gap else terminal.plain(lm.tokenizer.decode([id]))
        shown.append(word, style="dim" if gap else "bold green" if new else "")
    return shown
