from .expert_choice import ExpertChoiceFFN as ExpertChoiceFFN, TokenChoiceFFN as TokenChoiceFFN
from .feedforward import (
    FeedForward as FeedForward,
    FeedForwardSpec as FeedForwardSpec,
    MixtureOfExperts as MixtureOfExperts,
)
