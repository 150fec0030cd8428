from .annotation_budget import (
    AnnotationBudget as AnnotationBudget,
    BudgetPoint as BudgetPoint,
    BudgetReport as BudgetReport,
    Saturation as Saturation,
    annotation_curve as annotation_curve,
    split_items as split_items,
)
from .soft_labels import (
    SoftLabelFit as SoftLabelFit,
    SoftLabelLoss as SoftLabelLoss,
    annotations_to_distribution as annotations_to_distribution,
    distribution_metrics as distribution_metrics,
    hard_labels as hard_labels,
    nested_annotations as nested_annotations,
    smoothed_labels as smoothed_labels,
    subsample_annotations as subsample_annotations,
)
