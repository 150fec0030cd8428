from . import annotators as annotators, canary as canary, images as images, judges as judges, safety as safety
from .annotators.annotation_budget import (
    AnnotationBudget as AnnotationBudget,
    BudgetReport as BudgetReport,
    annotation_curve as annotation_curve,
)
from .annotators.soft_labels import (
    SoftLabelFit as SoftLabelFit,
    SoftLabelLoss as SoftLabelLoss,
    distribution_metrics as distribution_metrics,
)
from .calibration import (
    ClassificationPredictions as ClassificationPredictions,
    RegressionPredictions as RegressionPredictions,
    read_predictions as read_predictions,
)
from .canary.audit import CanaryAudit as CanaryAudit
from .disentanglement import DCI as DCI, dci as dci
from .extraction import ExtractionScore as ExtractionScore
from .images.sample_quality import (
    SampleQuality as SampleQuality,
    frechet_distance as frechet_distance,
    kernel_distance as kernel_distance,
    precision_recall as precision_recall,
)
from .judges.panel import JudgePanel as JudgePanel
from .judges.report import PanelReport as PanelReport
from .safety.evaluation import SafetyReport as SafetyReport
from .tool_calls import ToolCallScore as ToolCallScore
