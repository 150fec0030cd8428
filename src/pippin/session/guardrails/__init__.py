"""Guardrails: content filtering of input and output by named rules, with a reason for every decision."""

from pippin.session.guardrails.guardrails import Guardrails
from pippin.session.guardrails.policy import Decision, Verdict
from pippin.session.guardrails.rules import ClassifierRule, FunctionRule, PatternRule, TermRule
from pippin.session.guardrails.stream import Checker
from pippin.session.guardrails.typed import ValueChecker

__all__ = [
    "Checker",
    "ClassifierRule",
    "Decision",
    "FunctionRule",
    "Guardrails",
    "PatternRule",
    "TermRule",
    "ValueChecker",
    "Verdict",
]
