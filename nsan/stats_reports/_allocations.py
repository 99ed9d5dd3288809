"""Allocations of managed memory, and what faults and moves in each; as :mod:`nsan.analysis.attribution.allocations`."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, NamedTuple, Tuple

from nsan.stats_reports._address_map import AddressMap
from nsan.stats_reports._export import (
    BLOCK_BYTES,
    DTOD,
    DTOH,
    EVICTION,
    FAULT,
    HTOD,
    Export,
    block_of,
    unsigned,
)
from nsan.stats_reports._report import (
    Row,
    Rows,
    UmReport,
    added,
    address,
    hottest,
    ordered,
    shown,
)

ALWAYS, NEVER = -(1 << 62), 1 << 62
MANAGED = {4, 6}
"""Kinds of memory that page faults and migrations can concern: managed, managed static."""

REST = "unattributed"
"""What lies in no allocation."""

_KNOWN_OTHERS = {0, 1, 2, 3, 5}

Span = Tuple[int, int, int, int]
"""Since, until, first address, address after the last."""


class Allocation(NamedTuple):
    """An allocation; times are None outside of the capture."""

    pid: int | None
    alloc_ns: int | None
    va: int
    bytes: int
    free_ns: int | None
    name: str | None
    kind: int | None


def allocations(export: Export) -> list[Allocation]:
    """Pair each allocation with its release; a release alone is of an allocation before the capture.

    Parameters
    ----------
    export : Export
        The export; the part that is asked for does not matter here.

    Returns
    -------
    list of Allocation
        Those with an address and a size, of any kind of memory.
    """
    name = export.cell(export.table_of("memory_events"), "name", "text")
    events = list(
        export.ask(
            f"""
            SELECT pid, va, start, operation = 0, bytes, kind, name FROM (
                SELECT * FROM {_with_name(export, name)} WHERE operation IS NOT NULL
            ) ORDER BY pid, va < 0, va, start, 4, number
            """
        )
    )
    found = []
    for i, (pid, va, start, is_alloc, size, kind, label) in enumerate(events):
        before = events[i - 1] if i and events[i - 1][:2] == (pid, va) else None
        after = events[i + 1] if i + 1 < len(events) and events[i + 1][:2] == (pid, va) else None
        if not is_alloc and before is not None and before[3]:
            continue  # the release of the one before
        released = after[2] if is_alloc and after is not None and not after[3] else None
        if va is not None and size:
            times = (start, released) if is_alloc else (None, start)
            found.append(Allocation(pid, times[0], unsigned(va), size, times[1], label, kind))
    return found


def _with_name(export: Export, name: str) -> str:
    """Write the SQL of the memory events with their names, and numbers in the order of the file."""
    table = export.table_of("memory_events")
    cells = {
        "start": export.cell(table, "start"),
        "pid": f"({export.cell(table, 'globalPid')} >> 24) & 16777215",
        "va": export.cell(table, "address"),
        "bytes": export.cell(table, "bytes"),
        "kind": export.cell(table, "memKind"),
        "operation": export.cell(table, "memoryOperationType"),
        "name": name,
        "number": "rowid" if export.has_table(table) else "0",
    }
    return f"({export.select(table, cells)})"


_MOVED: dict[str, Callable[[int, int | None], bool]] = {
    "htod": lambda kind, _: kind == HTOD,
    "dtoh": lambda kind, _: kind == DTOH,
    "dtod": lambda kind, _: kind == DTOD,
    "evicted": lambda _, cause: cause == EVICTION,
    "faulted": lambda kind, cause: kind != DTOH and cause == FAULT,
}
"""Which copies each figure adds up, in the order of the columns."""


class Place:
    """An allocation, or what stands for one, and what happened in it."""

    def __init__(self, held: Allocation, part: str) -> None:
        self.held, self.part = held, part
        self.moved: dict[str, int | None] = dict.fromkeys(_MOVED, 0)
        self.faults: int | None = 0
        self.n = self.batches = self.cpu = 0

    def copied(self, size: int | None, kind: int, cause: int | None) -> None:
        """Add a piece of a copy."""
        self.n += 1
        for name, is_of in _MOVED.items():
            if is_of(kind, cause):
                self.moved[name] = added(self.moved[name], size)


class Places:
    """Which allocation holds an address, as time goes on.

    Parameters
    ----------
    held : list of Place
        Allocations of one process, in the order in which later ones take the addresses of earlier ones.
    rest : Place
        What lies in none.
    """

    def __init__(self, held: list[Place], rest: Place) -> None:
        self.held, self.rest = held, rest
        self._map = AddressMap()
        self._next = 0

    def advance(self, time: int) -> None:
        """Let every allocation take its addresses that is made at a time or before."""
        while self._next < len(self.held):
            place = self.held[self._next]
            held = place.held
            if _since(held) > time:
                return
            self._map.give(held.va, held.va + held.bytes, place)
            self._next += 1

    def at(self, time: int, va: int) -> Place:
        """Say where an address lies."""
        return self._alive(self._map.owner(va), time)

    def pieces(self, time: int, va: int, size: int) -> Iterator[tuple[Place, int]]:
        """Cut a range at the borders of allocations; together the sizes are the range's."""
        for low, high, owner in self._map.pieces(va, va + size):
            yield self._alive(owner, time), high - low

    def _alive(self, place: Place | None, time: int) -> Place:
        if place is None:
            return self.rest
        until = place.held.free_ns
        return place if until is None or time < until else self.rest


