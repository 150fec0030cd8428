"""Speculation: several tokens guessed, checked in one pass, and the answer's law kept."""

from pippin.engine.speculation.acceptance import AcceptanceRule, CoarseAcceptance, ExactAcceptance, Verified, verify
from pippin.engine.speculation.drafts import Draft, Place
from pippin.engine.speculation.groups import TokenGroups
from pippin.engine.speculation.settings import Speculation

__all__ = [
    "AcceptanceRule",
    "CoarseAcceptance",
    "Draft",
    "ExactAcceptance",
    "Place",
    "Speculation",
    "TokenGroups",
    "Verified",
    "verify",
]
