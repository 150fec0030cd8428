"""How soon a request is answered: OpenAI's service tiers, and the number that other servers take.

Notable here:
- a request may always ask for less than its turn; for more only where the server was told to allow it, because every
  client that hurries makes the others wait
- what was not allowed is answered in its usual turn, and the answer says so, as OpenAI's does
"""

from __future__ import annotations

from typing import Final

from pippin.core.errors import InvalidRequest
from pippin.serve.api.fields import Urgency
from pippin.serve.settings import Settings

TIERS: Final = {"flex": -5, "priority": 5, "fast": 5}
"""Priorities of the tiers; those that are not here have 0."""


def of(body: Urgency, settings: Settings) -> tuple[int, dict[str, str]]:
    """The priority of a request, and what its answer says of it: the tier that it really had, if it named one.

    Raises:
        InvalidRequest: a tier and a number that contradict each other.

    >>> of(Urgency(service_tier="priority"), Settings()), of(Urgency(service_tier="flex"), Settings())
    ((0, {'service_tier': 'default'}), (-5, {'service_tier': 'flex'}))
    >>> of(Urgency(priority=-3), Settings(priorities=True)), of(Urgency(priority=3), Settings())
    ((3, {}), (-3, {}))
    """
    asked = TIERS.get(body.service_tier or "", 0) if body.priority is None else -body.priority
    if body.priority is not None and body.service_tier not in (None, "auto"):
        raise InvalidRequest(
            f"priority is {body.priority} and service_tier {body.service_tier!r}; give one of the two",
            param="priority",
            code="invalid_value",
        )
    granted = asked if settings.priorities else min(asked, 0)
    if body.service_tier is None:
        return granted, {}
    return granted, {"service_tier": "flex" if granted < 0 else "priority" if granted > 0 else "default"}
