"""The dialects in which models write the calls of tools, one constant each.

Notable here:
- a dialect is text around JSON, or around arguments that are written one by one: what precedes the calls of an answer,
  each call, the next call, and what ends them
- which one a model speaks follows from its chat template, since that is what it was trained on; the user may name
  another
- markers such as ``[TOOL_CALLS]`` are spelled here; where the vocabulary has them as control tokens, the grammar
  demands those tokens, and no text can imitate them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.engine.grammar.arguments import KEY, Notation

NAME: Final = "{name}"
"""Stands for the name of the tool where a dialect has it outside the JSON."""
INDEX: Final = "{index}"
"""Stands for the number of the call where a dialect has one."""
PYTHON_TAGS: Final = ("<|python_tag|>", "<|python_start|>")
"""Control tokens that may precede calls without a marker of their own."""
ARGUMENTS: Final = ("arguments", "parameters")
"""The keys under which models write the arguments beside the name."""


@dataclass(frozen=True)
class ToolDialect:
    """How calls are written.

    Args:
        name: name of the dialect.
        begin: before the first call of an answer.
        before: before the arguments of each call.
        after: after the arguments of each call.
        between: between two calls.
        end: after the last call.
        key: the JSON is an object with "name" and the arguments under this key; None where ``before`` has the name and
            the JSON is the arguments alone.
        notation: how arguments are written one by one; None for JSON.
        marker: the fixed text at which the calls of an answer begin; empty if they begin with the JSON itself.
        fenced: whether JSON in a code block is read as a call too, if it names a tool.
        bare: whether calls without a marker before them are read, at the start of an answer.
        output: the output of a tool as text, for templates without a role for it.
        channels: the answer consists of messages on channels (Harmony).
    """

    name: ToolDialectName
    begin: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    key: str | None = "arguments"
    notation: Notation | None = None
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
            self.before.replace(NAME, name).replace(INDEX, str(at)) + self._arguments(name, values) + self.after
            for at, (name, values) in enumerate(calls)
        )
        return self.begin + self.between.join(written) + self.end

    def _arguments(self, name: str, values: dict[str, Any]) -> str:
        if self.notation is not None:
            return self.notation.write(values)
        return json.dumps(values if self.key is None else {"name": name, self.key: values}, ensure_ascii=False)


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

QWEN3_CODER: Final = ToolDialect(
    "qwen3-coder",
    before=f"<tool_call>\n<function={NAME}>\n",
    after="</function>\n</tool_call>",
    between="\n",
    notation=Notation(f"<parameter={KEY}>\n", "\n</parameter>\n", strings="text"),
    marker="<tool_call>",
)
"""Qwen3-Coder and Qwen 3.5."""

SEED_OSS: Final = ToolDialect(
    "seed-oss",
    before=f"<seed:tool_call>\n<function={NAME}>\n",
    after="</function>\n</seed:tool_call>",
    between="\n",
    notation=Notation(f"<parameter={KEY}>", "</parameter>\n", strings="text"),
    marker="<seed:tool_call>",
)
"""Seed-OSS."""

GLM_45: Final = ToolDialect(
    "glm-4.5",
    before=f"<tool_call>{NAME}\n",
    after="</tool_call>",
    between="\n",
    notation=Notation(f"<arg_key>{KEY}</arg_key>\n<arg_value>", "</arg_value>\n", strings="text"),
    marker="<tool_call>",
)
"""GLM-4.5 and 4.6."""

GLM_47: Final = ToolDialect(
    "glm-4.7",
    before=f"<tool_call>{NAME}",
    after="</tool_call>",
    notation=Notation(f"<arg_key>{KEY}</arg_key><arg_value>", "</arg_value>", strings="text"),
    marker="<tool_call>",
)
"""GLM-4.7 and later, without line breaks."""

MINIMAX_M2: Final = ToolDialect(
    "minimax-m2",
    begin="<minimax:tool_call>\n",
    before=f'<invoke name="{NAME}">\n',
    after="</invoke>",
    between="\n",
    end="\n</minimax:tool_call>",
    notation=Notation(f'<parameter name="{KEY}">', "</parameter>\n", strings="text"),
    marker="<minimax:tool_call>",
)
"""MiniMax M2."""

GEMMA_4: Final = ToolDialect(
    "gemma-4",
    before=f"<|tool_call>call:{NAME}{{",
    after="}<tool_call|>",
    notation=Notation(f"{KEY}:", between=",", strings="quoted", quote='<|"|>'),
    marker="<|tool_call>",
)
"""Gemma 4, whose strings stand between tokens of their own."""

_PYTHON: Final = Notation(f"{KEY}=", between=", ", python=True)

PYTHONIC: Final = ToolDialect(
    "pythonic",
    begin="[",
    before=f"{NAME}(",
    after=")",
    between=", ",
    end="]",
    notation=_PYTHON,
    bare=True,
)
"""Llama 4, ToolACE and others: a Python list of calls, which is the whole answer."""

LFM2: Final = ToolDialect(
    "lfm2",
    begin="<|tool_call_start|>[",
    before=f"{NAME}(",
    after=")",
    between=", ",
    end="]<|tool_call_end|>",
    notation=_PYTHON,
    marker="<|tool_call_start|>",
)
"""LFM2."""

OLMO: Final = ToolDialect(
    "olmo",
    begin="<function_calls>\n",
    before=f"{NAME}(",
    after=")",
    between="\n",
    end="\n</function_calls>",
    notation=Notation(f"{KEY}=", between=", "),
    marker="<function_calls>",
)
"""OLMo 3: a line for each call, with the constants of JSON."""

GRANITE: Final = ToolDialect("granite", begin="<|tool_call|>[", between=", ", end="]", marker="<|tool_call|>")
"""Granite 3; Granite 4 writes as Hermes does."""

PHI_4_MINI: Final = ToolDialect("phi-4-mini", begin="functools[", between=", ", end="]", marker="functools[")
"""Phi-4 mini."""

NEMOTRON: Final = ToolDialect("nemotron", begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>", marker="<TOOLCALL>")
"""Nemotron Nano 2 and Nemotron Super."""

KIMI_K2: Final = ToolDialect(
    "kimi-k2",
    begin="<|tool_calls_section_begin|>",
    before=f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    key=None,
    marker="<|tool_calls_section_begin|>",
)
"""Kimi K2, whose calls have numbers."""

DIALECTS: Final = (
    HERMES, LLAMA, PYTHONIC, LFM2, OLMO, MISTRAL, MISTRAL_ARGS, GEMMA, GEMMA_4, HARMONY, DEEPSEEK_V3, DEEPSEEK_V31,
    QWEN3_CODER, SEED_OSS, GLM_45, GLM_47, MINIMAX_M2, GRANITE, PHI_4_MINI, KIMI_K2, NEMOTRON,
)  # fmt: skip
BY_NAME: Final[dict[str, ToolDialect]] = {dialect.name: dialect for dialect in DIALECTS}

# What in a template tells its dialect, the first that is found; dialects that share a marker are told apart before.
_SIGNS: Final = (
    ("<minimax:tool_call>", MINIMAX_M2),
    ("<seed:tool_call>", SEED_OSS),
    ("<function=", QWEN3_CODER),
    ("</arg_key><arg_value>", GLM_47),
    ("<arg_key>", GLM_45),
    ("<|tool_call>", GEMMA_4),
    ("<TOOLCALL>", NEMOTRON),
    ("<function_calls>", OLMO),
    ("<|tool_list_start|>", LFM2),
    ("functools[", PHI_4_MINI),
    ("<|/tool|>", PHI_4_MINI),
    ("<|tool_call|>", GRANITE),
    (HERMES.marker, HERMES),
    ("func_name1(", PYTHONIC),
)


def detect(template: ChatTemplate) -> ToolDialect:
    """The dialect that a model speaks, according to its chat template and control tokens; Hermes if they name none."""
    source, control = template.source, template.tokenizer.control_strings
    if HARMONY.marker in source and {"<|channel|>", "<|message|>"} <= control:
        return HARMONY
    if KIMI_K2.marker in control or KIMI_K2.marker in source:
        return KIMI_K2
    if DEEPSEEK_V3.marker in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if MISTRAL.marker in source:
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL
    if found := next((dialect for sign, dialect in _SIGNS if sign in source), None):
        return found
    if "<|header_start|>" in source:
        return LLAMA if '"parameters"' in source else PYTHONIC
    if GRANITE.marker in control and "<|start_of_role|>" in source:
        return GRANITE
    if "<|python_tag|>" in control and "<|start_header_id|>" in source:
        return LLAMA
    return GEMMA if "<start_of_turn>" in source else HERMES


def writes(template: ChatTemplate, dialect: ToolDialect) -> bool:
    """Whether a template itself writes this dialect."""
    source = template.source
    if dialect.notation is not None:
        head = dialect.notation.before.partition(KEY)[0]
        return head in source if head else dialect.marker in source and "tool_calls" in source
    shared = any(sign in source for sign in ("<function=", "<arg_key>")) and dialect is HERMES
    return (dialect.marker or f'"{dialect.key}"') in source and not shared
