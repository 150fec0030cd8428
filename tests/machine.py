"""How slow the machine is now: limits on a computation stretch with it, since machines and their load differ."""

import time

USUAL = 0.05  # seconds that the loop below takes on a core of 2022


def slowness() -> float:
    """At least 1; 4 where a loop in plain Python takes four times as long as usual."""
    began = time.perf_counter()
    sum(number % 7 for number in range(1_000_000))
    return max(1.0, (time.perf_counter() - began) / USUAL)
