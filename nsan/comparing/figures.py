"""The figures that conditions are compared by: their names, what each needs, and where it is from.

Names are public: ``--fail-on``, the JSON document and advice use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nsan.analysis.compare.tables import Measure
from nsan.uvm.constants import BIG_PAGE_BYTES
from nsan.waiting import by_kernel, in_all

if TYPE_CHECKING:
    from nsan.asking import Asked

Found = tuple[float | None, str]
"""A value, and the kind that it has in a recorded trace."""

CAUSES: Final = "causes"
"""Need of figures that tell causes apart: the text of nvprof records none."""

_BYTES: Final = float(BIG_PAGE_BYTES)
"""Grain of migrated bytes: the driver's prefetcher brings or leaves 64 KiB at least."""


@dataclass(frozen=True)
class RunFigure(Measure):
    """A figure of a run as a whole.

    Attributes
    ----------
    needs : tuple of str
        Kinds of events that must have been recorded, or :data:`CAUSES`.
    of : callable
        Finds it in a trace.
    """

    needs: tuple[str, ...] = ()
    of: Callable[[Asked], Found] = field(kw_only=True)


@dataclass(frozen=True)
class PlaceFigure(Measure):
    """A figure of each step, range or kernel: a column of an analysis.

    Attributes
    ----------
    column : str
        Of ``iterations``, ``faults_by_nvtx`` or ``faults_by_kernel``.
    needs : tuple of str
        As of :class:`RunFigure`.
    """

    column: str = ""
    needs: tuple[str, ...] = ()


# Of a run -------------------------------------------------------------------------------------------


def _said(*keys: str, kind: str = "recorded") -> Callable[[Asked], Found]:
    """Take a number of the summary; 0 where a group of the rows is empty."""

    def find(asked: Asked) -> Found:
        found: Any = asked.summary
        for key in keys:
            found = found.get(key, 0) if isinstance(found, Mapping) else found
        return (None if found is None else float(found)), kind

    return find


def _cause(cause: str) -> Callable[[Asked], Found]:
    return _said("migrations", "by_cause", cause, "bytes")


def _waiting(asked: Asked) -> Found:
    """Measure how long kernels ran while a fault waited; not known where it is not how long they ran."""
    if asked.summary["kernels"]["busy_ns"] is None:
        return None, "derived"
    kernels = by_kernel(asked)
    if kernels is None:
        return 0.0, "derived"
    waited = in_all(asked, kernels)
    return float(waited.exposed_ns), waited.kind


def _refaulted(asked: Asked) -> Found:
    """Add up what GPUs evicted and brought back; a GPU that evicts nothing has no row.

    Of a part of a capture it is not known: what was evicted before decides.
    """
    if asked.is_part:
        return None, "derived"
    return float(asked.frame("refault_totals")["refaulted_bytes"].sum()), "derived"


_MOVED: Final = ("migrations",)
_SPLIT: Final = ("migrations", CAUSES)


def _moved(name: str, doc: str, of: Callable[[Asked], Found], needs: tuple[str, ...]) -> RunFigure:
    return RunFigure(f"migrations.{name}_bytes", "run", "byte", doc, _BYTES, needs, of=of)


