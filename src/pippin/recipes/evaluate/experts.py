"""What a cache of experts would cost under each policy, from a trace of the experts that a mixture needed.

Notable here:
- the table has every policy at every capacity and depth, so that where one does not win stands beside where it does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options

if TYPE_CHECKING:
    from pippin.engine.experts import Simulation

_LINK = "Link"


def shares(text: str) -> tuple[float, ...]:
    """Parse shares with commas between them: 5%,0.2.

    >>> shares("5%, 0.2")
    (0.05, 0.2)
    """
    return tuple(float(each[:-1]) / 100 if each.endswith("%") else float(each) for each in options.names(text))


def integers(text: str) -> tuple[int, ...]:
    """Parse integers with commas between them.

    >>> integers("0, 1,4")
    (0, 1, 4)
    """
    return tuple(int(each) for each in options.names(text))


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a comparison."""

    trace: Annotated[options.StrPath, Option("A trace, as `record_expert_trace` makes it (.npz).", positional=True)]
    policies: Annotated[
        tuple[str, ...], Option("Eviction policies; all without it.", metavar="NAMES", parse=options.names)
    ] = ()
    capacities: Annotated[
        tuple[float, ...], Option("Shares of all experts that fit, such as 5%,20%.", metavar="SHARES", parse=shares)
    ] = (0.05, 0.1, 0.2, 0.5)
    depths: Annotated[
        tuple[int, ...],
        Option("Layers to prefetch ahead; 0 and 1 if the trace has predictions.", metavar="N,N", parse=integers),
    ] = ()
    count: Annotated[PositiveInt | None, Option("Most experts of a layer to prefetch; as many as one needs.")] = None
    bandwidth: Annotated[PositiveFloat | None, Option("Gigabytes per second; no time passes without it.", _LINK)] = None
    layer_ms: Annotated[PositiveFloat, Option("Milliseconds that a layer computes.", _LINK)] = 1.0
    plot: Annotated[options.StrPath | None, Option("Draw hits and bytes into this file.", metavar="PATH")] = None


