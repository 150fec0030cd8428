"""`pippin infill`: fill the gaps of a text with a masked diffusion model, and show how."""

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
    path: Annotated[Path, typer.Argument(help="A folder that `pippin train diffusion` wrote.")],
    text: Annotated[
        str | None, typer.Argument(help="The text; [[12]] is a gap of twelve tokens. Without it, what is piped in.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Most denoising steps; more are slower and better.")] = 64,
    order: Annotated[str, typer.Option(help="confidence (the most confident tokens first) or random.")] = "confidence",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Device = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the text, what fills the gaps, each step.")
    ] = False,
) -> None:
    """Fill the gaps of a text.

    pippin infill filler "The cat[[4]] on the mat."
    """
    from pippin.core.errors import InvalidInput
    from pippin.language import MaskedDiffusionLM, UnmaskingOptions

    how = UnmaskingOptions(steps, cast(Any, order), temperature, top_p)
    given = inputs.read_stdin() if text is None else check_text(text, "the text")
    if given is None:
        raise InvalidInput('there is no text; write it as in: pippin infill FOLDER "The cat[[4]] on the mat."')
    lm = MaskedDiffusionLM.load(path, device=device)
    ids, masked = lm.parse_gaps(given)
    start, made = time.perf_counter(), list["UnmaskingStep"]()
    filling = lm.steps(ids, masked, how, seed=seed)
    if as_json or not terminal.watched(sys.stdout):
        made += filling
    else:
        from rich.live import Live

        with Live(refresh_per_second=12, transient=True) as live:
            for step in filling:
                made.append(step)
                live.update(_shown(lm, step))
    seconds, filled = time.perf_counter() - start, made[-1].ids[0]
    whole = lm.tokenizer.decode(filled.tolist())
    if not as_json:
        terminal.write(whole + "\n")
        if terminal.watched(sys.stderr):
            terminal.note(f"{int(masked.sum())} tokens in {len(made)} passes, {seconds:.2f} s")
        return
    gaps = [lm.tokenizer.decode(filled[gap].tolist()) for gap in _runs(masked[0].tolist())]
    states = [{"step": step.step, "text": _shown(lm, step).plain} for step in made]
    facts = {"text": whole, "gaps": gaps, "masked": int(masked.sum()), "passes": len(made), "seconds": seconds}
    terminal.write(terminal.to_json(facts | {"steps": states}) + "\n")


def _runs(masked: list[bool]) -> list[slice]:
    """The gaps, each as a slice of the tokens."""
    edges = [i for i in range(len(masked) + 1) if [*masked, False][i] != [False, *masked][i]]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _shown(lm: MaskedDiffusionLM, step: UnmaskingStep) -> Text:
    """The text after a step: what was fixed just now stands out, and a masked token is a shade."""
    from rich.text import Text

    shown = Text()
    for id, gap, new in zip(step.ids[0].tolist(), step.masked[0].tolist(), step.fixed[0].tolist(), strict=True):
        word = _GAP if gap else terminal.plain(lm.tokenizer.decode([id]))
        shown.append(word, style="dim" if gap else "bold green" if new else "")
    return shown
