"""Templates of strangers: whatever they do, it costs bounded time and memory, and the next conversation is rendered.

Oracle: the same templates rendered in this process.
"""

import copy
import gc
import os
import threading
import time

import psutil
import pytest

from pippin.core.errors import CheckpointError, InvalidInput
from pippin.data.text.jinja_sandbox import SandboxedTemplate
from pippin.data.text.template_process import MAX_BYTES, TemplateProcess

SECONDS = 0.5
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | tojson if tools }}{{ more }}"
DOUBLED = "{% set a = ['x'] %}" + "".join("{% set a = [a, a] %}" for _ in range(40))
# Each passes every check of the sandbox's expressions.
SLOW = {
    "lists in lists": DOUBLED + "{{ a }}",
    "lists in a namespace": "{% set n = namespace(a=['x']) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}"
    "{% endfor %}{{ n.a | string | length }}",
    "sorting": "{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "splitting": "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{% set x = a.split('a') %}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set x = ([[1] * 9999] * 9999) | map('sum') | list %}{% endfor %}",
}
LARGE = {
    "a width from an argument": "{{ '%*d' % (999999999, 1) }}",
    "tabulators": "{{ ('\t' * 99999).expandtabs(999999) | length }}",
    "replacing": "{{ ('a' * 999999).replace('a', 'b' * 999999) | length }}",
    "joining": "{{ (['a' * 999999] * 99999) | join | length }}",
}


def children():
    return {child.pid for child in psutil.Process().children()}


def test_the_text_is_that_of_the_sandbox():
    messages = [{"role": "user", "content": "Größe \U0001f600 \ud800 \0 '\""}] * 3
    variables = {"messages": messages, "tools": [{"a": [1, 1.5, None, True, 10**30]}], "more": {"b": ["c"]}}
    made = TemplateProcess(PLAIN)
    assert made.render(variables, 60) == SandboxedTemplate(PLAIN).render(variables, 60)
    assert made.render({"messages": []}, 0) == ""
    long = {"messages": [{"role": "user", "content": "ab" * 5_000_000}]}
    assert made.render(long, 10_000_000) == SandboxedTemplate(PLAIN).render(long, 10_000_000)


@pytest.mark.parametrize("name", SLOW)
def test_time_without_end_ends_the_process_and_the_next_conversation_has_another(name):
    made = TemplateProcess("{% if hostile %}" + SLOW[name] + "{% else %}fine{% endif %}", max_seconds=SECONDS)
    before = children()
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"more than 0\.5 s or 512 MB and was ended"):
        made.render({"hostile": True}, 0)
    assert time.process_time() - began < SECONDS  # of this process
    assert made.render({}, 0) == "fine"
    assert len(children() - before) == len(before - children()) == 1


@pytest.mark.parametrize("name", LARGE)
def test_memory_without_end_is_refused(name):
    made = TemplateProcess("{% if hostile %}" + LARGE[name] + "{% else %}fine{% endif %}")
    with pytest.raises(CheckpointError, match="more than 512 MB"):
        made.render({"hostile": True}, 0)
    assert made.render({}, 0) == "fine"


def test_the_limits_hold_for_compiling_too():
    # constants are computed when the template is compiled
    with pytest.raises(CheckpointError, match=r"more than .*512 MB"):
        TemplateProcess("{{ 'a' | center(9999999) | list | pprint | list | pprint }}", max_seconds=SECONDS)
    with pytest.raises(CheckpointError, match="has 1,048,577 characters"):
        TemplateProcess("x" * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="not valid: line 2"):
        TemplateProcess("a\n{% for x in y %}")


def test_a_long_conversation_has_time_and_memory_in_proportion():
    text = "x" * 20_000_000
    assert len(TemplateProcess("{{ t }}{{ t.upper() }}{{ t | tojson }}").render({"t": text}, len(text))) > 3 * len(text)
    assert 64 * len(text) > MAX_BYTES


def test_a_refusal_is_the_callers_fault_and_a_failure_the_templates():
    with pytest.raises(InvalidInput, match="refuses these messages: Roles must alternate!"):
        TemplateProcess("{{ raise_exception('Roles must alternate!') }}").render({}, 0)
    with pytest.raises(CheckpointError, match="failed: 'a' is undefined"):
        TemplateProcess("{{ a.b.c }}").render({}, 0)
    with pytest.raises(InvalidInput, match="cannot be written as JSON"):
        TemplateProcess("{{ a }}").render({"a": 10**5000}, 0)


def test_a_process_that_was_killed_is_started_again():
    before = children()
    made = TemplateProcess(PLAIN)
    (pid,) = children() - before
    psutil.Process(pid).kill()
    psutil.Process(pid).wait(30)
    assert made.render({"messages": [], "more": "again"}, 5) == "again"


def test_no_process_outlives_its_template():
    before = children()
    made = TemplateProcess(PLAIN)
    (pid,) = children() - before
    del made
    gc.collect()
    assert pid not in children()


def test_a_child_sees_none_of_the_parents_secrets(monkeypatch):
    monkeypatch.setenv("PIPPIN_API_KEYS", "tester:0123456789abcdef")
    before = children()
    made = TemplateProcess(PLAIN)
    (pid,) = children() - before
    child = psutil.Process(pid)
    assert "PIPPIN_API_KEYS" not in child.environ()
    assert child.num_fds() <= 6
    assert made.render({"messages": []}, 0) == ""


def test_copies_have_a_process_of_their_own():
    made = TemplateProcess(PLAIN)
    for other in (copy.copy(made), copy.deepcopy(made)):
        assert other.source == PLAIN
        assert other.render({"messages": [], "more": "a"}, 1) == "a"


def test_threads_take_turns():
    made, found = TemplateProcess(PLAIN), {}

    def ask(number):
        found[number] = [made.render({"messages": [], "more": f"{number}"}, 1) for _ in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [str(number)] * 50 for number in range(8)}


def test_a_fork_does_not_answer_from_its_parents_child():
    made = TemplateProcess(PLAIN)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, made.render({"messages": [], "more": "fork"}, 4).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 10) == b"fork"
    assert made.render({"messages": [], "more": "parent"}, 6) == "parent"
