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
    "deepseek-v3": (DEEPSEEK_V3, _DEEPSEEK),
    "deepseek-v3.1": (DEEPSEEK_V31, _DEEPSEEK),
}


@cache
def speaker(name: str) -> LanguageModel:
    """A model of a family."""
    template, control = FAMILIES[name]
    return tiny_model.build(8192, control=control, template=template)
