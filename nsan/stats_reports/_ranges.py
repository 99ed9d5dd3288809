"""Traffic and faults by range of addresses: VA blocks, and neighbours that moved the same bytes as one."""

from __future__ import annotations

from typing import Any

from nsan.stats_reports._export import BLOCK_BYTES, block_of
from nsan.stats_reports._report import (
    Busy,
    Row,
    Rows,
    UmReport,
    address,
    busy_times,
    hottest,
    ordered,
)
from nsan.stats_reports._totals import Figures, Key, figures


class Range:
    """Neighbouring VA blocks of one process and GPU, added up."""

    def __init__(self, key: Key, block: Figures) -> None:
        self.pid, self.device, self.first = key
        self.blocks = [block]

    def goes_on_with(self, key: Key, block: Figures) -> bool:
        """Say whether a block is the next one and moved as many bytes each way."""
        if self.first is None or key != (self.pid, self.device, self.first + len(self.blocks)):
            return False
        return _moved(self.blocks[-1]) == _moved(block)

    def total(self, name: str) -> Any:
        """Add up a figure of the blocks; None where one is unknown."""
        values = [getattr(block, name) for block in self.blocks]
        return None if None in values else sum(values)

    @property
    def timed(self) -> bool:
        """Whether all copies have their times."""
        return all(block.timed for block in self.blocks)


def _moved(block: Figures) -> tuple[Any, ...]:
    return block.htod, block.dtoh, block.dtod, block.evicted


def ranges(report: UmReport, *, merge: bool) -> Rows:
    """Give one row per range.

    Parameters
    ----------
    report : UmReport
        The report that is asked for.
    merge : bool
        Make one range of neighbouring VA blocks that moved the same bytes.
    """
    found = figures(report.export, by_block=True)
    joined: list[Range] = []
    number: dict[Key, int] = {}
    for key in sorted(found, key=lambda key: ordered(*key)):
        if joined and merge and joined[-1].goes_on_with(key, found[key]):
            joined[-1].blocks.append(found[key])
        else:
            joined.append(Range(key, found[key]))
        number[key] = len(joined) - 1
    connection = report.export.connection
    connection.create_function("nsan_range", 3, lambda *key: number.get(key, -1))
    busy = busy_times(report.export, [f"nsan_range(pid, device, {block_of()})"])
    rows = [_row(report, each, busy.get((i,), Busy())) for i, each in enumerate(joined)]
    rows.sort(key=lambda row: (*hottest(_bytes(row), *row[11:14]), *ordered(row[2], row[3])))
    return Rows(rows)


def _bytes(row: Row) -> Any:
    return None if None in row[4:7] else sum(row[4:7])


def _row(report: UmReport, each: Range, ran: Busy) -> Row:
    time = ran.ns if each.timed else None
    first = None if each.first is None else each.first * BLOCK_BYTES
    moved = [each.total(name) for name in ("htod", "dtoh", "dtod", "evicted", "n")]
    return (
        address(first),
        None if first is None else len(each.blocks) * BLOCK_BYTES,
        each.pid,
        each.device,
        *(report.known("migrations", figure) for figure in (*moved, time)),
        ran.rate(each.total("moved"), time),
        report.known("gpu_faults", each.total("batches")),
        report.known("gpu_faults", each.total("faults")),
        report.known("cpu_faults", each.total("cpu")),
    )
