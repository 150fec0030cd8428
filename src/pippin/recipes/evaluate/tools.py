"""How right a model calls tools: requests whose right call is known, for tools that no adapter was trained on.

Notable here:
- requests and tools are a function of the seed, so that two models are asked the same
- a quarter of the requests needs no tool that is on offer
- an answer to the output of a tool is measured by the figures and names that only the output has; a copy of the output
  has none
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import PippinError
from pippin.core.options import Option
from pippin.engine.options import Device, DType
from pippin.recipes import options
from pippin.recipes.evaluate import adapted_model

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.data.synthetic.tool_requests import ToolRequest
    from pippin.evaluate.tool_calls import Call, ToolCallScore
    from pippin.session.providers.local import LocalModel
    from pippin.session.providers.provider import ProviderEvent

MAX_TOKENS = 256
"""Longest answer; a call that is cut is no call."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: options.Model
    adapter: options.EvaluatedAdapter = None
    items: Annotated[PositiveInt, Option("Number of requests.", "Data")] = 200
    seed: options.Seed = 0
    device: Device = None
    dtype: DType = "auto"


@dataclass(frozen=True)
class ToolEvaluation:
    """What was measured.

    Attributes:
        model: name of the model.
        adapter: the adapter, None for the model itself.
        score: counts over all requests.
        findings: figures and names that outputs of tools have and answers must have.
        stated: of these, those that the answers have.
        failed: requests for which there was no answer.
        seconds: of all calls and answers without one.
    """

    model: str
    adapter: str | None
    score: ToolCallScore
    findings: int
    stated: int
    failed: int
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        score = self.score
        return {
            "model": self.model,
            "adapter": self.adapter,
            "requests": score.wanted + score.unwanted,
            "right": score.accuracy,
            "calls_wanted": score.wanted,
            "calls_right": score.right / max(1, score.wanted),
            "tools_right": score.called / max(1, score.wanted),
            "no_call_wanted": score.unwanted,
            "no_call_right": score.answered / max(1, score.unwanted),
            "findings": self.findings,
            "findings_stated": self.stated / max(1, self.findings),
            "failed": self.failed,
            "seconds_per_request": self.seconds / (score.wanted + score.unwanted),
        }

    def report(self) -> Report:
        """Shares of the requests, of the calls and of the answers without one that are right, and the time of one."""
        from pippin.core.report import Report, Row

        found = self.summary()
        rows = [
            Row("requests right", found["right"]),
            Row("calls right", found["calls_right"]),
            Row("right tool", found["tools_right"]),
            Row("requests for a call", self.score.wanted),
            Row("rightly without a call", found["no_call_right"]),
            Row("requests for none", self.score.unwanted),
            Row("facts of outputs in the answers", found["findings_stated"]),
            Row("facts of outputs", self.findings),
            Row("no answer", self.failed),
            Row("time of a request", found["seconds_per_request"], "s"),
        ]
        name = adapted_model.title(self.model, self.adapter)
        return Report(f"{name} on {found['requests']} requests with tools", rows)


def run(config: Config, *, show_progress: bool = True) -> ToolEvaluation:
    """Measure how many requests with tools a model deals with rightly.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    from pippin.evaluate.tool_calls import ToolCallScore, score
    from pippin.session.providers.local import LocalModel

    model, adapter = adapted_model.load_with_adapter(
        config.model, config.adapter, device=config.device, dtype=config.dtype
    )
    provider = LocalModel(model)
    found: list[Call]
    total, findings, stated, failed, seconds = ToolCallScore(), 0, 0, 0, 0.0
    with progress.bar(config.items, config.model, unit="requests", show_progress=show_progress) as shown:
        for request in requests(config.items, seed=config.seed):
            begin, found = time.perf_counter(), []
            try:
                found = calls(provider, request, adapter)
            except PippinError:
                failed += 1
            seconds += time.perf_counter() - begin
            total += score(request.call, found)
            if request.findings:
                findings += len(request.findings)
                stated += findings_stated(request, answer(provider, request, adapter))
            shown.advance(1)
    return ToolEvaluation(model.name, config.adapter, total, findings, stated, failed, seconds)


def requests(count: int, *, seed: int) -> list[ToolRequest]:
    """Requests for tools that are held out of training, whose schemas a grammar can hold.

    Args:
        count: how many.
        seed: of the requests.
    """
    from pippin.recipes.train.task_data import ExampleSplit, tools

    rng, found = random.Random(f"requests/{seed}"), list[Any]()
    while len(found) < count:
        request = tools.sample_request(rng, ExampleSplit(held_out=True))
        try:
            tools.declared(request)
        except PippinError:
            continue
        found.append(request)
    return found


def calls(provider: LocalModel, request: ToolRequest, adapter: str | None, *, required: bool = False) -> list[Call]:
    """What a model calls for a request; nothing where it answers.

    Args:
        provider: the model.
        request: the request.
        adapter: name of a loaded adapter; None for the model itself.
        required: whether it must call a tool.

    Raises:
        ContextOverflow: the tools do not fit.
    """
    from pippin.session.providers.provider import ToolCallsMade

    made = [
        event
        for event in _events(provider, request, adapter, required=required, reported=False)
        if isinstance(event, ToolCallsMade)
    ]
    return [(call.name, call.arguments) for event in made for call in event.calls]


def answer(provider: LocalModel, request: ToolRequest, adapter: str | None) -> str:
    """What a model says about the output of a tool; empty where it calls one again, or where there is no room.

    Args:
        provider: the model.
        request: has a call and an output.
        adapter: name of a loaded adapter; None for the model itself.
    """
    from pippin.session.providers.provider import TextDelta

    try:
        events = list(_events(provider, request, adapter, required=False, reported=True))
    except PippinError:
        return ""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def findings_stated(request: ToolRequest, text: str) -> int:
    """How many facts of the output are in an answer; 0 for an answer that is the output itself.

    Args:
        request: has the facts, each in the ways in which it may be written.
        text: the answer.

    >>> from pippin.data.synthetic.tool_requests import ToolRequest
    >>> request = ToolRequest((), "", findings=(("1,950.60", "1950.6"), ("EUR",)))
    >>> findings_stated(request, "It is 1950.6 euros."), findings_stated(request, '{"net": 1950.6, "currency": "EUR"}')
    (1, 0)
    """
    if any(sign in text for sign in ("tool_response", "tool_call", '{"', '":')):
        return 0
    plain = re.sub(r"\s+", " ", text).casefold()
    return sum(
        any(re.search(rf"(?<![\w.,]){re.escape(each.casefold())}(?!\w|[.,]\d)", plain) for each in spellings)
        for spellings in request.findings
    )


def _events(
    provider: LocalModel, request: ToolRequest, adapter: str | None, *, required: bool, reported: bool
) -> Iterator[ProviderEvent]:
    """What a model does for a request, or, where it is `reported`, after the output of the tool."""
    from pippin.recipes.train.task_data import tools
    from pippin.session.options import GenerationOptions
    from pippin.session.providers.provider import ProviderRequest
    from pippin.session.transcript import Transcript

    asked = ProviderRequest(
        tools.reported(request) if reported else Transcript(entries=tuple(tools.begun(request))),
        tuple(tools.declared(request)),
        options=GenerationOptions(
            max_tokens=MAX_TOKENS, temperature=0.0, tool_calling="required" if required else "allowed"
        ),
        adapter=adapter,
    )
    return provider.stream(asked)
