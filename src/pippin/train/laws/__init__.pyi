from .compute_budget import (
    ComputeOptimum as ComputeOptimum,
    LossHull as LossHull,
    ScalingExponents as ScalingExponents,
    late_fusion_flops as late_fusion_flops,
    optimum_by_search as optimum_by_search,
    optimum_in_closed_form as optimum_in_closed_form,
)
from .forgetting import (
    FinetuningLaw as FinetuningLaw,
    ForgettingLaw as ForgettingLaw,
    forgetting_evaluation as forgetting_evaluation,
)
from .io import load_law as load_law
from .scaling import ScalingLaw as ScalingLaw
