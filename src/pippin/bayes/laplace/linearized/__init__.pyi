from .evidence import (
    LinearizedEvidence as LinearizedEvidence,
    LinearizedPosterior as LinearizedPosterior,
    NetworkEvidence as NetworkEvidence,
)
from .model import LinearizedModel as LinearizedModel
from .scale_invariance import ParamGroup as ParamGroup, find_scale_invariant_groups as find_scale_invariant_groups
