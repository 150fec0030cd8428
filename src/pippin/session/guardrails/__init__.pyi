from .guardrails import Guardrails as Guardrails
from .policy import GuardrailDecision as GuardrailDecision, Verdict as Verdict
from .rules import (
    ClassifierRule as ClassifierRule,
    FunctionRule as FunctionRule,
    PatternRule as PatternRule,
    TermRule as TermRule,
)
from .stream import StreamChecker as StreamChecker
from .value_checker import ValueChecker as ValueChecker
