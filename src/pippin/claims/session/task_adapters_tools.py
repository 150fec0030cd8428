"""An adapter of a few megabytes makes a small frozen model call tools that it never saw, and leave them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.core.errors import PippinError
from pippin.evaluate.tool_calls import Call, ToolCallScore, score
from pippin.recipes.evaluate import tools as measurement
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSampler, ExampleSplit, tools

if TYPE_CHECKING:
    from pippin.data.synthetic.tool_requests import ToolRequest
    from pippin.language.constrained_objective import ConstrainedExample
    from pippin.language.language_model import LanguageModel

MODEL = "smollm2-135m"
STEPS = Scale.choose(smoke=1, laptop=14, long=110)
BATCH_TOKENS = Scale.choose(smoke=600, laptop=2048)
ITEMS = Scale.choose(smoke=1, laptop=20, long=60)
TRIVIAL = ("base model", "base model, call required", "never a call", "first tool")


@claim(
    id="task-adapters-tools",
    source="arXiv:2407.21075, task adapters: rank 16 over a frozen base; arXiv:2507.13575, constrained tool calling; "
    "no number for a model of this size",
    headline="a low-rank adapter specializes a small frozen model to a task",
    setting="SmolLM2-135M (4 bits), which has not learned to call tools, gets requests with one to five tools, "
    "a quarter of which need none; adapters of rank 16, trained by the recipe for the same steps, on other functions "
    "than those evaluated; three seeds",
    method="adapter",
    positive_control="known calls",
    negative_controls=(*TRIVIAL, "requests of others"),
    conditions=[
        Condition(
            "better than the base",
            "requests dealt with rightly (the right tool with the right arguments, or no call): at least 10 points "
            "above the base model, the base model that must call, never calling, and the first tool; 95 % intervals of "
            "the paired differences above 0",
            lambda e, arm: all(
                e.mean("requests right", arm) >= e.mean("requests right", other) + 0.1
                and e.paired("requests right", arm, other).low > 0
                for other in TRIVIAL
            ),
            headline=True,
        ),
        Condition(
            "calls",
            "at least a fifth of the requests for a call get the right one, arguments included",
            lambda e, arm: e.mean("calls right", arm) >= 0.2,
        ),
        Condition(
            "no needless calls",
            "at least half of the requests that no tool fits are answered without a call",
            lambda e, arm: e.mean("rightly without a call", arm) >= 0.5,
        ),
    ],
    reported="the adapter that comes with Pippin on the same requests, where there is one",
)
def run(scale: Scale) -> Evidence:
    """Train two adapters for each seed and measure every arm on the same requests."""
    evidence = Evidence()
    for seed in scale.seeds:
        for arm, call in _arms(scale, seed).items():
            measure = partial(_measure, scale, seed, call)
            for name, value in scale.measured(f"{arm}, {seed}", measure).items():
                evidence.add(name, value, seed=seed, arm=arm)
    return evidence


def _arms(scale: Scale, seed: int) -> dict[str, Callable[[ToolRequest], list[Call]]]:
    """What each arm calls for a request."""
    from pippin.language import task_adapters
    from pippin.language.language_model import load
    from pippin.session.providers.local import LocalModel

    model = load(MODEL)
    provider = LocalModel(model)
    for arm in ("adapter", "requests of others"):
        model.load_adapter(arm, _train(scale, seed, arm))
    arms: dict[str, Callable[[ToolRequest], list[Call]]] = {
        "adapter": lambda request: measurement.calls(provider, request, "adapter"),
        "base model": lambda request: measurement.calls(provider, request, None),
        "base model, call required": lambda request: measurement.calls(provider, request, None, required=True),
        "requests of others": lambda request: measurement.calls(provider, request, "requests of others"),
        "never a call": lambda request: [],
        "first tool": lambda request: [(request.tools[0]["function"]["name"], {})],
        "known calls": lambda request: [] if request.call is None else [request.call],
    }
    shipped = task_adapters.load(model, "tools")
    if shipped is not None:
        arms["shipped adapter"] = lambda request: measurement.calls(provider, request, shipped)
    return arms


def _train(scale: Scale, seed: int, arm: str) -> Any:
    """The folder of an adapter of this seed."""
    out = scale.checkpoints(f"{arm} {seed}")
    config = task_adapter.Config(
        model=MODEL, task="tools", out=out, steps=STEPS[scale], lr=1e-3, batch_tokens=BATCH_TOKENS[scale],
        save_every=10, seed=seed, resume=True,
    )  # fmt: skip
    task_adapter.run(config, examples=_of_others if arm == "requests of others" else None, show_progress=False)
    return out


def _of_others(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """As `pippin.recipes.train.task_data.tools.examples`, with the words of another request before each call."""

    def sample(rng: random.Random) -> ConstrainedExample | None:
        request, other = tools.sample_request(rng, split), tools.sample_request(rng, split)
        try:
            example = tools.request_example(model, replace(request, prompt=other.prompt), rng)
        except PippinError:
            return None
        return example if example is not None and len(example.ids) <= max_length else None

    return sample


def _measure(scale: Scale, seed: int, call: Callable[[ToolRequest], list[Call]]) -> dict[str, float]:
    """Shares over the requests of one seed."""
    total = ToolCallScore()
    for request in measurement.requests(ITEMS[scale], seed=1000 + seed):
        try:
            found = call(request)
        except PippinError:  # too many tools for the context, say: nothing is called
            found = []
        total += score(request.call, found)
    return {
        "requests right": total.accuracy,
        "calls right": total.right / max(1, total.wanted),
        "right tool": total.called / max(1, total.wanted),
        "rightly without a call": total.answered / max(1, total.unwanted),
    }
