"""Migrations and faults added up by process and GPU, and by VA block where that is asked for."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

from nsan.stats_reports._export import (
    DTOD,
    DTOH,
    EVICTION,
    HTOD,
    Export,
    block_of,
    complete,
    unsigned,
)
from nsan.stats_reports._report import (
    Busy,
    Rows,
    UmReport,
    address,
    busy_times,
    ordered,
)

Key = Tuple[Any, ...]

_MOVED = (
    ("htod", f"kind = {HTOD}"),
    ("dtoh", f"kind = {DTOH}"),
    ("dtod", f"kind = {DTOD}"),
    ("evicted", f"kind = {DTOH} AND cause = {EVICTION}"),
)


class Figures:
    """What is added up for one key."""

    __slots__ = (
        *("n", "htod", "dtoh", "dtod", "evicted", "timed", "batches", "faults", "cpu", "places"),
        "lacks_place",
    )

    def __init__(self) -> None:
        self.n = 0
        self.htod: int | None = 0
        self.dtoh: int | None = 0
        self.dtod: int | None = 0
        self.evicted: int | None = 0
        self.timed = True
        self.batches = 0
        self.faults: int | None = 0
        self.cpu = 0
        self.places: list[int] = []
        self.lacks_place = False

    @property
    def moved(self) -> int | None:
        """Bytes of all directions; None where one is unknown."""
        parts = (self.htod, self.dtoh, self.dtod)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def reach(self, *places: int | None) -> None:
        """Note the lowest and highest address of some rows."""
        self.places += [unsigned(va) for va in places if va is not None]


def figures(export: Export, *, by_block: bool = False) -> dict[Key, Figures]:
    """Add up the part of a capture that is asked for.

    CPU faults have no GPU. They stand with the one GPU of their process (or of their VA block) where there
    is just one, else by themselves, with None for the GPU.

    Parameters
    ----------
    export : Export
        The export.
    by_block : bool
        Keep VA blocks apart.

    Returns
    -------
    dict
        By process, GPU and, where asked, VA block.
    """
    place = [block_of()] if by_block else []
    found: dict[Key, Figures] = {}

    def of(key: Key) -> Figures:
        return found.setdefault(key, Figures())

    for key, n, *sums, timed, places, lacks in _grouped(export, "migrations", place):
        each = of(key)
        each.n, each.timed, each.lacks_place = n, bool(timed), bool(lacks)
        each.htod, each.dtoh, each.dtod, each.evicted = sums
        each.reach(*places)
    for key, n, faults, places, lacks in _grouped(export, "gpu_faults", place):
        each = of(key)
        each.batches, each.faults = n, faults
        each.lacks_place = each.lacks_place or bool(lacks)
        each.reach(*places)
    gpus: dict[Key, set[Any]] = {}
    for pid, device, *where in found:
        gpus.setdefault((pid, *where), set()).add(device)
    for key, n, places, lacks in _grouped(export, "cpu_faults", place):
        pid, *where = key
        own = gpus.get(key, set())
        each = of((pid, next(iter(own)) if len(own) == 1 else None, *where))
        each.cpu = n
        each.lacks_place = each.lacks_place or bool(lacks)
        each.reach(*places)
    return found


def _grouped(export: Export, name: str, place: Sequence[str]) -> list[tuple[Any, ...]]:
    """Run the sums of one table: key, count, figures, lowest and highest addresses, whether one is missing."""
    keys = ["pid"] if name == "cpu_faults" else ["pid", "device"]
    keys = [*keys, *place]
    measured = {
        "migrations": [
            *(complete("bytes", where=where) for _, where in _MOVED),
            'COUNT(start) = COUNT(*) AND COUNT("end") = COUNT(*)',
        ],
        "gpu_faults": [complete("faults")],
        "cpu_faults": [],
    }[name]
    low, high = (f"CASE WHEN va {sign} 0 THEN va END" for sign in (">=", "<"))
    bounds = [f"{side}({half})" for half in (low, high) for side in ("MIN", "MAX")]
    chosen = [*keys, "COUNT(*)", *measured, *bounds, "COUNT(va) < COUNT(*)"]
    numbers = ", ".join(str(i + 1) for i in range(len(keys)))
    sql = f"SELECT {', '.join(chosen)} FROM {export.rows(name)} GROUP BY {numbers}"
    n = len(keys)
    return [(row[:n], *row[n:-5], row[-5:-1], row[-1]) for row in export.ask(sql)]


def totals(report: UmReport) -> Rows:
    """Give the rows of the totals: by process and GPU."""
    found = figures(report.export)
    busy = busy_times(report.export, ["pid", "device"])
    lacking = "; ".join(report.recorded.lacking(*report.says)) or None
    rows = []
    for pid, device in sorted(found, key=lambda key: ordered(*key)):
        each = found[pid, device]
        ran = busy.get((pid, device), Busy())
        time = ran.ns if each.timed else None
        places = [] if each.lacks_place else each.places
        moved = (each.n, each.htod, each.dtoh, each.dtod, each.evicted, time)
        rows.append(
            (
                pid,
                device,
                *(report.known("migrations", figure) for figure in moved),
                ran.rate(each.moved, time),
                report.known("gpu_faults", each.batches),
                report.known("gpu_faults", each.faults),
                report.known("cpu_faults", each.cpu),
                address(min(places, default=None)),
                address(max(places, default=None)),
                lacking,
            )
        )
    return Rows(rows)