_OF_RUN: Final = (
    RunFigure(
        "duration_ns",
        "run",
        "ns",
        "From the first start of an event to the last end.",
        of=_said("duration_ns", kind="derived"),
    ),
    RunFigure(
        "gpu_faults.rows",
        "run",
        "fault rows",
        "GPU fault rows; one row is one driver batch, unless health says otherwise.",
        1,
        ("gpu_faults",),
        of=_said("gpu_faults", "n_rows"),
    ),
    RunFigure(
        "gpu_faults.va_blocks",
        "run",
        "VA blocks",
        "Distinct VA blocks of GPU fault rows.",
        1,
        ("gpu_faults",),
        of=_said("gpu_faults", "n_va_blocks", kind="derived"),
    ),
    RunFigure(
        "cpu_faults.n",
        "run",
        "faults",
        "CPU page faults on managed memory.",
        1,
        ("cpu_faults",),
        of=_said("cpu_faults", "n"),
    ),
    RunFigure(
        "migrations.n",
        "run",
        "migrations",
        "Copies of managed memory.",
        1,
        _MOVED,
        of=_said("migrations", "n"),
    ),
    RunFigure(
        "migrations.bytes",
        "run",
        "byte",
        "Migrated, all ways.",
        _BYTES,
        _MOVED,
        of=_said("migrations", "bytes"),
    ),
    _moved("htod", "Migrated to GPUs.", _said("migrations", "htod_bytes"), _MOVED),
    _moved("dtoh", "Migrated to the CPU.", _said("migrations", "dtoh_bytes"), _MOVED),
    _moved("dtod", "Migrated between GPUs.", _said("migrations", "dtod_bytes"), _MOVED),
    _moved("coherence", "Migrated because a page faulted.", _cause("coherence"), _SPLIT),
    _moved("prefetch", "Brought by the driver's prefetcher.", _cause("prefetch"), _SPLIT),
    _moved("user", "Migrated because the program asked for it.", _cause("user"), _SPLIT),
    _moved("eviction", "Evicted from GPUs to make room.", _cause("eviction"), _SPLIT),
    _moved(
        "access_counters", "Migrated because counters said so.", _cause("access_counters"), _SPLIT
    ),
    RunFigure(
        "migrations.busy_ns",
        "run",
        "ns",
        "Time in which at least one migration was in flight.",
        needs=_MOVED,
        of=_said("migrations", "busy_ns", kind="derived"),
    ),
    RunFigure(
        "refaults.bytes",
        "run",
        "byte",
        "Evicted from a GPU, and brought back to it.",
        _BYTES,
        _SPLIT,
        of=_refaulted,
    ),
    RunFigure(
        "kernels.n",
        "run",
        "kernels",
        "Kernels.",
        needs=("kernels",),
        of=_said("kernels", "n"),
    ),
    RunFigure(
        "kernels.busy_ns",
        "run",
        "ns",
        "Time in which at least one kernel ran.",
        needs=("kernels",),
        of=_said("kernels", "busy_ns", kind="derived"),
    ),
    RunFigure(
        "kernels.waiting_ns",
        "run",
        "ns",
        "Of that time, a page fault waited.",
        needs=("kernels", "migrations"),
        of=_waiting,
    ),
    RunFigure(
        "managed.allocations",
        "run",
        "allocations",
        "Managed allocations.",
        needs=("allocations",),
        of=_said("managed", "n_allocations"),
    ),
    RunFigure(
        "managed.bytes",
        "run",
        "byte",
        "Their sizes added up.",
        needs=("allocations",),
        of=_said("managed", "bytes"),
    ),
)

# Of steps, ranges and kernels -----------------------------------------------------------------------

_ROWS: Final = ("gpu_faults",)


def _of_place(scope: str, whose: str, prefix: str = "") -> tuple[PlaceFigure, ...]:
    """Declare what each scope has: time, fault rows and bytes."""
    rows = "n_inclusive_fault_rows" if prefix else "n_fault_rows"
    moved = (
        ("in_bytes", "Migrated to GPUs", _MOVED),
        ("out_bytes", "Migrated to the CPU", _MOVED),
        ("evicted_bytes", "Evicted from GPUs to make room", _SPLIT),
    )
    return (
        PlaceFigure(f"{scope}.time_ns", scope, "ns", f"Time of {whose}.", column="time_ns"),
        PlaceFigure(
            f"{scope}.fault_rows",
            scope,
            "fault rows",
            f"GPU fault rows of {whose}.",
            1,
            rows,
            _ROWS,
        ),
        *(
            PlaceFigure(
                f"{scope}.{name}",
                scope,
                "byte",
                f"{doc}, by {whose}.",
                _BYTES,
                prefix + name,
                needs,
            )
            for name, doc, needs in moved
        ),
    )


_OF_PLACES: Final = (
    *_of_place("step", "a warm step"),
    PlaceFigure(
        "step.va_blocks", "step", "VA blocks", "VA blocks that moved.", 1, "n_va_blocks", _MOVED
    ),
    PlaceFigure(
        "step.unique_bytes",
        "step",
        "byte",
        "Bytes that moved at least once.",
        _BYTES,
        "unique_bytes",
        _MOVED,
    ),
    PlaceFigure("range.n", "range", "ranges", "Ranges of this name.", column="n_ranges"),
    *_of_place("range", "the ranges of this name, with ranges inside", "inclusive_"),
    PlaceFigure("kernel.n", "kernel", "kernels", "Kernels of this name.", column="n_instances"),
    *_of_place("kernel", "the kernels of this name"),
    PlaceFigure(
        "kernel.waiting_ns",
        "kernel",
        "ns",
        "Of their time, a page fault waited.",
        column="exposed_ns",
        needs=_MOVED,
    ),
)

_ALL: Final[tuple[tuple[RunFigure | PlaceFigure, ...], ...]] = (_OF_RUN, _OF_PLACES)

FIGURES: Final[dict[str, RunFigure | PlaceFigure]] = {
    figure.name: figure for part in _ALL for figure in part
}
"""The figures by name, in the order in which they are shown."""


def is_known(asked: Asked, needs: tuple[str, ...]) -> bool:
    """Say whether a trace recorded what a figure needs.

    Parameters
    ----------
    asked : Asked
        The trace.
    needs : tuple of str
        Of the figure.

    Returns
    -------
    bool
        False where a bare 0 would be a lie.
    """
    if CAUSES in needs and asked.summary["source_kind"] == "nvprof-text":
        return False
    return asked.is_recorded(*(need for need in needs if need != CAUSES))