def _since(held: Allocation) -> int:
    return ALWAYS if held.alloc_ns is None else held.alloc_ns


def by_allocation(report: UmReport) -> Rows:
    """Give one row per allocation, and one per process for what lies in none."""
    export = report.export
    by_pid = _places(export)
    _add_copies(export, by_pid)
    _add_faults(export, by_pid)
    held = [place for places in by_pid.values() for place in places.held]
    rows = [(_traffic(place), _row(report, place)) for place in held]
    rows.sort(key=lambda each: (*hottest(*each[0]), *ordered(*each[1][:2])))
    rests = sorted((p.rest for p in by_pid.values()), key=lambda place: ordered(place.held.pid))
    return Rows([row for _, row in rows], [_row(report, place) for place in rests])


def _traffic(place: Place) -> tuple[int | None, ...]:
    moved: int | None = 0
    for name in ("htod", "dtoh", "dtod"):
        moved = added(moved, place.moved[name])
    return moved, place.batches, place.faults, place.cpu, place.held.bytes


def _places(export: Export) -> dict[int | None, Places]:
    """List the managed allocations of each process, and guessed ones for processes that have none."""
    held: dict[int | None, list[Place]] = {}
    for each in allocations(export):
        if each.kind not in _KNOWN_OTHERS and _reaches_in(export, each):
            held.setdefault(each.pid, []).append(Place(each, "allocation"))
    for guess in _guessed(export, held):
        held.setdefault(guess.pid, []).append(Place(guess, "guessed"))
    pids = set(held) | _pids(export)
    found = {}
    for pid in pids:
        mine = held.get(pid, [])
        mine.sort(key=lambda place: _order(place.held))
        found[pid] = Places(mine, Place(Allocation(pid, None, 0, 0, None, REST, None), REST))
    return found


def _order(held: Allocation) -> tuple[Any, ...]:
    """Give the order in which later allocations take addresses from earlier ones; what is not known is first."""
    keys = (held.alloc_ns, held.va, held.bytes, held.free_ns)
    known = [(key is not None, 0 if key is None else key) for key in keys]
    return (*known, (held.name is not None, held.name or ""))


