"""What was evicted and came back, by VA block; as :mod:`nsan.analysis.memory.refaults`.

Page-exact: for each block the map of addresses says which eviction took a page last, and the first later
arrival at any GPU ends that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Iterator, NamedTuple, Optional, Tuple

from nsan.stats_reports._address_map import AddressMap
from nsan.stats_reports._allocations import ALWAYS, MANAGED, Allocation, allocations
from nsan.stats_reports._export import (
    BLOCK_BITS,
    DTOH,
    EVICTION,
    FAULT,
    PREFETCH,
    Export,
    Part,
    block_of,
    in_order,
    unsigned,
)
from nsan.stats_reports._report import Rows, UmReport, address, hottest, ordered, percent

Block = Tuple[Optional[int], int]
"""Process and number of a VA block."""


class Evicted:
    """A VA block that one GPU evicted, and what became of it."""

    def __init__(self, pid: int | None, device: int | None, block: int) -> None:
        self.pid, self.device, self.block = pid, device, block
        self.n = self.bytes = self.back = self.by_fault = self.soon = self.elsewhere = 0


class Eviction(NamedTuple):
    """The eviction that took a page."""

    block: Evicted
    device: int | None
    life: int
    soon_ns: int
    """What is back before this time is so prematurely."""

    def came_back(self, size: int, device: int | None, cause: int | None, time: int) -> None:
        """Add pages of it that came to a GPU."""
        if device != self.device:
            self.block.elsewhere += size
            return
        self.block.back += size
        self.block.soon += size if time < self.soon_ns else 0
        self.block.by_fault += size if cause in {FAULT, PREFETCH} else 0


def has_evictions(export: Export) -> bool:
    """Say whether any GPU evicted anything in the part that is asked for."""
    rows = export.rows("migrations")
    sql = f"SELECT EXISTS (SELECT 1 FROM {rows} WHERE kind = {DTOH} AND cause = {EVICTION})"
    return bool(export.one(sql)[0])


def refaults(report: UmReport) -> Rows:
    """Give one row per VA block and GPU that evicted it, most refaulted bytes first."""
    export, part = report.export, report.export.part
    # What came before, or from elsewhere, decides: all copies are followed, some evictions are counted.
    export.part = Part()
    _number_pushes(export)
    lives = _lives(export)
    found = _follow(export, lives, part, report.parsed_args.premature)
    export.part = part
    rows = [_row(each) for each in found]
    rows.sort(key=lambda row: (*hottest(row[5], row[4]), *ordered(*row[:3])))
    return Rows(rows)


def _row(each: Evicted) -> tuple[Any, ...]:
    return (
        each.pid,
        each.device,
        address(each.block << BLOCK_BITS),
        each.n,
        each.bytes,
        each.back,
        percent(each.back, each.bytes),
        each.by_fault,
        each.soon,
        each.elsewhere,
        each.bytes - each.back - each.elsewhere,
    )


def _number_pushes(export: Export) -> None:
    """Put evictions and arrivals at GPUs into pushes: copies chained in one VA block and direction."""
    lane = in_order("pid", "device", "kind", "start", "va", "bytes", "fin", "cause", "source")
    block = block_of()
    export.ask(
        f"""
        CREATE TEMP TABLE nsan_moves AS
        WITH moves AS (
            SELECT pid, device, kind, start, COALESCE("end", start) AS fin, va, bytes, cause, source,
                {block} AS block
            FROM {export.rows("migrations")}
            WHERE start IS NOT NULL AND va IS NOT NULL AND bytes > 0
                AND (kind <> {DTOH} OR cause = {EVICTION})
        ),
        chained AS (
            SELECT *, CASE WHEN LAG(pid) OVER lane IS pid AND LAG(device) OVER lane IS device
                AND LAG(kind) OVER lane IS kind AND LAG(block) OVER lane IS block
                AND start - LAG(fin) OVER lane IN (0, 1) THEN 0 ELSE 1 END AS opens
            FROM moves WINDOW lane AS (ORDER BY {lane})
        )
        SELECT *, SUM(opens) OVER (ORDER BY {lane} ROWS UNBOUNDED PRECEDING) AS push FROM chained
        """
    )
    export.ask(
        """
        CREATE TEMP TABLE nsan_pushes AS
        SELECT push AS id, MIN(start) AS first, MAX(fin) AS last FROM nsan_moves GROUP BY push
        """
    )
    export.ask("CREATE UNIQUE INDEX temp.nsan_push ON nsan_pushes (id)")
    export.ask(
        f"""
        CREATE TEMP TABLE nsan_evicted AS
        SELECT DISTINCT COALESCE(pid, -1) AS process, block FROM nsan_moves WHERE kind = {DTOH}
        """
    )
    export.ask("CREATE UNIQUE INDEX temp.nsan_evicts ON nsan_evicted (process, block)")


def _follow(
    export: Export, lives: dict[Block, list[int]], part: Part, premature_ns: int
) -> list[Evicted]:
    """Follow every evicted page to its first later arrival at a GPU."""
    found: dict[tuple[Any, ...], Evicted] = {}
    maps: dict[Block, AddressMap] = {}
    counted: set[int] = set()
    order = in_order("start", "fin", "pid", "device", "va", "bytes", "kind", "source", "cause")
    moves = export.ask(
        f"""
        SELECT pid, device, kind, va, bytes, cause, fin, block, push, first, last
        FROM nsan_moves JOIN nsan_pushes ON id = push
        WHERE (COALESCE(pid, -1), block) IN (SELECT process, block FROM nsan_evicted)
        ORDER BY {order}
        """
    )
    for pid, device, kind, va, size, cause, fin, block, push, first, last in moves:
        evicted = None
        if kind == DTOH:
            evicted = Evicted(pid, device, block)
            if part.holds(first) and part.pid in {None, pid}:
                evicted = found.setdefault((pid, device, block), evicted)
            evicted.bytes += size
            evicted.n += push not in counted
            counted.add(push)
        for number, low, high in _by_block(unsigned(va), size):
            place = (pid, number)
            life = bisect_right(lives.get(place, ()), fin) - 1
            taken = maps.setdefault(place, AddressMap())
            if evicted is not None:
                taken.give(low, high, Eviction(evicted, device, life, last + premature_ns))
                continue
            for piece in taken.give(low, high, None):
                out = piece.owner
                if out is not None and out.life == life:
                    out.came_back(piece.high - piece.low, device, cause, last)
    return list(found.values())


def _by_block(va: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range at the borders of VA blocks; no copy of the driver crosses one."""
    low, end = va, va + size
    while low < end:
        number = low >> BLOCK_BITS
        high = min(end, (number + 1) << BLOCK_BITS)
        yield number, low, high
        low = high