@dataclass(frozen=True)
class ExpertComparison:
    """What was simulated.

    Attributes:
        trace: name of the file.
        total: bytes of all experts.
        passes: passes of the trace.
        timed: whether time passed.
        runs: one for each depth, capacity and policy, in this order.
    """

    trace: str
    total: int
    passes: int
    timed: bool
    runs: tuple[Simulation, ...]

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "trace": self.trace,
            "bytes_of_all_experts": self.total,
            "passes": self.passes,
            "runs": [self._row(run) for run in self.runs],
        }

    def _row(self, run: Simulation) -> dict[str, Any]:
        stats = run.stats
        row: dict[str, Any] = {
            "depth": run.prefetch.depth,
            "capacity": run.capacity / self.total,
            "policy": run.policy,
            "hit_rate": stats.hit_rate,
            "hit_rate_of_layers": [
                float(hits / demands) if demands else 1.0
                for hits, demands in zip(stats.hits.tolist(), stats.demands.tolist(), strict=True)
            ],
            **stats.totals(),
        }
        if self.timed:
            row |= {"first_s": run.first_seconds, "later_s": run.later_seconds, "stalled_s": run.stalled}
        return row

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells."""
        from pippin.core.files import format_bytes

        headings = ["depth", "room", "policy", "hits", "first", "unpredicted", "collisions", "wasted", "a pass reads"]
        cells = []
        for run in self.runs:
            stats = run.stats.totals()
            counts = [str(stats[name]) for name in ("first", "unpredicted", "collisions", "wasted")]
            read = format_bytes(round(stats["bytes_read"] / self.passes))
            room = f"{run.capacity / self.total:.0%}"
            line = [str(run.prefetch.depth), room, run.policy, f"{run.stats.hit_rate:.1%}"]
            times = [f"{1000 * run.later_seconds:.4g}"] if self.timed else []
            cells.append([*line, *counts, read, *times])
        return [*headings, *(["ms a pass"] if self.timed else [])], cells

    def draw(self, path: str | Path) -> None:
        """Draw hits and bytes against the capacity, a line for each policy, a column for each depth.

        Raises:
            InvalidArgument: a suffix other than .png, .svg or .pdf. MissingDependency: matplotlib is not installed.
        """
        from pippin.core import plotting

        depths = list(dict.fromkeys(run.prefetch.depth for run in self.runs))
        figure = plotting.new(4.5 * len(depths), 6.5)
        figure.suptitle(f"{self.trace}: {self.passes} passes")
        panels = figure.subplots(2, len(depths), squeeze=False, sharex=True, sharey="row")
        for column, depth in enumerate(depths):
            for name in dict.fromkeys(run.policy for run in self.runs):
                runs = [run for run in self.runs if (run.prefetch.depth, run.policy) == (depth, name)]
                room = [100 * run.capacity / self.total for run in runs]
                panels[0, column].plot(room, [100 * run.stats.hit_rate for run in runs], marker="o", label=name)
                read = [run.stats.bytes_read.sum() / self.passes / 1e6 for run in runs]
                panels[1, column].plot(room, read, marker="o", label=name)
            panels[0, column].set_title(f"prefetching, depth {depth}" if depth else "no prefetching")
            panels[1, column].set_xlabel("experts that fit (%)")
        panels[0, 0].set_ylabel("hits (%)")
        panels[1, 0].set_ylabel("read for a pass (MB)")
        panels[0, 0].legend()
        plotting.save(figure, path)


def run(config: Config) -> ExpertComparison:
    """Replay a trace under every policy, at every capacity and depth.

    Args:
        config: the settings.

    Raises:
        InvalidInput: there is no such file. CorruptedFile: it is no trace.
        InvalidArgument: a policy that there is not, a capacity outside 0 to 1, or a depth that the trace lacks.
        NotEnoughMemory: a capacity holds not one expert.
    """
    from pippin.core import plotting
    from pippin.engine.experts import ExpertTrace, compare
    from pippin.engine.experts.eviction import POLICIES, policy

    if config.plot is not None:
        plotting.check_path(config.plot)
    trace = ExpertTrace.load(config.trace)
    names: Sequence[str] = config.policies or POLICIES
    for name in names:
        policy(name, trace)
    if wrong := [share for share in config.capacities if not 0 < share <= 1]:
        raise InvalidArgument(f"capacities (--capacities) are shares above 0 and up to 1, got {wrong[0]}")
    known = 0 if trace.predicted is None else trace.predicted.shape[1]
    depths = config.depths or tuple(range(min(known, 1) + 1))
    if wrong_depths := [depth for depth in depths if not 0 <= depth <= known]:
        raise InvalidArgument(f"depths (--depths) are 0 to {known} for this trace, got {wrong_depths[0]}")
    total = int(trace.sizes.sum())
    runs = compare(
        trace,
        names,
        [max(1, int(share * total)) for share in config.capacities],
        [_prefetch(trace, depth, config.count) for depth in depths],
        bandwidth=None if config.bandwidth is None else config.bandwidth * 1e9,
        layer_seconds=config.layer_ms / 1000 if config.bandwidth else 0.0,
    )
    found = ExpertComparison(
        Path(config.trace).name, total, max(1, trace.num_passes), config.bandwidth is not None, tuple(runs)
    )
    if config.plot is not None:
        found.draw(config.plot)
    return found


def _prefetch(trace: Any, depth: int, count: int | None) -> Any:
    """As many experts of a layer as passes of one token need, unless a number is given."""
    import numpy as np

    from pippin.engine.experts import Prefetch

    if depth and count is None:
        needed = np.diff(trace.offsets).reshape(trace.num_passes, trace.num_layers)
        single = needed[trace.tokens == 1]
        count = max(1, int(np.median(single if len(single) else needed)))
    return Prefetch(depth, count=count if depth else None)