def _reaches_in(export: Export, held: Allocation) -> bool:
    part, since = export.part, _since(held)
    if part.pid not in {None, held.pid} or (part.end is not None and since >= part.end):
        return False
    until = max(NEVER if held.free_ns is None else held.free_ns, since + 1)
    return part.begin is None or until > part.begin


def _pids(export: Export) -> set[int | None]:
    names = ("migrations", "gpu_faults", "cpu_faults")
    sql = " UNION ".join(f"SELECT pid FROM {export.rows(name)}" for name in names)
    return {pid for (pid,) in export.ask(sql)}


def _guessed(export: Export, held: dict[int | None, Any]) -> Iterator[Allocation]:
    """Guess allocations of processes that have none: runs of neighbouring VA blocks in which something happened."""
    last = block_of("(va + bytes - 1)")
    moved = export.rows("migrations")
    touched = [
        f"SELECT pid, {block_of()} AS block FROM {export.rows(name)}"
        for name in ("migrations", "gpu_faults", "cpu_faults")
    ]
    touched.append(f"SELECT pid, {last} FROM {moved}")
    sql = (
        f"SELECT pid, block FROM ({' UNION '.join(touched)}) WHERE block IS NOT NULL ORDER BY 1, 2"
    )
    run: list[Any] | None = None
    for pid, block in export.ask(sql):
        if pid in held:
            continue
        if run is not None and run[0] == pid and run[2] + 1 == block:
            run[2] = block
            continue
        if run is not None:
            yield _run(*run)
        run = [pid, block, block]
    if run is not None:
        yield _run(*run)


def _run(pid: int | None, first: int, last: int) -> Allocation:
    size = (last - first + 1) * BLOCK_BYTES
    return Allocation(pid, None, first * BLOCK_BYTES, size, None, None, None)


def _add_copies(export: Export, by_pid: dict[int | None, Places]) -> None:
    sql = (
        f"SELECT start, pid, va, bytes, kind, cause FROM {export.rows('migrations')} ORDER BY start"
    )
    for start, pid, va, size, kind, cause in export.ask(sql):
        places = by_pid[pid]
        if start is None or va is None or not size:
            places.rest.copied(size, kind, cause)
            continue
        places.advance(start)
        parts: dict[int, tuple[Place, int]] = {}
        for place, piece in places.pieces(start, unsigned(va), size):
            parts[id(place)] = (place, parts.get(id(place), (place, 0))[1] + piece)
        for place, piece in parts.values():
            place.copied(piece, kind, cause)


def _add_faults(export: Export, by_pid: dict[int | None, Places]) -> None:
    """Add fault rows, of GPUs and of the CPU."""
    for name, faults in (("gpu_faults", "faults"), ("cpu_faults", "NULL")):
        started = {pid: Places(places.held, places.rest) for pid, places in by_pid.items()}
        sql = f"SELECT start, pid, va, {faults} FROM {export.rows(name)} ORDER BY start"
        for place, n in _located(export.ask(sql), started):
            if name == "cpu_faults":
                place.cpu += 1
            else:
                place.batches += 1
                place.faults = added(place.faults, n)


def _located(rows: Iterable[Row], by_pid: dict[int | None, Places]) -> Iterator[tuple[Place, Any]]:
    for start, pid, va, n in rows:
        places = by_pid[pid]
        if start is None or va is None:
            yield places.rest, n
        else:
            places.advance(start)
            yield places.at(start, unsigned(va)), n


def _row(report: UmReport, place: Place) -> Row:
    held, is_one = place.held, place.part != REST
    name = f"{held.va:#x}, {held.bytes} byte" if held.name is None else shown(held.name)
    moved = (*place.moved.values(), place.n)
    return (
        held.pid,
        name,
        address(held.va) if is_one else None,
        held.bytes if is_one else None,
        place.part,
        *(report.known("migrations", figure) for figure in moved),
        report.known("gpu_faults", place.batches),
        report.known("gpu_faults", place.faults),
        report.known("cpu_faults", place.cpu),
    )
