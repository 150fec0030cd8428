"""Encoding of transcripts as tokens.

Notable here:
- a model whose chat template supports tools gets them through the template; any other reads them in its instructions
- calls and outputs go through the template where it shows them, and are text in the dialect of the model elsewhere
- a base model without a template reads the plain text of the conversation
- reasoning of earlier turns is not shown to the model again, as the authors of such models recommend
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pippin.core.errors import UnsupportedCapability
from pippin.data.text.chat_template import CallForm
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.language.language_model import LanguageModel
from pippin.session.thinking_tags import thinking_tags, variables
from pippin.session.tool_dialects.dialect import BY_NAME, HERMES, ToolDialect, detect, writes
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import (
    Answer,
    Instructions,
    Prompt,
    Reasoning,
    ToolCalls,
    ToolOutput,
    Transcript,
)

TOOL_TEXT = """You can call these tools:
{tools}

To call a tool, write its name and its arguments {form}:
{example}
You will then read what the tool returned, and answer with it."""


def encode(
    model: LanguageModel,
    transcript: Transcript,
    tools: Sequence[ToolDefinition] = (),
    hint: str = "",
    *,
    dialect: ToolDialect | None = None,
    budget: int = 0,
) -> list[int]:
    """The tokens of a conversation in which the model is to answer next.

    Args:
        model: provides the template and the tokenizer.
        transcript: the conversation; its last entry is a prompt or a tool's output.
        tools: tools that the model may call.
        hint: text appended to the last prompt for this request only, such as the schema of the answer.
        dialect: how calls are written; None for `dialect_of` the model.
        budget: tokens for reasoning; with any, the prompt ends at the start of the model's reasoning.

    Raises:
        UnsupportedCapability: tools, for a model without a chat template.
        CheckpointError: the template cannot render this conversation.
    """
    if model.template is None:
        if tools:
            raise UnsupportedCapability(
                f"{model.name} is a base model without a chat template and cannot call tools; take a chat model, "
                "such as smollm2-135m"
            )
        said = [entry.text for entry in transcript if not isinstance(entry, Reasoning)]
        text = "\n\n".join([*said, *([hint] if hint else []), ""])
        bos = [model.tokenizer.bos_id] if model.tokenizer.add_bos and model.tokenizer.bos_id is not None else []
        return bos + model.tokenizer.encode(text)
    template, dialect = model.template, dialect or dialect_of(model)
    native = writes(template, dialect)
    definitions = [tool.definition() for tool in tools]
    described = native and template.accepts_tools
    tool_text = "" if described or not tools else _tool_text(definitions, dialect)
    if native and template.call_form is not None and not template.accepts_parallel_calls:
        transcript = Transcript(entries=tuple(_one_by_one(list(transcript))))
    turns = _messages(transcript, tool_text, hint, dialect, template.call_form if native else None)
    if turns and turns[0]["role"] == "system" and not template.accepts_system:
        system = turns.pop(0)["content"]
        turns[0] = turns[0] | {"content": f"{system}\n\n{turns[0]['content']}"}
    ids = template.encode(turns, tools=definitions if described and tools else None, **variables(budget))
    tags = thinking_tags(template)
    if budget and tags is not None and not ends_with(model, ids, tags.begin):
        ids += model.tokenizer.encode(tags.begin + ("\n" if tags.after == "\n\n" else ""), control=True)
    return ids


def ends_with(model: LanguageModel, ids: Sequence[int], tag: str) -> bool:
    """Whether a prompt ends with a tag, such as that of the reasoning."""
    tail = ids[-len(model.tokenizer.encode(tag, control=True)) - 4 :]
    text = b"".join(map(model.tokenizer.spelled_bytes, tail)).decode(errors="replace")
    return text.rstrip().endswith(tag.rstrip())


def dialect_of(model: LanguageModel, name: ToolDialectName | None = None) -> ToolDialect:
    """The dialect in which a model writes calls of tools: that of this name, that it was opened with, or its own."""
    if name or model.tool_dialect:
        return BY_NAME[name or model.tool_dialect or ""]
    return HERMES if model.template is None else detect(model.template)


def _tool_text(definitions: list[dict[str, Any]], dialect: ToolDialect) -> str:
    lines = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in definitions)
    form = "as JSON" if dialect.notation is None else "in this form"
    return TOOL_TEXT.format(tools=lines, form=form, example=dialect.write([("tool name", {"argument": "value"})]))


def _messages(
    transcript: Transcript, tool_text: str, hint: str, dialect: ToolDialect, form: CallForm | None
) -> list[dict[str, Any]]:
    """Chat messages; without ``form``, calls and outputs of tools are written as text."""
    entries = list(transcript)
    last_prompt = max((i for i, entry in enumerate(entries) if isinstance(entry, Prompt)), default=-1)
    said = [entry.text for entry in entries if isinstance(entry, Instructions)]
    system = "\n\n".join(text for text in (*said, tool_text) if text)
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    numbers: dict[str, str] = {}  # in the form that the template takes
    for index, entry in enumerate(entries):
        if isinstance(entry, Prompt):
            text = f"{entry.text}\n\n{hint}" if hint and index == last_prompt else entry.text
            turns.append({"role": "user", "content": text})
        elif isinstance(entry, Answer):
            turns.append({"role": "assistant", "content": entry.text})
        elif isinstance(entry, ToolCalls):
            called = [(call.name, call.arguments) for call in entry.calls]
            if form is None:
                content = "\n".join(part for part in (entry.text, dialect.write(called)) if part)
                turns.append({"role": "assistant", "content": content})
                continue
            for call in entry.calls:
                numbers[call.id] = form.id(len(numbers), call.name)
            ids = [numbers[call.id] for call in entry.calls]
            turns.append(form.message(entry.text, [(id, *call) for id, call in zip(ids, called, strict=True)]))
        elif isinstance(entry, ToolOutput):
            if form is not None:
                number = numbers.get(entry.call_id, entry.call_id)
                turns.append({"role": "tool", "name": entry.name, "tool_call_id": number, "content": entry.text})
                continue
            text = dialect.output.format(output=entry.text)
            if index and isinstance(entries[index - 1], ToolOutput):  # some templates want roles to alternate
                turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}\n{text}"}
            else:
                turns.append({"role": "user", "content": text})
    return turns


def _one_by_one(entries: list[Any]) -> Iterator[Any]:
    """The conversation with one call at a time, each before its output."""
    outputs = {entry.call_id: entry for entry in entries if isinstance(entry, ToolOutput)}
    moved: set[str] = set()
    for entry in entries:
        if isinstance(entry, ToolCalls) and len(entry.calls) > 1:
            for at, call in enumerate(entry.calls):
                yield ToolCalls(calls=(call,), text="" if at else entry.text)
                if call.id in outputs:
                    moved.add(call.id)
                    yield outputs[call.id]
        elif not (isinstance(entry, ToolOutput) and entry.call_id in moved):
            yield entry