def _lives(export: Export) -> dict[Block, list[int]]:
    """Say when the lives of each evicted VA block begin: it lives while any allocation in it does."""
    evicted: dict[int | None, list[int]] = {}
    for process, block in export.ask("SELECT process, block FROM nsan_evicted ORDER BY 1, 2"):
        evicted.setdefault(None if process < 0 else process, []).append(block)
    changes: dict[Block, list[tuple[int, int]]] = {}
    for held in _closed([each for each in allocations(export) if _is_there(each)]):
        blocks = evicted.get(held.pid, [])
        first, last = held.va >> BLOCK_BITS, (held.va + held.bytes - 1) >> BLOCK_BITS
        for block in blocks[bisect_left(blocks, first) : bisect_right(blocks, last)]:
            mine = changes.setdefault((held.pid, block), [])
            mine.append((ALWAYS if held.alloc_ns is None else held.alloc_ns, 1))
            if held.free_ns is not None:
                mine.append((held.free_ns, -1))
    return {place: _begins(sorted(mine)) for place, mine in changes.items()}


def _begins(changes: list[tuple[int, int]]) -> list[int]:
    """List when nothing was there and something came."""
    begins, alive = [], 0
    for time, change in changes:
        alive += change
        if change == 1 and alive == 1:
            begins.append(time)
    return begins


def _is_there(held: Allocation) -> bool:
    if held.kind not in MANAGED:
        return False
    return held.alloc_ns is None or held.free_ns is None or held.alloc_ns < held.free_ns


def _closed(held: list[Allocation]) -> Iterator[Allocation]:
    """End an allocation where another one takes its bytes: its release was not recorded."""
    maps: dict[int | None, AddressMap] = {}
    taken: dict[int, int] = {}
    held = sorted(held, key=_by_time)
    for i, each in enumerate(held):
        owners = maps.setdefault(each.pid, AddressMap())
        for piece in owners.give(each.va, each.va + each.bytes, i):
            if piece.owner is not None and each.alloc_ns is not None:
                taken[piece.owner] = min(taken.get(piece.owner, each.alloc_ns), each.alloc_ns)
    for i, each in enumerate(held):
        ends = [time for time in (each.free_ns, taken.get(i)) if time is not None]
        yield each._replace(free_ns=min(ends, default=None))


def _by_time(held: Allocation) -> tuple[Any, ...]:
    since = (held.alloc_ns is not None, held.alloc_ns or 0)
    return since, (held.free_ns is None, held.free_ns or 0)
