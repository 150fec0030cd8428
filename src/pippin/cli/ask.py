"""`pippin ask`: one question and its answer: free text, a choice, or a value of a type."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pippin.cli.common import inputs, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.first_answer import explain_default_model
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import CacheOptions, ModelOptions
from pippin.session.options import GenerationOptions

if TYPE_CHECKING:
    from pippin.session.response import Response

_FORM = "Answer format"


@with_options
def ask(
    prompt: Annotated[str | None, typer.Argument(help="The question; by default, standard input.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A document that the question is about; repeatable.")
    ] = None,
    instructions: options.Instructions = None,
    guardrails: Annotated[
        Literal["strict", "default", "permissive", "off"],
        typer.Option(help="Block harmful questions and answers, by the rules of all languages."),
    ] = "off",
    schema: Annotated[
        Path | None,
        typer.Option(help="Answer with JSON that this JSON Schema file describes.", rich_help_panel=_FORM),
    ] = None,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="FILE.py:NAME",
            help="Answer with a value of this Python type. Runs the file.",
            rich_help_panel=_FORM,
        ),
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with one of these; give two or more.", rich_help_panel=_FORM)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer with text that matches this regular expression.", rich_help_panel=_FORM)
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse a schema with parts that would be ignored with a note.", rich_help_panel=_FORM
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: content, usage, timing.", rich_help_panel=_FORM)
    ] = False,
    model: options.Model = DEFAULT_MODEL,
    adapter: options.Adapter = None,
    url: options.Url = None,
    model_options: ModelOptions = options.HERE,
    cache_options: CacheOptions = options.EVERYTHING,
    sampling: GenerationOptions = options.ANSWER,
) -> None:
    """Ask a model one question.

    Piped text is a document for the question:  cat letter.txt | pippin ask "Summarize this letter."
    A typed answer from a document needs no question:  pippin ask --file letter.txt --schema invoice.json
    """
    target = inputs.target(schema=schema, type_name=type_, choices=choice or (), regex=regex, strict=strict)
    text = inputs.compose_prompt(prompt, file or [], inputs.read_stdin(), typed=target is not None)
    import pippin
    from pippin.session.guardrails import Guardrails

    is_text = target is None or bool(choice or regex)
    cache = options.bounded_cache(cache_options, url)
    with options.provider(model, url, model_options, adapter) as provider:
        session = pippin.Session(
            provider,
            instructions=instructions,
            adapter=options.adapter_name(adapter),
            cache=cache,
            guardrails=None if guardrails == "off" else getattr(Guardrails, guardrails)(locale="*"),
        )
        if as_json or not (is_text or terminal.watched(sys.stdout)):
            response = session.respond(text, generating=target, options=sampling)
            value = _record(response, provider.name) if as_json else response.content
            terminal.write(terminal.to_json(value) + "\n")
        else:
            with session.stream(text, generating=target, options=sampling) as stream:
                response = terminal.show_text(stream) if is_text else terminal.show_value(stream)
    if response.finish_reason == "length":
        terminal.note(f"the answer was cut off after {response.usage.output_tokens} tokens (see --max-tokens)")
    for each in response.notes if schema else ():
        terminal.note(each)
    if terminal.watched(sys.stderr):
        terminal.note(terminal.figures(response))
    if not as_json:
        explain_default_model(model, url)


def _record(response: Response[Any], model: str) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "model": model,
        "content": response.content,
        "finish_reason": response.finish_reason,
        "usage": asdict(response.usage),
        "timing": asdict(response.timing),
    }
