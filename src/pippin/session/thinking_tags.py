"""The tags between which models reason before they answer, found by their chat templates.

Notable here:
- a template may begin the reasoning itself, leave that to the model, or say that there is none
- Granite 3.3 and Cohere's models put tags around the answer too
- Harmony has no tags but messages: its reasoning is a message on the channel ``analysis``
"""

from __future__ import annotations

from typing import Any, Final

from pippin.data.text.chat_template import ChatTemplate
from pippin.engine.decoding.thinking import Thinking
from pippin.session.options import BUDGETS

HARMONY: Final = Thinking("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
_THINK: Final = Thinking("<think>", "</think>", "\n\n")
_COHERE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_GRANITE: Final = ("<response>", "</response>")
# What in a template tells its tags, the first that is found.
_SIGNS: Final = (
    ("<|channel>", Thinking("<|channel>thought\n", "<channel|>")),
    ("[THINK]", Thinking("[THINK]", "[/THINK]")),
    ("<seed:think>", Thinking("<seed:think>", "</seed:think>")),
    ("◁think▷", Thinking("◁think▷", "◁/think▷")),
    ("<|inner_prefix|>", Thinking("<|inner_prefix|>", "<|inner_suffix|>")),
    ("<|START_THINKING|>", Thinking("<|START_THINKING|>", "<|END_THINKING|>", _COHERE[0], _COHERE)),
    ("".join(_GRANITE), Thinking("<think>", "</think>", _GRANITE[0], _GRANITE)),
    (_THINK.end, _THINK),
    ("Here is my response:", Thinking("Here is my thought process:", "Here is my response:")),
)


def thinking_tags(template: ChatTemplate | None) -> Thinking | None:
    """The tags of a model's reasoning; None for a model that was not trained to reason."""
    if template is None:
        return None
    source = template.source
    if "<|channel|>" in source and {"<|channel|>", "<|message|>"} <= template.tokenizer.control_strings:
        return HARMONY
    return next((tags for sign, tags in _SIGNS if sign in source), None)


def variables(budget: int) -> dict[str, Any]:
    """The variables with which templates are told whether and how much to reason, from a budget in tokens."""
    told: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking", "reasoning"), budget > 0)
    if budget:
        levels = {"low": BUDGETS["light"], "medium": BUDGETS["moderate"]}
        told["reasoning_effort"] = next((name for name, most in levels.items() if budget <= most), "high")
    return told
