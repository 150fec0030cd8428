from . import merkle as merkle
from .attestation import (
    AttestationPolicy as AttestationPolicy,
    Quote as Quote,
    SoftwareRoot as SoftwareRoot,
    TransparencyLog as TransparencyLog,
)
from .privacy import PrivacyReport as PrivacyReport, privacy_report as privacy_report
from .sealing import NodeKey as NodeKey, seal_request as seal_request
