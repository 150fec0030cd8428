"""Requests drawn from the library of tools: with one tool that fits, with none, or with a value missing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic.tool_requests import outputs
from pippin.data.synthetic.tool_requests.outputs import ToolReport
from pippin.data.synthetic.tool_requests.tool_files import (
    LANGUAGES,
    SLOT,
    ToolSpec,
    failures,
    is_held_out,
    library,
    unrelated,
)

_BEFORE: Final = {
    "en": ("Hi!", "Hey, quick one:", "Sorry to bother you.", "I'm in a bit of a rush.", "OK.", "Hello.", "Please help.",
           "It has been a long day.", "My sister is visiting this week.", "The coffee machine is broken again, anyway:",
           "Thanks for your help yesterday."),
    "de": ("Hallo!", "Guten Morgen!", "Kurze Frage zwischendurch:", "Ich hab's gerade eilig.", "Okay.", "Moin!",
           "Danke noch mal für gestern.", "Meine Schwester ist diese Woche zu Besuch.", "Heute ist hier viel los.",
           "Entschuldige die Störung."),
    "fr": ("Bonjour !", "Salut !", "Désolé de te déranger.", "Je suis un peu pressé.", "Bon.", "Encore moi !",
           "La journée a été longue.", "Ma sœur est là cette semaine.", "Merci pour ton aide hier."),
    "es": ("¡Hola!", "Buenos días.", "Perdona que te moleste.", "Tengo un poco de prisa.", "Vale.", "Otra cosa:",
           "Ha sido un día muy largo.", "Mi hermana está de visita esta semana.", "Gracias por lo de ayer."),
    "it": ("Ciao!", "Buongiorno!", "Scusa il disturbo.", "Vado un po' di fretta.", "Allora:", "Un'altra cosa:",
           "È stata una giornata lunga.", "Questa settimana c'è qui mia sorella.", "Grazie ancora per ieri."),
}  # fmt: skip
_AFTER: Final = {
    "en": ("Thanks!", "Thank you.", "That would be great.", "I'll be back in a moment."),
    "de": ("Danke!", "Vielen Dank.", "Das wäre super.", "Ich bin gleich wieder da."),
    "fr": ("Merci !", "Merci beaucoup.", "Ce serait parfait.", "Je reviens dans un instant."),
    "es": ("¡Gracias!", "Muchas gracias.", "Me vendría muy bien.", "Ahora vuelvo."),
    "it": ("Grazie!", "Grazie mille.", "Sarebbe perfetto.", "Torno subito."),
}
_INSTRUCTIONS: Final = (
    "You are a helpful assistant.",
    "Be brief.",
    "Use a tool when one fits the request; otherwise answer yourself.",
    "You help people in their daily life and at work.",
)

_FAILED: Final = 0.06  # of the calls


@dataclass(frozen=True)
class ToolRequest:
    """A request and what is right.

    Attributes:
        tools: what is on offer, in OpenAI's format.
        prompt: what the user says.
        call: name and arguments of the right call; None where no tool fits.
        reply: what is said without a call, or the beginning of it.
        output: what the tool returns.
        answer: what the user is told about it.
        findings: what the answer has from the output, each in the ways in which it may be written.
        instructions: of the system, or empty.
    """

    tools: tuple[dict[str, Any], ...]
    prompt: str
    call: tuple[str, dict[str, Any]] | None = None
    reply: str | None = None
    output: str | None = None
    answer: str | None = None
    findings: tuple[tuple[str, ...], ...] = ()
    instructions: str = ""


def sample(rng: random.Random, *, language: str | None = None, held_out: bool = False) -> ToolRequest:
    """A random request.

    Args:
        rng: draws it.
        language: of the request; any of `LANGUAGES` without one, English more often.
        held_out: whether its tools are those of the tenth that is evaluated on, rather than the others.

    Raises:
        InvalidArgument: an unknown language.
    """
    if language is not None and language not in LANGUAGES:
        raise InvalidArgument(f"language={language!r} is none of {', '.join(LANGUAGES)}")
    every = [tool for tool in library().values() if is_held_out(tool.name) == held_out]
    if language is None:
        language = "en" if rng.random() < 0.5 else rng.choice(LANGUAGES)
    tool = rng.choice(every)
    instructions = rng.choice(_INSTRUCTIONS) if rng.random() < 0.3 else ""
    drawn, lacking = rng.random(), tool.lacking.get(language)
    if drawn < 0.12:
        request, reply = rng.choice(unrelated()[language])
        return ToolRequest(_offered(_near(tool, every, rng), rng), request, reply=reply, instructions=instructions)
    if drawn < 0.2 and lacking:
        request, question = rng.choice(lacking)
        tools = _offered([tool, *_near(tool, every, rng)[1:]], rng)
        return ToolRequest(tools, request, reply=question, instructions=instructions)
    return _stated(tool, every, rng, language, instructions, offered=drawn > 0.28)


def _stated(
    tool: ToolSpec,
    every: Sequence[ToolSpec],
    rng: random.Random,
    language: str,
    instructions: str,
    offered: bool,
) -> ToolRequest:
    """A request that states all that the tool needs, whether the tool is on offer or not."""
    phrase = rng.choice(tool.phrases[language])
    drawn = {name: each.draw(rng, language) for name, each in tool.parameters.items()}
    said = {name: text for name, (_, text) in drawn.items()}
    prompt = _filled(phrase, said)
    if rng.random() < 0.3:
        prompt = f"{rng.choice(_BEFORE[language])} {prompt}"
    if rng.random() < 0.2:
        prompt += f"{' ' if prompt[-1] in '.?!' else '. '}{rng.choice(_AFTER[language])}"
    others = _near(tool, every, rng)
    if not offered and len(every) > 1:
        # a tool of the same domain might do what the request asks for, so the others are of other domains
        far = [each for each in every if each.domain != tool.domain]
        others = rng.sample(far, min(len(far), rng.randint(1, 3)))
        return ToolRequest(_offered(others, rng), prompt, reply="I", instructions=instructions)
    definition, renamed = tool.definition(rng)
    tools = [definition, *_offered(others[: rng.randint(0, 4)], rng)]
    rng.shuffle(tools)
    stated = set(SLOT.findall(phrase))
    arguments = {renamed[name]: drawn[name][0] for name in tool.parameters if name in stated}
    report = _reported(tool, language, rng, {name: _written(value) for name, (value, _) in drawn.items()}, said)
    return ToolRequest(
        tuple(tools),
        prompt,
        (tool.name, arguments),
        output=report.output,
        answer=report.answer,
        findings=report.findings,
        instructions=instructions,
    )


def _reported(
    tool: ToolSpec, language: str, rng: random.Random, values: dict[str, str], said: dict[str, str]
) -> ToolReport:
    """What the tool returns for a call, and what the user is told.

    Args:
        values: of the parameters, as the call has them.
        said: as the user says them.
    """
    if rng.random() < _FAILED:
        output, answers = rng.choice(failures())
        return outputs.redraw(output, answers[language], language, rng)
    state, chosen = rng.random(), rng.random()
    output = outputs.choose(tool.output, random.Random(chosen))
    report, sentence = (
        outputs.redraw(
            output,
            outputs.choose(rng.choice(tool.answers[each]), random.Random(chosen)),
            each,
            random.Random(state),
        )
        for each in (language, rng.choice((language, "en")))
    )
    if sentence.output != report.output:  # a number that one language has in words
        sentence = report
    answer = _filled(report.answer, said)
    spelled = {fact[-1]: fact[0] for fact in sentence.findings}
    findings = [tuple(dict.fromkeys((*fact, spelled.get(fact[-1], fact[0])))) for fact in report.findings]
    texts = outputs.texts(tool.output, output)
    return ToolReport(
        outputs.written(_filled(report.output, values), _filled(sentence.answer, values), rng),
        answer,
        (*findings, *((text,) for text in texts if text in answer)),
    )


def _near(tool: ToolSpec, every: Sequence[ToolSpec], rng: random.Random) -> list[ToolSpec]:
    """One to four other tools, those of the same domain more often."""
    others = sorted(
        (each for each in every if each is not tool), key=lambda each: rng.random() - 0.4 * (each.domain == tool.domain)
    )
    return others[: rng.randint(1, 4)]


def _offered(tools: Sequence[ToolSpec], rng: random.Random) -> tuple[dict[str, Any], ...]:
    definitions = [tool.definition(rng)[0] for tool in tools]
    rng.shuffle(definitions)
    return tuple(definitions)


def _written(value: Any) -> str:
    """An argument as the output of a tool repeats it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, list) else str(value)


def _filled(text: str, values: dict[str, str]) -> str:
    return SLOT.sub(lambda found: values[found[1]], text)
