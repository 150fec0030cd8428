"""`pippin summarize`: a summary of a text, with unsupported names and numbers reported."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pippin.cli.common import documents, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import Device, DType, ModelOptions

if TYPE_CHECKING:
    from pippin.kits.text import Passage, SummaryDraft, TextTasks

LONG = 4000
"""Characters of a text that takes some seconds to read."""


@with_options
def summarize(
    file: documents.File = None,
    length: Annotated[str, typer.Option(help="short, medium, long, or a number of sentences.")] = "medium",
    method: Annotated[
        Literal["write", "select"], typer.Option(help="write a summary, or select sentences of the text.")
    ] = "write",
    language: Annotated[str | None, typer.Option(help="Language tag of the summary, such as de.")] = None,
    as_json: documents.Json = False,
    model: options.Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: DType = "auto",
) -> None:
    """Summarize a text of any length.

    Numbers and names of the summary that are not in the text are listed on standard error.
    """
    size: Any = int(length) if length.isdecimal() else length
    from pippin.kits.text import TextTasks
    from pippin.kits.text.prompts import sentences_wanted

    sentences_wanted(size)
    _, text = documents.read(file)
    if not as_json:
        what = "selecting sentences of" if method == "select" else "summarizing"
        progress.note(f"{what} {len(text):,} characters with {model}", show_progress=len(text) > LONG)
    language_model = options.load(model, ModelOptions(device=device, dtype=dtype))
    tasks = TextTasks(language_model)
    if method == "select":
        with progress.counted("scoring", unit="sentences", show_progress=not as_json) as on_progress:
            done = tasks.summarize(text, length=size, method="select", on_progress=on_progress)
    else:
        done = _written(tasks, text, size, language, show_progress=not as_json)
    if as_json:
        record = {"model": language_model.name, "summary": done.text, "unverified": done.unverified}
        terminal.write(terminal.to_json(record) + "\n")
        return
    terminal.write(done.text + "\n")
    if done.unverified:
        terminal.note(f"not in the text: {', '.join(done.unverified)}")


def _written(
    tasks: TextTasks,
    text: str,
    length: Literal["short", "medium", "long"] | int,
    language: str | None,
    *,
    show_progress: bool,
) -> Passage:
    """Write a summary, showing drafts on a terminal."""
    drafts = tasks.summarize_drafts(text, length=length, language=language)
    last: SummaryDraft | None = None
    if show_progress and terminal.watched(sys.stdout):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), transient=True, refresh_per_second=12) as live:
            live.update(Text("reading the text …", style="dim"))
            for last in drafts:
                part = f"part {last.part + 1} of {last.parts}\n" if last.parts > 1 else ""
                live.update(Text(part, style="dim") + Text(terminal.plain(last.text), style="none"))
    else:
        with progress.busy("reading the text", show_progress=show_progress):
            last = next(drafts)
        several = show_progress and last.parts > 1
        with progress.bar(last.parts, "summarizing", unit="parts", show_progress=several) as bar:
            began, before = time.monotonic(), last.tokens
            for draft in drafts:
                if draft.part != last.part or draft.tokens < last.tokens:  # another part, or the same once more
                    began, before = time.monotonic(), draft.tokens
                seconds = time.monotonic() - began
                rate = f", {(draft.tokens - before) / seconds:.1f} tokens/s" if draft.tokens > before else ""
                bar.say(f"part {draft.part + 1} of {draft.parts}: {draft.tokens:,} tokens written{rate}")
                bar.advance(draft.part - last.part)
                last = draft
            bar.advance(last.parts - last.part)
    assert last is not None
    assert last.done is not None
    return last.done
