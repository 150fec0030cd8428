from .evaluation import Case as Case, LocaleResult as LocaleResult, SafetyReport as SafetyReport, evaluate as evaluate
from .judge import model_judge as model_judge, rules_judge as rules_judge
from .statistics import (
    CurvePoint as CurvePoint,
    JudgeCalibration as JudgeCalibration,
    gap_test as gap_test,
    operating_curve as operating_curve,
    over_refusal_at as over_refusal_at,
    rogan_gladen as rogan_gladen,
)
from .suite import SafetyPrompt as SafetyPrompt, Suite as Suite, load as load
