"""What Pippin does, in a minute: values from a letter, a tool and a free answer from a small model on this machine.

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
from pippin.session.extraction import Extraction

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
    console.print(figures({"values": typed, "tool call": called, "free answer": free}))
    memory = files.format_bytes(device.peak_memory())
    console.print(
        f"Model loaded in {seconds:.1f} s. Peak memory of the whole program {memory}. Nothing left this machine."
    )


def fill_form(model: pippin.LanguageModel) -> Extraction[Invoice]:
    """A letter goes in, an `Invoice` comes out: every value is a part of the letter, and its place is known."""
    console.rule("A letter becomes a typed object", align="left")
    letter = (FOLDER / "letter.txt").read_text()
    found = pippin.Session(model).extract(letter, Invoice)
    console.print(Panel(marked(letter, found), title="examples/letter.txt", title_align="left"))
    table = Table.grid(padding=(0, 2))
    for name, value in found.content:
        table.add_row(Text(name, "bold"), Text(str(value), "green"))
    console.print(table)
    return found


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


def marked(letter: str, found: Extraction[Invoice]) -> Text:
    """The lines of the letter that the values come from."""
    text = Text(letter, "dim")
    for span in found.spans:
        text.stylize("not dim bold green", span.start, span.end)
    numbers = {letter.count("\n", 0, span.start) for span in found.spans}
    shown = Text("\n", "dim").join(line for number, line in enumerate(text.split("\n")) if number in numbers)
    return shown


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
