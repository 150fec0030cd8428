"""The page's own functions, run in a browser against readers that others wrote."""

import itertools
import json
import math

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from markdown_it import MarkdownIt
from openai._streaming import SSEDecoder

from pippin.session.types.partial_json import parse_partial

# Many texts in one call of the browser, and few calls; what fails is short enough without being shrunk.
LIMITS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["", '"\\', "🍏 é\u2028", "a\tb\n", "__proto__", "constructor", "\ud83c", "\udf4f\ud83c"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@st.composite
def written(draw):
    """A JSON text in some style."""
    style = {
        "ensure_ascii": draw(st.booleans()) or True,
        "indent": draw(st.sampled_from([None, 1])),
        "separators": draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    }
    return json.dumps(draw(values), **style)


def number(text):
    """A JSON text as values, numbers as JavaScript has them."""
    return json.loads(text, parse_int=float)


SNAPSHOTS = """(json, texts) => texts.map((text) => {
  const reader = new json.JsonReader();
  const states = [];
  for (const character of text) {
    reader.push(character);
    states.push(JSON.stringify([reader.value ?? null, reader.complete]));
  }
  reader.finish();
  return [states, JSON.stringify(reader.value), reader.complete];
})"""


@LIMITS
@given(st.lists(written(), min_size=1, max_size=12))
def test_every_snapshot_is_the_servers_own(script, batch):
    for text, (states, final, complete) in zip(batch, script("json.js", SNAPSHOTS, batch), strict=True):
        assert complete
        assert number(final) == number(text)
        for end, state in enumerate(states, 1):
            value, whole = number(state)
            expected, expected_whole = parse_partial(text[:end])
            assert (value, whole) == (number(json.dumps(expected)), expected_whole), text[:end]


@LIMITS
@given(written(), st.integers(1, 7))
def test_the_size_of_the_pieces_does_not_matter(script, text, size):
    code = """(json, [text, size]) => {
      const reader = new json.JsonReader();
      for (let at = 0; at < text.length; at += size) reader.push(text.slice(at, at + size));
      return JSON.stringify(reader.finish().value);
    }"""
    assert number(script("json.js", code, [text, size])) == number(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{,",
            "[1,]",
            '{"a" 1',
            '{"a":}',
            "[}",
            '{"a":1]',
            "tru ",
            "01 ",
            "- ",
            "1.e ",
            '"\\x',
            '"\\u00g',
            '"\n',
            "{} x",
        ),
        *('{"a":1,}', "'a'", "[1 2", "nulll,", "+1 ", "{} x"),
    ],
)
def test_what_no_continuation_makes_json_is_refused(script, text):
    code = """(json, text) => {
      try { new json.JsonReader().push(text); return "accepted"; } catch (error) { return error.name; }
    }"""
    assert script("json.js", code, text) == "SyntaxError"


def test_a_key_that_is_special_in_javascript_is_a_key(script):
    code = """(json) => {
      const { value } = new json.JsonReader().push('{"__proto__": {"polluted": 1}}');
      return [Object.keys(value), ({}).polluted ?? null, Object.getPrototypeOf(value) === Object.prototype];
    }"""
    assert script("json.js", code) == [["__proto__"], None, True]


def test_deep_nesting_and_long_text_take_linear_time(script):
    code = """(json) => {
      const deep = new json.JsonReader().push("[".repeat(50_000) + "]".repeat(50_000));
      const long = new json.JsonReader();
      long.push('["');
      for (let at = 0; at < 20_000; at += 1) long.push("word ");
      long.push('"]');
      return [deep.complete, long.complete, long.value[0].length];
    }"""
    assert script("json.js", code) == [True, True, 100_000]


events = st.lists(
    st.sampled_from(["data: ", "data:", ": comment", "event: x", "id: 1", "data", "retry: 5", "data: é🍏", " "])
    | st.sampled_from(["\n", "\r\n", "\r"]),
    max_size=20,
).map(lambda parts: "".join(parts) + "\n\n")


