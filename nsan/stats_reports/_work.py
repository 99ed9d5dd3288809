"""What ran on a GPU at an instant, on the clock of faults; as :mod:`nsan.analysis.attribution.work`."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Iterator, NamedTuple, Optional, Tuple

from nsan.stats_reports._export import DTOH, FAULT, PREFETCH, Export

Gpu = Tuple[Optional[int], Optional[int]]
"""Process and CUDA ordinal."""

UNATTRIBUTED, AMBIGUOUS, USER_PREFETCH = -1, -2, -4
"""What is no piece of GPU work: nothing ran, several kernels ran, a prefetch call moved it."""

MAX_CLOCK_SKEW_NS = 100_000
NEIGHBOUR_NS = 10_000

_COPIES = dict(
    enumerate(
        ["unknown", "htod", "dtoh", "htoa", "atoh", "atoa", "atod", "dtoa", "dtod", "htoh", "ptop"]
    )
)
_MEMORY_THAT_FAULTS = {4: "managed", 6: "managed_static", 7: "unknown", None: "unknown"}
_MEMORY_THAT_DOES_NOT = {0, 1, 2, 3, 5}


class Item(NamedTuple):
    """All GPU work of one name on one GPU of a process."""

    gpu: Gpu
    kind: str
    name: str


class Intervals:
    """Disjoint intervals of time, ascending."""

    def __init__(self) -> None:
        self.starts, self.ends = array("q"), array("q")
        self._before = array("q")
        self.total = 0

    def add(self, start: int, end: int) -> None:
        """Add an interval that starts no earlier than those before it."""
        if start >= end:
            return
        if self.ends and start <= self.ends[-1]:
            longer = max(0, end - self.ends[-1])
            self.ends[-1] += longer
            self.total += longer
            return
        self.starts.append(start)
        self.ends.append(end)
        self._before.append(self.total)
        self.total += end - start

    def within(self, start: int, end: int) -> int:
        """Measure how much of a stretch of time is covered."""
        return self._until(end) - self._until(start)

    def covers(self, time: int) -> bool:
        """Say whether an instant is covered."""
        i = bisect_right(self.starts, time) - 1
        return i >= 0 and time < self.ends[i]

    def _until(self, time: int) -> int:
        i = bisect_right(self.starts, time) - 1
        return 0 if i < 0 else self._before[i] + min(time, self.ends[i]) - self.starts[i]


class Steps:
    """What ran on one GPU, from one instant to the next."""

    def __init__(self) -> None:
        self._times, self._items = array("q"), array("q")
        self._edges: list[tuple[int, int, int, int]] = []

    def add(self, start: int, end: int, item: int, *, is_kernel: bool) -> None:
        """Add a piece of work."""
        if start < end:
            self._edges.append((start, 1, item, is_kernel))
            self._edges.append((end, -1, item, is_kernel))

    def close(self) -> None:
        """Work out what ran, once all work was added."""
        n, ids = [0, 0], [0, 0]
        self._edges.sort()
        for i, (time, sign, item, is_kernel) in enumerate(self._edges):
            # Where one piece is open the sum of the numbers is its number.
            n[is_kernel] += sign
            ids[is_kernel] += sign * item
            if i + 1 == len(self._edges) or self._edges[i + 1][0] != time:
                self._times.append(time)
                self._items.append(self._found(n, ids))
        self._edges = []

    @staticmethod
    def _found(n: list[int], ids: list[int]) -> int:
        """Name the one kernel that runs, or the one copy or memset while none runs."""
        first = 1 if n[1] else 0
        if not n[first]:
            return UNATTRIBUTED
        return ids[first] if n[first] == 1 else AMBIGUOUS

    def at(self, time: int) -> int:
        """Say what ran at an instant."""
        i = bisect_right(self._times, time) - 1
        return UNATTRIBUTED if i < 0 else self._items[i]

    def during(self, start: int, end: int | None) -> int:
        """Say what ran from the start to the end of a fault or copy.

        Work cannot end before the replay of its fault: where the one piece that runs at the last instant is
        another than at the start, it is that one.
        """
        last = self.at(max((start if end is None else end) - 1, start))
        return last if last >= 0 else self.at(start)


class Work:
    """The GPU work of a capture that can raise page faults, moved onto the clock of faults.

    Parameters
    ----------
    export : Export
        The export, with the part that is asked for.
    """

    def __init__(self, export: Export) -> None:
        self.items: list[Item] = []
        self.instances: list[int] = []
        self.waits: dict[Gpu, Intervals] = {}
        """When faults waited; GPUs without fault rows have none."""
        self.recorded: set[Gpu] = set()
        """GPUs that have fault rows."""
        self._numbers: dict[Item, int] = {}
        pieces = sorted(self._pieces(export), key=lambda piece: piece[:2])
        spans: dict[Gpu, Intervals] = {}
        for start, end, item in pieces:
            spans.setdefault(self.items[item].gpu, Intervals()).add(start, end)
        self.offsets = self._listen(export, spans)
        self.spans: dict[Gpu, Intervals] = {}
        self.of_item: dict[int, Intervals] = {}
        self.steps: dict[Gpu, Steps] = {}
        for start, end, item in pieces:
            gpu = self.items[item].gpu
            moved = (start + self.offsets[gpu], end + self.offsets[gpu])
            self.spans.setdefault(gpu, Intervals()).add(*moved)
            self.of_item.setdefault(item, Intervals()).add(*moved)
            is_kernel = self.items[item].kind in {"kernel", "graph"}
            self.steps.setdefault(gpu, Steps()).add(*moved, item, is_kernel=is_kernel)
        for steps in self.steps.values():
            steps.close()

    def ran(self, gpu: Gpu, start: int, end: int | None) -> int:
        """Say which item, or remainder, a fault or copy belongs to."""
        steps = self.steps.get(gpu)
        return UNATTRIBUTED if steps is None else steps.during(start, end)

    def exposed(self, item: int) -> int:
        """Measure for how much of the time of an item a fault waited, ns."""
        waits, mine = self.waits.get(self.items[item].gpu), self.of_item[item]
        if waits is None:
            return 0
        return sum(waits.within(a, b) for a, b in zip(mine.starts, mine.ends))

    def exposed_alone(self, gpu: Gpu) -> int:
        """Measure for how long a fault waited while nothing ran, ns."""
        waits, spans = self.waits.get(gpu), self.spans.get(gpu)
        if waits is None:
            return 0
        beside = (
            0 if spans is None else sum(spans.within(*e) for e in zip(waits.starts, waits.ends))
        )
        return waits.total - beside

    def _listen(self, export: Export, spans: dict[Gpu, Intervals]) -> dict[Gpu, int]:
        """Read when faults waited, and by how much the times of work must be moved to fit them.

        As :func:`nsan.analysis.attribution.work.clock_offset`: from fault rows, or where a GPU has none from
        the copies that faults caused.
        """
        votes = {gpu: _Votes() for gpu in spans}
        for gpu, start, end in _events(export, "gpu_faults", "1"):
            self.recorded.add(gpu)
            if end is not None:
                self.waits.setdefault(gpu, Intervals()).add(start, end)
            if gpu in votes:
                votes[gpu].add(*_distances(spans[gpu], start, end))
        caused = f"kind <> {DTOH} AND cause IN ({FAULT}, {PREFETCH})"
        for gpu, start, end in _events(export, "migrations", caused):
            if gpu in votes and gpu not in self.recorded:
                votes[gpu].add(*_distances(spans[gpu], start, end))
        return {gpu: each.offset() for gpu, each in votes.items()}

    def _pieces(self, export: Export) -> Iterator[tuple[int, int, int]]:
        for gpu, start, end, kind, name in _all_work(export):
            item = Item(gpu, kind, name)
            number = self._numbers.setdefault(item, len(self.items))
            if number == len(self.items):
                self.items.append(item)
                self.instances.append(0)
            self.instances[number] += 1
            yield start, end, number


Piece = Tuple[Gpu, int, int, str, str]


def _all_work(export: Export) -> Iterator[Piece]:
    """List kernels, graph launches, copies and memsets that have their times."""
    timed = 'WHERE start IS NOT NULL AND "end" IS NOT NULL'
    kernels = f"FROM {export.work('kernels')}"
    # Where a process and GPU has kernels of graphs one by one, its launches of graphs are the same time.
    by_node = set(export.ask(f"SELECT DISTINCT pid, device {kernels} WHERE node IS NOT NULL"))
    names = export.texts(
        text
        for row in export.ask(f"SELECT DISTINCT short, full, mangled {kernels}")
        for text in row
        if text is not None
    )
    columns = 'pid, device, start, "end"'
    for *gpu, start, end, short, full, mangled in export.ask(
        f"SELECT {columns}, short, full, mangled {kernels} {timed}"
    ):
        known = (names[text] for text in (short, full, mangled) if text in names)
        yield (gpu[0], gpu[1]), start, end, "kernel", next(known, "(no name)")
    for pid, device, start, end, graph in export.ask(
        f"SELECT {columns}, graph FROM {export.work('graphs')} {timed}"
    ):
        if (pid, device) not in by_node:
            yield (
                (pid, device),
                start,
                end,
                "graph",
                f"CUDA graph {'?' if graph is None else graph}",
            )
    yield from _copies_and_memsets(export, columns, timed)


def _copies_and_memsets(export: Export, columns: str, timed: str) -> Iterator[Piece]:
    for pid, device, start, end, kind in export.ask(
        f"SELECT {columns}, kind FROM {export.work('copies')} {timed}"
    ):
        yield (pid, device), start, end, "copy", f"copy {_COPIES.get(kind, 'other')}"
    for pid, device, start, end, kind in export.ask(
        f"SELECT {columns}, kind FROM {export.work('memsets')} {timed}"
    ):
        if kind not in _MEMORY_THAT_DOES_NOT:
            name = _MEMORY_THAT_FAULTS.get(kind, "other")
            yield (pid, device), start, end, "memset", f"memset {name}"


def _events(export: Export, name: str, where: str) -> Iterator[tuple[Gpu, int, int | None]]:
    """List rows of a table by their start: GPU, start and end."""
    sql = f'SELECT pid, device, start, "end" FROM {export.rows(name)}'
    for pid, device, start, end in export.ask(
        f"{sql} WHERE start IS NOT NULL AND {where} ORDER BY start"
    ):
        yield (pid, device), start, end


class _Votes:
    """Distances of the events of one GPU that lie a little before work, or a little after it."""

    def __init__(self) -> None:
        self.leads = array("q")
        self.n_early = self.n_late = 0
        self.certain: int | None = None
        self.lag: int | None = None

    def add(self, lead: int | None, lag: int | None) -> None:
        early = lead is not None and lead <= MAX_CLOCK_SKEW_NS
        late = lag is not None and lag <= MAX_CLOCK_SKEW_NS
        if early and lead is not None:
            self.leads.append(lead)
            if not late:
                self.n_early += 1
                self.certain = lead if self.certain is None else max(self.certain, lead)
        elif late and lag is not None:
            self.n_late += 1
            self.lag = lag if self.lag is None else max(self.lag, lag)

    def offset(self) -> int:
        if self.n_late > self.n_early:
            return self.lag or 0
        limit = (MAX_CLOCK_SKEW_NS if self.certain is None else self.certain) + NEIGHBOUR_NS
        return -max((lead for lead in self.leads if lead <= limit), default=0)


def _distances(spans: Intervals, start: int, end: int | None) -> tuple[int | None, int | None]:
    """Measure by how much an event begins before work, and by how much it ends after it."""
    i = bisect_right(spans.starts, start) - 1
    until = spans.ends[i] if i >= 0 else None
    j = bisect_left(spans.starts, start)
    following = spans.starts[j] if j < len(spans.starts) else None
    outside = until is None or until <= start
    lead = following - start if outside and following is not None else None
    if until is None:
        return lead, None
    # Work cannot end before the replay of its fault. If other work follows soon, the row may be its.
    alone = following is None or following - until > MAX_CLOCK_SKEW_NS
    outlasts = end is not None and end > until and alone
    lag = max(start, start if end is None else end) - until if outside or outlasts else None
    return lead, lag
