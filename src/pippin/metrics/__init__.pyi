from .agreement import cohen_kappa as cohen_kappa, krippendorff_alpha as krippendorff_alpha
from .calibration import (
    ReliabilityDiagram as ReliabilityDiagram,
    expected_calibration_error as expected_calibration_error,
    reliability_diagram as reliability_diagram,
)
from .classification import accuracy as accuracy, brier_score as brier_score, entropy as entropy, log_loss as log_loss
from .intervals import (
    IntervalEstimate as IntervalEstimate,
    bootstrap_interval as bootstrap_interval,
    mean_interval as mean_interval,
    paired_difference as paired_difference,
    percentile_interval as percentile_interval,
    wilson_interval as wilson_interval,
)
from .ranking import (
    RiskCoverageCurve as RiskCoverageCurve,
    average_precision as average_precision,
    fpr_at_tpr as fpr_at_tpr,
    pearson_correlation as pearson_correlation,
    risk_coverage_curve as risk_coverage_curve,
    roc_auc as roc_auc,
    spearman_correlation as spearman_correlation,
)
from .regression import (
    gaussian_crps as gaussian_crps,
    gaussian_nll as gaussian_nll,
    interval_coverage as interval_coverage,
)
