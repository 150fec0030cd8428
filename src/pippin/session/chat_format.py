"""Encoding of transcripts as tokens, and the grammar of the model's output.

Notable here:
- a model whose chat template supports tools gets them through the template; any other reads them in its instructions
- tool calls are always written the same way, as JSON between <tool_call> and </tool_call>
- a base model without a template reads the plain text of the conversation
- reasoning of earlier turns is not shown to the model again, as the authors of such models recommend
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pippin.core.errors import UnsupportedCapability
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.lark import compose
from pippin.language.language_model import LanguageModel
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import (
    Answer,
    Instructions,
    Prompt,
    Reasoning,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from pippin.session.types.schema import Schema

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}\n(.*?)\n{CLOSE}", re.DOTALL)

# Start and end of a model's reasoning.
THINK, ANSWER = "<think>", "</think>"

MOST_CALLS = 8  # in one turn; a model that repeats itself would otherwise never stop

TOOL_TEXT = """You can call these tools:
{tools}

To call a tool, write its name and its arguments as JSON:
{open}
{{"name": "tool name", "arguments": {{"argument": "value"}}}}
{close}
You will then read what the tool returned, and answer with it."""


def encode(
    model: LanguageModel,
    transcript: Transcript,
    tools: Sequence[ToolDefinition] = (),
    hint: str = "",
    *,
    thinking: bool = False,
) -> list[int]:
    """The tokens of a conversation in which the model is to answer next.

    Args:
        model: provides the template and the tokenizer.
        transcript: the conversation; its last entry is a prompt or a tool's output.
        tools: tools that the model may call.
        hint: text appended to the last prompt for this request only, such as the schema of the answer.
        thinking: end at the start of the model's reasoning instead of its answer.

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
    native = bool(tools) and model.template.accepts_tool_results and OPEN in model.template.source
    definitions = [tool.definition() for tool in tools]
    turns = _messages(transcript, "" if native or not tools else _tool_text(definitions), hint, native)
    if turns and turns[0]["role"] == "system" and not model.template.accepts_system:
        system = turns.pop(0)["content"]
        turns[0] = turns[0] | {"content": f"{system}\n\n{turns[0]['content']}"}
    ids = model.template.encode(turns, tools=definitions if native else None, enable_thinking=thinking)
    if thinking and not model.tokenizer.decode(ids[-8:]).rstrip().endswith(THINK):
        ids += model.tokenizer.encode(f"{THINK}\n")
    return ids


def can_think(model: LanguageModel) -> bool:
    """Whether the model was trained to reason between <think> and </think>, according to its template."""
    return model.template is not None and ANSWER in model.template.source


def _tool_text(definitions: list[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in definitions)
    return TOOL_TEXT.format(tools=lines, open=OPEN, close=CLOSE)


def _messages(transcript: Transcript, tool_text: str, hint: str, native: bool) -> list[dict[str, Any]]:
    """Chat messages; with ``native`` false, tool calls and outputs are written as text."""
    entries = list(transcript)
    last_prompt = max((i for i, entry in enumerate(entries) if isinstance(entry, Prompt)), default=-1)
    said = [entry.text for entry in entries if isinstance(entry, Instructions)]
    system = "\n\n".join(text for text in (*said, tool_text) if text)
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, entry in enumerate(entries):
        if isinstance(entry, Prompt):
            text = f"{entry.text}\n\n{hint}" if hint and index == last_prompt else entry.text
            turns.append({"role": "user", "content": text})
        elif isinstance(entry, Answer):
            turns.append({"role": "assistant", "content": entry.text})
        elif isinstance(entry, ToolCalls):
            turns.append(_calls_message(entry, native))
        elif isinstance(entry, ToolOutput):
            if native:
                turns.append({"role": "tool", "name": entry.name, "tool_call_id": entry.call_id, "content": entry.text})
            else:
                turns.append({"role": "user", "content": f"<tool_response>\n{entry.text}\n</tool_response>"})
    return turns


def _calls_message(entry: ToolCalls, native: bool) -> dict[str, Any]:
    if native:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in entry.calls
        ]
        return {"role": "assistant", "content": entry.text, "tool_calls": calls}
    written = (
        f"{OPEN}\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n{CLOSE}"
        for call in entry.calls
    )
    return {"role": "assistant", "content": "\n".join(part for part in (entry.text, *written) if part)}


def grammar(
    schema: Schema[Any] | None, tools: Iterable[ToolDefinition], *, required: bool, parallel: bool
) -> Grammar | None:
    """The grammar of the model's output in one turn; None for no constraint.

    Args:
        schema: schema of the answer; None for free text.
        tools: tools that it may call instead of answering (free text may precede a call).
        required: whether it must call a tool.
        parallel: whether it may make several calls.
    """
    calls = [_call_schema(tool) for tool in tools]
    if not calls:
        return None if schema is None else schema.grammar
    body = Grammar.json_schema({"anyOf": calls} if len(calls) > 1 else calls[0])
    parts = {"body": body}
    more = f'"\\n" body "\\n{CLOSE}"'
    if parallel:
        more += f' ("\\n{OPEN}\\n" body "\\n{CLOSE}"){{0,{MOST_CALLS - 1}}}'
    if required:
        return compose(f'start: "{OPEN}" {more}', parts)
    if schema is not None:
        return compose(f'start: answer | "{OPEN}" {more}', {"answer": schema.grammar, **parts})
    return compose(
        f"start: FREE | open {more}\n"
        rf"open[lazy]: /(.|\n)*{OPEN}/"
        "\n"
        rf"FREE: /(.|\n)*/ & ~/(.|\n)*{OPEN}(.|\n)*/",
        parts,
    )


def _call_schema(tool: ToolDefinition) -> dict[str, Any]:
    """The JSON Schema of one call: its name and its arguments, with definitions moved to the root."""
    arguments = dict(tool.schema.json_schema or {})
    definitions = arguments.pop("$defs", {})
    call: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return call | ({"$defs": definitions} if definitions else {})


def calls(raw: str, transcript: Transcript) -> tuple[ToolCall, ...]:
    """The calls in output under `grammar`, with ids that continue those of the transcript.

    A call that is written twice is one call.
    """
    before = sum(len(entry.calls) for entry in transcript if isinstance(entry, ToolCalls))
    written = (json.loads(text) for text in dict.fromkeys(CALL.findall(raw)))
    return tuple(
        ToolCall(id=f"call_{before + index}", name=call["name"], arguments=call["arguments"])
        for index, call in enumerate(written)
    )
