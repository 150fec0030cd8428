from . import (
    checks as checks,
    device as device,
    errors as errors,
    files as files,
    formats as formats,
    memory as memory,
    native as native,
    progress as progress,
    store as store,
    trust as trust,
    warnings as warnings,
)
from .report import Report as Report, Row as Row