@LIMITS
@given(st.lists(st.tuples(events, st.lists(st.integers(1, 5), min_size=1, max_size=8)), min_size=1, max_size=10))
def test_events_are_read_as_openais_client_reads_them(script, batch):
    code = """(api, batch) => batch.map(([text, sizes]) => {
      const reader = new api.EventReader();
      const found = [];
      let at = 0;
      for (let turn = 0; at < text.length; turn += 1) {
        const size = sizes[turn % sizes.length];
        found.push(...reader.push(text.slice(at, at + size)));
        at += size;
      }
      return found;
    })"""
    for (text, _), found in zip(batch, script("api.js", code, batch), strict=True):
        # Events without data exist for that client; the page has no use for them.
        expected = [event.data for event in SSEDecoder().iter_bytes(iter([text.encode()])) if event.data]
        assert [data for data in found if data] == expected


numbers = st.integers(0, 999).map(str) | st.floats(0, 1e3, allow_nan=False).map(lambda x: f"{x:.3f}")
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", " - ", "*", " / "]), inner).map("".join),
        inner.map(lambda each: f"({each})"),
        inner.map(lambda each: f"-{each}"),
        inner.map(lambda each: f"abs({each})"),
        st.tuples(inner, inner).map(lambda both: f"max({both[0]}, {both[1]})"),
    ),
    max_leaves=8,
)

CALCULATE = """(module, list) => list.map((text) => {
  try { return module.calculate(text); } catch (error) { return error.name + ": " + error.message; }
})"""


@LIMITS
@given(st.lists(expressions, min_size=1, max_size=30))
def test_the_calculator_computes_as_python_does(script, batch):
    for text, found in zip(batch, script("calculator.js", CALCULATE, batch), strict=True):
        try:
            expected = eval(text, {"abs": abs, "max": max})
        except ZeroDivisionError:
            assert found == "RangeError: division by zero"
        else:
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-9), text


def test_the_calculator_knows_powers_functions_and_constants(script):
    batch = [
        "2^3^2",
        "-2^2",
        "2**-1",
        "sqrt(2)",
        "LN(e)",
        "log(1000)",
        "cos(pi)",
        "7 % 4",
        "min(3, 1, 2)",
        ".5e1",
        "1e3",
    ]
    expected = [512, -4, 0.5, math.sqrt(2), 1, 3, -1, 3, 1, 5, 1000]
    assert script("calculator.js", CALCULATE, batch) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "1 +",
            "(1",
            "1)",
            "1 2",
            "alert(1)",
            "constructor",
            "toString()",
            "x",
            "2 & 3",
            "1/0",
            "0^-1",
            "sqrt(-1)",
        ),
        *("__proto__", "1;2", "9" * 2000, "(" * 500 + "1" + ")" * 500, "a.b", "`1`", "min()", "sqrt(-1)"),
    ],
)
def test_what_is_no_expression_is_refused_and_never_run(script, text):
    assert script("calculator.js", CALCULATE, [text])[0].startswith(("SyntaxError", "RangeError"))


