"""Calls of tools to train on: the right call with the right arguments, or an answer where no tool fits.

Notable here:
- prompts and grammars are those of inference
- where no tool fits, only the choice between a call and text is learned, so that the model keeps its own style
- some conversations go on with the output of the tool, and the answer that tells it to the user is learned, above all
  what only the output says
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pippin.core.errors import InvalidInput, PippinError
from pippin.data.synthetic import tool_requests
from pippin.data.synthetic.tool_requests import ToolRequest
from pippin.language.constrained_objective import ConstrainedExample
from pippin.recipes.train.task_data.examples import ExampleSampler, ExampleSplit, constrained_example
from pippin.recipes.train.task_data.function_requests import function_requests
from pippin.recipes.train.task_data.record_requests import sample_record_request
from pippin.recipes.train.task_data.summaries import free_example
from pippin.session import chat_format
from pippin.session.text_prompts import end_of_turn
from pippin.session.tool_dialects.grammar import tool_grammar
from pippin.session.tools import Tool
from pippin.session.transcript import Instructions, Prompt, ToolCall, ToolCalls, ToolOutput, Transcript

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_BEGINNINGS: Final = ("I", "The", "Sure", "Yes", "To", "Here", "Hello", "You", "That", "It", "A", "In")
_FROM_FUNCTIONS: Final = 0.35  # of the requests, where BFCL is installed
_CALL_WEIGHT: Final = 4.0  # of the choice between a call and text, on which all else depends
_WITHOUT_CALL: Final = 0.25  # of these
_FROM_RECORDS: Final = 0.12  # of the examples
_WITH_OUTPUT: Final = 0.35  # of the requests that have one; of those for records more, since their calls are much alike
_RECORD_OUTPUT: Final = 0.75
_FACT_WEIGHT: Final = 3.0  # of what an answer has from the output, beside its other words


def sample_request(rng: random.Random, split: ExampleSplit) -> ToolRequest:
    """A random request, from the synthetic library or from BFCL.

    Args:
        rng: draws it.
        split: the languages that may occur, and whether its tools are those that are held out.
    """
    if rng.random() < _FROM_FUNCTIONS and (not split.languages or "en" in split.languages):
        listed = function_requests(held_out=split.held_out, called=rng.random() >= _WITHOUT_CALL)
        if listed:
            return rng.choice(listed)
    language = None
    if split.languages and not set(tool_requests.LANGUAGES) <= set(split.languages):
        language = rng.choice([each for each in split.languages if each in tool_requests.LANGUAGES])
    return tool_requests.sample(rng, language=language, held_out=split.held_out)


def examples(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """A sampler of requests with tools.

    Args:
        model: provides tokenizer, chat template and the dialect of calls.
        split: the languages that may occur, and whether the tools are those that are held out.
        max_length: most tokens of an example.
    """

    def sample(rng: random.Random) -> ConstrainedExample | None:
        record = rng.random() < _FROM_RECORDS
        request = sample_record_request(rng, split) if record else sample_request(rng, split)
        if request is None:
            return None
        answered = request.call is not None and request.answer is not None
        answered = answered and rng.random() < (_RECORD_OUTPUT if record else _WITH_OUTPUT)
        try:
            example = answer_example(model, request) if answered else request_example(model, request, rng)
        except PippinError:  # a schema of BFCL that no grammar enforces, or a value that it does not allow
            return None
        return example if example is not None and len(example.ids) <= max_length else None

    return sample


def request_example(model: LanguageModel, request: ToolRequest, rng: random.Random) -> ConstrainedExample | None:
    """What the model is to do first: the call, or the first token of a reply.

    Args:
        model: provides tokenizer, chat template and the dialect of calls.
        request: the request.
        rng: draws the beginning of a reply where the request has none.

    Raises:
        PippinError: a schema that no grammar enforces, or arguments that do not fit it.
    """
    tools, tokenizer, dialect = declared(request), model.tokenizer, chat_format.dialect_of(model)
    prompt = chat_format.encode(model, Transcript(entries=tuple(begun(request))), tools)
    if request.call is None:
        call = tokenizer.encode(dialect.marker or dialect.write([(tools[0].name, {})]), control=True)[0]
        reply = request.reply if request.reply and request.reply != "I" else rng.choice(_BEGINNINGS)
        first = tokenizer.encode(reply)[0]
        return None if first == call else _choice(prompt, first, call, model.config.vocab_size)
    name, arguments = request.call
    tool = next(each for each in tools if each.name == name)
    order = list((tool.schema.json_schema or {}).get("properties", arguments))
    if unknown := set(arguments) - set(order):
        raise InvalidInput(f"{name} has no parameter {min(unknown)!r}")
    arguments = {key: arguments[key] for key in order if key in arguments}  # the order in which the grammar has them
    answer = tokenizer.encode(dialect.write([(name, arguments)]), control=True)
    grammar = tool_grammar(dialect, tokenizer, None, tools, required=False, max_calls=1)
    example = None if grammar is None else constrained_example(prompt, answer, grammar, tokenizer)
    if example is None or example.places[0] != len(prompt) - 1:
        return example
    weights = np.ones(len(example.places))
    weights[0] = _CALL_WEIGHT
    return replace(example, weights=weights)


def answer_example(model: LanguageModel, request: ToolRequest) -> ConstrainedExample:
    """What the model is to say about the output of a tool, to the end of its turn.

    Args:
        model: provides tokenizer, chat template and the dialect of calls.
        request: has a call, an output and an answer.
    """
    prompt = chat_format.encode(model, reported(request), declared(request))
    answer = model.tokenizer.encode(request.answer or "")
    example = free_example(prompt, [*answer, *end_of_turn(model)], model.config.vocab_size)
    weights = np.ones(len(example.targets))
    ends = [len(model.tokenizer.decode(answer[: index + 1])) for index in range(len(answer))]
    for spellings in request.findings:
        begin = (request.answer or "").find(spellings[0])
        for index, (start, end) in enumerate(pairwise([0, *ends])):
            if start < begin + len(spellings[0]) and end > begin >= 0:
                weights[index] = _FACT_WEIGHT
    return replace(example, weights=weights)


def reported(request: ToolRequest) -> Transcript:
    """The conversation up to the output of the tool.

    Args:
        request: has a call and an output.
    """
    name, arguments = request.call or ("", {})
    return Transcript(
        entries=(
            *begun(request),
            ToolCalls(calls=(ToolCall(id="call_0", name=name, arguments=arguments),)),
            ToolOutput(request.output or "", call_id="call_0", name=name),
        )
    )


def declared(request: ToolRequest) -> list[Tool[..., Any]]:
    """The tools of a request as a session takes them.

    Raises:
        InvalidTool, SchemaError: an invalid name or schema.
    """
    functions = [tool["function"] for tool in request.tools]
    return [Tool.from_schema(each["name"], each["description"], each["parameters"], dict) for each in functions]


def begun(request: ToolRequest) -> list[Instructions | Prompt]:
    """The conversation up to the request."""
    said = [Instructions(request.instructions)] if request.instructions else []
    return [*said, Prompt(request.prompt)]


def _choice(prompt: list[int], right: int, other: int, vocab_size: int) -> ConstrainedExample:
    """A choice between two tokens after a prompt."""
    allowed = np.zeros((1, vocab_size), bool)
    allowed[0, [right, other]] = True
    bits = np.packbits(allowed, axis=1, bitorder="little")
    weights = np.array([_CALL_WEIGHT])
    return ConstrainedExample((*prompt, right), np.array([len(prompt) - 1]), np.array([right]), bits, weights)
