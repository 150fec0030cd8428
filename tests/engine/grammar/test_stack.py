"""Grammars as deep as their length allows: compiled, or refused, whatever the stack of the thread that asks."""

import json
import subprocess
import sys
import threading

import pytest

from pippin.core.errors import Overloaded, SchemaError, UnsupportedGuide
from pippin.engine.grammar import stack
from pippin.engine.grammar.constraint import Grammar

LINKS = 30_000
# Each is far deeper than a thread's usual stack: it ended the process when it was compiled there.
DEEP = {
    "rules": lambda i: f"r{i:x}:r{i + 1:x}\n",
    "optional rules": lambda i: f"r{i:x}:r{i + 1:x}?\n",
    "terminals": lambda i: f"T{i}:T{i + 1}\n",
    "repeated terminals": lambda i: f'T{i}:("b"T{i + 1})*"c"\n',
}
COMPILE = """
import json, sys
from pippin.core.errors import PippinError
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.regex import byte_tokenizer

class Bytes:
    grammar_tokenizer = byte_tokenizer()

for name, source in json.load(sys.stdin).items():
    try:
        constraint = Grammar.lark(source).start(Bytes())
        constraint.mask()
        constraint.fork().mask()
        print(name, "compiled", flush=True)
    except PippinError as error:
        print(name, "refused", flush=True)
"""


def chain(link):
    """As many links as the longest grammar has room for."""
    start, text, count = link(0).partition(":")[0], "", 0
    while len(text) + 60 < stack.MAX_SOURCE and count < LINKS:
        text += link(count)
        count += 1
    end = link(count).partition(":")[0]
    return f'start: {start}\n{text}{end}: "a"\n'


def json_chain(link):
    """The same within %json."""
    definitions, count, size = {}, 0, 0
    while size + 2000 < stack.MAX_SOURCE:
        definitions[f"a{count}"] = link({"$ref": f"#/$defs/a{count + 1}"})
        size += len(json.dumps(definitions[f"a{count}"])) + len(f'"a{count}": , ')
        count += 1
    definitions[f"a{count}"] = {"type": "null"}
    return "start: %json " + json.dumps({"$ref": "#/$defs/a0", "$defs": definitions}) + "\n"


def nested(inner, depth=100):
    for _ in range(depth):
        inner = {"items": inner}
    return inner


SOURCES = {name: (lambda link=link: chain(link)) for name, link in DEEP.items()} | {
    "references": lambda: json_chain(lambda reference: reference),
    "references in objects": lambda: json_chain(lambda reference: {"properties": {"p": reference}}),
    "references in nested lists": lambda: json_chain(nested),
}


def test_a_grammar_as_deep_as_it_is_long_ends_no_process():
    sources = {name: make() for name, make in SOURCES.items()}
    assert all(stack.MAX_SOURCE / 2 < len(source) <= stack.MAX_SOURCE for source in sources.values())
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps(sources), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout)
    assert [line.rpartition(" ")[0] for line in done.stdout.splitlines()] == list(SOURCES)


def test_a_longer_grammar_is_refused_before_it_is_read():
    with pytest.raises(UnsupportedGuide, match=r"the grammar has 262,145 characters and may have 262,144"):
        Grammar.lark("x" * (stack.MAX_SOURCE + 1))


def test_an_error_in_the_thread_is_the_callers():
    with pytest.raises(SchemaError, match="mine"):
        stack.with_stack("", _fail)


def _fail():
    raise SchemaError("mine")


def test_the_size_of_the_stack_follows_the_length_and_is_put_back(monkeypatch):
    sizes = []
    set_size = threading.stack_size
    monkeypatch.setattr(stack.threading, "stack_size", lambda size: sizes.append(size) or set_size(size))
    before = set_size()
    for length in (0, 5000, 10**7):
        stack.with_stack("x" * length, lambda: None)
    # short sources share threads with one size of stack
    assert sizes[::2] == [(1 << 23) + 2048 * 4096, (1 << 23) + 2048 * 5000, (1 << 23) + 2048 * stack.MAX_SOURCE]
    assert set_size() == before


def test_no_room_for_a_stack_is_an_overload(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stack.threading.Thread, "start", start)
    with pytest.raises(Overloaded, match="no memory for a stack of 17 MB"):
        stack.with_stack("x" * 5000, lambda: None)


def test_a_forked_process_compiles_too():
    code = """
import os
from pippin.engine.grammar import stack
assert stack.with_stack("", lambda: 1) == 1
child = os.fork()
if not child:
    os._exit(stack.with_stack("", lambda: 7))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_many_members_of_one_of_are_compared_once_each(monkeypatch):
    from pippin.engine.grammar.json_schema import SchemaReader

    asked = []
    disjoint = SchemaReader._disjoint
    monkeypatch.setattr(SchemaReader, "_disjoint", lambda self, a, b: asked.append((a, b)) or disjoint(self, a, b))
    members = [{"type": "string", "pattern": f"^a{{{i}}}b$"} for i in range(8)]
    Grammar.json_schema({"oneOf": members})
    assert len(asked) == 8 * 7 // 2