leaf_schemas = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(0, 3), "maxLength": st.integers(1, 4)}),
    st.fixed_dictionaries({"type": st.just("number"), "minimum": st.integers(-3, 0), "exclusiveMaximum": st.just(5)}),
    st.fixed_dictionaries({"type": st.just(["integer", "null"]), "maximum": st.integers(-3, 3)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["a", "b", 1, None, True, [1]]), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": st.sampled_from(["a", 1, None])}),
)
schemas = st.recursive(
    leaf_schemas,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
                "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
                "additionalProperties": st.booleans() | inner,
            }
        ),
    ),
    max_leaves=5,
)
candidates = st.recursive(
    st.sampled_from(["a", "b", "abcde", "🍏", 0, 1, 5, -4, 2.5, None, True, False]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@LIMITS
@given(st.lists(st.tuples(candidates, schemas), min_size=20, max_size=40))
def test_a_value_is_judged_as_jsonschema_judges_it(script, batch):
    code = "(schema, batch) => batch.map(([value, rule]) => schema.check(value, rule).length === 0)"
    for (value, schema), valid in zip(batch, script("schema.js", code, batch), strict=True):
        assert valid == jsonschema.Draft202012Validator(schema).is_valid(value), (value, schema)


def test_local_references_are_followed_and_circles_end(script):
    schema = {"$defs": {"a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}, "$ref": "#/$defs/a~1b"}
    code = "(schema, [value, rule]) => schema.check(value, rule).map((found) => found.message)"
    assert script("schema.js", code, [1, schema]) == []
    assert script("schema.js", code, ["x", schema]) == ["is string, expected integer"]
    assert script("schema.js", code, [1, {**schema, "$ref": "#/$defs/loop"}]) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, "x"]}, ["a[1] is string, expected integer"]),
        ({}, ["a is missing"]),
        ({"a": [], "b": 1}, ["b is not part of the schema"]),
        (3, ["the value is integer, expected object"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(script, value, expected):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    code = "(schema, [value, rule]) => schema.check(value, rule).map(({ path, message }) => `${path} ${message}`)"
    assert script("schema.js", code, [value, schema | {"additionalProperties": False}]) == expected


fields = st.deferred(
    lambda: st.lists(
        st.one_of(
            st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean"])}),
            st.fixed_dictionaries({"type": st.just("enum"), "options": st.lists(st.sampled_from("xyz"), min_size=1)}),
            st.fixed_dictionaries({"type": st.just("object"), "fields": fields}),
            st.fixed_dictionaries({"type": st.just("array"), "item": st.sampled_from(["string", "number"])}),
        ).flatmap(
            lambda shape: st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["a", "b", "é f"]),
                    "required": st.booleans(),
                    "description": st.sampled_from(["", "x"]),
                }
            ).map(lambda rest: shape | rest)
        ),
        max_size=3,
        unique_by=lambda each: each["name"],
    )
)


@LIMITS
@given(fields)
def test_the_builder_reads_back_what_it_wrote(script, given_fields):
    code = """(schema, fields) => {
      const written = schema.fromFields(fields);
      return [written, schema.fromFields(schema.toFields(written))];
    }"""
    written_schema, again = script("schema.js", code, given_fields)
    assert again == written_schema
    jsonschema.Draft202012Validator.check_schema(written_schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "patternProperties": {}},
        {"type": "object", "properties": {"a": {"enum": [1]}}},
        {"type": "object", "properties": {"a": {"type": "array"}}},
    ],
)
def test_the_builder_declines_what_it_could_not_show_whole(script, schema):
    assert script("schema.js", "(schema, rule) => schema.toFields(rule)", schema) is None


# --- markdown ---------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    "One *two* **three** `four` ~~five~~\nsix",
    "# A\n\ntext\n\n## B\n\n- x\n- y\n  - z\n\n1. p\n2. q\n",
    "```py\na = 1\n\nb < 2\n```\nafter",
    "> quoted *text*\n> more\n\n---\n\nend",
    "| a | b |\n|---|---|\n| 1 | **2** |\n\nafter",
    "snake_case_name and 2 * 3 * 4 and `a*b*c` \\*not\\*",
    "[web](https://example.org/a) and https://example.org/b.",
    "3. third\n4. fourth",
]

OUTLINE = """(module, [text, sizes]) => {
  const root = document.createElement("div");
  const drawn = new module.Markdown(root);
  let at = 0;
  for (let turn = 0; at < text.length; turn += 1) {
    const size = sizes[turn % sizes.length];
    drawn.push(text.slice(at, at + size));
    at += size;
  }
  drawn.finish();
  root.querySelectorAll("button, .code-head, .host").forEach((element) => element.remove());
  const elements = [...root.querySelectorAll("*")].filter((element) => !["DIV", "SPAN"].includes(element.tagName));
  return [root.innerHTML, elements
    .map((element) => [element.tagName.toLowerCase(), element.textContent.replace(/\\s+/g, "")])];
}"""


