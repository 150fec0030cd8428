"""All warnings that Pippin issues, under `PippinWarning`: a result is returned, but with a reservation.

`pippin.core.errors` re-exports them; users find both in `pippin.errors`.
"""

from __future__ import annotations


class PippinWarning(UserWarning):
    """The base class of Pippin's warnings: a result is returned, but it differs from what was requested."""


class NewtonFallback(PippinWarning):
    """Newton's method did not converge and a sequential scan was used instead; the message has the residual."""


class UntrainedSharing(PippinWarning):
    """Layers share KV caches in a model that was not trained for it."""


class Extrapolation(PippinWarning):
    """A scaling law predicts a run far outside the fitted range, or its fit is uncertain."""


class Truncation(PippinWarning):
    """A text was longer than the model's context and was truncated."""


class JacobiUnconverged(PippinWarning):
    """The Jacobi iteration of a flow's inversion stopped before it converged; the message has the residual."""


class CompositionAtRisk(PippinWarning):
    """The scores of models that affect the same features were added; the result may not be their composition."""


class LabelDrift(PippinWarning):
    """An image refiner changes features that the labels describe."""


class Misspecified(PippinWarning):
    """Observations lie outside the range of a simulator or model; the message says how far."""


class InertWeights(PippinWarning):
    """Weights selected for a posterior have zero curvature, so they cannot change any prediction."""


class InferenceAtRisk(PippinWarning):
    """A diagnostic of a posterior, a Markov chain or a transport plan failed; the message has the values."""


class GuessedEncoding(PippinWarning):
    """A text was not UTF-8 and was read in the encoding that fits its bytes; the message names it."""


class ExposedKeys(PippinWarning):
    """A file of API keys can be read or changed by other users of the machine."""


class SlowStorage(PippinWarning):
    """Weights are read from storage, and not as it is meant; the message says what is slow or uses memory, and why."""


class QualityLoss(PippinWarning):
    """A model was quantized and lost much of its quality; the message has the figure."""
