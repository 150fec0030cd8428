"""What Pippin does, in a minute: a typed answer, a tool and a free answer from a small model on this machine.

Run it with `make demo`, or `python examples/demo.py`. The first run fetches the model; after that no network is used.
"""

import os
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from forms import Invoice
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import pippin
from pippin.core import device, files
from pippin.core.store import catalog, store

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # torch's waiting threads soon sleep: other programs keep their share
FOLDER = Path(__file__).parent
console = Console(highlight=False)


@pippin.tool
def weekday(day: date) -> str:
    """Tell which day of the week a date is."""
    return f"{day.day} {day:%B %Y} is a {day:%A}."


def main() -> None:
    """Fetch and load the model, let it work three times, and tell the figures."""
    entry = catalog.entries()[catalog.DEFAULT_MODEL]
    store.pull(entry.name)
    start = time.perf_counter()
    model = pippin.load(entry.name, device="cpu")
    seconds = time.perf_counter() - start
    console.print(f"[bold]{entry.title}[/], on {escape(device.cpu_name())}, {device.threads()} threads, {model.dtype}")

    typed = fill_form(model)
    called = call_tool(model, typed.content.payment_due)
    free = read_article(model)

    console.rule("Figures", align="left")
    console.print(figures({"typed answer": typed, "tool call": called, "free answer": free}))
    memory = files.format_bytes(device.peak_memory())
    console.print(
        f"Model loaded in {seconds:.1f} s. Peak memory of the whole program {memory}. Nothing left this machine."
    )


def fill_form(model: pippin.LanguageModel) -> pippin.Response[Invoice]:
    """A letter goes in, an `Invoice` comes out; the grammar of the type allows nothing else."""
    console.rule("A letter becomes a typed object", align="left")
    letter = (FOLDER / "letter.txt").read_text()
    console.print(
        Panel(Text(excerpt(letter, "    Invoice number"), "dim"), title="examples/letter.txt", title_align="left")
    )
    session = pippin.Session(model)
    return show(session.stream(f"{letter}\n\nFill in the invoice.", generating=Invoice), form)


def call_tool(model: pippin.LanguageModel, day: date) -> pippin.Response[str]:
    """The model asks Python what it cannot know, and answers with what it hears."""
    console.rule("The model calls a Python function", align="left")
    question = f"Which day of the week is {day}? Please answer in one sentence."
    console.print(f"[bold]>[/] {question}")
    session = pippin.Session(model, tools=[weekday])
    response = session.respond(question, options=pippin.GenerationOptions(tool_calling="required", max_tokens=80))
    for part in response.transcript_entries:
        if part.kind == "tool_calls":
            for call in part.calls:
                arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
                console.print(f"  [dim]the model calls[/] {call.name}({escape(arguments)})")
        elif part.kind == "tool_output":
            console.print(f"  [dim]Python returns[/] {escape(part.text)}")
    console.print(response.content, markup=False)
    return response


def read_article(model: pippin.LanguageModel) -> pippin.Response[str]:
    """A free answer, shown as it is written."""
    console.rule("A free answer, streamed", align="left")
    question = "What is this article about? Answer in one sentence."
    console.print(f"[bold]>[/] {question} [dim](examples/article.txt)[/]")
    article = (FOLDER / "article.txt").read_text()
    session = pippin.Session(model, instructions="You answer briefly and only from the text.")
    return show(session.stream(f"{article}\n\n{question}", options=pippin.GenerationOptions(max_tokens=120)), Text)


def show(stream: Any, render: Callable[[Any], Any]) -> pippin.Response:
    """Draw each snapshot in place of the one before, then the whole answer."""
    with Live(console=console, transient=True, refresh_per_second=15) as live:
        for snapshot in stream:
            live.update(render(snapshot.content))
    console.print(render(stream.response.content))
    return stream.response


def form(value: Invoice) -> Table:
    """The fields so far; a dash where nothing has been written yet."""
    table = Table.grid(padding=(0, 2))
    for name in Invoice.model_fields:
        content = getattr(value, name, None)
        table.add_row(Text(name, "bold"), Text("-", "dim") if content is None else Text(str(content), "green"))
    return table


def excerpt(text: str, begin: str) -> str:
    """The six lines that matter here; the model reads all of it."""
    lines = text[text.index(begin) :].splitlines()[:6]
    return "\n".join(["…", *(line.strip() for line in lines), "…"])


def figures(responses: dict[str, pippin.Response]) -> Table:
    """Tokens and speed, measured by the engine itself."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "prompt", "tokens/s", "first token", "answer", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for name, response in responses.items():
        usage, timing = response.usage, response.timing
        read = usage.input_tokens - usage.cached_tokens
        table.add_row(
            name,
            f"{read} tokens",
            f"{read / timing.prompt_seconds:.0f}",
            f"{timing.first_token_seconds:.2f} s",
            f"{usage.output_tokens} tokens",
            f"{usage.output_tokens / timing.answer_seconds:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