def outline(text):
    """Tags with their text, as markdown-it sees them; headings two levels down, as in the page."""
    import xml.etree.ElementTree as ElementTree

    html = MarkdownIt("commonmark", {"linkify": False, "breaks": True, "xhtmlOut": True})
    html.enable(["table", "strikethrough"])
    root = ElementTree.fromstring(f"<div>{html.render(text)}</div>")
    found = []
    for element in root.iter():
        tag = {"s": "del", "h1": "h3", "h2": "h4"}.get(element.tag, element.tag)
        if element is not root and tag not in ("p", "br"):
            found.append([tag, "".join("".join(element.itertext()).split())])
    return found


@pytest.mark.parametrize("text", DOCUMENTS)
def test_the_structure_is_what_markdown_it_finds(script, text):
    _, found = script("markdown.js", OUTLINE, [text, [len(text)]])
    found = [row for row in found if row[0] not in ("p", "br")]
    expected = outline(text)
    if "https://example.org/b" in text:  # an address by itself is a link here, which is an extension there
        expected.append(["a", "https://example.org/b"])
    assert found == expected


@LIMITS
@given(st.sampled_from(DOCUMENTS), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_how_the_text_was_cut_does_not_show(script, text, sizes):
    assert script("markdown.js", OUTLINE, [text, sizes]) == script("markdown.js", OUTLINE, [text, [len(text)]])


@LIMITS
@given(
    st.lists(st.sampled_from([*"*_`~[]()#>-|!\\ \n1.<a", "**", "```", "https://x.y", "](", "- ", "| "]), max_size=60)
)
def test_no_text_is_lost_or_becomes_markup(script, parts):
    text = "".join(parts)
    code = """(module, text) => {
      const root = document.createElement("div");
      new module.Markdown(root).push(text).finish();
      const known = "P H3 H4 H5 H6 UL OL LI PRE CODE STRONG EM DEL A SPAN BLOCKQUOTE HR "
        + "TABLE THEAD TBODY TR TH TD BR DIV BUTTON svg path";
      const strange = [...root.querySelectorAll("*")].filter((element) => !known.split(" ").includes(element.tagName));
      return [root.textContent, strange.length];
    }"""
    shown, strange = script("markdown.js", code, text)
    assert strange == 0
    for letter in "a<":
        assert shown.count(letter) >= text.count(letter) - 3 * text.count("](")


def test_hostile_text_takes_bounded_time(script):
    for text in itertools.chain(("*" * 15_000, "[" * 15_000, "`" * 15_000), ("> " * 5_000, "- " * 5_000, "_a" * 7_000)):
        code = """(module, text) => {
          const root = document.createElement("div");
          const begin = performance.now();
          new module.Markdown(root).push(text).finish();
          return performance.now() - begin;
        }"""
        assert script("markdown.js", code, text) < 3000


spans = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5)


@LIMITS
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), spans)
def test_a_marked_text_is_the_text_and_its_marks_are_where_python_has_them(script, text, spans):
    given_spans = [
        {"start": start, "end": end, "path": [at], "confidence": None} for at, (start, end) in enumerate(spans)
    ]
    pieces = script("source.js", "(source, [text, spans]) => source.segments(text, spans)", [text, given_spans])
    assert "".join(piece["text"] for piece in pieces) == text
    place = 0
    for piece in pieces:
        here = range(place, place + len(piece["text"]))
        inside = [each for each in marked if 0 <= each["start"] < each["end"] <= len(text)]
        expected = [each["path"] for each in inside if each["start"] <= here.start and here.stop <= each["end"]]
        assert [each["path"] for each in piece["spans"]] == expected
        place = here.stop
