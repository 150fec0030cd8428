from .acceptance import (
    AcceptanceRule as AcceptanceRule,
    CoarseAcceptance as CoarseAcceptance,
    ExactAcceptance as ExactAcceptance,
    Verified as Verified,
    verify as verify,
)
from .drafts import CachePosition as CachePosition, Draft as Draft
from .groups import TokenGroups as TokenGroups
from .speculation import Speculation as Speculation
