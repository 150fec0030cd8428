"""The synthetic requests for tools: calls that fit their schemas, values that the user says, and a split by name."""

import json
import random
import re

import jsonschema
import pytest

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic import tool_requests
from pippin.data.synthetic.tool_requests import outputs, sampling, tool_files
from pippin.data.synthetic.tool_requests.tool_files import unrelated


def _requests(count, seed=0, **options):
    rng = random.Random(seed)
    return [tool_requests.sample(rng, **options) for _ in range(count)]


# what a call has where the user says it in words: the values of enums
CODES = {
    code
    for tool in tool_requests.library().values()
    for each in tool.parameters.values()
    if "enum" in (each.type, each.format)
    for code in each.codes(each.values)
}
MONTHS = {
    "01": "January|Januar|janvier|enero|gennaio",
    "02": "February|Februar|février|febrero|febbraio",
    "03": "March|März|mars|marzo",
    "05": "May|Mai|mai|mayo|maggio",
    "07": "July|Juli|juillet|julio|luglio",
    "09": "September|septembre|septiembre|settembre",
    "11": "November|novembre|noviembre",
}


def _written(value):
    """A pattern of the ways in which a user may write a value."""
    text = str(value)
    found = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", text)
    if not found:
        return rf"{re.escape(text)}|{re.escape(text.replace('.', ','))}"
    year, month, day = found.groups()
    named = rf"\b{int(day)}\.? (de )?({MONTHS[month]}) (de )?{year}|({MONTHS[month]}) {int(day)}, {year}"
    return rf"{text}|{day}[./]{month}[./]{year}|{named}"


def test_the_arguments_of_a_call_fit_the_schema_of_its_tool():
    called = [request for request in _requests(600) if request.call]
    assert len(called) > 350
    for request in called:
        name, arguments = request.call
        (function,) = (tool["function"] for tool in request.tools if tool["function"]["name"] == name)
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
        jsonschema.validate(arguments, function["parameters"])
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)


def test_the_user_says_the_values_of_a_call():
    for request in _requests(600, 1):
        for value in (request.call or ("", {}))[1].values():
            for item in value if isinstance(value, list) else [value]:
                assert isinstance(item, bool) or item in CODES or re.search(_written(item), request.prompt)
        for text in (request.prompt, request.reply, request.output, request.answer):
            assert not re.search(r"\{\w+\}", text or "")


@pytest.mark.parametrize("held_out", [True, False])
def test_the_tools_are_split_by_their_names(held_out):
    offered = {tool["function"]["name"] for request in _requests(600, 2, held_out=held_out) for tool in request.tools}
    every = {name for name in tool_requests.library() if tool_requests.is_held_out(name) == held_out}
    assert offered == every
    assert len(every) >= 5


def test_some_requests_have_no_tool_that_fits():
    requests = _requests(600, 3)
    without = [request for request in requests if request.call is None]
    assert 0.15 < len(without) / len(requests) < 0.4
    assert all(request.reply and request.tools for request in without)
    assert {request.prompt for request in without} & {request for each in unrelated().values() for request, _ in each}


def test_a_sample_is_a_function_of_its_seed():
    assert _requests(20, 4) == _requests(20, 4) != _requests(20, 5)


@pytest.mark.parametrize("language", tool_requests.LANGUAGES)
def test_a_language_is_that_of_the_requests(language):
    tools = tool_requests.library().values()
    phrases = [phrase for tool in tools for phrase in tool.phrases[language]]
    phrases += [request for tool in tools for request, _ in tool.lacking.get(language, [])]
    phrases += [request for request, _ in unrelated()[language]]
    patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(phrase)) for phrase in phrases]
    for request in _requests(100, 6, language=language):
        assert any(re.search(pattern, request.prompt) for pattern in patterns)


@pytest.mark.parametrize("language", tool_requests.LANGUAGES)
def test_some_requests_of_every_language_need_no_tool(language):
    pairs = unrelated()[language]
    assert len({request for request, _ in pairs}) == len(pairs) >= 25
    assert all(reply.strip() for _, reply in pairs)


def test_an_unknown_language_is_refused():
    with pytest.raises(InvalidArgument, match="klingon"):
        tool_requests.sample(random.Random(0), language="klingon")


TRAM = """@stop = North|South
@stop:de = Norden|Süden
# transport
[tram] Next tram.
stop string! @stop : Stop
kind enum! fast=quick|slow=calm : Kind
tags array:enum! red|blue=dark : Tags
day string:date! 2026-03-05 : Day
limit integer:bounded! 10..20/5 : Most trams
hours number! 2.5..2.5 : Hours
late boolean! true=late|false=early : Whether it is late
~ de: kind fast=flott|slow=ruhig
~ de: tags red=rot|blue=blau
~ de: late true=spät|false=früh
+ {stop} {kind} {tags} {day} {limit} {hours} {late}
+ de: {stop} {kind} {tags} {day} {limit} {hours} {late}
> {"stop": "{stop}", "kind": "{kind}", "late": {late}, "limit": {limit}, "hours": {hours}, "day": "{day}"}
< {stop} on {day}
< de: {stop} am {day}
"""

