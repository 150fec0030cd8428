"""Models that speak each dialect: random weights over bytes, with the control tokens and a template of its family."""

from __future__ import annotations

from functools import cache

import tiny_model

from pippin.language import LanguageModel

HERMES = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with <tool_call></tool_call>.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{- '\\n' + m.content if m.content else '' }}{% for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{% macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- head('assistant') }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}<|eot_id|>
{%- else %}{{ head(m.role) + m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ '' if loop.last else ', ' }}{% endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""

MISTRAL_ARGS = """{% for m in messages %}{% if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}</s>
{%- endif %}{% endfor %}"""

GEMMA = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

HARMONY = """{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% set call = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

DEEPSEEK_V3 = """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}{{ '' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else %}{{ '<｜Assistant｜>' if m.role == 'assistant' else '<｜User｜>' if m.role == 'user' else '' }}{{ m.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

DEEPSEEK_V31 = """{% for m in messages %}{% if m.tool_calls %}{{ m.content or '' }}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else %}{{ '<｜Assistant｜>' if m.role == 'assistant' else '<｜User｜>' if m.role == 'user' else '' }}{{ m.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

_CHATML = """{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not m.tool_calls %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}"""

QWEN3_CODER = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant{% for c in m.tool_calls %}{{ '\\n<tool_call>' }}
<function={{ c.function.name }}>
{% for name, value in c.function.arguments | items %}<parameter={{ name }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SEED_OSS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant{% for c in m.tool_calls %}{{ '\\n<seed:tool_call>' }}
<function={{ c.function.name }}>
{% for name, value in c.function.arguments.items() %}<parameter={{ name }}>
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</function>
</seed:tool_call>{% endfor %}<|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM_45 = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant{% for c in m.tool_calls %}{{ '\\n<tool_call>' + c.function.name }}
{% for name, value in c.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}<|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM_47 = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <arg_key>{key}</arg_key><arg_value> #}
{%- for m in messages %}{% if m.tool_calls %}<|im_start|>assistant
{% for c in m.tool_calls %}{{ '<tool_call>' + c.function.name }}
{%- for name, value in c.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
{{- '<arg_value>' }}{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}<|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MINIMAX_M2 = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant
<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for name, value in c.function.arguments.items() %}<parameter name="{{ name }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call><|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PYTHONIC = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- macro head(role) %}<|header_start|>{{ role }}<|header_end|>\n\n{% endmacro %}
{%- for m in messages %}{% if m.tool_calls %}{{ head('assistant') }}[
{%- for c in m.tool_calls %}{{ c.function.name }}(
{%- for name, value in c.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ '' if loop.last else ', ' }}
{%- endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]<|eot|>
{%- elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}<|eot|>
{%- else %}{{ head(m.role) + m.content }}<|eot|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

LFM2 = """{% if tools %}<|im_start|>system
List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<|tool_response_start|>{{ m.content }}<|tool_response_end|>
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

OLMO = """{% if tools %}<|im_start|>system
<functions>{{ tools | tojson }}</functions> Call in <function_calls></function_calls>.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}<function_calls>
{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for name, value in c.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ '' if loop.last else ', ' }}
{%- endfor %})
{% endfor %}</function_calls>{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GEMMA_4 = """{%- macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}{
{%- for name, item in value | dictsort %}{{ name }}:{{ shown(item) }}{{ '' if loop.last else ',' }}{% endfor %}}
{%- elif value is boolean %}{{ value | tojson }}{% elif value is sequence %}[
{%- for item in value %}{{ shown(item) }}{{ '' if loop.last else ',' }}{% endfor %}]
{%- else %}{{ value }}{% endif %}{% endmacro %}
{%- for tool in tools or [] %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}
{%- for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{
{%- for name, value in c.function.arguments | dictsort %}{{ name }}:{{ shown(value) }}{{ '' if loop.last else ',' }}
{%- endfor %}}<tool_call|>{% endfor %}{{ m.content or '' }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""

GRANITE = """{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>{% endif %}
{%- for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{% if m.tool_calls %}<|tool_call|>[
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
{{- '' if loop.last else ', ' }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

PHI_4_MINI = """{% for m in messages %}{% if m.role == 'system' and tools %}
{{- '<|system|>' + m.content + '<|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

NEMOTRON = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.tool_calls %}<|im_start|>assistant
<TOOLCALL>[{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}
{{- '' if loop.last else ', ' }}{% endfor %}]</TOOLCALL><|im_end|>
{% endif %}CHATML{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

KIMI_K2 = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_assistant|>{{ m.role }}<|im_middle|>{% if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

_IM = ("<|im_end|>", "<|im_start|>")
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin"),
        *("tool▁call▁end", "tool▁sep", "tool▁output▁begin", "tool▁output▁end"),
    )
)
_MISTRAL = ("</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

FAMILIES = {
    "hermes": (HERMES, ("<|im_end|>", "<|im_start|>")),
    "llama": (LLAMA, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")),
    "mistral": (MISTRAL, (*_MISTRAL, "[TOOL_CALLS]")),
    "mistral-args": (MISTRAL_ARGS, (*_MISTRAL, "[TOOL_CALLS]", "[ARGS]")),
    "gemma": (GEMMA, ("<end_of_turn>", "<start_of_turn>")),
    "harmony": (
        HARMONY,
        ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    ),
    "qwen3-coder": (QWEN3_CODER, _IM),
    "seed-oss": (SEED_OSS, _IM),
    "glm-4.5": (GLM_45, _IM),
    "glm-4.7": (GLM_47, _IM),
    "minimax-m2": (MINIMAX_M2, (*_IM, "<minimax:tool_call>", "</minimax:tool_call>")),
    "pythonic": (PYTHONIC, ("<|eot|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>")),
    "lfm2": (LFM2, (*_IM, "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo": (OLMO, _IM),
    "gemma-4": (
        GEMMA_4,
        ("<turn|>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "granite": (GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")),
    "phi-4-mini": (PHI_4_MINI, ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>")),
    "nemotron": (NEMOTRON, _IM),
    "kimi-k2": (
        KIMI_K2,
        (
            *("<|im_end|>", "<|im_system|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "deepseek-v3": (DEEPSEEK_V3, _DEEPSEEK),
    "deepseek-v3.1": (DEEPSEEK_V31, _DEEPSEEK),
}


@cache
def speaker(name: str) -> LanguageModel:
    """A model of a family."""
    template, control = FAMILIES[name]
    return tiny_model.build(8192, control=control, template=template.replace("CHATML", _CHATML))
