"""The dialects in which models write the calls of tools, one constant each.

Notable here:
- a dialect is text around JSON: what precedes the calls of an answer, each call, the next call, and what ends them
- which one a model speaks follows from its chat template, since that is what it was trained on
- markers such as ``[TOOL_CALLS]`` are spelled here; where the vocabulary has them as control tokens, the grammar
  demands those tokens, and no text can imitate them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pippin.data.text.chat_template import ChatTemplate

NAME: Final = "{name}"
"""Stands for the name of the tool where a dialect has it outside the JSON."""
ARGUMENTS: Final = ("arguments", "parameters")
"""The keys under which models write the arguments beside the name."""


@dataclass(frozen=True)
class ToolDialect:
    """How calls are written.

    Args:
        name: name of the dialect.
        begin: before the first call of an answer.
        before: before the JSON of each call.
        after: after the JSON of each call.
        between: between two calls.
        end: after the last call.
        key: the JSON is an object with "name" and the arguments under this key; None where ``before`` has the name and
            the JSON is the arguments alone.
        marker: the fixed text at which the calls of an answer begin; empty if they begin with the JSON itself.
        fenced: whether JSON in a code block is read as a call too, if it names a tool.
        bare: whether JSON without anything around it is read as a call, at the start of an answer.
        output: the output of a tool as text, for templates without a role for it.
        channels: the answer consists of messages on channels (Harmony).
    """

    name: str
    begin: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    key: str | None = "arguments"
    marker: str = ""
    fenced: bool = False
    bare: bool = False
    output: str = "<tool_response>\n{output}\n</tool_response>"
    channels: bool = False

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Calls as the model writes them, from their names and arguments.

        >>> HERMES.write([("clock", {"zone": "UTC"})])
        '<tool_call>\\n{"name": "clock", "arguments": {"zone": "UTC"}}\\n</tool_call>'
        """
        written = (
            self.before.replace(NAME, name)
            + json.dumps(values if self.key is None else {"name": name, self.key: values}, ensure_ascii=False)
            + self.after
            for name, values in calls
        )
        return self.begin + self.between.join(written) + self.end


HERMES: Final = ToolDialect(
    "hermes", before="<tool_call>\n", after="\n</tool_call>", between="\n", marker="<tool_call>", fenced=True
)
"""Hermes, Qwen and most others. Qwen2.5-Coder has the template of Qwen2.5, and writes fenced JSON all the same."""

LLAMA: Final = ToolDialect("llama", key="parameters", fenced=True, bare=True)
"""Llama 3.1 and later: the call is the whole answer, after ``<|python_tag|>`` or not."""

MISTRAL: Final = ToolDialect("mistral", begin="[TOOL_CALLS][", between=", ", end="]", marker="[TOOL_CALLS]")
"""Mistral up to the eleventh version of its tokenizers: a list of calls."""

MISTRAL_ARGS: Final = ToolDialect("mistral-args", before=f"[TOOL_CALLS]{NAME}[ARGS]", key=None, marker="[TOOL_CALLS]")
"""Mistral from the eleventh version on: a marker before each name and before its arguments."""

GEMMA: Final = ToolDialect(
    "gemma",
    before="```tool_code\n",
    after="\n```",
    between="\n",
    key="parameters",
    marker="```tool_code",
    fenced=True,
    output="```tool_output\n{output}\n```",
)
"""Gemma 3, whose own template knows no tools: JSON in a block of ``tool_code``."""

HARMONY: Final = ToolDialect(
    "harmony",
    before=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    key=None,
    marker="<|channel|>",
    channels=True,
)
"""gpt-oss: a call is a message to a function, and its end token ends the answer."""

DEEPSEEK_V3: Final = ToolDialect(
    "deepseek-v3",
    begin="<｜tool▁calls▁begin｜>",
    before=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    between="\n",
    end="<｜tool▁calls▁end｜>",
    key=None,
    marker="<｜tool▁calls▁begin｜>",
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31: Final = ToolDialect(
    "deepseek-v3.1",
    begin="<｜tool▁calls▁begin｜>",
    before=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    key=None,
    marker="<｜tool▁calls▁begin｜>",
)
"""DeepSeek V3.1."""

DIALECTS: Final = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GEMMA, HARMONY, DEEPSEEK_V3, DEEPSEEK_V31)


def detect(template: ChatTemplate) -> ToolDialect:
    """The dialect that a model speaks, according to its chat template and control tokens; Hermes if they name none."""
    source, control = template.source, template.tokenizer.control_strings
    if HARMONY.marker in source and {"<|channel|>", "<|message|>"} <= control:
        return HARMONY
    if DEEPSEEK_V3.marker in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if MISTRAL.marker in source:
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL
    if HERMES.marker in source:
        return HERMES
    if "<|python_tag|>" in control and "<|start_header_id|>" in source:
        return LLAMA
    return GEMMA if "<start_of_turn>" in source else HERMES


def writes(template: ChatTemplate, dialect: ToolDialect) -> bool:
    """Whether a template itself writes this dialect; some write calls between Hermes' tags as XML, which it is not."""
    return (dialect.marker or f'"{dialect.key}"') in template.source and "<function=" not in template.source