WHOLE = "[bell] Ring.\nhow string @how : How\n+ Ring {how}\n> {}\n< done\n" + "".join(
    f"+ {language}: ring\n< {language}: done\n" for language in tool_requests.LANGUAGES[1:]
)


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", r"(North|South) (quick|calm) (red|dark|red and dark|dark and red) "
               r"(2026-03-05|March 5, 2026|5 March 2026) (10|15|20) 2\.5 (late|early)"),
        ("de", r"(Norden|Süden) (flott|ruhig) (rot|blau|rot und blau|blau und rot) "
               r"(2026-03-05|05\.03\.2026|5\. März 2026) (10|15|20) 2,5 (spät|früh)"),
    ],
)  # fmt: skip
def test_users_say_values_in_their_language(language, said, monkeypatch):
    monkeypatch.setattr(sampling, "library", lambda: tool_requests.read(TRAM))
    monkeypatch.setattr(sampling, "_FAILED", 0)
    monkeypatch.setattr(outputs, "written", lambda output, sentence, rng: output)
    seen = set()
    for request in _requests(200, 7, language=language):
        if request.call is None:
            continue
        (words,) = re.findall(said, request.prompt)
        seen |= set(words)
        arguments = request.call[1].values()
        stop, kind, tags, day, limit, hours, late = arguments
        assert (stop, str(limit)) == (words[0], words[4])
        assert kind == {"quick": "fast", "calm": "slow", "flott": "fast", "ruhig": "slow"}[words[1]]
        colors = {"red": "red", "dark": "blue", "rot": "red", "blau": "blue"}
        assert tags == [colors[word] for word in re.split(" and | und ", words[2])]
        assert (day, hours, late) == ("2026-03-05", 2.5, words[5] in ("late", "spät"))
        output = {"stop": stop, "kind": kind, "late": late, "limit": limit, "hours": hours, "day": day}
        assert json.loads(request.output) == output
        assert request.answer == f"{stop} {'on' if language == 'en' else 'am'} {words[3]}"
    assert len(seen) == 16


def test_fixed_values_and_bounds_stand_in_the_schema():
    parameters = tool_requests.read(TRAM)["tram"].parameters
    assert parameters["kind"].schema() == {"type": "string", "enum": ["fast", "slow"]}
    assert parameters["tags"].schema() == {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}
    assert parameters["limit"].schema() == {"type": "integer", "minimum": 10, "maximum": 20}
    assert parameters["day"].schema() == {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tools_a.txt": TRAM}, "tram has no request or no answer in es"),
        ({"tools_a.txt": WHOLE, "tools_b.txt": WHOLE}, "tools_b.txt has the tool 'bell' again"),
    ],
)
def test_a_library_has_every_tool_once_and_in_every_language(files, message, tmp_path, monkeypatch):
    for name, text in {"lists.txt": "@how = loudly|softly\n", **files}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tool_files, "_FOLDER", tmp_path)
    with pytest.raises(InvalidInput, match=message):
        tool_files.library.__wrapped__()
    (tmp_path / "tools_a.txt").write_text(WHOLE)
    (tmp_path / "tools_b.txt").unlink(missing_ok=True)
    assert tool_files.library.__wrapped__()["bell"].parameters["how"].values == ("loudly", "softly")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+ a request before any tool", "line 1"),
        ("[a] b\nx integer! many : not a range\n", "line 2"),
        ("[a] b\nx integer! 1..2 : Number\n+ no value\n> {}\n< done", "lacks a required"),
        ("[a] b\nx integer! 1..2 : Number\n+ take {x} and {y}\n> {}\n< done", "unknown"),
        ("[a] b\nx integer 1..2 : Number\n+ take {x}\n> {}\n< {x} done", "not every call"),
        ("[a] b\n+ do it\n> {}", "no answer"),
        ("[a] b\n? no question\n", "line 2"),
        ("[a] b\n~ de: x eins|zwei\n", "line 2"),
        ("[a] b\nx enum one|two : Number\n~ de: x one=eins|three=drei\n", "line 3"),
        ("[a] b\nx string one|two : Number\n~ x eins|zwei\n", "line 3"),
        ("[a] b\nx string one|two : Number\n~ de: x @numbers\n", "line 3"),
        ("[a] b\nx boolean true=on|false=off : On\n+ it\n+ de: nun {x}\n> {}\n< done", "not in that language"),
    ],
)
def test_a_faulty_file_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        tool_requests.read(text)
