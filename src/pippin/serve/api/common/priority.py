"""Request priority: OpenAI's service tiers, and the numeric priority of other servers.

Notable here:
- a request may always ask for a lower priority, but for a higher one only where the server's settings allow it, because
  it makes the other clients wait
- a priority that is not allowed becomes the default, and the answer reports that, as OpenAI's does
"""

from __future__ import annotations

from typing import Final

from pippin.core.errors import InvalidRequest
from pippin.serve.api.common.fields import PriorityFields
from pippin.serve.settings import ServerSettings

TIERS: Final = {"flex": -5, "priority": 5, "fast": 5}
"""Priorities of the tiers; other tiers have 0."""


def priority_of(body: PriorityFields, settings: ServerSettings) -> tuple[int, dict[str, str]]:
    """The priority of a request, and the tier that its answer reports, if the request named one.

    Raises:
        InvalidRequest: a tier and a number that contradict each other.

    >>> [priority_of(PriorityFields(service_tier=tier), ServerSettings()) for tier in ("priority", "flex")]
    [(0, {'service_tier': 'default'}), (-5, {'service_tier': 'flex'})]
    >>> [priority_of(PriorityFields(priority=value), ServerSettings(priorities=True)) for value in (-3, 3)]
    [(3, {}), (-3, {})]
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
