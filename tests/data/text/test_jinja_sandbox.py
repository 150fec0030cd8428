"""Oracle: transformers' own Jinja set-up; hostile templates must end in a typed error, soon."""

import json
import time
from contextlib import suppress
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from pippin.core.errors import CheckpointError
from pippin.data.text.jinja_sandbox import SandboxedTemplate, TemplateRejection

VARIABLES = {"items": [1, 2, 3], "text": "Größe <b>&'\"</b>", "data": {"b": [1, {"a": "é<"}], "a": None}}


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in items %}{{ x }}{% if not loop.last %}, {% endif %}\n{% endfor %}",
        "{% for x in items -%} {{ loop.index0 ~ ':' ~ x }} {%- endfor %}",
        "{% for x in items %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}",
        "  {% if text %}\n    {{ text }}\n  {% endif %}\nend",
        "{{ data | tojson }}|{{ data | tojson(indent=2) }}|{{ data | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{% set ns = namespace(n=0) %}{% for x in items %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n * 2 ** 3 % 7 }}",
        "{% macro m(x, y='d') %}[{{ x }}{{ y }}{{ caller() if caller else '' }}]{% endmacro %}{{ m(1) ~ m(2, 'é') }}",
        "{% generation %}{{ text }}{% endgeneration %}.",
        "{{ text.upper().split('B')[0] | trim | length }}{{ '%s-%03d' % (text, 7) }}{{ '%s!' | format(text) }}",
        "{{ '{}-{a}'.format(1, a=text) }}{{ items[::-1] | join('+') }}{{ undefined_name }}{{ text is string }}",
        "{{ 'a' * 3 ~ none ~ 1.5 ~ true }}{{ [1] + [2] }}{{ dict(a=1) | items | list }}{{ range(3) | list }}",
        "{{ text | indent(4) }}{{ 'x' | center(9) }}{{ text[:3] + text[-2:] }}",
        "{% for k, v in data | dictsort %}{{ k }}={{ v }};{% else %}none{% endfor %}",
    ],
)
def test_templates_mean_what_they_mean_to_transformers(source):
    assert SandboxedTemplate(source).render(dict(VARIABLES), 0) == _compile_jinja_template(source).render(**VARIABLES)


def test_the_date_is_today():
    assert SandboxedTemplate("{{ strftime_now('%Y') }}").render({}, 0) in {str(datetime.now().year)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", "500000 loop iterations"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for x in range(99999) %}{{ text }}{% endfor %}", "output is far longer"),
        ("{{ 'a' * 999999999999 }}", r"'\*' of values this large"),
        ("{{ 9 ** 9 ** 9 }}", r"'\*\*' of values this large"),
        ("{% set ns = namespace(x=text) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "length"),
        ("{% set ns = namespace(x=text) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "length"),
        ("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "length"),
        ("{{ 'a'.ljust(99999999999) }}", "number 99999999999 in a call"),
        ("{{ 'a' | center(99999999999) }}", "number 99999999999 in a call"),
        ("{{ data | tojson(indent=99999999999) }}", "number 99999999999 in a call"),
        ("{{ '%99999999999d' % 1 }}", "fields this wide"),
        ("{{ '%99999999999d' | format(1) }}", "fields this wide"),
        ("{{ '{:99999999999}'.format(1) }}", "fields this wide"),
        ("{{ lipsum(999999) }}", "'lipsum' is undefined"),
    ],
)
def test_what_would_run_or_grow_without_end_is_stopped(source, message):
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        SandboxedTemplate(source).render({**VARIABLES, "text": "a" * 100}, 100)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (text | attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format(text) }}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ items.append(4) }}",
        "{% include 'other' %}",
    ],
)
def test_python_and_the_inputs_are_out_of_reach(source):
    variables = json.loads(json.dumps(VARIABLES))
    shown = ""  # what the sandbox hides is undefined, which prints as nothing
    with suppress(CheckpointError):
        shown = SandboxedTemplate(source).render(variables, 0)
    assert shown == ""
    assert variables == VARIABLES


def test_errors_carry_the_words_of_the_template():
    with pytest.raises(TemplateRejection, match=r"^Roles must alternate!$"):
        SandboxedTemplate("{{ raise_exception('Roles must alternate!') }}").render({}, 0)
    with pytest.raises(CheckpointError, match=r"not valid: line 2: .*endfor"):
        SandboxedTemplate("a\n{% for x in y %}")
    with pytest.raises(CheckpointError, match="'a' is undefined"):
        SandboxedTemplate("{{ a.b.c }}").render({}, 0)
