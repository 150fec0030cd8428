"""Every warning that Pippin gives, under `PippinWarning`: a result stands, but not as it was asked for.

They are imported from `pippin.core.errors`, beside the errors; users find both in `pippin.errors`.
"""

from __future__ import annotations


class PippinWarning(UserWarning):
    """What is said by `warnings.warn` of a result that stands, but not as it was asked for."""


class NewtonFallback(PippinWarning):
    """Newton's method did not converge, and the recurrence was computed step by step; the message has the residual."""


class UntrainedSharing(PippinWarning):
    """Layers share caches in a model that was not trained for it."""


class Extrapolation(PippinWarning):
    """A law is asked about a run far outside those it was fitted on, or its fit is uncertain."""


class Truncation(PippinWarning):
    """Something was longer than what reads it, and its end was left out."""


class JacobiUnconverged(PippinWarning):
    """A parallel inversion of a flow stopped before it was exact; the message has the residual."""


class CompositionAtRisk(PippinWarning):
    """Scores were added whose models change the same things: the result may be no composition of them."""


class LabelDrift(PippinWarning):
    """A refiner of images changes what their labels say."""


class Misspecified(PippinWarning):
    """Observations lie outside what a simulator or a model produces; the message says how far."""


class InertWeights(PippinWarning):
    """Weights chosen for a posterior have no curvature, so that they cannot change any prediction."""


class InferenceAtRisk(PippinWarning):
    """A posterior, a chain or a plan stands, but a diagnostic says to distrust it; the message has the figures."""
