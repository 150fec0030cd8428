from .compose import (
    ComponentModel as ComponentModel,
    Composability as Composability,
    Composed as Composed,
    composability as composability,
)
from .locality import LocalityReport as LocalityReport, length_curve as length_curve, locality_report as locality_report
