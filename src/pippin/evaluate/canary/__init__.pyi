from .audit import CanaryAudit as CanaryAudit, Findings as Findings, Hit as Hit
from .child_process import AuditedWork as AuditedWork
