"""Which kernel faults and moves memory; as :mod:`nsan.analysis.attribution.kernels`.

A fault or copy belongs to the kernel, graph, copy or memset that ran on its GPU meanwhile. What none, or
several, of them can be named for has rows of its own, so that the parts add up.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

from nsan.stats_reports._export import DTOH, EVICTION, FAULT, PREFETCH, USER, Export
from nsan.stats_reports._report import Row, Rows, UmReport, added, hottest, ordered, shown
from nsan.stats_reports._work import AMBIGUOUS, UNATTRIBUTED, USER_PREFETCH, Gpu, Work

MAKES_ROOM_WITHIN_NS = 1_000_000
"""A copy to the GPU that begins this soon after an eviction is what it made room for."""

_REMAINDERS = {
    USER_PREFETCH: "user_prefetch",
    AMBIGUOUS: "ambiguous",
    UNATTRIBUTED: "unattributed",
}
Key = Tuple[Gpu, int]
Evicted = Tuple[Gpu, int, Optional[int], Optional[int]]
"""GPU, start, end and bytes of an eviction."""


class Sums:
    """What belongs to one item of work."""

    def __init__(self) -> None:
        self.batches = 0
        self.faults: int | None = 0
        self.into: int | None = 0
        self.faulted: int | None = 0
        self.prefetched: int | None = 0
        self.evicted: int | None = 0


def by_kernel(report: UmReport) -> Rows:
    """Give one row per name of GPU work, and the remainders of each GPU."""
    export = report.export
    work = Work(export)
    sums: dict[Key, Sums] = {}
    gpus = {item.gpu: True for item in work.items}
    _add_faults(export, work, sums)
    _add_copies(export, work, sums)
    gpus.update((gpu, True) for gpu, _ in sums)
    rows = [_of_item(report, work, number, sums) for number in range(len(work.items))]
    rows.sort(
        key=lambda row: (*hottest(row[6], row[9], row[7], row[5]), *ordered(*row[:2]), row[2:4])
    )
    rests = [
        _remainder(report, work, gpu, number, sums)
        for gpu in sorted(gpus, key=lambda gpu: ordered(*gpu))
        for number in _REMAINDERS
        if number == UNATTRIBUTED or (gpu, number) in sums
    ]
    return Rows(rows, rests)


def _add_faults(export: Export, work: Work, sums: dict[Key, Sums]) -> None:
    rows = f'SELECT pid, device, start, "end", faults FROM {export.rows("gpu_faults")}'
    for pid, device, start, end, faults in export.ask(f"{rows} WHERE start IS NOT NULL"):
        gpu = (pid, device)
        each = sums.setdefault((gpu, work.ran(gpu, start, end)), Sums())
        each.batches += 1
        each.faults = added(each.faults, faults)


def _add_copies(export: Export, work: Work, sums: dict[Key, Sums]) -> None:
    """Add copies to GPUs, and evictions; other copies to the CPU are no work of a GPU."""
    waiting: list[Evicted] = []
    before: Gpu | None = None
    rows = export.ask(
        f"""
        SELECT pid, device, start, "end", bytes, kind, cause FROM {export.rows("migrations")}
        WHERE start IS NOT NULL AND (kind <> {DTOH} OR cause = {EVICTION})
        ORDER BY pid, device, start, "end", va < 0, va, bytes
        """
    )
    for pid, device, start, end, size, kind, cause in rows:
        gpu = (pid, device)
        if gpu != before:
            _add_evictions(work, sums, waiting, None)
            before = gpu
        if kind == DTOH:
            waiting.append((gpu, start, end, size))
            continue
        _add_evictions(work, sums, waiting, (start, cause))
        number = USER_PREFETCH if cause == USER else _ran(work, gpu, start, end, cause)
        each = sums.setdefault((gpu, number), Sums())
        each.into = added(each.into, size)
        if cause == FAULT:
            each.faulted = added(each.faulted, size)
        if cause == PREFETCH:
            each.prefetched = added(each.prefetched, size)
    _add_evictions(work, sums, waiting, None)


def _add_evictions(
    work: Work,
    sums: dict[Key, Sums],
    waiting: list[Evicted],
    following: tuple[int, Any] | None,
) -> None:
    """Lay evictions to what ran, or to the prefetch call that they made room for."""
    for gpu, start, end, size in waiting:
        by_call = (
            following is not None
            and following[1] == USER
            and end is not None
            and following[0] - end <= MAKES_ROOM_WITHIN_NS
        )
        number = USER_PREFETCH if by_call else _ran(work, gpu, start, end, EVICTION)
        each = sums.setdefault((gpu, number), Sums())
        each.evicted = added(each.evicted, size)
    waiting.clear()


def _ran(work: Work, gpu: Gpu, start: int, end: int | None, cause: int | None) -> int:
    """Say what a copy belongs to; an eviction to nothing where no fault of that GPU waited for room."""
    if cause == EVICTION and gpu in work.recorded:
        waits = work.waits.get(gpu)
        if waits is None or not waits.covers(start):
            return UNATTRIBUTED
    return work.ran(gpu, start, end)


def _of_item(report: UmReport, work: Work, number: int, sums: dict[Key, Sums]) -> Row:
    item, spans = work.items[number], work.of_item[number]
    exposed = work.exposed(number) if item.gpu in work.recorded and spans.total else None
    lead = (*item.gpu, item.kind, shown(item.name), work.instances[number], spans.total or None)
    return (*lead, *_figures(report, exposed, sums.get((item.gpu, number), Sums())))


def _remainder(report: UmReport, work: Work, gpu: Gpu, number: int, sums: dict[Key, Sums]) -> Row:
    alone = number == UNATTRIBUTED and gpu in work.recorded
    exposed = work.exposed_alone(gpu) if alone else None
    word = _REMAINDERS[number]
    lead = (*gpu, word, word, None, None)
    return (*lead, *_figures(report, exposed, sums.get((gpu, number), Sums())))


def _figures(report: UmReport, exposed: int | None, each: Sums) -> Row:
    moved = (each.faulted, each.prefetched, each.into, each.evicted)
    return (
        report.known("gpu_faults", exposed),
        report.known("gpu_faults", each.batches),
        report.known("gpu_faults", each.faults),
        *(report.known("migrations", figure) for figure in moved),
    )
